"""A lock that threads take in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Turns(type(threading.RLock())):
    """A lock that goes to a thread that waits for it before the one that has just had it gets it again.

    A thread that steps an engine takes it again right after it has released it, and nobody else would ever get it from
    `threading.RLock`. The thread that has it may take it again. It is released by code that is not Python's, which no
    Ctrl-C can interrupt.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()

    def __enter__(self) -> None:
        if self._is_owned():
            self.acquire()
            return
        try:
            with self._next:
                self.acquire()
        except BaseException:
            if self._is_owned():  # Ctrl-C came right after it was taken
                self.release()
            raise

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
