"""The Hydra callback that compares the runs of a multirun when the last one is done.

How busy the GPU is takes a profiler, which slows later graph launches of the process; so that is looked at last, when
all times have been taken, in a few steps of each run anew.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from graphmod.cli.start import loading
from graphmod.cli.stdout import OutputError, show
from graphmod.cli.training.compose import parse, parse_early
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.run.folders import link_latest
from graphmod.train.run.ownership import owned

if TYPE_CHECKING:
    from graphmod.train.report.result import RunResult

_COMPARISONS = Path("runs/compare")  # of config.yaml
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


def gpu_busy_ms(result: RunResult) -> float | None:
    """Kernel time of a step of the run, in ms, from a few steps done again; None without a GPU, on
    several, or if that fails."""
    if not result.device or result.device.startswith("CPU") or result.ranks > 1:
        return None
    from graphmod.train.run.loop import train

    scope = result.auto.get("chosen") or result.scope
    graph = {**result.config["graph"], "scope": scope, "auto": False}
    settings = {**result.config, "graph": graph, "train": {**result.config["train"], **_PROFILED}}
    with tempfile.TemporaryDirectory() as folder:
        try:
            return train(parse(settings), Path(folder), say=lambda text: None).profile["run"].get("busy_ms")
        except Exception:  # the comparison is worth having without this column
            return None


# Of the multirun under way or just done: Hydra makes the callback, shows it to nobody, and turns what it raises into a
# warning.
_running: ComparisonCallback | None = None
_failure: str | None = None
_folder = ExitStack()  # owned by this process
_refusal: GraphmodError | None = None


def take_failure() -> str | None:
    """Why the last comparison could not be written; None where it was, and when asked again."""
    global _failure
    said, _failure = _failure, None
    return said


def require_folder() -> None:
    """Raises FolderInUse, or another GraphmodError, when this process does not own the folder of its multirun."""
    if _refusal is not None:
        raise _refusal


def leave_folder() -> None:
    """Lets others have the folder of the multirun that was under way, if one was."""
    global _refusal
    _folder.close()
    _refusal = None


def end_early(folder: Path, reason: str) -> None:
    """Compares what a multirun under way has done, with a job in `folder` as failed. Does nothing without one."""
    if _running is not None:
        _running.end_early(folder, reason)


class ComparisonCallback(Callback):
    """Remembers where each job wrote; at the end prints the table and writes it beside them in several forms."""

    def __init__(self) -> None:
        self._jobs: dict[Path, tuple[str, Any]] = {}
        self._config: DictConfig | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Loads PyTorch: the settings are composed by now, and a Ctrl-C leaves no folder behind. Not for settings that
        will be refused, which the job says: what is raised here, Hydra would turn into a warning."""
        try:
            parse_early(OmegaConf.masked_copy(config, [name for name in config if name != "hydra"]))
        except ConfigError:
            return
        self._load()

    def _load(self) -> None:
        with loading():
            import graphmod.train.run.loop  # noqa: F401

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Loads PyTorch, lets `end_early` know what to compare, and takes the folder, which `require_folder` tells."""
        global _running, _refusal
        self._load()
        self._config, _running = config, self
        try:
            _folder.enter_context(owned(Path(config.hydra.sweep.dir)))
        except GraphmodError as error:
            _refusal = error

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Notes a job that ended: the folder that it wrote to, which is another than its own where it went on with an
        earlier run, or the result that says why it failed."""
        folder = Path(config.hydra.runtime.output_dir)
        outcome = job_return.return_value if job_return.status is JobStatus.COMPLETED else folder
        self._jobs[folder] = str(config.graph.scope.value), outcome

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Compares what the jobs left behind; one that left nothing is listed as failed."""
        global _running, _failure
        _running, sweep = None, Path(config.hydra.sweep.dir)
        try:
            self._compare(sweep)
        except BrokenPipeError:  # as with `| head`, where nothing is wrong
            return
        except OutputError as error:
            _failure = str(error)
        except OSError as error:
            for path in sweep.glob("comparison*"):
                if path.is_file() and not path.stat().st_size:
                    path.unlink()
            _failure = (
                f"cannot write the comparison to {sweep}: {error.strerror or error}; what the runs wrote is kept. Make "
                "room, or choose another folder with hydra.sweep.dir=FOLDER"
            )

    def end_early(self, folder: Path, reason: str) -> None:
        """Compares what there is when Hydra could not go on, because it could not make the folder of a job."""
        if not self._jobs:
            return  # the reason is all there is to say
        from graphmod.train.report.result import RunResult

        self._jobs[folder] = "", RunResult(scope="", status="failed", error=reason)
        self.on_multirun_end(self._config)

    def _compare(self, sweep: Path) -> None:
        from graphmod.train.report.comparison import compare, swept
        from graphmod.train.report.report import JSON_FILE, PLOT_FILE, on_tensorboard, remarks, table, write_report
        from graphmod.train.report.result import RunResult

        results = {}
        for folder, (scope, outcome) in self._jobs.items():
            try:
                result = outcome if isinstance(outcome, RunResult) else RunResult.read(outcome)
            except (OSError, ValueError, TypeError) as error:
                result = RunResult(scope=scope, status="failed", error=f"it left no result ({error})")
            results[folder.name] = result
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
        files = write_report(sweep, rows, results)
        show(f"\nwritten to {', '.join(map(str, files))}")
        if sweep / PLOT_FILE not in files:
            show(f"no {PLOT_FILE}: matplotlib is not installed (pip install matplotlib)")
        # A folder of one's own choice has nothing beside it that could be older.
        shown = link_latest(sweep) if sweep.absolute().parent == _COMPARISONS.absolute() else sweep
        if on_tensorboard(results):
            show(f"side by side: tensorboard --logdir {shown}")
