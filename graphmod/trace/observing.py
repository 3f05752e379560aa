"""Lets somebody see the operations of a capture, beside its recorder."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Callback = Callable[[Any, tuple, dict, Any, list[Tensor]], None]


class _Observer(threading.local):
    callback: Callback | None = None


_observer = _Observer()


def observer() -> Callback | None:
    """Who observes the captures of this thread."""
    return _observer.callback


@contextlib.contextmanager
def observed(callback: Callback) -> Iterator[None]:
    """Shows the operations of captures that this thread makes meanwhile to `callback`, as to `after` of `Recorder`. It
    must not raise, and must keep no tensor alive that the capture makes."""
    before, _observer.callback = _observer.callback, callback
    try:
        yield
    finally:
        _observer.callback = before
