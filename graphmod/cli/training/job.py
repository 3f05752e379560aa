"""One job of `train.py`: its settings, its run, and each way it can end in words and an exit status."""

import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from graphmod.cli.endings import conclude
from graphmod.cli.environment import ranks_started
from graphmod.cli.start import words
from graphmod.cli.stdout import complain, complain_for_all, say_plainly, show, stay_silent
from graphmod.cli.training.compose import TRAIN, parse
from graphmod.cli.training.launch import launch
from graphmod.cli.training.peers import Peers
from graphmod.cli.training.resumed import job_settings
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.checkpoints.manifest import FOLDER, checkpoints
from graphmod.train.report.display import Journal
from graphmod.train.report.result import RESULT_FILE, RunResult
from graphmod.train.run.folders import from_here
from graphmod.train.run.interrupt import Aborted
from graphmod.train.run.loop import train
from graphmod.train.run.ownership import owned
from graphmod.train.run.ranks import ALONE, Ranks, joined, ranks_of
from graphmod.train.run.resume import ResumePoint, claimed
from graphmod.train.schema.run import RunConfig
from graphmod.train.schema.train import DeviceName

_LOST_SECONDS = 3.0


@dataclass
class Job:
    """What Hydra makes of a command line, or of one of the jobs of a multirun.

    Attributes:
        folder: made for it.
        overrides: of its settings.
        alone: it is not part of a multirun.
        given: the arguments of the command line, as they were.
    """

    folder: Path
    overrides: list[str]
    alone: bool
    given: list[str]


def _way_on(folder: Path, given: list[str]) -> str:
    """The command that resumes the run in `folder`, which was started with the arguments `given`."""
    command = words("train")
    if not {"--multirun", "-m"} & set(given):
        return shlex.join([*command, f"train.resume={from_here(folder)}"])
    # All jobs would resume that one run; so each looks into its folder, and the sweep is the one it was.
    again = [f"hydra.sweep.dir={from_here(folder.parent)}", "train.resume=auto"]
    changed = tuple(argument.partition("=")[0] + "=" for argument in again)
    return shlex.join([*command, *(argument for argument in given if not argument.startswith(changed)), *again])


def _say_stopped(result: RunResult, folder: Path, given: list[str]) -> int:
    done, steps = len(result.losses), result.config["train"]["steps"]
    said = [
        f"stopped by {result.error} after step {done} of {steps}",
        "nothing was saved, because train.checkpoint=false",
    ]
    if result.config["train"]["checkpoint"]:
        said[1:] = [f"saved in {folder / result.checkpoint}", f"to resume: {_way_on(folder, given)}"]
    with suppress(OSError):  # to a terminal that was closed
        show("\n  ".join(said))
    return 128 + signal.Signals[result.error]


def _check(config: RunConfig, folder: Path) -> tuple[int, Path]:
    """Only says what would keep the step out of graphs."""
    from graphmod.train.run.hazards import CHECK_FILE, check_training

    report = check_training(config, folder)
    show(f"{report}\n  written to {folder / CHECK_FILE}")
    return int(not report.captured), folder


def attempt(cfg: DictConfig, job: Job) -> tuple[int, str | Path]:
    """Runs one job, composed by Hydra; returns its exit status, and the folder it wrote to or, if it failed, why."""
    if ranks_started() == 1:
        return _tried(cfg, job, ALONE)
    try:
        with joined(_device(cfg, job)) as ranks:
            peers = Peers(ranks, complain_for_all)
            if not ranks.first:
                stay_silent(peers.say)
            status, outcome = _tried(cfg, job, ranks, peers)
            peers.close(status, failed=isinstance(outcome, str))
            if isinstance(outcome, str):
                raise _Failed
            return status, outcome
    except _Failed:
        return status, outcome
    except ConfigError as error:
        complain(error)
        return 2, str(error)


