"""The picture of a comparison: step times as bars and over the steps, and losses where other settings differ."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphmod.train.report.comparison import Row
from graphmod.train.report.result import RunResult

EMULATED = "Graphs are emulated on a CPU: these times say nothing about a GPU."
_WIDE = 10.0  # times that reach from one number to more than so many times it are drawn on a logarithmic axis


def emulated(results: Iterable[RunResult]) -> bool:
    """Whether one of the runs had graphs that were emulated."""
    return any(result.device.startswith("CPU") and result.graph.get("captures") for result in results)


def _bars(axes: Any, rows: list[Row], colors: list[str]) -> None:
    medians = [row.step_ms_median or 0.0 for row in rows]
    axes.barh(range(len(rows)), medians, color=colors)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    for index, row in enumerate(rows):
        label = f" {row.step_ms_median:.2f} ms" + (f", {row.speedup:.2f}x" if row.speedup else "")
        axes.text(row.step_ms_median, index, label, va="center", fontsize=9)
    axes.set_xlim(0, 1.45 * max(medians, default=1.0))
    axes.invert_yaxis()
    axes.set_xlabel("step time, ms (median)")


def _times(axes: Any, curves: list[tuple[str, str, RunResult]]) -> None:
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


def _losses(axes: Any, curves: list[tuple[str, str, RunResult]]) -> None:
    for name, color, result in curves:
        axes.plot(range(1, 1 + len(result.losses)), result.losses, color=color, label=name, linewidth=1)
        if result.eval_losses:
            done, losses = zip(*result.eval_losses, strict=True)
            axes.plot(done, losses, color=color, marker="o", markersize=4, linestyle="none")
    axes.set_ylabel("loss, nats per token")
    axes.set_title("lines: training; dots: evaluation", fontsize=9)


def plot(path: Path, rows: list[Row], results: Mapping[str, RunResult], device: str, with_losses: bool = False) -> bool:
    """Draws the runs that were measured; False, and no file, where matplotlib is not installed.

    Args:
        path: of the PNG file.
        rows: from `compare`.
        results: by the name of the run.
        device: its name.
        with_losses: draw losses too.
    """
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
    _bars(bars, shown, [colors[row.name] for row in shown])
    _times(others[0], curves)
    if with_losses:
        _losses(others[1], curves)
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
