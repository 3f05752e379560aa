"""Other kernels for a wrapped callable, beside its own: for what compiles a call after it was captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphmod.graph.exchange import exchangeable
from graphmod.wrap.module import CUDAGraphModule


def serving(wrapper: CUDAGraphModule) -> Any:
    """Stands for the graph behind the last call: another object after each capture of the call. None if there was
    none."""
    return wrapper._context.served


def exchange(wrapper: CUDAGraphModule, run: Callable[[], None]) -> bool:
    """Lets other code take the place of the graph behind the last call: from the next call on, a graph of `run()` is
    replayed. Once that call is captured anew, for whatever reason, its own code is back.

    Args:
        run: does all that the call did, from and to the same tensors, and returns nothing. It must have run once, so
            that whatever it compiles and loads is there.

    Returns:
        Whether it does: not if no graph served the last call, or one that returns tensors, copies arguments, draws
        random numbers or has a backward.
    """
    graph = serving(wrapper)
    if graph is None or not exchangeable(graph):
        return False
    graph.successor = run
    return True
