"""Lets somebody see the operations of a capture, beside its recorder, and the kernels that are no operations."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from graphmod.trace.dispatch import within_an_operation
from graphmod.trace.patches import Patch

Observer = Callable[[Any, tuple, dict, Any, list[Tensor]], None]
"""Takes in an operation, as `after` of `Recorder`. Raises nothing, and keeps no tensor alive that a capture makes."""


class Observed:
    """What else happened while somebody observed.

    Attributes:
        launched: whether Python launched a kernel of Triton that is no operation of PyTorch.
    """

    def __init__(self) -> None:
        self.launched = False


class _OfThread(threading.local):
    now: tuple[Observer, Observed] | None = None


_of_thread = _OfThread()


def observer() -> Observer | None:
    """Who observes the captures of this thread."""
    return None if _of_thread.now is None else _of_thread.now[0]


def _launches() -> list[tuple[Any, str, Any]]:
    kind = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    if kind is None:
        return []
    launch = kind.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = _of_thread.now
        if now is not None and not within_an_operation():
            now[1].launched = True
        return launch(self, *args, **kwargs)

    return [(kind, "run", run)]


_patch = Patch(_launches)


@contextlib.contextmanager
def observed(by: Observer) -> Iterator[Observed]:
    """Lets `by` observe the captures that this thread makes meanwhile."""
    before, found = _of_thread.now, Observed()
    with _patch:
        _of_thread.now = by, found
        try:
            yield found
        finally:
            _of_thread.now = before
