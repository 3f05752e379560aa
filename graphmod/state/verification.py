"""When calls are verified: run eagerly instead of being replayed, and compared with what was captured."""

from __future__ import annotations

import time

_SHARE = 1000  # verified calls take at most one part in so many of the time
LOOKS = 64  # replays after which it is asked again whether it is time


class Verification:
    """The time that the verified calls of a group of modules take."""

    def __init__(self) -> None:
        self._next: float | None = None

    def due(self, cost: float) -> bool:
        """Whether a call may be verified now.

        Args:
            cost: seconds that it is going to take, at most.
        """
        now = time.perf_counter()
        if self._next is None:
            self._next = now + _SHARE * cost
        return now >= self._next

    def took(self, seconds: float) -> None:
        """Takes in how long a verified call took."""
        self._next = time.perf_counter() + _SHARE * seconds
