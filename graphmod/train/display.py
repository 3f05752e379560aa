"""What a run says before and while it trains: a bar on a terminal, else lines; all of it also in `train.log`."""

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from graphmod.config import CompileMode
from graphmod.train.batches import Data
from graphmod.train.device import device_name
from graphmod.train.ranks import ALONE, Ranks
from graphmod.train.result import peak_flops
from graphmod.train.settings import RunConfig
from graphmod.words import counted

# -- what is said while a progress bar is shown, by the log of graphmod and by threads ---------------------------------

log = logging.getLogger("graphmod")

# What batches of another shape lead to: another signature, and gradients at other addresses until it is captured.
_OF_LENGTHS = (
    " is called with other inputs",
    "runs eagerly: the gradients it accumulates into or reads differ from those at capture",
)


@contextmanager
def events_fail_once() -> Iterator[None]:
    """The thread that writes TensorBoard's events hands an error such as a full disk on to the run, which words it; a
    traceback of the thread would only say it before."""
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        handed_on = isinstance(failed.exc_value, OSError) and type(failed.thread).__module__.startswith("tensorboard.")
        if not handed_on:
            before(failed)

    with patch.object(threading, "excepthook", hook):
        yield


@contextmanager
def beside_bar(lengths: bool, bar: bool = True) -> Iterator[None]:
    """Inside, messages stand on lines of their own above the bar, if there is one; what was asked for is not said:
    where batches come in several `lengths`, calls with other inputs are expected."""

    def is_news(record: logging.LogRecord) -> bool:
        return not (lengths and any(words in record.getMessage() for words in _OF_LENGTHS))

    log.addFilter(is_news)
    try:
        with logging_redirect_tqdm() if bar else nullcontext():
            yield
    finally:
        log.removeFilter(is_news)


# -- bar, lines and file -----------------------------------------------------------------------------------------------

LOG_FILE = "train.log"


class Journal(logging.Handler):
    """The file `train.log` of a run; a resumed run adds to it. Each rank but the first has a file of its own, such as
    `train.rank1.log`, with messages only."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        super().__init__()
        self._path = folder / (f"train.rank{rank}.log" if rank else LOG_FILE)

    def write(self, text: str) -> None:
        """Adds the lines of `text`, each with the time. Raises OSError where that cannot be written."""
        now = datetime.now().isoformat(" ", "seconds")
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{now} {line}\n" for line in text.splitlines())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, messages of graphmod's log are added too, unless they are written to this file anyway."""
        files = [getattr(handler, "baseFilename", None) for handler in logging.root.handlers]
        if str(self._path.absolute()) in files:
            yield
            return
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a message of the log."""
        with suppress(OSError):  # the next line of the run itself says so
            self.write(f"{record.levelname.lower()}: {record.getMessage()}")


_FORMS = {
    "train/loss": "loss {:.4f}",
    "train/lr": "lr {:.2e}",
    "train/grad_norm": "gradient norm {:.3g}",
    "perf/step_ms": "step {:.1f} ms",
    "perf/tokens_per_s": "{:,.0f} tokens/s",
    "perf/mfu": "MFU {:.1%}",
}


class Display:
    """Shows the points of a run as their values arrive, if it shows anything; the journal takes every line. `first`
    steps of all were done before."""

    def __init__(self, journal: Journal, first: int, steps: int, shows: bool = True) -> None:
        self._journal, self._steps, self._shows = journal, steps, shows
        self._terminal, self._heard = shows and sys.stderr.isatty(), True
        self._bar = tqdm(
            total=steps, initial=first, unit="step", dynamic_ncols=True, mininterval=0.2, disable=not self._terminal
        )
        self._shown: dict[str, str] = {}

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *error: object) -> None:
        with self._telling():
            self._bar.close()

    def advance(self) -> None:
        """A step was done."""
        with self._telling():
            self._bar.update()

    def state(self, graphs: str) -> None:
        """In which state the graphs are; shown beside the bar."""
        self._shown["graph"] = graphs
        self._bar.set_postfix(self._shown, refresh=False)

    def point(self, done: int, scalars: Mapping[str, float | None]) -> None:
        """Shows the values of a log point or of an evaluation, by tag, after `done` steps."""
        if not self._shows:
            return
        if "eval/loss" in scalars:
            averaged = scalars.get("eval/ema_loss")
            text = f"step {done:,}/{self._steps:,}: evaluation loss {scalars['eval/loss']:.4f}"
            self._line(text if averaged is None else f"{text}, with averaged weights {averaged:.4f}", always=True)
            self._shown["eval"] = f"{scalars['eval/loss']:.3f}"
        if "train/loss" in scalars:
            known = {tag: value for tag in _FORMS if (value := scalars.get(tag)) is not None}
            parts = [_FORMS[tag].format(value) for tag, value in known.items()]
            if "perf/step_ms" in known and done < self._steps:
                left = known["perf/step_ms"] / 1e3 * (self._steps - done)
                parts.append(f"{tqdm.format_interval(left)} left")
            self._line(f"step {done:,}/{self._steps:,}: {', '.join(parts)}")
            self._shown["loss"] = f"{scalars['train/loss']:.3f}"
            if "perf/tokens_per_s" in known:
                self._shown["tokens/s"] = f"{known['perf/tokens_per_s']:,.0f}"
            if "perf/mfu" in known:
                self._shown["MFU"] = f"{known['perf/mfu']:.0%}"
        self._bar.set_postfix(self._shown, refresh=False)

    def _line(self, text: str, always: bool = False) -> None:
        self._journal.write(text)
        if (self._terminal and not always) or not self._heard:
            return  # the bar has these values
        with self._telling(), tqdm.external_write_mode(file=sys.stderr):
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A run goes on where nobody hears of it any more: its terminal was closed, or what reads its output ended."""
        try:
            yield
        except OSError as error:
            self._heard, self._bar.disable = False, True
            why = error.strerror or error
            self._journal.write(f"warning: the standard error output cannot be written: {why}; the run goes on")


