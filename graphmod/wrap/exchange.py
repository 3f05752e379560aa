"""The operations of a captured call, and other kernels in their place: for what compiles a call after it was captured.

What that has to know of operations and tensors is offered here, too, so that it imports nothing of the rooms below.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from graphmod.trace import dispatch
from graphmod.trace.compiled import CompiledGraph
from graphmod.trace.operations import Facts, address, draws, facts, written
from graphmod.trace.patches import Patch, Replacement
from graphmod.trace.recorder import observing
from graphmod.trace.tensors import each_tensor
from graphmod.trace.untraced import untraced
from graphmod.wrap.module import CUDAGraphModule

__all__ = [
    "CompiledGraph",
    "Facts",
    "address",
    "draws",
    "each_tensor",
    "exchange",
    "facts",
    "memory_of",
    "observed",
    "serving",
    "written",
]


class Observer(Protocol):
    """Sees the operations of a capture, beside its recorder. Raises nothing, and keeps no tensor alive that the capture
    makes."""

    def __call__(self, op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        """Takes in an operation, as `after` of `trace.recorder.Graph`."""

    def note_launch(self) -> None:
        """Takes in that Python launches a kernel of Triton that is no operation of PyTorch."""


def _launches() -> list[Replacement]:
    kind = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    if kind is None:
        return []
    launch = kind.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if observing.by is not None and not dispatch.within_an_operation():
            untraced(observing.by.note_launch)  # which changes what it is of
        return launch(self, *args, **kwargs)

    return [(kind, "run", run)]


_patch_of_launches = Patch(_launches)


@contextlib.contextmanager
def observed(by: Observer) -> Iterator[None]:
    """Lets `by` observe the captures that this thread makes meanwhile."""
    before = observing.by
    try:
        _patch_of_launches.take(by)
        observing.by = by
        yield
    finally:
        observing.by = before
        _patch_of_launches.leave(by)


def serving(wrapper: CUDAGraphModule) -> Any:
    """Stands for the graph behind the last call: another object after each capture of the call. None if there was
    none."""
    return wrapper._context.served


def memory_of(graph: Any) -> tuple[set[int], set[int]]:
    """Addresses of the memory that was there before the capture of a graph, which `serving` gave; and of tensors that
    it took over from the recorded call."""
    seen = graph.graph.seen
    return {*seen.outside, *(address(static.tensor) for static in graph.inputs)}, seen.kept_at


def exchange(wrapper: CUDAGraphModule, run: Callable[[], None]) -> bool:
    """Lets other code take the place of the graph behind the last call: from the next call on, a graph of `run()` is
    replayed. Arguments, guards and order stay those of the call that was recorded. Once that call is captured anew, for
    whatever reason, its own code is back.

    Args:
        run: does all that the call did, from and to the same tensors, and returns nothing. It must have run once, so
            that whatever it compiles and loads is there.

    Returns:
        Whether it does: not if no graph served the last call, or one that returns tensors, copies arguments, draws
        random numbers or has a backward.
    """
    graph = serving(wrapper)
    # All that the call leaves behind lies in tensors from outside, where other code can leave it as well.
    if graph is None or not graph.stands_alone or graph.results.with_grad or graph.random or graph.advanced:
        return False
    graph.replace_by(run)
    return True
