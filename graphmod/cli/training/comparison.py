"""The comparison of the jobs of a multirun: what each of them leaves for it, and what is made of that at the end.

Jobs may run in other processes, and on other machines; so each leaves a line in the folder of the multirun.

How busy the GPU is takes a profiler, which slows later graph launches of the process; so that is looked at last, when
all times have been taken, in a few steps of each run anew.
"""

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphmod.cli.stdout import show
from graphmod.cli.training.settings import parse
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.compare import JSON_FILE, PLOT_FILE, compare, on_tensorboard, remarks, swept, table, write_report
from graphmod.train.folders import from_here, link_latest
from graphmod.train.result import RunResult, median
from graphmod.train.resume import NONE, holds_finished_runs
from graphmod.train.run import train

_COMPARISONS = Path("runs/compare")  # of train.yaml
_PROFILED = {
    "steps": 8,
    "eval_every": 0,
    "checkpoint": False,
    "checkpoint_every": 0,
    "resume": "none",
    "log": [],
    "profile": True,
    "ema_decay": None,
}


_JOBS = ".jobs"
_SWEEP_FILE = "multirun.yaml"  # Hydra's


def require_new(sweep: Path, resume: str) -> None:
    """Clears what jobs of an earlier multirun have left in its folder for the comparison.

    Raises:
        ConfigError: it holds finished runs of another multirun, and is not to be resumed.
    """
    if resume == NONE and holds_finished_runs(sweep):
        raise ConfigError(
            f"hydra.sweep.dir={from_here(sweep)} holds runs of an earlier multirun, and new ones would mix with them; "
            "give another folder, or delete that one (train.resume=auto resumes runs that have checkpoints)"
        )
    shutil.rmtree(sweep / _JOBS, ignore_errors=True)


def leave(sweep: Path, number: int, **what: Any) -> None:
    """Leaves what there is to know of a job for the comparison.

    Args:
        sweep: the folder of the multirun.
        number: of the job.
        what: `name`, `folder`, `scope`, `status` (of a process with this job alone) and `error`.
    """
    with suppress(OSError):  # a full disk: the job itself has said so
        (sweep / _JOBS).mkdir(exist_ok=True)
        (sweep / _JOBS / f"{number:06}.json").write_text(json.dumps(what), encoding="utf-8")


def conclude_sweep(sweep: Path, failed: bool) -> int:
    """Compares the jobs that have left something; returns the highest of their exit statuses.

    Args:
        sweep: the folder of the multirun.
        failed: it has said why there may be no job.

    Raises:
        ConfigError: there was no job.
        GraphmodError: the comparison cannot be written.
    """
    jobs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((sweep / _JOBS).glob("*.json"))]
    shutil.rmtree(sweep / _JOBS, ignore_errors=True)
    if not jobs:
        (sweep / _SWEEP_FILE).unlink(missing_ok=True)
        if not failed:
            raise ConfigError("these settings make no job; look for a choice(), range() or glob() without values")
        return 0
    results = {}
    for job in jobs:
        unfinished = RunResult(scope=job["scope"], status="failed", error=job["error"])
        name = job["name"] if job["name"] not in results else f"{job['name']} ({len(results)})"
        results[name] = unfinished if job["error"] else _result(job["scope"], Path(job["folder"]))
    _compare(Path(from_here(sweep)), results)
    return max(job["status"] for job in jobs)


def _result(scope: str, folder: Path) -> RunResult:
    try:
        return RunResult.read(folder)
    except (OSError, ValueError, TypeError) as error:
        return RunResult(scope=scope, status="failed", error=f"it wrote no result ({error})")


def gpu_busy_ms(result: RunResult) -> float | None:
    """Kernel time of a step of the run, in ms, from a few steps done again, or, of several ranks, from those that the
    run itself has recorded; None without a GPU, or if that fails."""
    if result.ranks > 1:
        return median(result.rank_profile.get("busy_ms", ()))
    if not result.device or result.device.startswith("CPU"):
        return None
    scope = result.auto.get("chosen") or result.scope
    graph = {**result.config["graph"], "scope": scope, "auto": False}
    settings = {**result.config, "graph": graph, "train": {**result.config["train"], **_PROFILED}}
    with tempfile.TemporaryDirectory() as folder:
        try:
            return train(parse(settings), Path(folder), say=lambda text: None).profile["run"].get("busy_ms")
        except Exception:  # the comparison is worth having without this column
            return None


def _compare(sweep: Path, results: dict[str, RunResult]) -> None:
    """Prints the table, and writes it to the folder in several forms."""
    finished = {name: result for name, result in results.items() if result.status == "finished"}
    if any(not result.device.startswith("CPU") for result in finished.values()):
        show("\nprofiling a few steps of each run, to see how busy the GPU is")
    busy = {name: ms for name, result in finished.items() if (ms := gpu_busy_ms(result)) is not None}
    rows = compare(results, busy)
    show(f"\n{table(rows, swept(results))}")
    for remark in remarks(rows, results):
        show(remark)
    if not finished and (sweep / JSON_FILE).exists():
        show(f"\nno run finished; the comparison in {sweep} is an earlier one")
        return
    try:
        files = write_report(sweep, rows, results)
    except OSError as error:
        for path in sweep.glob("comparison*"):
            if path.is_file() and not path.stat().st_size:
                path.unlink()
        raise GraphmodError(
            f"cannot write the comparison to {sweep}: {error.strerror or error}; what the runs wrote is kept. Make "
            "room, or choose another folder with hydra.sweep.dir=FOLDER"
        ) from error
    show(f"\nwritten to {', '.join(map(str, files))}")
    if sweep / PLOT_FILE not in files:
        show(f"no {PLOT_FILE}: matplotlib is not installed (pip install matplotlib)")
    # A folder of one's own choice has nothing beside it that could be older.
    shown = link_latest(sweep) if sweep.absolute().parent == _COMPARISONS.absolute() else sweep
    if on_tensorboard(results):
        show(f"side by side: tensorboard --logdir {shown}")
