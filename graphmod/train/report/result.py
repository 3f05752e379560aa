"""What a run leaves behind as numbers: the `RunResult`, its `result.json` and the closing report."""

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graphmod.train.report.timing import median, percentile
from graphmod.words import counted

RESULT_FILE = "result.json"


def _number(loss: float | None) -> float | str | None:
    return loss if loss is None or math.isfinite(loss) else str(loss)


@dataclass
class RunResult:
    """The numbers of one run.

    Attributes:
        scope: `none`, `per_layer`, `full_iteration`, or `auto`.
        config: the resolved settings.
        status: `finished`, `interrupted` (by the signal in `error`), or `failed` with the reason in `error`.
        device: name of the device.
        time_source: what `step_ms` was measured with, `cuda events` or `wall clock`.
        tokens_per_step: over all microbatches of all ranks.
        losses: one a step; in the file with all the digits that tell them from other floats, and as strings (`nan`,
            `inf`) where they are not finite, which JSON has no numbers for.
        eval_losses: [steps done, loss].
        ema_loss: that of the averaged weights at the last evaluation; None without.
        step_ms, host_ms: milliseconds of each step, and of the host's part in it.
        measured_from_step: the first step that counts for medians; warm-up and capture lie before it.
        allocated_gib, reserved_gib: peaks of GPU memory; None on the CPU. With `graph=auto`, since the scope that was
            kept began.
        graph: the counters of `GraphStats`, evaluation apart.
        evaluation_graph: what evaluations added to them, the graphs that training shares with them included.
        flops_per_token, peak_flops: of the model and of the devices (`train/report/flops.py`); None where unknown.
        seconds: of the loop, evaluation included.
        checkpoint: folder of the last checkpoint, relative to the run's.
        resumed_at_step: steps done by earlier processes; `step_ms` and `host_ms` begin there.
        versions: of the libraries, by name.
        commit: of the clone that graphmod was imported from; None without one.
        skipped_steps: updates skipped because something was not finite.
        lengths: with `data.buckets`, by length: how many pieces of documents are in it, the share of padding, and the
            graphs captured for it; also for all, and for what one bucket would take.
        profile: with `train.profile`, what `profile_steps` summed up.
        auto: what `graph=auto` measured and chose; empty without it.
        ranks: processes that trained together; `step_ms` and `host_ms` are those of the first one.
        rank_step_ms: the median step time of each rank, of the measured steps; empty of one rank.
        rank_profile: on several GPUs, milliseconds of a step for each rank, from a few steps recorded at the end: in
            which kernels ran (`busy_ms`), in which those of NCCL did (`comm_ms`), waits for other ranks included, and
            in which others ran beside these (`comm_hidden_ms`); empty without.
        first_nonfinite_step: the first step, counted from 1, whose loss or gradient was not finite; None without one.
    """

    scope: str
    config: dict[str, Any] = field(default_factory=dict)
    status: str = "finished"
    error: str | None = None
    device: str = ""
    time_source: str = ""
    tokens_per_step: int = 0
    losses: list[float] = field(default_factory=list)
    eval_losses: list[list] = field(default_factory=list)
    ema_loss: float | None = None
    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    measured_from_step: int = 0
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    graph: dict[str, Any] = field(default_factory=dict)
    evaluation_graph: dict[str, Any] = field(default_factory=dict)
    flops_per_token: float | None = None
    peak_flops: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    seconds: float = 0.0
    checkpoint: str | None = None
    resumed_at_step: int = 0
    skipped_steps: int = 0
    first_nonfinite_step: int | None = None
    lengths: dict[str, dict[str, Any]] = field(default_factory=dict)
    profile: dict[str, dict[str, Any]] = field(default_factory=dict)
    auto: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    rank_step_ms: list[float] = field(default_factory=list)
    rank_profile: dict[str, list[float]] = field(default_factory=dict)

    @property
    def step_ms_median(self) -> float | None:
        """Median of the measured steps; None when the run ended before them."""
        return median(self.step_ms[self.measured_from_step :])

    @property
    def step_ms_p95(self) -> float | None:
        """95th percentile of the measured steps."""
        return percentile(self.step_ms[self.measured_from_step :], 95)

    @property
    def host_ms_median(self) -> float | None:
        """Median of the host's part in the measured steps."""
        return median(self.host_ms[self.measured_from_step :])

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of a step over the median step time."""
        step_ms = self.step_ms_median
        return self.tokens_per_step / step_ms * 1e3 if step_ms else None

    @property
    def mfu(self) -> float | None:
        """Share of the device's peak that the model's FLOPs take, 1 being all of it; None where one is unknown."""
        if self.tokens_per_s is None or self.flops_per_token is None or self.peak_flops is None:
            return None
        return self.tokens_per_s * self.flops_per_token / self.peak_flops

    def summary(self) -> dict[str, Any]:
        """The derived numbers, by name."""
        names = ("step_ms_median", "step_ms_p95", "host_ms_median", "tokens_per_s", "mfu")
        of_ranks = {"rank_step_ms_spread": spread(self.rank_step_ms)} if self.rank_step_ms else {}
        return {name: getattr(self, name) for name in names} | of_ranks | self.communication()

    def communication(self) -> dict[str, float]:
        """`comm_ms` of a step, the median of all ranks, and `comm_hidden_share`, the part of it beside which others
        compute, from 0 to 1; empty where it was not measured."""
        sent = median(self.rank_profile.get("comm_ms", ()))
        if not sent:
            return {}
        return {"comm_ms": sent, "comm_hidden_share": statistics.median(self.rank_profile["comm_hidden_ms"]) / sent}

    @property
    def train_loss(self) -> float | None:
        """Mean loss of the last tenth of the steps; None before the first step."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :]) if self.losses else None

    @property
    def last_loss(self) -> float | None:
        """The loss of the last evaluation, or without any `train_loss`: what a sweeper may minimize."""
        return self.eval_losses[-1][1] if self.eval_losses else self.train_loss

    def write(self, folder: Path) -> Path:
        """Writes `result.json` into `folder`, whole or not at all."""
        path = folder / RESULT_FILE
        partial = folder / f".{RESULT_FILE}.partial"
        values = {**self.summary(), **asdict(self)}
        values["losses"] = [_number(loss) for loss in self.losses]
        values["eval_losses"] = [[done, _number(loss)] for done, loss in self.eval_losses]
        values["ema_loss"] = _number(self.ema_loss)
        partial.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
        return path

    @classmethod
    def read(cls, folder: Path) -> "RunResult":
        """The result written into `folder`. Raises OSError or ValueError when there is none that can be read."""
        values = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
        known = cls.__dataclass_fields__
        result = cls(**{name: value for name, value in values.items() if name in known})
        result.losses = [float(loss) for loss in result.losses]
        result.eval_losses = [[done, float(loss)] for done, loss in result.eval_losses]
        result.ema_loss = None if result.ema_loss is None else float(result.ema_loss)
        return result

    def report(self) -> str:
        """A few lines for the end of a run."""
        lines = [f"graph={self.scope}: {self.graph.get('state', 'eager')} on {self.device}"]
        if self.device.startswith("CPU") and self.graph.get("captures"):
            lines[0] += ", where graphs are emulated: the numbers are right, but nothing gets faster"
        lines.append(_counters("training", self.graph))
        if any(self.evaluation_graph.values()):
            lines.append(_counters("evaluation", self.evaluation_graph))
        lines.append(_times(self))
        if self.rank_step_ms:
            lines.append(_of_ranks(self.rank_step_ms))
        if found := self.communication():
            lines.append(
                f"  communication takes {found['comm_ms']:.2f} ms of a step, waits for other ranks included; during "
                f"{found['comm_hidden_share']:.0%} of that the GPU computes as well"
            )
        elif self.ranks > 1 and self.device.startswith("CPU"):
            lines.append("  how long ranks communicate is measured on GPUs only")
        if self.reserved_gib is not None:
            lines.append(f"  GPU memory: {self.allocated_gib:.2f} GiB allocated, {self.reserved_gib:.2f} GiB reserved")
        if self.lengths:
            lines += _lengths(self.lengths)
        for name, found in self.profile.items():
            lines += _profile(name, found)
        if self.auto:
            lines.append(f"  using {self.auto['chosen'] or 'nothing yet'}: {self.auto['reason']}")
            lines += [f"  note: {note}" for note in self.auto.get("notes", ())]
        if self.skipped_steps:
            lines.append(_skipped(self))
        if self.losses:
            lines.append(_losses(self))
        return "\n".join(lines)


