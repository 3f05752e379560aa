"""Calls that run eagerly although a graph would serve them, to be compared with what was captured."""

from __future__ import annotations

import time
from typing import Any

from graphmod.config import Verify
from graphmod.ranks.agreement import several_ranks
from graphmod.signature.call import Call
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.recording import follow
from graphmod.step.together import alone
from graphmod.torch_private import current_node, top_saved_tensors_hooks


def due(context: Context, entry: Entry) -> Any:
    """The recording that a call of this signature is to be compared with; None where it is not to be verified now."""
    how, group = context.config.verify, context.group
    rounds = group.verification
    if how is Verify.sampled:
        if _is_run_again():
            rounds.stop()
        if entry.verified_in < 0:
            rounds.expect(entry.recordings[0].seconds)
        elif entry.verified_in == rounds.round and (group.busy or several_ranks() or not rounds.begins()):
            return None
        first, entry.verified_in = entry.verified_in < 0, rounds.round
        if first or not group.backend.has_room(sum(arena.pool.bytes() for arena in group.arenas)):
            return None
    elif how is Verify.off:
        entry.verified_in = rounds.round
        return None
    recording = entry.recording_of_now()
    return recording if any(graph.recording is recording for graph in entry.graphs) else None


def _is_run_again() -> bool:
    """Whether a checkpoint runs the call, which counts what it saves: it has to run alike both times."""
    inside = current_node() is not None
    return inside or top_saved_tensors_hooks(True) is not None


def verify(context: Context, entry: Entry, call: Call, recording: Any) -> Any:
    """An eager call that is compared with the recorded one.

    Raises:
        VerificationFailed: it did other operations, and every call is verified.
    """
    began = time.perf_counter()
    context.ran_eagerly()
    context.counters.verified += 1
    recorder, _ = alone(context, entry, lambda: follow(call, context.group.gpu))
    difference = recording.script.compare(recorder.trace)
    context.group.verification.took(time.perf_counter() - began)
    if difference is not None:
        context.out_of_date(entry, difference)
    entry.verified_at = entry.replays
    return context.eager_result(entry, call)
