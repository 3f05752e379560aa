"""How much may be done for graphs that bring hardly a replay, whatever the pattern of calls."""

from __future__ import annotations

REPLAY = 1 / 8  # what one pays
_DENIED = 1 / 256  # what an eager call pays that had to be one because the account was empty


class Account:
    """The patience with one signature, or with all signatures of one wrapper.

    A recorded call costs one, its first capture included, and each further capture one; a recorded call in which
    something was compiled costs two, and a captured backward that is given up because it does not fit, three. Eight
    replays pay one back, up to what there was at first; one whose backward does not fit pays nothing. Once less than
    one is left, nothing more is recorded or captured: graphs that fit go on, and may pay for others; a signature
    without any stays eager, with the reason.

    Calls for which no graph was free are no reason to capture another until they have become more than the warm-up
    calls, less one for each eight replays. Failures are counted apart, because the next success makes up for all of
    them: `max_failures` in a row end it too. `force_enable()` opens a new account.

    Args:
        full: how much there is at first, and at most.

    Attributes:
        failures: those since the last success.
        misses: calls for which no graph was free, or no place for one.
    """

    __slots__ = ("_full", "_left", "_replays", "failures", "misses")

    def __init__(self, full: int) -> None:
        self._full = full
        self._left = float(full)
        self._replays = 0
        self.failures = 0
        self.misses = 0.0

    def allows(self, replays: int, cost: float = 1) -> bool:
        """Whether something may be tried, such as to record or capture a call; `replays` counts all there were."""
        self._take_in(replays)
        if self._left >= cost:
            return True
        self._left += _DENIED
        return False

    def missed(self, replays: int) -> None:
        """Takes in that no graph was free for a call, or no place for one; `replays` counts all there were."""
        self._take_in(replays)
        self.misses += 1

    def _take_in(self, replays: int) -> None:
        paid = (replays - self._replays) * REPLAY
        self._left, self.misses = min(self._full, self._left + paid), max(0.0, self.misses - paid)
        self._replays = replays

    def try_again(self) -> None:
        """Lets one more attempt be made."""
        self._left = max(self._left, 1.0)

    def spend(self, cost: float) -> None:
        """Takes in that something was tried."""
        self._left -= cost
