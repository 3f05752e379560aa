"""A recorded call: an eager call that is watched, so that its capture can be decided on before any is tried.

Imports `guards`, `tracer`, `garbage` and `results`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from graphmod.garbage import no_garbage_collection
from graphmod.guards.guards import Guards, what_changed
from graphmod.guards.notes import noting
from graphmod.results import resolved
from graphmod.trace import Step
from graphmod.tracer import Tracer


class Recording:
    """What one recorded call showed.

    Attributes:
        trace: its operations.
        generators: those it passed to random operations.
        backward: whether a backward ran inside.
        guards: what its code read.
        refused: why it is not to be captured; None where it may be.
    """

    def __init__(self, tracer: Tracer, guards: Guards, refused: str | None) -> None:
        self.trace: list[Step] = tracer.trace
        self.generators = tracer.generators
        self.backward = tracer.backward
        self.guards = guards
        self.refused = refused


def record(call: Callable, args: tuple, kwargs: dict, *roots: Any) -> tuple[Any, Recording]:
    """Makes a call and watches it.

    Args:
        roots: what it works on besides its arguments.

    Returns:
        The result, and what was seen.
    """
    tracer = Tracer()
    torch.clear_autocast_cache()  # what a graph casts, it casts itself; the recorded call must do so too
    with contextlib.ExitStack() as watching:
        watching.enter_context(no_garbage_collection())
        # What a backward runs in Python has to be seen as well.
        watching.enter_context(torch.autograd.set_multithreading_enabled(False))
        notes = watching.enter_context(noting(call, args, kwargs, *roots))
        watching.enter_context(tracer)
        result = resolved(call(*args, **kwargs))
    refused = what_changed(notes)
    return result, Recording(tracer, Guards(notes, tracer.backward), refused)
