"""One job of `train.py`: its settings, its run, and each way it can end in words and an exit status."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from graphmod.cli.errors import JobFailed, conclude
from graphmod.cli.start import ranks_started, words
from graphmod.cli.stdout import complain_for_all, say_plainly, show, stay_silent
from graphmod.cli.training.comparison import leave
from graphmod.cli.training.launch import launch
from graphmod.cli.training.peers import Peers
from graphmod.cli.training.resumed import job_settings
from graphmod.cli.training.settings import TRAIN, parse
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.display import LOG_FILE, Journal
from graphmod.train.folders import CHECKPOINTS, checkpoints, from_here, owned
from graphmod.train.ranks import ALONE, Ranks, joined, ranks_of
from graphmod.train.result import RESULT_FILE, RunResult
from graphmod.train.resume import ResumePoint, claimed, require_left
from graphmod.train.run import Aborted, train
from graphmod.train.settings import DeviceName, RunConfig, plain_config

_LOST_SECONDS = 3.0
# Settings that may be paths, from the folder in which the command was typed.
_PATHS = ("data.path", "data.tokenizer", "data.cache", "model.path", "train.resume")


@dataclass
class Job:
    """What Hydra makes of a command line, or of one of the jobs of a multirun.

    Attributes:
        folder: made for it.
        overrides: of its settings.
        alone: it is not part of a multirun.
        given: the arguments of the command line, as they were.
        named: `folder` was named, and is no default.
        cwd: where the command was typed, if the job runs elsewhere (`hydra.job.chdir`).
        sweep: the folder of the multirun.
        logging: Hydra's settings of it, for ranks that are started.
    """

    folder: Path
    overrides: list[str]
    alone: bool
    given: list[str]
    named: bool = False
    cwd: str | None = None
    sweep: Path | None = None
    logging: dict[str, Any] = field(default_factory=dict)


@dataclass
class Start:
    """A job with all that is known before it begins.

    Attributes:
        config: its checked settings.
        point: where it starts; None for one that only checks.
        resumed: it has the settings of the run that it resumes.
        held: the lock of its folder.
    """

    config: RunConfig
    point: ResumePoint | None
    resumed: bool
    held: ExitStack
    folder: Path

    @property
    def plain(self) -> dict[str, Any]:
        """The settings as plain values."""
        return plain_config(self.config)


def _anchored(cfg: DictConfig, cwd: str | None) -> DictConfig:
    """The settings with paths from where the command was typed, if that is not here."""
    if cwd is None:
        return cfg
    cfg = cfg.copy()
    for key in _PATHS:
        value = OmegaConf.select(cfg, key)
        several = list(value) if OmegaConf.is_list(value) else [value]
        found = [str(there) if isinstance(one, str) and (there := Path(cwd, one)).exists() else one for one in several]
        with open_dict(cfg):
            OmegaConf.update(cfg, key, found if OmegaConf.is_list(value) else found[0])
    return cfg


@contextmanager
def started(cfg: DictConfig, job: Job) -> Iterator[Start]:
    """Where a job starts, and with which settings. Inside, this process owns the folder that it writes to, until the
    lock is given back to ranks that it starts.

    Raises:
        ConfigError: settings that cannot be, or see `claimed`.
    """
    if job.cwd is not None and job.cwd not in sys.path:
        sys.path.insert(0, job.cwd)  # where parts of the user's own are
    settings, changed = job_settings(_anchored(cfg, job.cwd), job.overrides)
    config = parse(settings)
    with ExitStack() as held:
        start = Start(config, None, isinstance(settings, dict), held, job.folder)
        if not config.graph.check:
            # What lies beside a folder that was named is other jobs, which may be running.
            beside = job.alone and not job.named
            point = held.enter_context(claimed(config, job.folder, beside=beside, named=job.alone and job.named))
            point.changed = changed
            if point.checkpoint is not None and config.train.epochs is None:
                require_left(point, config.train.steps)
            start.point, start.folder = point, point.run_dir
        yield start


def _way_on(folder: Path, job: Job) -> str:
    """The command that resumes the run in `folder`, which this job wrote to."""
    command = words("train")
    # Other sweepers may choose other values the next time.
    if job.sweep is None or any(one.startswith("hydra/sweeper=") for one in job.given):
        return shlex.join([*command, f"train.resume={from_here(folder, job.cwd)}"])
    # All jobs would resume that one run; so each looks into its folder, and the sweep is the one it was.
    again = [f"hydra.sweep.dir={from_here(job.sweep, job.cwd)}", "train.resume=auto"]
    changed = tuple(argument.partition("=")[0] + "=" for argument in again)
    return shlex.join([*command, *(argument for argument in job.given if not argument.startswith(changed)), *again])


def _say_stopped(result: RunResult, folder: Path, job: Job) -> None:
    """Says how to go on, and raises SystemExit."""
    done, steps = len(result.losses), result.config["train"]["steps"]
    said = [
        f"stopped by {result.error} after step {done} of {steps}",
        "nothing was saved, because train.checkpoint=false",
    ]
    if result.config["train"]["checkpoint"] and result.checkpoint is not None:
        said[1:] = [f"saved in {folder / result.checkpoint}", f"to resume: {_way_on(folder, job)}"]
    with suppress(OSError):  # to a terminal that was closed
        show("\n  ".join(said))
    raise SystemExit(128 + signal.Signals[str(result.error)])


def _check(config: RunConfig, folder: Path) -> Path:
    """Only says what would keep the step out of graphs; raises SystemExit where something would."""
    from graphmod.train.check import CHECK_FILE, check_training

    report = check_training(config, folder)
    show(f"{report}\n  written to {folder / CHECK_FILE}")
    if not report.captured:
        raise SystemExit(1)
    return folder


def run_job(cfg: DictConfig, job: Job, start: Start | None = None, failed: Exception | None = None) -> Path:
    """Runs one job, composed by Hydra; returns the folder it wrote to.

    Args:
        cfg: its settings.
        job: it.
        start: where it starts, if that is known; of ranks that a launcher has started the first one knows it.
        failed: why it cannot, of such ranks.

    Raises:
        JobFailed: it failed, and has said why.
        SystemExit: it was stopped, or what it checked would not be captured.
    """
    try:
        if ranks_started() > 1:
            return among_ranks(lambda: _device(cfg, job), job, lambda ranks: _on_ranks(start, failed, ranks))
        with _said(job), nullcontext(start) if start is not None else started(cfg, job) as found:
            if found.point is None or (count := ranks_of(found.config)) == 1:
                return _run(found, job, ALONE)
            (found.folder / LOG_FILE).touch()  # else a folder that nothing is in would go with its lock
            found.held.close()  # which the first rank takes
            launch(_told(found, job), count)
            return found.folder
    except JobFailed as error:
        if error.status >= 128:  # nobody wants what follows, either
            raise SystemExit(error.status) from error
        raise


def run_one_of(cfg: DictConfig, job: Job, number: int, require: Callable[[], None]) -> Path:
    """Runs one job of a multirun as `run_job` does, and leaves what the comparison needs.

    Args:
        cfg: its settings.
        job: it.
        number: of the job.
        require: raises ConfigError for settings that it cannot have.
    """
    assert job.sweep is not None
    about = {"name": os.path.relpath(job.folder, job.sweep), "folder": str(job.folder), "scope": cfg.graph.scope.value}
    try:
        with _said(job):
            require()
        folder = run_job(cfg, job)
    except JobFailed as error:
        leave(job.sweep, number, **about, status=error.status, error=str(error))
        _note_failure(job.folder, about["scope"], str(error))
        raise
    leave(job.sweep, number, **{**about, "folder": str(folder)}, status=0, error=None)
    return folder


def among_ranks(
    device: Callable[[], DeviceName], job: Job, start: Callable[[Ranks], AbstractContextManager[Start]]
) -> Path:
    """Runs a job on the ranks that a launcher has started, all of which call this; returns the folder it wrote to.

    Args:
        device: says on which they join.
        job: it.
        start: where it starts, the same on all ranks.

    Raises:
        JobFailed, SystemExit: as `run_job`.
    """
    with _said(job), joined(device()) as ranks:
        peers = Peers(ranks, complain_for_all)
        if not ranks.first:
            stay_silent(peers.say)
        status, failed = 0, False
        try:
            with _said(job, ranks, peers), start(ranks) as found:
                return _run(found, job, ranks, peers)
        except SystemExit as end:
            status = end.code
            raise
        except JobFailed as error:
            status, failed = error.status, True
            raise
        finally:
            peers.close(status, failed)


def _device(cfg: DictConfig, job: Job) -> DeviceName:
    """That of the run, which is not the command line's where it is resumed. Raises ConfigError: see `job_settings`."""
    return DeviceName(job_settings(cfg, job.overrides)[0]["train"]["device"])


