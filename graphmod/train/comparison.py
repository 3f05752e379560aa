"""Compares runs that differ in what they capture: the table on the terminal and `comparison.json`.

Works on `RunResult`s alone; what calls it at the end of a multirun is `train/callback.py`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphmod.train.result import RunResult

COMPARISON_FILE = "comparison.json"
_BASELINE = "none"


@dataclass
class Row:
    """One run beside its baseline, the run with the same settings and graph=none.

    Attributes:
        name: the run's folder.
        baseline: the baseline's name; None when there is none.
        speedup: median step time of the baseline over this run's.
        losses_equal: whether every loss is, bit for bit, the baseline's.
        first_difference: the first step, counted from 0, whose loss is not; None when there is none.
        error: why the run failed; then the numbers are None.
    """

    name: str
    scope: str
    baseline: str | None = None
    step_ms_median: float | None = None
    step_ms_p95: float | None = None
    host_ms_median: float | None = None
    tokens_per_s: float | None = None
    speedup: float | None = None
    reserved_gib: float | None = None
    capture_seconds: float | None = None
    losses_equal: bool | None = None
    first_difference: int | None = None
    error: str | None = None


def _other_settings(result: RunResult) -> str:
    return json.dumps({group: values for group, values in result.config.items() if group != "graph"}, sort_keys=True)


def _first_difference(losses: list[str], expected: list[str]) -> int | None:
    for step, (loss, other) in enumerate(zip(losses, expected, strict=False)):
        if loss != other:
            return step
    return None if len(losses) == len(expected) else min(len(losses), len(expected))


def compare(results: Mapping[str, RunResult]) -> list[Row]:
    """A row for each run, in the given order; failed ones are kept and say why."""
    baselines: dict[str, str] = {}
    for name, result in results.items():
        if result.status == "finished" and result.scope == _BASELINE:
            baselines.setdefault(_other_settings(result), name)
    rows = []
    for name, result in results.items():
        row = Row(name, result.scope)
        rows.append(row)
        if result.status != "finished":
            row.error = result.error or result.status
            continue
        row.step_ms_median, row.step_ms_p95 = result.step_ms_median, result.step_ms_p95
        row.host_ms_median, row.tokens_per_s = result.host_ms_median, result.tokens_per_s
        row.reserved_gib, row.capture_seconds = result.reserved_gib, result.graph.get("capture_seconds")
        row.baseline = baselines.get(_other_settings(result))
        if row.baseline is None:
            continue
        base = results[row.baseline]
        if row.step_ms_median and base.step_ms_median:
            row.speedup = base.step_ms_median / row.step_ms_median
        row.first_difference = _first_difference(result.losses, base.losses)
        row.losses_equal = row.first_difference is None
    return rows


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _losses(row: Row) -> str:
    if row.losses_equal is None:
        return "-"
    return "yes" if row.losses_equal else f"no, from step {row.first_difference}"


def table(rows: list[Row]) -> str:
    """The rows as aligned text; failed runs follow below it, with their reason."""
    lines = [
        ["run", "step ms", "p95", "host ms", "tokens/s", "speed-up", "reserved GiB", "capture s", "losses as none"]
    ]
    for row in rows:
        if row.error is None:
            lines.append(
                [
                    row.name,
                    _cell(row.step_ms_median, ".2f"),
                    _cell(row.step_ms_p95, ".2f"),
                    _cell(row.host_ms_median, ".2f"),
                    _cell(row.tokens_per_s, ",.0f"),
                    _cell(row.speedup, ".2f"),
                    _cell(row.reserved_gib, ".2f"),
                    _cell(row.capture_seconds, ".2f"),
                    _losses(row),
                ]
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = []
    for line in lines:
        cells = [line[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)
        ]
        shown.append("  ".join(cells).rstrip())
    shown += [f"{row.name}: failed: {row.error}" for row in rows if row.error is not None]
    return "\n".join(shown)


def remarks(rows: list[Row], results: Mapping[str, RunResult]) -> list[str]:
    """What a reader of the table must know to read it right."""
    said = []
    loose = [row for row in rows if row.losses_equal is False]
    if any(not results[row.name].config["train"]["deterministic"] for row in loose):
        said.append("Losses differ. Some kernels vary from run to run; train.deterministic=true uses others.")
    if any(row.error is None and row.step_ms_median is None for row in rows):
        said.append("A run was too short to be measured: the first steps, which warm up and capture, do not count.")
    if rows and all(row.baseline is None for row in rows):
        said.append("There is no speed-up without a run of graph=none to compare with.")
    return said


def write_comparison(folder: Path, rows: list[Row]) -> Path:
    """Writes `comparison.json` into `folder`, whole or not at all."""
    content: dict[str, Any] = {"baseline": _BASELINE, "runs": [asdict(row) for row in rows]}
    partial = folder / f".{COMPARISON_FILE}.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path = folder / COMPARISON_FILE
    os.replace(partial, path)
    return path
