"""Shows a comparison: as text, Markdown, JSON and in TensorBoard; the picture is drawn in `train/report/plot.py`."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from graphmod.train.report.comparison import BASELINE, Row, swept
from graphmod.train.report.plot import EMULATED, emulated, plot
from graphmod.train.report.result import RunResult
from graphmod.train.report.timing import unsteady
from graphmod.train.settings import LogTo
from graphmod.words import counted

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


def layout(on_gpu: bool) -> dict:
    """The charts that TensorBoard's Custom Scalars page shows, each with a line for every run."""
    charts = {**_CHARTS, **(_GPU_CHARTS if on_gpu else {})}
    return {"comparison": {title: ["Multiline", [tag]] for title, tag in charts.items()}}


def _losses(row: Row) -> str | None:
    if row.losses_equal is None:
        return None
    return "yes" if row.losses_equal else f"no, from step {row.first_difference}"


def _form(form: str) -> Callable[[float | None], str | None]:
    return lambda value: None if value is None else format(value, form)


_LOSSES = {
    "train loss": lambda row: _form(".4f")(row.train_loss),
    "eval loss": lambda row: _form(".4f")(row.eval_loss),
    "averaged": lambda row: _form(".4f")(row.ema_loss),
}
_COLUMNS: dict[str, Callable[[Row], str | None]] = {
    "run": lambda row: row.name,
    "step ms": lambda row: _form(".2f")(row.step_ms_median),
    "p95": lambda row: _form(".2f")(row.step_ms_p95),
    "host ms": lambda row: _form(".2f")(row.host_ms_median),
    "tokens/s": lambda row: _form(",.0f")(row.tokens_per_s),
    **_LOSSES,
    "speed-up": lambda row: _form(".2f")(row.speedup),
    "ranks": lambda row: None if row.ranks == 1 else str(row.ranks),
    "scaling": lambda row: _form(".0%")(row.scaling),
    "GPU busy": lambda row: _form(".0%")(row.gpu_busy_share),
    "comm ms": lambda row: _form(".2f")(row.comm_ms),
    "comm hidden": lambda row: _form(".0%")(row.comm_hidden_share),
    "ahead after": lambda row: None if row.payback_steps is None else counted(row.payback_steps, "step"),
    "reserved GiB": lambda row: _form(".2f")(row.reserved_gib),
    "capture s": lambda row: _form(".2f")(row.capture_seconds),
    "losses as none": _losses,
}


def _lines(rows: list[Row], with_losses: bool) -> list[list[str]]:
    """Head and cells; columns in which no run has anything are not shown."""
    rows = [row for row in rows if row.error is None]
    columns = []
    for title, cell in _COLUMNS.items():
        cells = [cell(row) for row in rows]
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


def _write_text(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def on_tensorboard(results: Mapping[str, RunResult]) -> bool:
    """Whether one of the runs that say where they log to (`train.log`) logs to TensorBoard; true where none says."""
    said = [result.config["train"]["log"] for result in results.values() if "log" in result.config.get("train", {})]
    return not said or any(LogTo.tensorboard in places for places in said)


def write_tensorboard(folder: Path, page: str, on_gpu: bool) -> None:
    """Adds a layout under Custom Scalars that draws all runs in the same charts, and the page as text."""
    with SummaryWriter(str(folder / TENSORBOARD_FOLDER)) as writer:
        writer.add_custom_scalars(layout(on_gpu))
        writer.add_text("comparison", page)


def write_report(folder: Path, rows: list[Row], results: Mapping[str, RunResult]) -> list[Path]:
    """Writes everything into `folder`; returns the files, for people. Each appears whole or not at all."""
    device = next((result.device for result in results.values() if result.device), "no device")
    content: dict[str, Any] = {"baseline": BASELINE, "device": device, "runs": [asdict(row) for row in rows]}
    files = [_write_text(folder / JSON_FILE, json.dumps(content, indent=1) + "\n")]
    page = markdown(rows, remarks(rows, results), device, swept(results))
    files.append(_write_text(folder / MARKDOWN_FILE, page))
    if plot(folder / PLOT_FILE, rows, results, device, swept(results)):
        files.append(folder / PLOT_FILE)
    if on_tensorboard(results):
        write_tensorboard(folder, page, any(result.reserved_gib is not None for result in results.values()))
    return files
