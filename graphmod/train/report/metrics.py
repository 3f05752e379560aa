"""Losses and scalars of a run: kept on the device, fetched in the background, handed to the loggers that it opens.

Between two log points nothing is read from the device, and at a log point nothing waits: values are copied into pinned
memory and written once their copy is known to have ended.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmod.train.checkpoints.progress import Progress
from graphmod.train.report.flops import Utilization
from graphmod.train.report.loggers.logger import Logger
from graphmod.train.report.timing import StepClock, median
from graphmod.train.settings import LogTo

Point = Callable[[int, dict[str, float | None]], None]

GIB = 2**30


@dataclass
class _Fetch:
    """A copy on its way: the losses of steps `first` up to `last`, then one value for each of `names`."""

    values: Tensor
    arrived: "torch.cuda.Event | None"
    first: int
    last: int
    names: list[str]
    scalars: dict[str, float]


def open_loggers(names: Sequence[str], folder: Path, settings: dict[str, Any], before: int | None) -> list[Logger]:
    """Opens the loggers of a run; where one fails, those before it are closed.

    Args:
        names: of `LogTo`.
        folder: of the run.
        settings: of the run, as nested plain values.
        before: steps that a resumed run had done; None for a new one.

    Raises:
        ConfigError: a library is missing.
        GraphmodError: a service does not begin a run.
        OSError: the folder cannot be written to.
    """
    with ExitStack() as opened:
        loggers = []
        for name in names:
            loggers.append(_open(LogTo(name), folder, settings, before))
            opened.callback(loggers[-1].close)
        opened.pop_all()
    return loggers


def _open(name: LogTo, folder: Path, settings: dict[str, Any], before: int | None) -> Logger:
    # Each library is loaded only where it is used.
    if name is LogTo.tensorboard:
        from graphmod.train.report.loggers.tensorboard_events import TensorBoardLogger

        return TensorBoardLogger(folder, settings, before)
    if name is LogTo.csv:
        from graphmod.train.report.loggers.csv_file import CsvLogger

        return CsvLogger(folder, before)
    from graphmod.train.report.loggers.wandb_run import WandbLogger

    return WandbLogger(folder, settings)


class Metrics:
    """Collects the loss of each step and hands points to the loggers.

    Args:
        loggers: of this run; closed with it.
        device: where the losses are.
        steps: steps of the run.
        clock: of the same run; its medians become `perf/step_ms` and `perf/host_ms`.
        tokens_per_step: for `perf/tokens_per_s`.
        before: of a resumed run, how far it was; its losses come first.
        used: of model and device, for `perf/mfu`; None where that is not known.
        point: called with the steps done and the values by tag of each log point and evaluation that has arrived.

    Attributes:
        losses: the losses that have arrived, one a step, in order.
        eval_losses: (steps done, loss) of the evaluations that have arrived.
        latest: the last value that arrived under each name.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        device: torch.device,
        steps: int,
        clock: StepClock,
        tokens_per_step: int,
        before: Progress | None = None,
        used: Utilization | None = None,
        point: Point | None = None,
    ) -> None:
        self._device, self._clock, self._tokens = device, clock, tokens_per_step
        self._used, self._point = used, point
        self._on_gpu = device.type == "cuda"
        self._first = before.steps_done if before else 0
        self._recent = torch.zeros(steps - self._first, dtype=torch.float32, device=device)
        self._done = self._sent = 0
        self._fetches: deque[_Fetch] = deque()
        self.losses: list[float] = list(before.losses) if before else []
        self.eval_losses: list[tuple[int, float]] = list(before.eval_losses) if before else []
        self.latest: dict[str, float] = {}
        self._loggers = loggers

    def record(self, loss: Tensor) -> None:
        """Keeps the 0-d loss of the step that was just done, on the device."""
        self._recent[self._done].copy_(loss)
        self._done += 1

    def _fetch(self, parts: dict[str, Tensor], scalars: dict[str, float], with_losses: bool = True) -> None:
        first, last = self._sent if with_losses else self._done, self._done
        packed = [self._recent[first:last]]
        packed += [value.detach().to(self._device, torch.float32).reshape(1) for value in parts.values()]
        values = torch.cat(packed)  # also what keeps a value that its graph will overwrite
        arrived = None
        if self._on_gpu:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self._device))
        if with_losses:
            self._sent = last
        self._fetches.append(_Fetch(values, arrived, first, last, list(parts), scalars))

    def log(self, values: dict[str, Tensor | float | None], graph: dict[str, int]) -> None:
        """A log point after the step that was just done.

        Args:
            values: by tag: one-element tensors, numbers, or None for what there is not. A name without a slash is no
                tag; its value is only kept in `latest`.
            graph: counters, by the last part of their tag (`captures`, `replays`, `eager_calls`).
        """
        parts = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        scalars: dict[str, float] = {f"graph/{name}": value for name, value in graph.items()}
        scalars |= {
            name: value for name, value in values.items() if value is not None and not isinstance(value, Tensor)
        }
        if self._on_gpu:
            scalars["memory/allocated_gib"] = torch.cuda.memory_allocated(self._device) / GIB
            scalars["memory/reserved_gib"] = torch.cuda.memory_reserved(self._device) / GIB
        self._fetch(parts, scalars)
        self.write()

    def log_evaluation(self, losses: dict[str, Tensor]) -> None:
        """Keeps 0-d evaluation losses by tag (`eval/loss`), measured after the step that was just done."""
        self._fetch(losses, {}, with_losses=False)
        self.write()

    def log_text(self, tag: str, text: str, done: int) -> None:
        """Logs a text after `done` steps, line breaks and signs of markup as they are."""
        for logger in self._loggers:
            logger.text(tag, text, done)

    def log_numbers(self, values: dict[str, float]) -> None:
        """Logs numbers by tag, known on the host, after the step that was last done, to the disk."""
        for logger in self._loggers:
            logger.scalars(values, self._first + self._done)
            logger.flush()

    def write(self, wait: bool = False) -> None:
        """Writes the points whose values have arrived; with `wait`, all of them."""
        self._clock.collect(wait)
        while self._fetches:
            fetch = self._fetches[0]
            if fetch.arrived is not None:
                if wait:
                    fetch.arrived.synchronize()
                elif not fetch.arrived.query():
                    return
            self._write(self._fetches.popleft())

    def _write(self, fetch: _Fetch) -> None:
        values = fetch.values.tolist()
        count = fetch.last - fetch.first
        self.losses += values[:count]
        known = {**fetch.scalars, **dict(zip(fetch.names, values[count:], strict=True))}
        done = self._first + fetch.last
        self.latest |= known
        if "eval/loss" in known:
            self.eval_losses.append((done, known["eval/loss"]))
        scalars: dict[str, float | None] = {**known}
        if count:
            # Steps end before their losses arrive, so the clock knows all of these by now.
            step_ms = median(self._clock.step_ms[fetch.first : fetch.last])
            scalars["train/loss"] = values[count - 1]
            scalars["perf/host_ms"] = median(self._clock.host_ms[fetch.first : fetch.last])
            scalars["perf/step_ms"] = step_ms
            if step_ms:
                speed = scalars["perf/tokens_per_s"] = self._tokens / step_ms * 1e3
                scalars["perf/mfu"] = self._used(speed) if self._used else None
        point = {tag: value for tag, value in scalars.items() if value is not None and "/" in tag}
        for logger in self._loggers:
            logger.scalars(point, done)
        if self._point is not None:
            self._point(done, scalars)

    def finish(self) -> None:
        """Waits for every value still on its way and writes it, to the disk."""
        self.write(wait=True)
        for logger in self._loggers:
            logger.flush()

    def end(self) -> None:
        """Notes that the run went through."""
        for logger in self._loggers:
            logger.end()

    def close(self) -> None:
        """Closes the loggers; values still on their way are dropped (call `finish` first to keep them)."""
        self._fetches.clear()
        with ExitStack() as closing:  # each, whatever another one raises
            for logger in self._loggers:
                closing.callback(logger.close)