def _counters(name: str, graph: Mapping[str, Any]) -> str:
    text = f"  {name}: captures {graph.get('captures', 0)}, replays {graph.get('replays', 0)}"
    text += f", eager calls {graph.get('eager_calls', 0)}, failures {graph.get('failures', 0)}"
    return text + f", capturing took {graph.get('capture_seconds', 0.0):.2f} s"


def _times(result: "RunResult") -> str:
    if result.step_ms_median is None:
        return f"  {_without_times(result)}"
    first = result.resumed_at_step + result.measured_from_step + 1
    used = "" if result.mfu is None else f", MFU {result.mfu:.1%}"
    return (
        f"  step {result.step_ms_median:.2f} ms (median from step {first} on), "
        f"host {result.host_ms_median:.2f} ms, {result.tokens_per_s:,.0f} tokens/s{used}"
    )


def _without_times(result: "RunResult") -> str:
    done, before = len(result.step_ms), result.resumed_at_step
    if before and not done:
        return f"no step was left to train: all {before:,} had been done before the run was resumed"
    first, last = before + result.measured_from_step + 1, before + done
    return f"no step times: timing starts at step {first:,}, after warm-up and capture; the run ended at step {last:,}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """The least, the median and the greatest, by these names; nothing of nothing."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)} if values else {}


