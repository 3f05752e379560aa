"""The operations of a captured call, and other kernels in their place: for what compiles a call after it was captured.

What that has to know of operations and tensors is offered here, too, so that it imports nothing of the rooms below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphmod.trace.compiled import CompiledGraph
from graphmod.trace.operations import Facts, address, draws, facts, written
from graphmod.trace.patches import observed
from graphmod.trace.tensors import each_tensor
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
    graph.successor = run
    return True
