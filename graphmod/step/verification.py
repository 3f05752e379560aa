"""When calls are verified: run eagerly instead of being replayed, and compared with what was captured."""

from __future__ import annotations

import math
import time

_SHARE = 1000  # verified calls take at most one part in so many of the time
LOOKS = 61  # replays after which it is asked whether it is time; a prime, so that each call of a pass has its turn


class Verification:
    """The rounds in which the calls of a group of modules are verified: all in one pass, because after one eager call
    those that follow would find their arguments elsewhere than in a graph's result.

    Attributes:
        round: how many have begun.
    """

    def __init__(self) -> None:
        self.round = 0
        self._seconds = 0.0  # that a round takes
        self._next: float | None = None

    def expect(self, seconds: float) -> None:
        """Takes in, before the first round, how long one of the calls will take, at most."""
        self._seconds += seconds

    def stop(self) -> None:
        """Begins no round any more."""
        self._next = math.inf

    def begins(self) -> bool:
        """Whether it is time for another round, which begins if so."""
        now = time.perf_counter()
        if self._next is None:
            self._next = now + _SHARE * self._seconds
        if now < self._next:
            return False
        self._next = now
        self.round += 1
        return True

    def took(self, seconds: float) -> None:
        """Takes in how long a verified call of this round took."""
        self._next = max(self._next or 0.0, time.perf_counter()) + _SHARE * seconds
