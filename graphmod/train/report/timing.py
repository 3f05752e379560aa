"""How long each step takes, on the device and on the host, without making either wait."""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

# Steps the host may run ahead of a GPU. A replayed step costs the host so little that it would otherwise queue up
# hundreds, and the progress bar, Ctrl-C and an error would all come seconds late.
_MAX_AHEAD = 8


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return float(np.median(values)) if len(values) else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The given percentile (0 to 100), or None of nothing."""
    return float(np.percentile(values, share)) if len(values) else None


def unsteady(middle: float | None, high: float | None) -> bool:
    """Whether times with this median and this 95th percentile vary too much to conclude from them."""
    return middle is not None and high is not None and high > 2 * middle


class StepClock:
    """Measures steps from the end of one to the end of the next.

    On a GPU the ends are CUDA events, because the host's own clock says only when work was handed over. With `sync`
    each step ends with a wait for the device, and the host's clock is right; so it is on the CPU.

    Args:
        device: where the steps run.
        sync: wait for the device at the end of each step.

    Attributes:
        step_ms: milliseconds of each step that is known to have ended, in order.
        host_ms: milliseconds the host spent in each step's call.
        source: `cuda events` or `wall clock`, what `step_ms` was measured with.
    """

    def __init__(self, device: torch.device, sync: bool = False) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._wait = self._on_gpu and sync
        self._by_events = self._on_gpu and not sync
        self.source = "cuda events" if self._by_events else "wall clock"
        self.step_ms: list[float] = []
        self.host_ms: list[float] = []
        self._pending: deque = deque()
        self._mark = None

    def _now(self):
        if not self._by_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self) -> None:
        """Starts a stretch of steps: the first one, and the first after an evaluation."""
        self._mark = self._now()

    def end_step(self, host_seconds: float) -> None:
        """Ends a step whose call took the host `host_seconds`."""
        self.host_ms.append(host_seconds * 1e3)
        if self._wait:
            torch.cuda.synchronize(self._device)
        mark = self._now()
        self._pending.append((self._mark, mark))
        self._mark = mark
        if self._by_events and len(self._pending) > _MAX_AHEAD:
            self._pending[-1 - _MAX_AHEAD][1].synchronize()
        self.collect()

    def collect(self, wait: bool = False) -> None:
        """Moves the steps that have ended to `step_ms`; with `wait`, waits for all of them."""
        while self._pending:
            start, end = self._pending[0]
            if not self._by_events:
                self.step_ms.append((end - start) * 1e3)
            else:
                if wait:
                    end.synchronize()
                elif not end.query():
                    return
                self.step_ms.append(start.elapsed_time(end))
            self._pending.popleft()
