"""A recorded call: an eager call that is watched, so that its capture can be decided on before any is tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphmod.graph.results import not_to_be_made_again, outline, resolved
from graphmod.guards.changes import what_changed
from graphmod.guards.guards import Guards
from graphmod.guards.notes import Notes
from graphmod.guards.watching import noting
from graphmod.signature.arguments import Given
from graphmod.signature.flattening import flatten
from graphmod.trace import dispatch
from graphmod.trace.garbage import no_garbage_collection
from graphmod.trace.recorder import Recorder


class Recording:
    """What one recorded call showed.

    Attributes:
        script: its operations, and what it made of constants.
        generators: those it passed to random operations.
        backward: whether a backward ran inside.
        hazards: what of it a graph cannot repeat.
        guards: what its code read.
        returned: the outline of its result.
        refused: why it is not to be captured; None where it may be.
    """

    def __init__(self, recorder: Recorder, guards: Guards, returned: tuple, refused: str | None) -> None:
        self.script = recorder.script()
        self.generators = recorder.generators
        self.backward = recorder.backward
        self.hazards = recorder.hazards
        self.guards = guards
        self.returned = returned
        self.refused = refused


def record(
    call: Callable, args: tuple, kwargs: dict, names: list[str], gpu: int | None, *roots: Any
) -> tuple[Any, Recording]:
    """Makes a call and watches it.

    Args:
        names: of its positional parameters.
        gpu: index of the GPU that it works on; None on the CPU.
        roots: what it works on besides its arguments.

    Returns:
        The result, and what was seen.
    """
    result, recorder, notes, given = watch(call, args, kwargs, names, gpu, *roots)
    returned = outline(result)
    refused = str(recorder.hazards[0]) if recorder.hazards else None
    refused = refused or given.changed() or given.returned(result) or not_to_be_made_again(returned[0])
    refused = refused or what_changed(notes)
    return result, Recording(recorder, Guards(notes, recorder.backward), returned, refused)


def watch(
    call: Callable, args: tuple, kwargs: dict, names: list[str], gpu: int | None, *roots: Any
) -> tuple[Any, Recorder, Notes, Given]:
    """Makes a call; returns its result and all that watched it, before anything is made of that. See `record`."""
    leaves: list[Tensor] = []
    flatten((args, kwargs), leaves, {})
    recorder = Recorder(leaves, gpu=gpu, watching=True)
    dispatch.has_key()  # which imports much when it is first asked: not while frames are watched
    torch.clear_autocast_cache()  # what a graph casts, it casts itself; the recorded call must do so too
    given = Given(args, kwargs, names)
    with contextlib.ExitStack() as watching:
        watching.enter_context(no_garbage_collection())
        # What a backward runs in Python has to be seen as well.
        watching.enter_context(torch.autograd.set_multithreading_enabled(False))
        notes = watching.enter_context(noting(call, args, kwargs, *roots))
        watching.enter_context(given)  # before the recorder, which must not see what that does
        watching.enter_context(recorder)
        result = resolved(call(*args, **kwargs))
    return result, recorder, notes, given