@contextmanager
def _said(job: Job, ranks: Ranks = ALONE, peers: Peers | None = None) -> Iterator[None]:
    """Inside, whatever goes wrong is said, and is JobFailed from there on."""
    try:
        yield
    except (JobFailed, SystemExit):
        raise
    except BaseException as error:
        # A collective fails because another rank is gone, which is no fault of this one.
        unclear = isinstance(error, RuntimeError) and not isinstance(error, GraphmodError)
        if peers is not None and unclear and (lost := peers.noticed(_LOST_SECONDS)) is not None:
            if ranks.first:
                peers.speak(lost)
            raise JobFailed(lost, peers.status) from error
        if isinstance(error, Aborted):
            way_on = f"\n  to resume: {_way_on(error.kept.parent.parent, job)}" if error.kept else ""
            say_plainly(f"{error}{way_on}")
            raise JobFailed(str(error), 128 + signal.SIGINT) from error
        status, reason = conclude(error, TRAIN.smaller, job.folder)
        raise JobFailed(reason, status) from error


@contextmanager
def _on_ranks(start: Start | None, failed: Exception | None, ranks: Ranks) -> Iterator[Start]:
    """Where a job of ranks starts; the first rank has found that out, and owns the folder for all."""
    if failed is not None:
        raise failed
    found = ranks.told(start and replace(start, held=ExitStack()))
    assert found is not None
    yield found