def _of_ranks(times: list[float]) -> str:
    found = spread(times)
    return (
        f"  {counted(len(times), 'rank')}: median steps of {found['min']:.2f} to {found['max']:.2f} ms, "
        f"{found['median']:.2f} ms in the middle"
    )


def _lengths(lengths: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    parts = (
        f"{length}: {counted(entry['pieces'], 'piece')}, {entry['padding']:.0%} padding, "
        f"{counted(entry['graphs'], 'graph')}"
        for length, entry in lengths.items()
        if "graphs" in entry
    )
    yield "  buckets " + "; ".join(parts)
    whole, single = lengths["all"]["padding"], lengths["one bucket"]["padding"]
    yield f"  padding {whole:.1%} in total; with only the longest bucket it would be {single:.1%}"


def _profile(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    if "busy_share" in found:
        yield (
            f"  profile, {name}: GPU busy {found['busy_ms']:.2f} ms of a step ({found['busy_share']:.0%}), "
            f"idle {found['idle_ms']:.2f} ms, {found['kernels']:.0f} kernels"
        )
    else:
        yield f"  profile, {name}: {found['step_ms']:.2f} ms per step; no GPU"


def _skipped(result: "RunResult") -> str:
    scaled = result.config.get("train", {}).get("precision") == "fp16_mixed"
    why = " (including overflows of the loss scale)" if scaled else ""
    first = result.first_nonfinite_step
    where = f"; first non-finite step: {first}" if first else ""
    return f"  {counted(result.skipped_steps, 'update')} skipped{why}{where}"


def _losses(result: "RunResult") -> str:
    text = f"  loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
    if result.eval_losses:
        text += f", evaluation {result.eval_losses[-1][1]:.3f}"
    if result.ema_loss is not None:
        text += f", evaluation with averaged weights {result.ema_loss:.3f}"
    return f"{text} nats per token"
