"""What a run leaves behind as numbers: the `RunResult`, its `result.json` and the closing report."""

import json
import math
import platform
import re
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import graphmod
from graphmod.train.folders import write_whole
from graphmod.words import counted

# -- how long each step takes, on the device and on the host, without making either wait -------------------------------

# Steps the host may run ahead of a GPU. A replayed step costs the host so little that it would otherwise queue up
# hundreds, and the progress bar, Ctrl-C and an error would all come seconds late.
_MAX_AHEAD = 8


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return float(np.median(values)) if len(values) else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The given percentile (0 to 100), or None of nothing."""
    return float(np.percentile(values, share)) if len(values) else None


def unsteady(middle: float | None, high: float | None) -> bool:
    """Whether times with this median and this 95th percentile vary too much to conclude from them."""
    return middle is not None and high is not None and high > 2 * middle


class StepClock:
    """Measures steps from the end of one to the end of the next; on a GPU the ends are CUDA events, because the host's
    own clock says only when work was handed over.

    Attributes:
        step_ms: milliseconds of each step that is known to have ended, in order.
        host_ms: milliseconds the host spent in each step's call.
        source: `cuda events` or `wall clock`, what `step_ms` was measured with.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._by_events = device, device.type == "cuda"
        self.source = "cuda events" if self._by_events else "wall clock"
        self.step_ms: list[float] = []
        self.host_ms: list[float] = []
        self._pending: deque = deque()
        self._mark = None

    def _now(self):
        if not self._by_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self) -> None:
        """Starts a stretch of steps: the first one, and the first after an evaluation."""
        self._mark = self._now()

    def end_step(self, host_seconds: float) -> None:
        """Ends a step whose call took the host `host_seconds`."""
        self.host_ms.append(host_seconds * 1e3)
        mark = self._now()
        self._pending.append((self._mark, mark))
        self._mark = mark
        if self._by_events and len(self._pending) > _MAX_AHEAD:
            self._pending[-1 - _MAX_AHEAD][1].synchronize()
        self.collect()

    def collect(self, wait: bool = False) -> None:
        """Moves the steps that have ended to `step_ms`; with `wait`, waits for all of them."""
        while self._pending:
            start, end = self._pending[0]
            if not self._by_events:
                self.step_ms.append((end - start) * 1e3)
            else:
                if wait:
                    end.synchronize()
                elif not end.query():
                    return
                self.step_ms.append(start.elapsed_time(end))
            self._pending.popleft()


# -- how much of a GPU's arithmetic a run uses: model FLOPs utilization (MFU) ------------------------------------------
# Counted as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): for each token 6 FLOPs a parameter and 12
# * layers * heads * head size * sequence length for attention, forward and backward; what runs again in the backward
# does not count.

# Dense bf16 tensor-core TFLOP/s by the name that CUDA reports, from NVIDIA's data sheets of these products, which give
# twice as much for sparse matrices. The first pattern that is found counts.
_PEAKS = (
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.5),
    (r"\b(GH|H)200\b", 989.5),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100\b", 989.5),
    (r"\bA100\b", 312.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.05),
    (r"\bL40\b", 181.05),
    (r"\bL4\b", 121.0),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b", 71.0),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def peak_flops(device: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None where it is not known, as of a CPU or a part of a GPU (MIG)."""
    if "MIG" in device:
        return None
    return next((peak * 1e12 for pattern, peak in _PEAKS if re.search(pattern, device)), None)


def multiplied_parameters(model: nn.Module) -> int:
    """Parameters of the model without the embeddings that are only looked up."""
    looked_up = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    looked_up -= {id(part.weight) for part in model.modules() if isinstance(part, nn.Linear)}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in looked_up)


