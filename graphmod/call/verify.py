"""Calls that run eagerly although a graph would serve them, to be compared with what was captured."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from graphmod.call.warmup import track
from graphmod.capture.recording import follow
from graphmod.config import Verify
from graphmod.graph.context import Context
from graphmod.state.entry import Entry
from graphmod.state.verification import LOOKS
from graphmod.trace.operations import compare

_serial = itertools.count()


def due(context: Context, entry: Entry) -> Any:
    """The recording that a call of this signature is to be compared with; None where it is not to be verified now."""
    how, group = context.config.verify, context.group
    wait = LOOKS if entry.verify_at else next(_serial) % LOOKS  # not all layers of a model at once
    entry.verify_at = entry.replays + (0 if how is Verify.always else wait + 1)
    if how is Verify.off:
        return None
    if how is Verify.sampled and (_several_processes() or not group.verification.due(entry.recordings[0].seconds)):
        return None
    recording = entry.recording_of_now()
    if recording is None or all(graph.recording is not recording for graph in entry.graphs):
        return None
    pools = sum(arena.pool.bytes() for arena in group.arenas)
    return recording if how is Verify.always or group.backend.has_room(pools) else None


def _several_processes() -> bool:
    """Whether others would wait for this process while it verifies a call."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def verify(context: Context, entry: Entry, recording: Any, args: tuple, kwargs: dict) -> Any:
    """An eager call that is compared with the recorded one.

    Raises:
        VerificationFailed: it did other operations, and every call is verified.
    """
    began = time.perf_counter()
    counters = context.counters
    counters.eager_calls += 1
    counters.verified += 1
    context.served, context.eager_in = None, context.group.begun
    result, recorder, _ = follow(context.call, args, kwargs, context.group.gpu)
    difference = compare(recording.script.trace, recorder.trace)
    context.group.verification.took(time.perf_counter() - began)
    if difference is not None:
        context.out_of_date(entry, difference)
    entry.verified = entry.replays
    return track(context, entry, result)
