"""What a run leaves behind as numbers: the `RunResult`, its `result.json` and the closing report."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graphmod.train.report.timing import median, percentile
from graphmod.words import counted

RESULT_FILE = "result.json"
_PHASES = ("forward_ms", "backward_ms", "optimizer_ms")


@dataclass
class RunResult:
    """The numbers of one run.

    Attributes:
        scope: `none`, `per_layer`, `full_iteration`, or `auto`.
        config: the resolved settings.
        status: `finished`, `interrupted` (by the signal in `error`), or `failed` with the reason in `error`.
        device: name of the device.
        time_source: what `step_ms` was measured with, `cuda events` or `wall clock`.
        tokens_per_step: over all microbatches.
        losses: one a step, exact, as hexadecimal floats.
        eval_losses: [steps done, loss as hexadecimal float].
        step_ms, host_ms: milliseconds of each step, and of the host's part in it.
        measured_from_step: the first step that counts for medians; warm-up and capture lie before it.
        allocated_gib, reserved_gib: peaks of GPU memory; None on the CPU. With `graph=auto`, since the scope that was
            kept began.
        graph: the counters of `GraphStats`.
        seconds: of the loop, evaluation included.
        checkpoint: folder of the last checkpoint, relative to the run's.
        resumed_at_step: steps done by earlier processes; `step_ms` and `host_ms` begin there.
        skipped_steps: updates left out because something was not finite.
        lengths: with `data.buckets`, by length: how many pieces of documents are in it, the share of padding, and the
            graphs captured for it; also for all, and for what one bucket would take.
        profile: with `train.profile`, what `profile_steps` summed up.
        auto: what `graph=auto` measured and chose; empty without it.
        first_nonfinite_step: the first step, counted from 1, whose loss or gradient was not finite; None without one.
    """

    scope: str
    config: dict[str, Any] = field(default_factory=dict)
    status: str = "finished"
    error: str | None = None
    device: str = ""
    time_source: str = ""
    tokens_per_step: int = 0
    losses: list[str] = field(default_factory=list)
    eval_losses: list[list] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    measured_from_step: int = 0
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    graph: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    checkpoint: str | None = None
    resumed_at_step: int = 0
    skipped_steps: int = 0
    first_nonfinite_step: int | None = None
    lengths: dict[str, dict[str, Any]] = field(default_factory=dict)
    profile: dict[str, dict[str, Any]] = field(default_factory=dict)
    auto: dict[str, Any] = field(default_factory=dict)

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

    def summary(self) -> dict[str, Any]:
        """The derived numbers, by name."""
        names = ("step_ms_median", "step_ms_p95", "host_ms_median", "tokens_per_s")
        return {name: getattr(self, name) for name in names}

    def write(self, folder: Path) -> Path:
        """Writes `result.json` into `folder`, whole or not at all."""
        path = folder / RESULT_FILE
        partial = folder / f".{RESULT_FILE}.partial"
        partial.write_text(json.dumps({**self.summary(), **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
        return path

    @classmethod
    def read(cls, folder: Path) -> "RunResult":
        """The result written into `folder`. Raises OSError or ValueError when there is none that can be read."""
        values = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
        known = cls.__dataclass_fields__
        return cls(**{name: value for name, value in values.items() if name in known})

    def report(self) -> str:
        """A few lines for the end of a run."""
        graph = self.graph
        first, last = (float.fromhex(self.losses[index]) for index in (0, -1)) if self.losses else (None, None)
        lines = [f"graph={self.scope}: {graph.get('state', 'eager')} on {self.device}"]
        lines.append(
            f"  captures {graph.get('captures', 0)}, replays {graph.get('replays', 0)}, "
            f"eager calls {graph.get('eager_calls', 0)}, failures {graph.get('failures', 0)}, "
            f"capturing took {graph.get('capture_seconds', 0.0):.2f} s"
        )
        if self.step_ms_median is not None:
            lines.append(
                f"  step {self.step_ms_median:.2f} ms (median from step {self.measured_from_step} on), "
                f"host {self.host_ms_median:.2f} ms, {self.tokens_per_s:,.0f} tokens/s"
            )
        else:
            lines.append(f"  no step times: timing starts at step {self.measured_from_step + 1}")
        if self.reserved_gib is not None:
            lines.append(f"  GPU memory: {self.allocated_gib:.2f} GiB allocated, {self.reserved_gib:.2f} GiB reserved")
        if self.lengths:
            parts = (
                f"{length}: {counted(entry['pieces'], 'piece')}, {entry['padding']:.0%} padding, "
                f"{counted(entry['graphs'], 'graph')}"
                for length, entry in self.lengths.items()
                if "graphs" in entry
            )
            lines.append("  buckets " + "; ".join(parts))
            whole, single = self.lengths["all"]["padding"], self.lengths["one bucket"]["padding"]
            lines.append(f"  padding {whole:.1%} in total; with only the longest bucket it would be {single:.1%}")
        for name, found in self.profile.items():
            if "busy_share" in found:
                lines.append(
                    f"  profile, {name}: GPU busy {found['busy_ms']:.2f} ms of a step ({found['busy_share']:.0%}), "
                    f"idle {found['idle_ms']:.2f} ms, {found['kernels']:.0f} kernels"
                )
            else:
                lines.append(f"  profile, {name}: {found['step_ms']:.2f} ms per step; no GPU")
            if "layers" in found:
                phases = ", ".join(f"{key[:-3]} {found[key]:.2f} ms" for key in _PHASES if key in found)
                lines.append(f"  profile, layers: {found['layers']}" + (f"; {phases}" if phases else ""))
        if self.auto:
            lines.append(f"  using {self.auto['chosen'] or 'nothing yet'}: {self.auto['reason']}")
            lines += [f"  note: {note}" for note in self.auto.get("notes", ())]
        if self.skipped_steps:
            where = f"; first non-finite step: {self.first_nonfinite_step}" if self.first_nonfinite_step else ""
            scaled = self.config.get("train", {}).get("precision") == "fp16_mixed"
            why = " (including overflows of the loss scale)" if scaled else ""
            lines.append(f"  {counted(self.skipped_steps, 'update')} skipped{why}{where}")
        if first is not None:
            evaluated = f", evaluation {float.fromhex(self.eval_losses[-1][1]):.3f}" if self.eval_losses else ""
            lines.append(f"  loss {first:.3f} -> {last:.3f}{evaluated} nats per token")
        return "\n".join(lines)
