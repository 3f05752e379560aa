"""What a run records of a few more steps, when all others are done and saved."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from graphmod.train.report.profile import profile_briefly, profile_steps
from graphmod.train.report.result import RunResult
from graphmod.train.run.steps import Run
from graphmod.train.step.staging import shapes

_KEPT = ("busy_ms", "comm_ms", "comm_hidden_ms")


def add_profile(run: Run, result: RunResult) -> None:
    """Adds to the result of a run what `train.profile` asks for, and, on several GPUs, how long each communicates."""
    several = run.ranks.count > 1 and run.device.type == "cuda"
    if run.config.train.profile:
        with TemporaryDirectory() as nowhere:
            folder = run.folder if run.ranks.first else Path(nowhere)
            result.profile = profile_steps(run.model, run.step, run.make_step, _batches(run), folder)
        found = result.profile["run"]
    elif several:
        found = profile_briefly(run.step, _batches(run))
    if not several:
        return
    of_ranks = run.ranks.all({name: found[name] for name in _KEPT if name in found})
    result.rank_profile = {name: [one[name] for one in of_ranks if name in one] for name in _KEPT}
    run.metrics.log_numbers({f"perf/{name}": value for name, value in result.communication().items()})


def _batches(run: Run) -> list[Any]:
    make, after = run.batches.sampler, run.config.train.steps
    batches = [make(after)]
    # Of one shape, where there are several.
    return batches + [batch for k in range(1, 64) if shapes(batch := make(after + k)) == shapes(batches[0])][:2]
