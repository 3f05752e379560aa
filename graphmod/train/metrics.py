"""Losses and scalars of a run: kept on the device, fetched in the background, handed to the loggers that it opens.

Between two log points nothing is read from the device, and at a log point nothing waits: values are copied into pinned
memory and written once their copy is known to have ended.
"""

import csv
import html
import io
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import GraphmodError, reason
from graphmod.train.checkpoint import Progress
from graphmod.train.folders import write_whole
from graphmod.train.result import StepClock, median
from graphmod.train.settings import LogTo

# -- where points are written beside a run's own files: TensorBoard, a CSV file, Weights & Biases ----------------------


class Logger:
    """One such place; this one does nothing. Steps never go back, and one step may come in several calls: a log point
    and an evaluation."""

    def scalars(self, values: Mapping[str, float], done: int) -> None:
        """Writes values by tag (`train/loss`), measured when `done` steps were done."""

    def text(self, tag: str, text: str, done: int) -> None:
        """Writes a text, line breaks and signs of markup as they are. Where there is no place for texts, nothing."""

    def flush(self) -> None:
        """Returns when everything is where a killed process leaves it."""

    def end(self) -> None:
        """Notes that the run went through; without it, `close` means that it failed."""

    def close(self) -> None:
        """Gives back files and threads. The last call."""


def by_full_name(settings: Mapping[str, Any], path: str = "") -> dict[str, float | str]:
    """Nested settings by full name, such as `optim.learning_rate`; what is neither number nor text is JSON."""
    found: dict[str, float | str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= by_full_name(value, f"{path}{name}.")
        else:
            plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
            found[path + name] = value if plain else json.dumps(value, default=str)
    return found


_RESULTS = ("train/loss", "eval/loss", "perf/step_ms", "perf/tokens_per_s")  # by which HParams lists runs


class TensorBoardLogger(Logger):
    """TensorBoard shows the settings as text and under HParams. What it shows of steps after `before`, those that a
    resumed run had done, is replaced; None is a new run."""

    def __init__(self, folder: Path, settings: dict[str, Any], before: int | None) -> None:
        # Each library is loaded only where it is used.
        import yaml
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # At the start, too: what was killed in this folder before it had saved anything left points of the same steps.
        self._writer = SummaryWriter(str(folder), purge_step=0 if before is None else before + 1)
        if before is None:
            text = yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)
            self._writer.add_text("config", "```yaml\n" + text + "\n```")
        experiment, start, self._end = hparams(by_full_name(settings), dict.fromkeys(_RESULTS))
        assert self._writer.file_writer is not None
        self._events = self._writer.file_writer
        for summary in (experiment, start):
            self._events.add_summary(summary)

    def scalars(self, values: Mapping[str, float], done: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, done)

    def text(self, tag: str, text: str, done: int) -> None:
        # A block of code, since TensorBoard reads Markdown.
        self._writer.add_text(tag, "    " + text.replace("\n", "\n    "), done)

    def flush(self) -> None:
        self._writer.flush()

    def end(self) -> None:
        self._events.add_summary(self._end)

    def close(self) -> None:
        self._writer.close()


CSV_FILE = "metrics.csv"
_STEP = "step"


