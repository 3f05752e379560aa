"""Ctrl-C where it breaks nothing: it waits. What a call undoes that it has interrupted is in `trace.undo`. Standard
library only.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Held:
    """Lets Ctrl-C wait while it is entered and `heard` is not; what waits comes when it is left.

    A KeyboardInterrupt may come between any two instructions: after a context manager has changed something and before
    `with` knows of it, or before one that is left has put anything back. Who presses Ctrl-C twice does not wait. Only
    the main thread is ever interrupted; in others this does nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._real: Any = None
        self._came = False

    def __enter__(self) -> Held:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):  # else it is ignored, or ends the process
                outer = getattr(before, "__self__", None)
                self._before, self._real = before, outer._real if isinstance(outer, Held) else before
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        before, self._before = self._before, None
        if signal.getsignal(signal.SIGINT) == self._note:  # else it has come where it was heard, or is another's by now
            signal.signal(signal.SIGINT, before)
        if self._came:
            before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            self._real(number, frame)
        self._came = True

    def tell(self) -> None:
        """Lets what waits come now, at a moment at which nothing is half-way."""
        if self._came:
            self._came = False
            self._real(signal.SIGINT, None)

    def heard(self) -> _Heard:
        """A context in which Ctrl-C comes at once, as if nothing held it."""
        return _Heard(self)


class _Heard:
    def __init__(self, held: Held) -> None:
        self._held = held

    def __enter__(self) -> None:
        held = self._held
        held.tell()
        if held._before is not None:
            signal.signal(signal.SIGINT, held._real)

    def __exit__(self, *_: object) -> None:
        held = self._held
        if held._before is not None and signal.getsignal(signal.SIGINT) == held._real:
            signal.signal(signal.SIGINT, held._note)
