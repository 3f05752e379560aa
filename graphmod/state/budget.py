"""How many captures are worth their time, whatever the pattern of calls."""

from __future__ import annotations

_REPLAYS = 16  # that a capture must bring
_DENIED = 256  # eager calls after which another try is made


class Budget:
    """Captures that may still be made without enough replays in between.

    Args:
        full: how many at first, and at most.
    """

    __slots__ = ("_full", "_left", "_replays")

    def __init__(self, full: int) -> None:
        self._full = full
        self._left = float(full)
        self._replays = 0

    def allows(self, replays: int) -> bool:
        """Whether one more capture may be made; `replays` counts all there were."""
        self._left = min(self._full, self._left + (replays - self._replays) / _REPLAYS)
        self._replays = replays
        if self._left >= 1:
            return True
        self._left += 1 / _DENIED
        return False

    def spend(self) -> None:
        """Takes in that a capture was tried."""
        self._left -= 1
