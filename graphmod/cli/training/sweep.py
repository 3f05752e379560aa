"""The jobs of a multirun, one after the other, and the comparison of what they did.

How busy the GPU is takes a profiler, which slows later graph launches of the process; so that is looked at last, when
all times have been taken, in a few steps of each run anew.
"""

import tempfile
from pathlib import Path

from omegaconf import DictConfig

from graphmod.cli.stdout import say_plainly, show
from graphmod.cli.training.compose import parse
from graphmod.cli.training.job import Job, attempt, failed
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.report.comparison import compare, swept
from graphmod.train.report.report import JSON_FILE, PLOT_FILE, on_tensorboard, remarks, table, write_report
from graphmod.train.report.result import RunResult
from graphmod.train.report.timing import median
from graphmod.train.run.folders import link_latest
from graphmod.train.run.loop import train
from graphmod.train.run.ownership import owned
from graphmod.train.run.resume import NONE, holds_finished_runs

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


def run(sweep: Path, jobs: list[tuple[DictConfig, Job]]) -> int:
    """Runs all jobs, compares them, and returns the highest exit status, or at once that of one that was stopped.

    Raises:
        FolderInUse: another process writes to the folder `sweep`.
        ConfigError: it holds the runs of another multirun.
        GraphmodError: it cannot be written to.
    """
    with owned(sweep):
        # The jobs, one by one, would compare what is new without what they may not touch.
        if all(settings.train.resume == NONE for settings, _ in jobs) and holds_finished_runs(sweep):
            raise ConfigError(
                f"hydra.sweep.dir={sweep} holds runs of an earlier multirun, and new ones would mix with them; give "
                "another folder, or delete that one (train.resume=auto resumes runs that have checkpoints)"
            )
        highest, results = 0, {}
        for number, (settings, job) in enumerate(jobs, start=1):
            say_plainly(f"\njob {number} of {len(jobs)}: {' '.join(job.overrides)}")
            status, outcome = attempt(settings, job)
            if status >= 128:
                return status  # the jobs that would follow must not start
            highest = max(highest, status)
            results[job.folder.name] = failed(settings, job.folder, outcome) if status else _result(settings, outcome)
        _compare(sweep, results)
    return highest


def _result(settings: DictConfig, folder: Path) -> RunResult:
    try:
        return RunResult.read(folder)
    except (OSError, ValueError, TypeError) as error:
        scope = settings.graph.scope.value
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
