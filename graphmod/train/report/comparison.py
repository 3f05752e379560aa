"""Compares runs: one row each, beside the run without graphs, with losses where other settings than the graph differ.

Works on `RunResult`s alone. How the rows are shown is `train/report/report.py`'s business; what calls both
at the end of a multirun is `cli/training/comparison.py`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphmod.train.report.result import RunResult

BASELINE = "none"


@dataclass
class Row:
    """One run beside its baseline, the run with the same settings and graph=none.

    Attributes:
        name: the run's folder.
        baseline: the baseline's name; None when there is none.
        speedup: median step time of the baseline over this run's.
        gpu_busy_share: share of the step in which the GPU computes: kernel times of a profiled step over the median
            step time; None without a GPU.
        ranks: processes that trained together, each on a GPU.
        scaling: tokens per second over `ranks` times those of the run on one rank with otherwise the same settings;
            None without such a run.
        comm_ms, comm_hidden_share: of several GPUs, the milliseconds of a step in which a rank communicates, waits for
            others included, and in what share of these it computes as well; None where that was not measured.
        payback_steps: after how many steps the time that warm-up, compilation and capture took beyond eager's first
            steps is won back; None where nothing is won.
        train_loss: mean loss of the last tenth of the steps, in nats per token.
        eval_loss, ema_loss: at the last evaluation, the latter with averaged weights; None without one.
        losses_equal: whether every loss is, bit for bit, that of the run without graphs that computes with the same
            kernels (the same `graph.compile`); None when there is no such run, or this is it.
        first_difference: the first step, counted from 1, whose loss is not; None when there is none.
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
    ranks: int = 1
    scaling: float | None = None
    gpu_busy_share: float | None = None
    comm_ms: float | None = None
    comm_hidden_share: float | None = None
    payback_steps: int | None = None
    reserved_gib: float | None = None
    capture_seconds: float | None = None
    train_loss: float | None = None
    eval_loss: float | None = None
    ema_loss: float | None = None
    losses_equal: bool | None = None
    first_difference: int | None = None
    error: str | None = None


_UNIMPORTANT = {"resume", "profile", "checkpoint", "checkpoint_every", "keep_checkpoints"}


def _other_settings(result: RunResult) -> str:
    kept = {group: values for group, values in result.config.items() if group != "graph"}
    kept["train"] = {key: value for key, value in kept.get("train", {}).items() if key not in _UNIMPORTANT}
    return json.dumps(kept, sort_keys=True)


def _on_one_rank(result: RunResult) -> str:
    """The settings of a run but for how many ranks it has."""
    graph = result.config.get("graph", {})
    apart = json.dumps({key: value for key, value in json.loads(_other_settings(result)).items() if key != "parallel"})
    return f"{result.scope} {json.dumps(graph, sort_keys=True)} {apart}"


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
    return len({_other_settings(result) for result in results.values() if result.status == "finished"}) > 1


def compare(results: Mapping[str, RunResult], busy_ms: Mapping[str, float] | None = None) -> list[Row]:
    """A row for each run, in the given order; failed ones are kept and say why.

    Args:
        results: by the name of the run.
        busy_ms: sum of kernel times of a step, by the name of the run, where it is known.
    """
    eager: dict[str, dict[str, str]] = {}
    for name, result in results.items():
        if result.status == "finished" and result.scope == BASELINE:
            eager.setdefault(_other_settings(result), {}).setdefault(_compiled(result), name)
    finished = [result for result in results.values() if result.status == "finished"]
    alone = {_on_one_rank(result): result.tokens_per_s for result in finished if result.ranks == 1}
    rows = []
    for name, result in results.items():
        row = Row(name, result.scope, ranks=result.ranks)
        rows.append(row)
        if result.status != "finished":
            row.error = result.error or result.status
            continue
        row.step_ms_median, row.step_ms_p95 = result.step_ms_median, result.step_ms_p95
        row.host_ms_median, row.tokens_per_s = result.host_ms_median, result.tokens_per_s
        if result.ranks > 1 and result.tokens_per_s and (of_one := alone.get(_on_one_rank(result))):
            row.scaling = result.tokens_per_s / (result.ranks * of_one)
        row.reserved_gib, row.capture_seconds = result.reserved_gib, result.graph.get("capture_seconds")
        row.train_loss = result.train_loss
        row.eval_loss, row.ema_loss = result.eval_losses[-1][1] if result.eval_losses else None, result.ema_loss
        if row.step_ms_median and busy_ms and name in busy_ms:
            row.gpu_busy_share = min(1.0, busy_ms[name] / row.step_ms_median)
        sent = result.communication()
        row.comm_ms, row.comm_hidden_share = sent.get("comm_ms"), sent.get("comm_hidden_share")
        alike = eager.get(_other_settings(result), {})
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
