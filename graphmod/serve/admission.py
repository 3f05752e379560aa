"""How many requests are let in: as many samples as the engine runs at a time, and a bounded queue behind them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from graphmod.serve.errors import ApiError
from graphmod.words import counted

_LONGEST_WAIT = 60  # seconds that anybody is told to wait


class Admission:
    """Counts what has been let in. Used by one thread, the one that answers.

    Args:
        rows: samples that run at the same time.
        max_waiting: samples that may wait for a row.

    Attributes:
        samples, requests: let in and not finished.
    """

    def __init__(self, rows: int, max_waiting: int) -> None:
        self.rows, self.max_waiting = rows, max_waiting
        self.samples = self.requests = 0
        self._seconds: deque[float] = deque(maxlen=32)

    @contextmanager
    def let_in(self, samples: int) -> Iterator[None]:
        """Around a request of so many samples.

        Raises:
            ApiError: the queue is full (429), or could never hold them (400).
        """
        most = self.rows + self.max_waiting
        if samples > most:
            raise ApiError(
                400,
                f"the request asks for {counted(samples, 'completion')} and this server takes {most} at a time; "
                "ask for fewer",
                "n",
            )
        if self.samples + samples > most:
            raise ApiError(
                429,
                f"the queue is full: {counted(self.samples, 'completion')} of at most {most} run or wait",
                code="queue_full",
                retry_after=self.retry_after(),
            )
        self.samples, self.requests = self.samples + samples, self.requests + 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.samples, self.requests = self.samples - samples, self.requests - 1
            self._seconds.append(time.monotonic() - began)

    def retry_after(self) -> int:
        """Seconds after which there probably is room: about as long as a request took lately."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return max(1, min(_LONGEST_WAIT, round(mean)))
