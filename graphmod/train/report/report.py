"""Shows a comparison: as text, Markdown, JSON, a picture and in TensorBoard."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from graphmod.train.report.comparison import BASELINE, Row
from graphmod.train.report.result import RunResult
from graphmod.train.report.timing import unsteady
from graphmod.words import counted

JSON_FILE, MARKDOWN_FILE, PLOT_FILE, TENSORBOARD_FOLDER = (
    "comparison.json",
    "comparison.md",
    "comparison.png",
    "comparison",
)
_HEAD = [
    "run",
    "step ms",
    "p95",
    "host ms",
    "tokens/s",
    "speed-up",
    "GPU busy",
    "ahead after",
    "reserved GiB",
    "capture s",
    "losses as none",
]
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


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _losses(row: Row) -> str:
    if row.losses_equal is None:
        return "-"
    return "yes" if row.losses_equal else f"no, from step {row.first_difference}"


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        _cell(row.step_ms_median, ".2f"),
        _cell(row.step_ms_p95, ".2f"),
        _cell(row.host_ms_median, ".2f"),
        _cell(row.tokens_per_s, ",.0f"),
        _cell(row.speedup, ".2f"),
        _cell(row.gpu_busy_share, ".0%"),
        "-" if row.payback_steps is None else counted(row.payback_steps, "step"),
        _cell(row.reserved_gib, ".2f"),
        _cell(row.capture_seconds, ".2f"),
        _losses(row),
    ]


def _failures(rows: list[Row]) -> list[str]:
    return [f"{row.name}: failed: {row.error}" for row in rows if row.error is not None]


def table(rows: list[Row]) -> str:
    """The rows as aligned text; failed runs follow below it, with their reason."""
    lines = [_HEAD, *(_cells(row) for row in rows if row.error is None)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    shown = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        shown.append("  ".join(cells).rstrip())
    return "\n".join([*shown, *_failures(rows)])


def markdown(rows: list[Row], said: list[str], device: str) -> str:
    """The comparison as a Markdown page."""
    align = ["---"] + ["---:"] * (len(_HEAD) - 1)
    body = [_cells(row) for row in rows if row.error is None]
    lines = [f"| {' | '.join(line)} |" for line in (_HEAD, align, *body)]
    notes = [f"- {note}" for note in (*_failures(rows), *said)]
    text = [f"# Step time of {counted(len(body), 'run')} on {device}", "", *lines, ""]
    explained = (
        "Step and host time are medians after warm-up and capture. *Speed-up* is against the run without graphs with "
        "otherwise the same settings. *Ahead after* is the step from which on a run is ahead of it, including "
        "warm-up, compilation and capture. *Losses as none*: bit for bit, at every step."
    )
    return "\n".join([*text, explained, "", *notes]) + "\n"


def remarks(rows: list[Row], results: Mapping[str, RunResult]) -> list[str]:
    """What a reader of the table must know to read it right."""
    said = []
    loose = [row for row in rows if row.losses_equal is False]
    if any(not results[row.name].config["train"]["deterministic"] for row in loose):
        said.append("Losses differ. Some kernels vary from run to run; train.deterministic=true avoids them.")
    if any(row.error is None and row.step_ms_median is None for row in rows):
        said.append("A run was too short to measure: the first steps, which warm up and capture, do not count.")
    if rows and all(row.baseline is None for row in rows):
        said.append("There is no speed-up without a run of graph=none to compare with.")
    restless = [row.name for row in rows if unsteady(row.step_ms_median, row.step_ms_p95)]
    if restless:
        said.append(
            f"Step times varied a lot in {', '.join(restless)}: p95 is more than twice the median. Compare again on an "
            "idle machine."
        )
    measured = [results[row.name] for row in rows if row.step_ms_median is not None]
    if any(result.device.startswith("CPU") and result.graph.get("captures") for result in measured):
        said.append("Graphs are emulated on a CPU: these times do not predict a GPU.")
    return said


def _write_text(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def plot(path: Path, rows: list[Row], results: Mapping[str, RunResult], device: str) -> bool:
    """Draws step times as bars and over the steps; False, and no file, where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shown = [row for row in rows if row.step_ms_median is not None]
    figure = Figure(figsize=(11, 1.6 + 0.5 * max(len(shown), 4)), layout="constrained")
    bars, curves = figure.subplots(1, 2)
    colors = [f"C{index % 10}" for index in range(len(shown))]
    medians = [row.step_ms_median for row in shown]
    bars.barh([row.name for row in shown], medians, color=colors)
    for index, row in enumerate(shown):
        label = f" {row.step_ms_median:.2f} ms" + (f", {row.speedup:.2f}x" if row.speedup else "")
        bars.text(row.step_ms_median, index, label, va="center", fontsize=9)
    bars.set_xlim(0, 1.45 * max(medians, default=1.0))
    bars.invert_yaxis()
    bars.set_xlabel("step time, ms (median)")
    for row, color in zip(shown, colors, strict=True):
        curves.plot(results[row.name].step_ms, color=color, label=row.name, linewidth=1)
    curves.set_yscale("log")
    curves.set_xlabel("step")
    curves.set_ylabel("ms")
    curves.set_title("warm-up and capture are at the beginning", fontsize=9)
    if shown:
        curves.legend(fontsize=8)
    figure.suptitle(device, fontsize=10)
    figure.savefig(path, dpi=130)
    return True


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
    page = markdown(rows, remarks(rows, results), device)
    files.append(_write_text(folder / MARKDOWN_FILE, page))
    if plot(folder / PLOT_FILE, rows, results, device):
        files.append(folder / PLOT_FILE)
    write_tensorboard(folder, page, any(result.reserved_gib is not None for result in results.values()))
    return files
