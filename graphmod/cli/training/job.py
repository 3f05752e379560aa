"""One job of `train.py`: its settings, its run, and each way it can end in words and an exit status."""

import re
import shlex
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

from graphmod.cli.explain import system_error
from graphmod.cli.start import words
from graphmod.cli.stdout import complain, show, unwritten
from graphmod.cli.training.arguments import NO_CHECK, NO_PROFILE
from graphmod.cli.training.compose import parse
from graphmod.cli.training.resumed import job_settings
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.report.result import RESULT_FILE, RunResult
from graphmod.train.run.folders import from_here
from graphmod.train.run.interrupt import Aborted
from graphmod.train.run.loop import train
from graphmod.train.run.ownership import owned
from graphmod.train.run.resume import claimed
from graphmod.train.schema.run import RunConfig


@dataclass
class Job:
    """What Hydra makes of a command line, or of one of the jobs of a multirun.

    Attributes:
        folder: made for it.
        overrides: of its settings, Hydra's own apart.
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
    show(f"stopped by {result.error} after step {done} of {steps}")
    if result.config["train"]["checkpoint"]:
        show(f"  saved in {folder / result.checkpoint}\n  to resume: {_way_on(folder, given)}")
    else:
        show("  nothing was saved, because train.checkpoint=false")
    return 128 + signal.Signals[result.error]


def _bug(error: Exception) -> tuple[int, str]:
    # All of it is shown, but the other jobs of a multirun go on.
    traceback.print_exception(error)
    complain("this is a bug in graphmod or in a library it uses; the lines above show where")
    return 1, f"{type(error).__name__}: {error}"


def _check(config: RunConfig, folder: Path, alone: bool) -> tuple[int, Path]:
    """Only says what would keep the step out of graphs."""
    if not alone:
        raise ConfigError(NO_CHECK)  # likewise
    from graphmod.train.run.hazards import CHECK_FILE, check_training

    report = check_training(config, folder)
    show(f"{report}\n  written to {folder / CHECK_FILE}")
    return int(not report.captured), folder


def attempt(cfg: DictConfig, job: Job) -> tuple[int, str | Path]:
    """Runs one job, composed by Hydra; returns its exit status, and the folder it wrote to or, if it failed, why."""
    try:
        chosen = job_settings(cfg, job.overrides)
        config = parse(chosen.settings)
        if config.train.profile and not job.alone:
            raise ConfigError(NO_PROFILE)  # a file of configs/ says so; the command line was looked at before
        if config.graph.check:
            return _check(config, job.folder, job.alone)
        # What lies beside a folder that was named is other jobs, which may be running.
        named = any(re.match(r"hydra\.run\.dir=[^$]+$", argument) for argument in job.given)
        with claimed(config, job.folder, beside=job.alone and not named, named=named) as point:
            point.changed = chosen.changed
            result = train(config, point.run_dir, point, say=show)
            if result.status == "interrupted":
                return _say_stopped(result, point.run_dir, job.given), point.run_dir
            show(f"{result.report()}\n  written to {point.run_dir}")
            return 0, point.run_dir
    except Aborted as error:
        way_on = f"\n  to resume: {_way_on(error.kept.parent.parent, job.given)}" if error.kept else ""
        print(f"{error}{way_on}", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT, str(error)
    except BrokenPipeError:  # as with `| head`, where nothing is wrong
        return 128 + signal.SIGPIPE, "nobody reads the standard output any more"
    except ConfigError as error:
        complain(error)
        return 2, str(error)
    except GraphmodError as error:
        complain(error)
        return 1, str(error)
    except OSError as error:
        reason = unwritten() or system_error(error, job.folder)
        complain(reason)
        return 1, reason
    except torch.OutOfMemoryError as error:
        reason = f"out of GPU memory; lower data.batch_size or data.seq_len. {str(error).splitlines()[0]}"
        complain(reason)
        return 1, reason
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            return _bug(error)
        reason = f"out of memory; lower data.batch_size or data.seq_len. {error}".splitlines()[0]
        complain(reason)
        return 1, reason
    except Exception as error:
        return _bug(error)


def failed(cfg: DictConfig, folder: Path, reason: str) -> RunResult:
    """What the comparison says of a job of a multirun that failed; also left in its folder, if that has no result."""
    scope = str(getattr(cfg.graph.scope, "value", cfg.graph.scope))
    result = RunResult(scope=scope, status="failed", error=reason)
    if not (folder / RESULT_FILE).exists():  # else an earlier run's, with which this one was not allowed to mix
        with suppress(OSError, GraphmodError), owned(folder):  # nor one that another process writes to
            result.write(folder)
    return result
