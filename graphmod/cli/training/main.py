"""What `train.py` does: compose the config with Hydra, run the job or jobs, and word every error for its reader.

Exit status: 0 all went well, 1 a run failed, 2 the command line, a config or the data cannot be used, 128 + N stopped
by signal N (130 is Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from graphmod.cli.explain import explain, system_error
from graphmod.cli.start import shown, version, words
from graphmod.cli.training import callback
from graphmod.cli.training.arguments import NO_CHECK, NO_PROFILE, for_hydra, groups, swept_keys
from graphmod.cli.training.compose import CONFIGS, parse, register
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.run.folders import from_here, job_folder, unused
from graphmod.train.schema import RunConfig

if TYPE_CHECKING:
    from graphmod.train.report.result import RunResult

_FULL_ERROR = "HYDRA_FULL_ERROR"


def _complain(message: object) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


@contextmanager
def _hydra_raises() -> Iterator[None]:
    # Otherwise Hydra prints errors itself, in terms of its own files, and exits with status 1.
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before


def _way_on(folder: Path, given: list[str]) -> str:
    """The command that goes on with the run in `folder`, which was started with the arguments `given`."""
    again = [f"train.resume={from_here(folder)}"]
    if {"--multirun", "-m"} & set(given):  # whose jobs would all go on with that one
        again = [f"hydra.sweep.dir={from_here(folder.parent)}", "train.resume=auto"]
    changed = tuple(argument.partition("=")[0] + "=" for argument in again)
    given = [argument for argument in given if not argument.startswith(changed)]
    return shlex.join([*words("train"), *given, *again])


def _say_stopped(result: RunResult, folder: Path, given: list[str]) -> int:
    done, steps = len(result.losses), result.config["train"]["steps"]
    print(f"stopped by {result.error} after step {done} of {steps}")
    if result.config["train"]["checkpoint"]:
        print(f"  saved in {folder / result.checkpoint}\n  to resume: {_way_on(folder, given)}")
    else:
        print("  nothing was saved, because train.checkpoint=false")
    return 128 + signal.Signals[result.error]


def _bug(error: Exception) -> tuple[int, str]:
    # All of it is shown, but the other jobs of a multirun go on.
    traceback.print_exception(error)
    _complain("this is a bug in graphmod or in a library it uses; the lines above show where")
    return 1, f"{type(error).__name__}: {error}"


def _check(config: RunConfig, folder: Path, alone: bool) -> tuple[int, Path]:
    """Only says what would keep the step out of graphs."""
    if not alone:
        raise ConfigError(NO_CHECK)  # likewise
    from graphmod.train.run.hazards import CHECK_FILE, check_training

    report = check_training(config, folder)
    print(report)
    print(f"  written to {folder / CHECK_FILE}")
    return int(not report.captured), folder


def _attempt(cfg: DictConfig, folder: Path, alone: bool, given: list[str]) -> tuple[int, str | Path]:
    """Runs one job; returns its exit status, and the folder it wrote to or, if it failed, why.

    Args:
        cfg: composed by Hydra.
        folder: of the job.
        alone: it is not part of a multirun.
        given: the arguments of the command line, as they were.
    """
    try:
        config = parse(cfg)
        if config.train.profile and not alone:
            raise ConfigError(NO_PROFILE)  # a config file says so; the command line was looked at before
        if config.graph.check:
            return _check(config, folder, alone)
        from graphmod.train.run.loop import resume_point, train

        # What lies beside a folder that was named is other jobs, which may be running.
        named = any(re.match(r"hydra\.run\.dir=[^$]+$", argument) for argument in given)
        point = resume_point(config, folder, beside=alone and not named)
        result = train(config, point.run_dir, point, say=print)
    except ConfigError as error:
        _complain(error)
        return 2, str(error)
    except GraphmodError as error:
        _complain(error)
        return 1, str(error)
    except OSError as error:
        reason = system_error(error, folder)
        _complain(reason)
        return 1, reason
    except (MemoryError, RuntimeError) as error:
        on_gpu = type(error).__name__ == "OutOfMemoryError"  # PyTorch's, which may not be loaded yet
        if not on_gpu and isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            return _bug(error)
        where = "GPU memory" if on_gpu else "memory"
        reason = f"out of {where}; lower data.batch_size or data.seq_len. {error}".splitlines()[0]
        _complain(reason)
        return 1, reason
    except Exception as error:
        return _bug(error)
    if result.status == "interrupted":
        return _say_stopped(result, point.run_dir, given), point.run_dir
    print(result.report())
    print(f"  written to {point.run_dir}")
    return 0, point.run_dir


def _failed(cfg: DictConfig, folder: Path, reason: str) -> RunResult:
    """What the comparison says of a job of a multirun that failed; also left in its folder, if that has no result."""
    from graphmod.train.report.result import RESULT_FILE, RunResult

    scope = str(getattr(cfg.graph.scope, "value", cfg.graph.scope))
    result = RunResult(scope=scope, status="failed", error=reason)
    if not (folder / RESULT_FILE).exists():  # else an earlier run's, with which this one was not allowed to mix
        with suppress(OSError):
            result.write(folder)
    return result


def _tidy(folder: Path) -> None:
    # A run that never began, or went on in the folder of another, should leave no dated folder behind.
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".hydra"}:
        shutil.rmtree(folder, ignore_errors=True)


def main(given: list[str]) -> int:
    """Runs `train.py` with these arguments; returns the exit status."""
    statuses: list[int] = []
    before, show_all = sys.argv[1:], _FULL_ERROR in os.environ
    if "--version" in given:
        print(version())
        return 0

    def job(cfg: DictConfig) -> str | Path | RunResult:
        hydra_config = HydraConfig.get()
        folder = Path(hydra_config.runtime.output_dir)
        alone = hydra_config.mode is RunMode.RUN
        status, outcome = _attempt(cfg, folder, alone, given)
        statuses.append(status)
        if alone:
            _tidy(folder)
        if status >= 128:
            raise KeyboardInterrupt  # the jobs that would follow must not start
        return _failed(cfg, folder, outcome) if status and not alone else outcome

    try:
        arguments = for_hydra(given)
        sys.argv[1:] = arguments
        register()
        keys = swept_keys(arguments)
        OmegaConf.register_new_resolver(
            "swept", lambda overrides, number: job_folder(keys, list(overrides), number), replace=True
        )
        OmegaConf.register_new_resolver("unused", unused, replace=True)
        OmegaConf.register_new_resolver("groups", lambda: groups(CONFIGS), replace=True)
        OmegaConf.register_new_resolver("command", lambda: shown("train"), replace=True)
        with _hydra_raises():
            hydra.main(config_path=str(CONFIGS), config_name="config", version_base="1.3")(job)()
    except KeyboardInterrupt:
        if statuses and statuses[-1] >= 128:
            return statuses[-1]
        print("interrupted", file=sys.stderr)
        return 130
    except ConfigError as error:
        _complain(error)
        return 2
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        if show_all:
            traceback.print_exc()
        _complain(explain(error))
        return 2
    except OSError as error:  # Hydra could not make the folder of the run
        where = error.filename or "the folder of the run"
        reason = (
            f"cannot write to {where}: {error.strerror or error}; choose another folder with hydra.run.dir=FOLDER "
            "(of a multirun: hydra.sweep.dir=FOLDER)"
        )
        callback.end_early(Path(error.filename or "the next job"), reason)
        _complain(reason)
        if (unwritten := callback.take_failure()) is not None:
            _complain(unwritten)
        return 1
    finally:
        sys.argv[1:] = before
    if (unwritten := callback.take_failure()) is not None:
        _complain(unwritten)
        statuses.append(1)
    return max(statuses, default=0)