def _device(cfg: DictConfig, job: Job) -> DeviceName:
    """That of the run, which is not the command line's where it is resumed. Raises ConfigError: see `job_settings`."""
    return DeviceName(job_settings(cfg, job.overrides).settings["train"]["device"])


class _Failed(Exception):
    """Leaves the ranks without waiting for them."""


def _tried(cfg: DictConfig, job: Job, ranks: Ranks, peers: Peers | None = None) -> tuple[int, str | Path]:
    try:
        return _run(cfg, job, ranks, peers)
    except BaseException as error:
        # A collective fails because another rank is gone, which is no fault of this one.
        unclear = isinstance(error, RuntimeError) and not isinstance(error, GraphmodError)
        if peers is not None and unclear and (lost := peers.noticed(_LOST_SECONDS)) is not None:
            if ranks.first:
                peers.speak(lost)
            return peers.status, lost
        if isinstance(error, Aborted):
            way_on = f"\n  to resume: {_way_on(error.kept.parent.parent, job.given)}" if error.kept else ""
            say_plainly(f"{error}{way_on}")
            return 128 + signal.SIGINT, str(error)
        return conclude(error, TRAIN.smaller, job.folder)


def _run(cfg: DictConfig, job: Job, ranks: Ranks, peers: Peers | None) -> tuple[int, str | Path]:
    chosen = job_settings(cfg, job.overrides)
    config = parse(chosen.settings)
    if config.graph.check:
        return _check(config, job.folder) if ranks.first else (0, job.folder)
    count = ranks_of(config)
    if ranks.count != count:
        return launch(_told(cfg, job), count)
    with _start(config, job, ranks, chosen.changed) as point:
        if peers is not None:
            peers.way_on = lambda: _kept(point.run_dir, job.given)
            peers.speak = lambda text: _say_and_note(text, point.run_dir)
        result = train(config, point.run_dir, point, say=show, ranks=ranks)
        if result.status == "interrupted":
            return _say_stopped(result, point.run_dir, job.given), point.run_dir
        show(f"{result.report()}\n  written to {point.run_dir}")
        return 0, point.run_dir


@contextmanager
def _start(config: RunConfig, job: Job, ranks: Ranks, changed: list[str]) -> Iterator[ResumePoint]:
    """Where the run starts; the first rank finds that out, and owns the folder for all."""
    if not ranks.first:
        yield ranks.told(None)
        return
    # What lies beside a folder that was named is other jobs, which may be running.
    named = any(re.match(r"hydra\.run\.dir=[^$]+$", argument) for argument in job.given)
    with claimed(config, job.folder, beside=job.alone and not named, named=named) as point:
        point.changed = changed
        yield ranks.told(point)


def _told(cfg: DictConfig | dict, job: Job) -> dict[str, Any]:
    """What ranks are told that this process starts: the settings as Hydra composed them, and the job."""
    folder = str(job.folder.absolute())
    return {**asdict(job), "folder": folder, "settings": OmegaConf.to_yaml(cfg, resolve=True), "command": sys.argv}


def _say_and_note(text: str, folder: Path) -> None:
    complain_for_all(text)
    with suppress(OSError):
        Journal(folder).write(f"error: {text}")


def _kept(folder: Path, given: list[str]) -> str:
    newest = next(iter(checkpoints(folder / FOLDER)), None)
    if newest is None:
        return "; no checkpoint was saved"
    return f"; the newest checkpoint is {newest}\n  to resume: {_way_on(folder, given)}"


def failed(cfg: DictConfig, folder: Path, reason: str) -> RunResult:
    """What the comparison says of a job of a multirun that failed; also left in its folder, if that has no result."""
    result = RunResult(scope=cfg.graph.scope.value, status="failed", error=reason)
    if not (folder / RESULT_FILE).exists():  # else an earlier run's, with which this one was not allowed to mix
        with suppress(OSError, GraphmodError), owned(folder):  # nor one that another process writes to
            result.write(folder)
    return result