def flops_per_token(model: nn.Module, config: Any, length: int) -> float | None:
    """FLOPs that training takes for each token of a sequence of so many; None for a model of experts, not all of which
    see each token, or one whose attention is not described in the terms of its transformers config."""
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    hidden = getattr(config, "hidden_size", None)
    size = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)
    if not layers or not heads or not size or any(getattr(config, name, None) for name in _EXPERTS):
        return None
    return 6.0 * multiplied_parameters(model) + 12.0 * layers * heads * size * length


def utilization(model: nn.Module, config: Any, length: int, device: str, count: int = 1) -> tuple[float, float] | None:
    """FLOPs that a token takes, and FLOP/s of `count` such devices: their quotient times tokens per second is the MFU
    of a run. None where one of them is not known."""
    flops, peak = flops_per_token(model, config, length), peak_flops(device)
    return None if flops is None or peak is None else (flops, count * peak)


# -- what a run was made with: versions of the libraries, and the commit of a clone ------------------------------------


def versions() -> dict[str, str]:
    """The versions of graphmod, torch, transformers and Python, by name."""
    return {
        "graphmod": graphmod.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def commit(clone: Path | None = None) -> str | None:
    """The commit that a clone (that of graphmod by default) is at, 40 or 64 hexadecimal digits; None where there is no
    clone, no commit yet, or no git."""
    git = (clone or Path(graphmod.__file__).parent.parent) / ".git"
    if not git.exists():
        return None
    command = ["git", f"--git-dir={git}", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


# -- the result --------------------------------------------------------------------------------------------------------

RESULT_FILE = "result.json"


def _number(loss: float | None) -> float | str | None:
    return loss if loss is None or math.isfinite(loss) else str(loss)


@dataclass
class RunResult:
    """The numbers of one run."""

    scope: str  # `none`, `per_layer`, `full_iteration`, or `auto`
    config: dict[str, Any] = field(default_factory=dict)  # the resolved settings
    # `finished`, `interrupted` (by the signal in `error`), or `failed` with the reason in `error`.
    status: str = "finished"
    error: str | None = None
    device: str = ""  # name of the device
    time_source: str = ""  # what `step_ms` was measured with, `cuda events` or `wall clock`
    tokens_per_step: int = 0  # over all microbatches of all ranks
    # One a step; in the file with all the digits that tell them from other floats, and as strings (`nan`, `inf`) where
    # they are not finite, which JSON has no numbers for.
    losses: list[float] = field(default_factory=list)
    eval_losses: list[list] = field(default_factory=list)  # [steps done, loss]
    ema_loss: float | None = None  # that of the averaged weights at the last evaluation; None without
    # Milliseconds of each step, and of the host's part in it.
    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    measured_from_step: int = 0  # the first step that counts for medians; warm-up and capture lie before it
    # Peaks of GPU memory; None on the CPU. With `graph=auto`, since the scope that was kept began.
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    graph: dict[str, Any] = field(default_factory=dict)  # the counters of `GraphStats`, evaluation apart
    # What evaluations added to them, the graphs that training shares with them included.
    evaluation_graph: dict[str, Any] = field(default_factory=dict)
    # Of the model and of the devices (`train/result.py`); None where unknown.
    flops_per_token: float | None = None
    peak_flops: float | None = None
    versions: dict[str, str] = field(default_factory=dict)  # of the libraries, by name
    commit: str | None = None  # of the clone that graphmod was imported from; None without one
    seconds: float = 0.0  # of the loop, evaluation included
    checkpoint: str | None = None  # folder of the last checkpoint, relative to the run's
    resumed_at_step: int = 0  # steps done by earlier processes; `step_ms` and `host_ms` begin there
    # With `parallel=experts`, steps and batches of evaluations that ran again for want of places for tokens.
    rerun_steps: int = 0
    skipped_steps: int = 0  # updates skipped because something was not finite
    # The first step, counted from 1, whose loss or gradient was not finite; None without one.
    first_nonfinite_step: int | None = None
    # With `data.buckets`, by length: how many pieces of documents are in it, the share of padding, and the graphs
    # captured for it; also for all, and for what one bucket would take.
    lengths: dict[str, dict[str, Any]] = field(default_factory=dict)
    # With `train.profile`, what `profile_steps` summed up.
    profile: dict[str, dict[str, Any]] = field(default_factory=dict)
    auto: dict[str, Any] = field(default_factory=dict)  # what `graph=auto` measured and chose; empty without it
    ranks: int = 1  # processes that trained together; `step_ms` and `host_ms` are those of the first one
    # The median step time of each rank, of the measured steps; empty of one rank.
    rank_step_ms: list[float] = field(default_factory=list)
    # On several GPUs, milliseconds of a step for each rank, from a few steps recorded at the end: in which kernels ran
    # (`busy_ms`), in which those of NCCL did (`comm_ms`), waits for other ranks included, and in which others ran
    # beside these (`comm_hidden_ms`); empty without.
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
        values = {**self.summary(), **asdict(self)}
        values["losses"] = [_number(loss) for loss in self.losses]
        values["eval_losses"] = [[done, _number(loss)] for done, loss in self.eval_losses]
        values["ema_loss"] = _number(self.ema_loss)
        return write_whole(folder / RESULT_FILE, json.dumps(values, indent=1, allow_nan=False) + "\n")

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
        lines.append(f"  {_times(self)}")
        if found := spread(self.rank_step_ms):
            lines.append(
                f"  {counted(len(self.rank_step_ms), 'rank')}: median steps of {found['min']:.2f} to "
                f"{found['max']:.2f} ms, {found['median']:.2f} ms in the middle"
            )
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
        if self.rerun_steps:
            lines.append(
                f"  {counted(self.rerun_steps, 'step')} ran again without a graph, for want of places for tokens "
                "(parallel.capacity_factor)"
            )
        if self.skipped_steps:
            scaled = self.config.get("train", {}).get("precision") == "fp16_mixed"
            why = " (including overflows of the loss scale)" if scaled else ""
            first = self.first_nonfinite_step
            where = f"; first non-finite step: {first}" if first else ""
            lines.append(f"  {counted(self.skipped_steps, 'update')} skipped{why}{where}")
        if self.losses:
            last = f", evaluation {self.eval_losses[-1][1]:.3f}" if self.eval_losses else ""
            last += f", evaluation with averaged weights {self.ema_loss:.3f}" if self.ema_loss is not None else ""
            lines.append(f"  loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}{last}{self.loss_unit}")
        return "\n".join(lines)

    @property
    def loss_unit(self) -> str:
        """Of the losses, for what stands before it; empty with a loss of the user's own."""
        return "" if self.config.get("train", {}).get("loss") else " nats per token"


def _counters(name: str, graph: Mapping[str, Any]) -> str:
    text = f"  {name}: captures {graph.get('captures', 0)}, replays {graph.get('replays', 0)}"
    text += f", eager calls {graph.get('eager_calls', 0)}, failures {graph.get('failures', 0)}"
    return text + f", capturing took {graph.get('capture_seconds', 0.0):.2f} s"


def _times(result: "RunResult") -> str:
    done, before = len(result.step_ms), result.resumed_at_step
    first = before + result.measured_from_step + 1
    if result.step_ms_median is not None:
        used = "" if result.mfu is None else f", MFU {result.mfu:.1%}"
        return (
            f"step {result.step_ms_median:.2f} ms (median from step {first} on), "
            f"host {result.host_ms_median:.2f} ms, {result.tokens_per_s:,.0f} tokens/s{used}"
        )
    if before and not done:
        return f"no step was left to train: all {before:,} had been done before the run was resumed"
    ended = before + done
    return f"no step times: timing starts at step {first:,}, after warm-up and capture; the run ended at step {ended:,}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """The least, the median and the greatest, by these names; nothing of nothing."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)} if values else {}


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
