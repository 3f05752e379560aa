"""Losses and scalars of a run: kept on the device, fetched in the background, written to TensorBoard.

Between two log points nothing is read from the device, and at a log point nothing waits: values are copied into pinned
memory and written once their copy is known to have ended.
"""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from graphmod.train.checkpoints.checkpoint import Progress
from graphmod.train.report.flops import Utilization
from graphmod.train.report.timing import StepClock, median

_RESULTS = ("train/loss", "eval/loss", "perf/step_ms", "perf/tokens_per_s")  # by which HParams lists runs

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


def _flat(settings: dict[str, Any], path: str = "") -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{path}{name}.")
        else:
            plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
            found[path + name] = value if plain else json.dumps(value, default=str)
    return found


class Metrics:
    """Collects the loss of each step and writes TensorBoard points.

    Args:
        folder: where the events go.
        device: where the losses are.
        steps: steps of the run.
        clock: of the same run; its medians become `perf/step_ms` and `perf/host_ms`.
        tokens_per_step: for `perf/tokens_per_s`.
        settings: of the run, as nested plain values; TensorBoard shows them as text and under HParams.
        before: of a resumed run, how far it was; its losses come first, and what TensorBoard shows of later steps, from
            before the interruption, is replaced.
        used: of model and device, for `perf/mfu`; None where that is not known.
        point: called with the steps done and the values by tag of each log point and evaluation that has arrived.

    Attributes:
        losses: the losses that have arrived, one a step, in order.
        eval_losses: (steps done, loss) of the evaluations that have arrived.
        latest: the last value that arrived under each name.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        steps: int,
        clock: StepClock,
        tokens_per_step: int,
        settings: dict[str, Any],
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
        # At the start, too: what was killed in this folder before it had saved anything left points of the same steps.
        self._writer = SummaryWriter(str(folder), purge_step=self._first + 1 if before else 0)
        if before is None:
            text = OmegaConf.to_yaml(OmegaConf.create(settings))
            self._writer.add_text("config", "```yaml\n" + text + "\n```")
        experiment, start, self._end = hparams(_flat(settings), dict.fromkeys(_RESULTS))
        for summary in (experiment, start):
            self._writer.file_writer.add_summary(summary)

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
        scalars = {f"graph/{name}": value for name, value in graph.items()}
        scalars |= {name: value for name, value in values.items() if value is not None and name not in parts}
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
        """Writes a text after `done` steps, line breaks and signs of Markdown as they are."""
        self._writer.add_text(tag, "    " + text.replace("\n", "\n    "), done)

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
        scalars = dict(fetch.scalars)
        scalars.update(zip(fetch.names, values[count:], strict=True))
        done = self._first + fetch.last
        self.latest |= scalars
        if "eval/loss" in scalars:
            self.eval_losses.append((done, scalars["eval/loss"]))
        if count:
            # Steps end before their losses arrive, so the clock knows all of these by now.
            step_ms = median(self._clock.step_ms[fetch.first : fetch.last])
            scalars["train/loss"] = values[count - 1]
            scalars["perf/host_ms"] = median(self._clock.host_ms[fetch.first : fetch.last])
            scalars["perf/step_ms"] = step_ms
            if step_ms:
                speed = scalars["perf/tokens_per_s"] = self._tokens / step_ms * 1e3
                scalars["perf/mfu"] = self._used(speed) if self._used else None
        for tag, value in scalars.items():
            if value is not None and "/" in tag:
                self._writer.add_scalar(tag, value, done)
        if self._point is not None:
            self._point(done, scalars)

    def finish(self) -> None:
        """Waits for every value still on its way and writes it, to the disk."""
        self.write(wait=True)
        self._writer.flush()

    def end(self) -> None:
        """Notes under HParams that the run went through."""
        self._writer.file_writer.add_summary(self._end)

    def close(self) -> None:
        """Closes the event file; values still on their way are dropped (call `finish` first to keep them)."""
        self._fetches.clear()
        self._writer.close()
