"""When CUDA graphs are captured and destroyed: one capture at a time, and nothing is destroyed during one.

PyTorch keeps, for each random number generator, a set of the graphs that use it, and whether a capture is under way,
without a lock around either.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

_turn = threading.RLock()  # to capture
_lock = threading.RLock()  # of what follows
_under_way = 0  # captures
_waiting: list[torch.cuda.CUDAGraph] = []
_later: list[Callable[[], None]] = []
_prepare: list[Callable[[torch.cuda.CUDAGraph], Callable[[], None] | None]] = []  # for the capture under way
_PATIENCE = 60.0  # seconds: a capture may wait for this very thread, and would never end


class Graphs:
    """Holds the graphs of one capture. The last to hold some may let go at any time: an error that Python forgets, a
    result. While a capture is under way, in any thread, they wait."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        end: Any = weakref.finalize(self, _let_go, self.graphs)  # whose stub lacks the attribute
        end.atexit = False


def _let_go(graphs: list[torch.cuda.CUDAGraph]) -> None:
    with _lock:
        if _under_way:
            _waiting.extend(graphs)
        graphs.clear()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """For a capture to run in.

    Raises:
        RuntimeError: another thread captures, and has not come to its end for a while.
    """
    global _under_way
    if not _turn.acquire(timeout=_PATIENCE):
        raise RuntimeError(f"another thread has been capturing for over {_PATIENCE:.0f} s")
    try:
        with _lock:
            _under_way += 1
        try:
            yield
        finally:
            with _lock:
                _under_way -= 1
                if not _under_way:
                    _waiting.clear()
                    _prepare.clear()
    finally:
        _turn.release()
        do_what_waits()


def prepare_launches(prepare: Callable[[torch.cuda.CUDAGraph], Callable[[], None] | None]) -> None:
    """To be called by code that is captured, for what the host does before each launch of what that becomes.

    Args:
        prepare: is given each graph of the capture, instantiated; what it returns is called before each launch of that
            graph. None does nothing there.
    """
    if prepare not in _prepare:
        _prepare.append(prepare)


def launcher(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """What launches a graph of the capture under way, which is instantiated, and does before what that asked for."""
    before = [act for prepare in _prepare if (act := prepare(graph)) is not None]
    if not before:
        return graph.replay

    def launch() -> None:
        for act in before:
            act()
        graph.replay()

    return launch


def between_captures(act: Callable[[], None]) -> None:
    """Does what would break a capture, such as waiting for the GPU: now, or once none is under way.

    Args:
        act: raises nothing.
    """
    _later.append(act)
    do_what_waits()


def do_what_waits() -> None:
    """Does what has waited for the end of a capture, if it has ended. That of a capture by others waits for the next
    call."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        if _under_way:
            return
        acts, _later[:] = _later[:], []
    for act in acts:
        act()