class CsvLogger(Logger):
    """Lines are added at the end. Where a tag comes that had no column yet, or more of a line that was written, the
    file is written anew. Lines of steps after `before`, those that a resumed run had done, are dropped, because they
    come again; None is a new run, which begins a new file."""

    def __init__(self, folder: Path, before: int | None) -> None:
        self._path, self._columns = folder / CSV_FILE, [_STEP]
        self._lines: list[dict[str, Any]] = []
        if before is not None and self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self._columns = [*(reader.fieldnames or [_STEP])]
                # A killed process may have left half a last line; whole ones have a value or nothing for each column.
                whole = (line for line in reader if line[_STEP].isdigit() and None not in line.values())
                self._lines = [line for line in whole if int(line[_STEP]) <= before]
        self._rewrite()

    def _rewrite(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(self._lines)
        write_whole(self._path, text.getvalue())
        self._written, self._changed = len(self._lines), False

    def scalars(self, values: Mapping[str, float], done: int) -> None:
        """Adds the values to the line of that step, which is written when it is whole."""
        if not self._lines or self._lines[-1][_STEP] != done:
            self.flush()
            self._lines.append({_STEP: done})
        self._lines[-1] |= values
        self._changed = self._written == len(self._lines)  # `flush` was in between

    def flush(self) -> None:
        """Writes the last line, too; between lines the file is closed."""
        more = [tag for line in self._lines[-1:] for tag in line if tag not in self._columns]
        if more or self._changed:
            self._columns += more
            self._rewrite()
        elif self._written < len(self._lines):
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(self._lines[-1])
            self._written = len(self._lines)

    close = flush


ID_FILE = "wandb_id.txt"
_PROJECT = "graphmod"


class WandbLogger(Logger):
    """The library's environment variables hold: `WANDB_MODE`, without which nothing leaves this machine (`offline`),
    `WANDB_PROJECT`, and what else it knows. Its run's identifier is kept in the folder: who resumes there goes on with
    the same run of W&B. Raises GraphmodError where W&B does not begin a run, for example because nobody is logged
    in."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        import wandb

        self._html = wandb.Html
        kept = folder / ID_FILE
        if not kept.exists():
            kept.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=os.environ.get("WANDB_NAME", folder.name),
                id=kept.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(folder),
                config=by_full_name(settings),
                allow_val_change=True,  # a resumed run may have other settings
                mode=os.environ.get("WANDB_MODE", "offline"),
            )
        except Exception as error:  # the library raises its own, and those of its server
            raise GraphmodError(
                f"train.log=wandb: W&B does not begin a run: {reason(error)} WANDB_MODE=offline needs no server"
            ) from error
        self._failed = True

    def scalars(self, values: Mapping[str, float], done: int) -> None:
        """Logs the values; W&B keeps what it has of a step that comes again, and the numbers are the same."""
        self._run.log(dict(values), step=done)

    def text(self, tag: str, text: str, done: int) -> None:
        self._run.log({tag: self._html(f"<pre>{html.escape(text)}</pre>")}, step=done)

    def end(self) -> None:
        self._failed = False

    def close(self) -> None:
        """Waits until the library has written, and in `online` mode sent, everything."""
        self._run.finish(exit_code=int(self._failed))


# -- metrics -----------------------------------------------------------------------------------------------------------

Point = Callable[[int, dict[str, float | None]], None]

GIB = 2**30


def open_loggers(names: Sequence[str], folder: Path, settings: dict[str, Any], before: int | None) -> list[Logger]:
    """Opens the loggers of a run that `names` of `LogTo` say; where one fails, those before it are closed. `before` are
    the steps that a resumed run had done; None for a new one. Raises GraphmodError, or OSError where the folder cannot
    be written to."""
    kinds: dict[LogTo, Callable[[], Logger]] = {
        LogTo.tensorboard: lambda: TensorBoardLogger(folder, settings, before),
        LogTo.csv: lambda: CsvLogger(folder, before),
        LogTo.wandb: lambda: WandbLogger(folder, settings),
    }
    with ExitStack() as opened:
        loggers = []
        for name in names:
            loggers.append(kinds[LogTo(name)]())
            opened.callback(loggers[-1].close)
        opened.pop_all()
    return loggers


class Metrics:
    """Collects the loss of each step and hands points to the loggers.

    Args:
        loggers: of this run; closed with it.
        clock: of the same run; its medians become `perf/step_ms` and `perf/host_ms`.
        before: of a resumed run, how far it was; its losses come first.
        used: what `utilization` tells of model and device, for `perf/mfu`; None where that is not known.
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
        used: tuple[float, float] | None = None,
        point: Point | None = None,
    ) -> None:
        self._device, self._clock, self._tokens = device, clock, tokens_per_step
        self._used, self._point = used, point
        self._on_gpu = device.type == "cuda"
        self._first = before.steps_done if before else 0
        self._recent = torch.zeros(steps - self._first, dtype=torch.float32, device=device)
        self._done = self._sent = 0
        # Copies on their way: when they have arrived, None where they are there, and what is done then.
        self._fetches: deque[tuple[torch.cuda.Event | None, Callable[[], None]]] = deque()
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
        self._fetches.append((arrived, partial(self._write, values, slice(first, last), list(parts), scalars)))

    def log(self, values: dict[str, Tensor | float | None], graph: dict[str, int]) -> None:
        """A log point after the step that was just done: one-element tensors, numbers, or None for what there is not,
        by tag (a name without a slash is no tag; its value is only kept in `latest`), and the counters of `graph` by
        the last part of their tag."""
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
            arrived, write = self._fetches[0]
            if arrived is not None:
                if wait:
                    arrived.synchronize()
                elif not arrived.query():
                    return
            self._fetches.popleft()
            write()

    def _write(self, fetched: Tensor, steps: slice, names: list[str], given: dict[str, float]) -> None:
        """Hands on the losses of these steps, then a value for each of `names`, and what else is `given`."""
        values, count, done = fetched.tolist(), steps.stop - steps.start, self._first + steps.stop
        self.losses += values[:count]
        known = {**given, **dict(zip(names, values[count:], strict=True))}
        self.latest |= known
        if "eval/loss" in known:
            self.eval_losses.append((done, known["eval/loss"]))
        scalars: dict[str, float | None] = {**known}
        if count:
            # Steps end before their losses arrive, so the clock knows all of these by now.
            step_ms = median(self._clock.step_ms[steps])
            scalars["train/loss"] = values[count - 1]
            scalars["perf/host_ms"] = median(self._clock.host_ms[steps])
            scalars["perf/step_ms"] = step_ms
            if step_ms:
                speed = scalars["perf/tokens_per_s"] = self._tokens / step_ms * 1e3
                scalars["perf/mfu"] = speed * self._used[0] / self._used[1] if self._used else None
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