@contextmanager
def given_to_ranks(told: dict[str, Any], ranks: Ranks) -> Iterator[Start]:
    """Where a job starts that `launch` has started ranks for: with what these were told."""
    point = ResumePoint(**told["point"])
    point.run_dir, point.checkpoint = Path(point.run_dir), point.checkpoint and Path(point.checkpoint)
    sys.path[:0] = [told["job"]["cwd"]] * (told["job"]["cwd"] is not None)
    with owned(point.run_dir) if ranks.first else nullcontext(), ExitStack() as held:
        newest = next(iter(checkpoints(point.run_dir / CHECKPOINTS)), None)
        if ranks.first and point.checkpoint is not None and newest is not None and newest > point.checkpoint:
            raise ConfigError(f"{point.run_dir} was resumed by another process just now; start again")
        yield Start(parse(told["settings"]), point, False, held, point.run_dir)


def _run(start: Start, job: Job, ranks: Ranks, peers: Peers | None = None) -> Path:
    config, point = start.config, start.point
    if point is None:
        return _check(config, job.folder) if ranks.first else job.folder
    if peers is not None:
        ranks_of(config)  # whether so many can be
        peers.way_on = lambda: _kept(point.run_dir, job)
        peers.speak = lambda text: _say_and_note(text, point.run_dir)
    result = train(config, point.run_dir, point, say=show, ranks=ranks)
    if result.status == "interrupted":
        _say_stopped(result, point.run_dir, job)
    show(f"{result.report()}\n  written to {point.run_dir}")
    return point.run_dir


def _told(start: Start, job: Job) -> dict[str, Any]:
    """What ranks are told that this process starts: where they start, with which settings, and the job."""
    assert start.point is not None
    point = asdict(start.point)
    point |= {name: point[name] and str(point[name]) for name in ("run_dir", "checkpoint")}
    return {
        "job": {**asdict(job), "folder": str(job.folder), "sweep": job.sweep and str(job.sweep)},
        "settings": start.plain,
        "point": point,
        "command": sys.argv,
    }


def _say_and_note(text: str, folder: Path) -> None:
    complain_for_all(text)
    with suppress(OSError):
        Journal(folder).write(f"error: {text}")


def _kept(folder: Path, job: Job) -> str:
    newest = next(iter(checkpoints(folder / CHECKPOINTS)), None)
    if newest is None:
        return "; no checkpoint was saved"
    return f"; the newest checkpoint is {newest}\n  to resume: {_way_on(folder, job)}"


def _note_failure(folder: Path, scope: str, reason: str) -> None:
    """Leaves in the folder of a job that it failed, if it has no result."""
    if not (folder / RESULT_FILE).exists():  # else an earlier run's, with which this one was not allowed to mix
        with suppress(OSError, GraphmodError), owned(folder):  # nor one that another process writes to
            RunResult(scope=scope, status="failed", error=reason).write(folder)