# -- what a run says about itself before its first step ----------------------------------------------------------------


def _model(config: RunConfig, model: nn.Module) -> str:
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    some = "" if trained == total else f", {trained:,} of them trained"
    name = type(model).__name__.removeprefix("FSDP")  # which fully_shard puts before it
    return f"{name}, {counted(total, 'parameter')}{some}, precision {config.train.precision}"


def _batches(config: RunConfig, length: int, tokens_per_step: int, first: int, ranks: int) -> str:
    data, train = config.data, config.train
    each = f"{ranks} ranks x " if ranks > 1 else ""
    micro = f"{counted(train.grad_accumulation, 'microbatch')} of " if train.grad_accumulation > 1 else ""
    size = f"{micro}{data.batch_size} x {length} tokens"
    if data.buckets is not None:
        size = (
            f"{micro}up to {data.batch_size * data.seq_len:,} tokens in buckets of {', '.join(map(str, data.buckets))}"
        )
    left = train.steps - first
    done = f", {first:,} of them done" if first else ""
    tokens = f"{left * tokens_per_step:,} tokens {'to go' if first else 'in all'}"
    return f"{counted(train.steps, 'step')}{done}, each of {each}{size}; {tokens}"


def _device(config: RunConfig, device: torch.device, ranks: Ranks) -> str:
    name = device_name(device)
    peak = peak_flops(name)
    known = "" if peak is None else f" (peak {peak / 1e12:,.0f} TFLOP/s in bf16)"
    scope = "auto" if config.graph.auto else config.graph.scope.value
    compiled = "" if config.graph.compile is CompileMode.none else f", graph.compile={config.graph.compile}"
    several = f", {ranks.arrangement(config.parallel.mode)}" if ranks.count > 1 else ""
    return f"{name}{known}{several}, graph={scope}{compiled}"


def opening(
    config: RunConfig,
    model: nn.Module,
    corpus: Data,
    device: torch.device,
    folder: Path,
    tokens_per_step: int,
    first: int,
    ranks: Ranks = ALONE,
) -> str:
    """Five lines: model, data, batches, device and graphs, folder; `first` steps were done before."""
    lines = {
        "model": _model(config, model),
        "data": corpus.summary(),
        "batches": _batches(config, corpus.length, tokens_per_step, first, ranks.data_ranks),
        "device": _device(config, device, ranks),
        "folder": str(folder),
    }
    return "\n".join(f"{name + ':':<9}{text}" for name, text in lines.items())
