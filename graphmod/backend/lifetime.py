"""When CUDA graphs are destroyed: not while one is captured."""

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

_lock = threading.RLock()
_under_way = 0  # captures
_waiting: list[torch.cuda.CUDAGraph] = []


class Graphs:
    """Holds the graphs of one capture. To destroy a graph while its thread captures would end that capture, and the
    last to hold some may let go at any time: an error that Python forgets, a result. So they wait until no capture is
    under way."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        weakref.finalize(self, _let_go, self.graphs).atexit = False


def _let_go(graphs: list[torch.cuda.CUDAGraph]) -> None:
    with _lock:
        if _under_way:
            _waiting.extend(graphs)
    graphs.clear()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """For a capture to run in."""
    global _under_way
    with _lock:
        _under_way += 1
    try:
        yield
    finally:
        with _lock:
            _under_way -= 1
            gone = [] if _under_way else _waiting[:]
            if gone:
                _waiting.clear()
        del gone
