"""Compares runs: one row each, beside the run without graphs, with losses where other settings than the graph differ.

Works on `RunResult`s alone. What calls it at the end of a multirun is `cli/job.py`.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from graphmod.train.folders import write_whole
from graphmod.train.result import RunResult, unsteady
from graphmod.train.settings import LogTo
from graphmod.words import counted

# -- the rows ----------------------------------------------------------------------------------------------------------

BASELINE = "none"


@dataclass
class Row:
    """One run beside its baseline, the run with the same settings and graph=none."""

    name: str  # the run's folder
    scope: str
    baseline: str | None = None  # the baseline's name; None when there is none
    step_ms_median: float | None = None
    step_ms_p95: float | None = None
    host_ms_median: float | None = None
    tokens_per_s: float | None = None
    speedup: float | None = None  # median step time of the baseline over this run's
    ranks: int = 1  # processes that trained together, each on a GPU
    # Tokens per second over `ranks` times those of the run on one rank with otherwise the same settings; None without
    # such a run.
    scaling: float | None = None
    # Share of the step in which the GPU computes: kernel times of a profiled step over the median step time; None
    # without a GPU.
    gpu_busy_share: float | None = None
    # Of several GPUs, the milliseconds of a step in which a rank communicates, waits for others included, and in what
    # share of these it computes as well; None where that was not measured.
    comm_ms: float | None = None
    comm_hidden_share: float | None = None
    # After how many steps the time that warm-up, compilation and capture took beyond eager's first steps is won back;
    # None where nothing is won.
    payback_steps: int | None = None
    reserved_gib: float | None = None
    capture_seconds: float | None = None
    train_loss: float | None = None  # mean loss of the last tenth of the steps, in nats per token
    # At the last evaluation, the latter with averaged weights; None without one.
    eval_loss: float | None = None
    ema_loss: float | None = None
    # Whether every loss is, bit for bit, that of the run without graphs that computes with the same kernels (the same
    # `graph.compile`); None when there is no such run, or this is it.
    losses_equal: bool | None = None
    first_difference: int | None = None  # the first step, counted from 1, whose loss is not; None when there is none
    error: str | None = None  # why the run failed; then the numbers are None


# Of `train`: what changes neither losses nor the times of steps.
_UNIMPORTANT = {
    *("resume", "profile", "checkpoint", "checkpoint_every", "keep_checkpoints", "log", "log_every"),
    *("eval_every", "eval_batches", "sample_every", "sample_prompt", "sample_tokens", "sample_temperature"),
}


def _settings(result: RunResult, apart: str) -> str:
    """The settings of a run, without those of the group `apart`, to be compared."""
    kept = {group: values for group, values in result.config.items() if group != apart}
    kept["train"] = {key: value for key, value in kept.get("train", {}).items() if key not in _UNIMPORTANT}
    return json.dumps(kept, sort_keys=True)


def _compiled(result: RunResult) -> str:
    return result.config.get("graph", {}).get("compile", "none")


def _payback(result: RunResult, base: RunResult, gain: float) -> int | None:
    """Steps until the slower beginning of `result` is made up for, by the milliseconds that a later step gains."""
    first = min(result.measured_from_step, base.measured_from_step)
    if result is base or gain <= 0 or first == 0:
        return None
    # Both beginnings hold what any first step costs, so that their difference is what graphs cost.
    lost = sum(result.step_ms[:first]) - sum(base.step_ms[:first])
    return first + max(0, math.ceil(lost / gain))


def _first_difference(losses: list[float], expected: list[float]) -> int | None:
    for step, (loss, other) in enumerate(zip(losses, expected, strict=False), start=1):
        if loss.hex() != other.hex():  # NaN is NaN here
            return step
    return None if len(losses) == len(expected) else min(len(losses), len(expected)) + 1


def swept(results: Mapping[str, RunResult]) -> bool:
    """Whether other settings than those of the graphs differ among the runs that finished."""
    return len({_settings(result, "graph") for result in results.values() if result.status == "finished"}) > 1


def compare(results: Mapping[str, RunResult], busy_ms: Mapping[str, float] | None = None) -> list[Row]:
    """A row for each run, in the given order; failed ones are kept and say why. `busy_ms` has the sum of kernel times
    of a step, where it is known. Both are by the name of the run."""
    eager: dict[str, dict[str, str]] = {}
    for name, result in results.items():
        if result.status == "finished" and result.scope == BASELINE:
            eager.setdefault(_settings(result, "graph"), {}).setdefault(_compiled(result), name)
    finished = [result for result in results.values() if result.status == "finished"]
    alone = {_settings(result, "parallel"): result.tokens_per_s for result in finished if result.ranks == 1}
    rows = []
    for name, result in results.items():
        if result.status != "finished":
            rows.append(Row(name, result.scope, ranks=result.ranks, error=result.error or result.status))
            continue
        known: dict[str, Any] = result.communication()
        known |= {one.name: getattr(result, one.name) for one in fields(Row) if hasattr(result, one.name)}
        row = Row(name, **known)
        rows.append(row)
        row.capture_seconds = result.graph.get("capture_seconds")
        row.eval_loss = result.eval_losses[-1][1] if result.eval_losses else None
        if result.ranks > 1 and result.tokens_per_s and (of_one := alone.get(_settings(result, "parallel"))):
            row.scaling = result.tokens_per_s / (result.ranks * of_one)
        if row.step_ms_median and busy_ms and name in busy_ms:
            row.gpu_busy_share = min(1.0, busy_ms[name] / row.step_ms_median)
        alike = eager.get(_settings(result, "graph"), {})
        if not alike:
            continue
        row.baseline = alike.get("none") or next(iter(alike.values()))
        base = results[row.baseline]
        if row.step_ms_median and base.step_ms_median:
            row.speedup = base.step_ms_median / row.step_ms_median
            row.payback_steps = _payback(result, base, base.step_ms_median - row.step_ms_median)
        same_kernels = alike.get(_compiled(result))
        if same_kernels is not None and same_kernels != name:
            row.first_difference = _first_difference(result.losses, results[same_kernels].losses)
            row.losses_equal = row.first_difference is None
    return rows


# -- the picture: step times as bars and over the steps, and losses where other settings differ ------------------------

EMULATED = "Graphs are emulated on a CPU: these times say nothing about a GPU."
_WIDE = 10.0  # times that reach from one number to more than so many times it are drawn on a logarithmic axis


def emulated(results: Iterable[RunResult]) -> bool:
    """Whether one of the runs had graphs that were emulated."""
    return any(result.device.startswith("CPU") and result.graph.get("captures") for result in results)


def _draw_bars(axes: Any, rows: list[Row], colors: list[str]) -> None:
    medians = [row.step_ms_median or 0.0 for row in rows]
    axes.barh(range(len(rows)), medians, color=colors)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    for index, row in enumerate(rows):
        label = f" {row.step_ms_median:.2f} ms" + (f", {row.speedup:.2f}x" if row.speedup else "")
        axes.text(row.step_ms_median, index, label, va="center", fontsize=9)
    axes.set_xlim(0, 1.45 * max(medians, default=1.0))
    axes.invert_yaxis()
    axes.set_xlabel("step time, ms (median)")


def _draw_times(axes: Any, curves: list[tuple[str, str, RunResult]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name, color, result in curves:
        steps = range(result.resumed_at_step + 1, result.resumed_at_step + 1 + len(result.step_ms))
        axes.plot(steps, result.step_ms, color=color, label=name, linewidth=1)
    times = [ms for _, _, result in curves for ms in result.step_ms]
    if times and max(times) > _WIDE * min(times) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_ylabel("step time, ms")
    axes.set_title("the first steps include warm-up and capture", fontsize=9)


def _draw_losses(axes: Any, curves: list[tuple[str, str, RunResult]]) -> None:
    for name, color, result in curves:
        axes.plot(range(1, 1 + len(result.losses)), result.losses, color=color, label=name, linewidth=1)
        if result.eval_losses:
            done, losses = zip(*result.eval_losses, strict=True)
            axes.plot(done, losses, color=color, marker="o", markersize=4, linestyle="none")
    unit = min((result.loss_unit for _, _, result in curves), default="")
    axes.set_ylabel(f"loss,{unit}" if unit else "loss")
    axes.set_title("lines: training; dots: evaluation", fontsize=9)


def plot(path: Path, rows: list[Row], results: Mapping[str, RunResult], device: str, with_losses: bool = False) -> bool:
    """Draws the runs that were measured, losses too if asked, as a PNG file; False, and no file, where matplotlib is
    not installed."""
    # When it is first used in a home it says that it made a list of fonts, which nobody asked for.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    shown = [row for row in rows if row.step_ms_median is not None]
    drawn = [row.name for row in rows if row.error is None]
    colors = {name: f"C{index % 10}" for index, name in enumerate(drawn)}
    curves = [(name, colors[name], results[name]) for name in drawn]
    figure = Figure(figsize=(16 if with_losses else 11, 1.9 + 0.5 * max(len(drawn), 4)), layout="constrained")
    bars, *others = figure.subplots(1, 3 if with_losses else 2)
    _draw_bars(bars, shown, [colors[row.name] for row in shown])
    _draw_times(others[0], curves)
    if with_losses:
        _draw_losses(others[1], curves)
    for axes in others:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if curves:
            axes.legend(fontsize=8)
    warned = emulated(result for _, _, result in curves)
    figure.suptitle(
        f"{device}\n{EMULATED}" if warned else device, fontsize=10, color="firebrick" if warned else "black"
    )
    figure.savefig(path, dpi=130)
    return True


# -- as text, Markdown, JSON and in TensorBoard ------------------------------------------------------------------------

JSON_FILE, MARKDOWN_FILE, PLOT_FILE, TENSORBOARD_FOLDER = (
    "comparison.json",
    "comparison.md",
    "comparison.png",
    "comparison",
)
_CHARTS = {
    "step time, ms": "perf/step_ms",
    "host time, ms": "perf/host_ms",
    "loss": "train/loss",
    "tokens per second": "perf/tokens_per_s",
}
_GPU_CHARTS = {"GPU memory, GiB": "memory/reserved_gib"}


def _losses_as_none(row: Row) -> str | None:
    if row.losses_equal is None:
        return None
    return "yes" if row.losses_equal else f"no, from step {row.first_difference}"


_LOSSES = {"train loss": "train_loss .4f", "eval loss": "eval_loss .4f", "averaged": "ema_loss .4f"}
# What stands in a column: an attribute in a form, or what is made of a row.
_COLUMNS: dict[str, str | Callable[[Row], str | None]] = {
    "run": "name s",
    "step ms": "step_ms_median .2f",
    "p95": "step_ms_p95 .2f",
    "host ms": "host_ms_median .2f",
    "tokens/s": "tokens_per_s ,.0f",
    **_LOSSES,
    "speed-up": "speedup .2f",
    "ranks": lambda row: None if row.ranks == 1 else str(row.ranks),
    "scaling": "scaling .0%",
    "GPU busy": "gpu_busy_share .0%",
    "comm ms": "comm_ms .2f",
    "comm hidden": "comm_hidden_share .0%",
    "ahead after": lambda row: None if row.payback_steps is None else counted(row.payback_steps, "step"),
    "reserved GiB": "reserved_gib .2f",
    "capture s": "capture_seconds .2f",
    "losses as none": _losses_as_none,
}


def _cell(row: Row, what: str | Callable[[Row], str | None]) -> str | None:
    if not isinstance(what, str):
        return what(row)
    name, form = what.split(" ")
    value = getattr(row, name)
    return None if value is None else format(value, form)


def _lines(rows: list[Row], with_losses: bool) -> list[list[str]]:
    """Head and cells; columns in which no run has anything are not shown."""
    rows = [row for row in rows if row.error is None]
    columns = []
    for title, what in _COLUMNS.items():
        cells = [_cell(row, what) for row in rows]
        if title in ("run", "step ms") or (any(cells) and (with_losses or title not in _LOSSES)):
            columns.append([title, *(cell or "-" for cell in cells)])
    return [list(line) for line in zip(*columns, strict=True)]


def _failures(rows: list[Row]) -> list[str]:
    return [f"{row.name}: failed: {row.error}" for row in rows if row.error is not None]


def table(rows: list[Row], with_losses: bool = False) -> str:
    """The rows as aligned text, with columns for losses if asked; failed runs follow below it, with their reason."""
    lines = _lines(rows, with_losses)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        shown.append("  ".join(cells).rstrip())
    return "\n".join([*shown, *_failures(rows)])


_EXPLAINED = {
    "step ms": "Step and host time are medians after warm-up and capture.",
    "train loss": "*Train loss* is the mean of the last tenth of the steps, *eval loss* that of the last evaluation.",
    "speed-up": "*Speed-up* is over the run without graphs with otherwise the same settings.",
    "scaling": "*Scaling*: tokens/s, over as many times those of the run on one GPU with otherwise the same settings.",
    "comm ms": "*Comm ms*: of a step, in which a GPU communicates or waits for others; *comm hidden*: in what share of "
    "these it computes as well.",
    "ahead after": "*Ahead after*: the step from which a run is ahead of it, compilation and capture included.",
    "losses as none": "*Losses as none*: bit for bit, at every step; `-` for that run itself.",
}


def markdown(rows: list[Row], said: list[str], device: str, with_losses: bool = False) -> str:
    """The comparison as a Markdown page."""
    head, *body = _lines(rows, with_losses)
    align = ["---"] + ["---:"] * (len(head) - 1)
    lines = [f"| {' | '.join(line)} |" for line in (head, align, *body)]
    notes = [f"- {note}" for note in (*_failures(rows), *said)]
    text = [f"# Comparison of {counted(len(body), 'run')} on {device}", "", *lines, ""]
    explained = " ".join(words for title, words in _EXPLAINED.items() if title in head)
    return "\n".join([*text, explained, "", *notes]) + "\n"


def remarks(rows: list[Row], results: Mapping[str, RunResult]) -> list[str]:
    """What a reader of the table must know to read it right."""
    said = []
    loose = [row for row in rows if row.losses_equal is False]
    if any(not results[row.name].config["train"]["deterministic"] for row in loose):
        said.append("Losses differ. Some kernels vary from run to run; train.deterministic=true avoids them.")
    if any(row.error is None and row.step_ms_median is None for row in rows):
        said.append("A run was too short to measure: the first steps, which warm up and capture, do not count.")
    if len({row.scope for row in rows}) > 1 and all(row.baseline is None for row in rows):
        said.append("There is no speed-up without a run of graph=none to compare with.")
    restless = [row.name for row in rows if unsteady(row.step_ms_median, row.step_ms_p95)]
    if restless:
        said.append(
            f"Step times varied a lot in {', '.join(restless)}: p95 is more than twice the median. Compare again on an "
            "idle machine."
        )
    measured = [results[row.name] for row in rows if row.step_ms_median is not None]
    if emulated(measured):
        said.append(EMULATED)
    return said


def on_tensorboard(results: Mapping[str, RunResult]) -> bool:
    """Whether one of the runs that say where they log to (`train.log`) logs to TensorBoard; true where none says."""
    said = [result.config["train"]["log"] for result in results.values() if "log" in result.config.get("train", {})]
    return not said or any(LogTo.tensorboard in places for places in said)


def write_report(folder: Path, rows: list[Row], results: Mapping[str, RunResult]) -> list[Path]:
    """Writes everything into `folder`; returns the files, for people. Each appears whole or not at all."""
    device = next((result.device for result in results.values() if result.device), "no device")
    content: dict[str, Any] = {"baseline": BASELINE, "device": device, "runs": [asdict(row) for row in rows]}
    files = [write_whole(folder / JSON_FILE, json.dumps(content, indent=1) + "\n")]
    page = markdown(rows, remarks(rows, results), device, swept(results))
    files.append(write_whole(folder / MARKDOWN_FILE, page))
    if plot(folder / PLOT_FILE, rows, results, device, swept(results)):
        files.append(folder / PLOT_FILE)
    if on_tensorboard(results):
        on_gpu = any(result.reserved_gib is not None for result in results.values())
        charts = _CHARTS | (_GPU_CHARTS if on_gpu else {})
        layout = {"comparison": {title: ["Multiline", [tag]] for title, tag in charts.items()}}
        with SummaryWriter(str(folder / TENSORBOARD_FOLDER)) as writer:
            writer.add_custom_scalars(layout)  # all runs in the same charts
            writer.add_text("comparison", page)
    return files
