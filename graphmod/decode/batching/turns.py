"""A lock that threads take in turns."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from graphmod.decode.errors import DecodeError
from graphmod.decode.interrupts import Held

log = logging.getLogger("graphmod")

_LOOK = 0.05  # seconds between two looks whether there still is something to wait for
_LONG = 10  # seconds after which who waits is told for whom
_LAST = 10  # seconds that a step may still take when the interpreter ends
_all: weakref.WeakSet[Turns] = weakref.WeakSet()


class Turns(type(threading.RLock())):
    """A lock that goes to a thread that waits for it before the one that has just had it gets it again.

    A thread that steps an engine takes it again right after it has released it, and nobody else would ever get it from
    `threading.RLock`. The thread that has it may take it again.

    Attributes:
        paused: the thread that keeps it for a while, and where it says so in the source; None while none does.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()
        self.paused: tuple[threading.Thread, str] | None = None
        _all.add(self)

    def take(self, interrupts: Held) -> bool:
        """Waits for it; says whether this thread had it before.

        Args:
            interrupts: that are held: who is interrupted once he has it may not be able to give it back.

        Raises:
            DecodeError: the thread that has paused has ended.
        """
        if self._is_owned():
            return self.acquire()
        self._wait_for(self._next, interrupts)
        try:
            self._wait_for(self, interrupts)
        finally:
            self._next.release()
        return False

    def _wait_for(self, lock: Any, interrupts: Held) -> None:
        began, told = time.monotonic(), False
        while not lock.acquire(timeout=_LOOK):
            interrupts.tell()
            if (paused := self.paused) is None:
                continue
            thread, place = paused
            if not thread.is_alive():
                raise DecodeError(
                    f"the thread {thread.name!r} has ended and never left the engine.pause() that it entered at "
                    f"{place}; write `with engine.pause():`, and make a new engine"
                )
            if not told and time.monotonic() - began > _LONG:
                log.warning("waiting for thread %r to leave the engine.pause() of %s", thread.name, place)
                told = True

    def do_if_free(self, act: Callable[[], Any]) -> bool:
        """Does it while it has the lock, if that needs no waiting; says whether it did."""
        if self._is_owned():
            act()
            return True
        try:
            if not self.acquire(blocking=False):
                return False
            act()
            return True
        finally:
            if self._is_owned():
                self.release()


@atexit.register
def _end() -> None:
    """Takes the turns of all engines and keeps them: a daemon thread that the end of the interpreter meets in the
    middle of an operation of PyTorch would abort the process."""
    for turns in [*_all]:
        if turns.paused is None:
            turns.acquire(timeout=_LAST)
