"""What `DecodeEngine.pause` gives."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable

from graphmod.decode.batching.traffic import Traffic
from graphmod.decode.errors import DecodeError

log = logging.getLogger("graphmod")


class Pause:
    """For as long as it is entered no step runs or is under way. It is entered once; other threads wait for its end.

    Args:
        traffic: that stands still.
        place: in the source, for those who wait.
    """

    def __init__(self, traffic: Traffic, place: str) -> None:
        self._traffic, self._place = traffic, place
        self._left: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        if self._left is not None:
            raise DecodeError("this pause has been entered already; call engine.pause() for another")
        self._left = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            interrupts = stack.enter_context(self._traffic.turn())
            self._traffic.drain()
            stack.callback(self._traffic.forget)
            stack.enter_context(self._traffic.kept_by(threading.current_thread(), self._place))
            stack.enter_context(interrupts.heard())
            self._left = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # modules have nothing in them any more
            return
        if self._left is None:
            said = f"engine.pause() of {self._place} was not entered, and pauses nothing: write `with engine.pause():`"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        else:
            with contextlib.suppress(RuntimeError):  # of another thread than this: nobody else can leave it
                self._left.close()
