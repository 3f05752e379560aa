"""What `train.py` does: compose the config with Hydra, run the job or jobs, and word every error for its reader.

Exit status: 0 all went well, 1 a run failed, 2 the command line, a config or the data cannot be used, 128 + N stopped
by signal N (130 is Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import os
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

from graphmod.cli.environment import own_rank, ranks_started, require_one_process
from graphmod.cli.explain import explain
from graphmod.cli.start import shown, version
from graphmod.cli.stdout import complain, end_at_once, show, stay_silent, unwritten
from graphmod.cli.training import callback
from graphmod.cli.training.arguments import for_hydra, groups, swept_keys
from graphmod.cli.training.compose import CONFIGS, parse_early, register
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.run.folders import job_folder, unused
from graphmod.train.schema.parallel import ParallelMode

if TYPE_CHECKING:
    from graphmod.train.report.result import RunResult

_FULL_ERROR = "HYDRA_FULL_ERROR"


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


def _tidy(folder: Path) -> None:
    # A run that never began, or resumed in the folder of another, should leave no dated folder behind.
    with suppress(OSError):  # it holds something
        folder.rmdir()


def _for_one_rank(arguments: list[str]) -> list[str]:
    """The arguments of one of several processes that a launcher started; all but the first one stay silent.

    Raises:
        ConfigError: they ask for a multirun.
    """
    if own_rank() == 0:
        if {"--multirun", "-m"} & set(arguments):
            raise ConfigError(
                f"--multirun with a launcher (WORLD_SIZE={ranks_started()}) is not supported; leave the launcher out, "
                "each job starts its own ranks: --multirun parallel=ddp parallel.gpus=2"
            )
        return arguments
    stay_silent(lambda text: None)
    if {"--multirun", "-m"} & set(arguments):
        raise ConfigError("the first rank says it")
    # Nothing is written there: the first rank tells which folder the run has.
    return [one for one in arguments if not one.startswith("hydra.run.dir=")] + ["hydra.run.dir=."]


def main(given: list[str]) -> int:
    """Runs `train.py` with these arguments; returns the exit status."""
    statuses: list[int] = []
    before, show_all = sys.argv[1:], _FULL_ERROR in os.environ

    def job(cfg: DictConfig) -> str | Path | RunResult:
        hydra_config = HydraConfig.get()
        folder = Path(hydra_config.runtime.output_dir)
        alone = hydra_config.mode is RunMode.RUN
        if alone:
            try:
                parse_early(cfg)
                if cfg.train.resume in ("none", "auto") and cfg.parallel.mode is ParallelMode.none:
                    require_one_process("parallel=none trains in one; add parallel=ddp")
            except ConfigError as error:
                complain(error)
                _tidy(folder)
                statuses.append(2)
                return folder
        from graphmod.cli.training.job import Job, attempt, failed  # loads PyTorch

        callback.require_folder()
        try:
            status, outcome = attempt(cfg, Job(folder, list(hydra_config.overrides.task), alone, given))
        finally:
            if alone and own_rank() == 0:
                _tidy(folder)
        statuses.append(status)
        if isinstance(outcome, str) and ranks_started() > 1:
            end_at_once(status)  # a process group whose ranks are gone may wait for them
        if status >= 128:
            raise KeyboardInterrupt  # the jobs that would follow must not start
        return failed(cfg, folder, outcome) if status and not alone else outcome

    try:
        if "--version" in given:
            show(version())
            return 0
        arguments = for_hydra(given)
        if ranks_started() > 1:
            arguments = _for_one_rank(arguments)
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
        complain(error)
        return 2
    except GraphmodError as error:
        complain(error)
        return 1
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        if show_all:
            traceback.print_exc()
        complain(explain(error))
        return 2
    except BrokenPipeError:  # as with `| head`, where nothing is wrong
        unwritten()
        return 128 + 13  # what a shell says of a program that SIGPIPE ended
    except OSError as error:  # Hydra could not make the folder of the run, or print what it was asked for
        if (reason := unwritten()) is not None:
            complain(reason)
            return 1
        where = error.filename or "the folder of the run"
        reason = (
            f"cannot write to {where}: {error.strerror or error}; choose another folder with hydra.run.dir=FOLDER "
            "(of a multirun: hydra.sweep.dir=FOLDER)"
        )
        callback.end_early(Path(error.filename or "the next job"), reason)
        complain(reason)
        if (uncompared := callback.take_failure()) is not None:
            complain(uncompared)
        return 1
    finally:
        callback.leave_folder()
        sys.argv[1:] = before
    for reason in (callback.take_failure(), unwritten()):
        if reason is not None:
            complain(reason)
            statuses.append(1)
    return max(statuses, default=0)
