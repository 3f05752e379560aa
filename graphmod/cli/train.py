"""What `train.py` does: one run, or with --multirun all jobs that Hydra makes of settings with several values.

What can be refused before a folder is made is refused here, most of it before PyTorch is loaded.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import InterpolationResolutionError

from graphmod.cli.app import (
    BASIC_SWEEPER,
    TRAIN,
    CommandCallback,
    default_folder,
    given_overrides,
    quoted,
    without_hydra,
)
from graphmod.cli.start import end_at_once, loading, own_rank, ranks_started, require_one_process, stay_silent
from graphmod.errors import ConfigError
from graphmod.train.folders import from_here, owned, unused
from graphmod.train.settings import ParallelMode, RunConfig, check, check_resume, plain_config

if TYPE_CHECKING:
    from graphmod.cli.job import Start

_NAMES_NO_FOLDER = ("none", "auto")
_NOWHERE = {"run__dir": ".", "output_subdir": None, "job__chdir": False, "job_logging__root": None}


@dataclass
class _Command:
    """What this process holds while its command runs."""

    held: ExitStack = field(default_factory=ExitStack)  # the locks of the folders that it writes to
    start: "Start | None" = None  # of its only run, which has been looked for before Hydra made the folder
    sweep: Path | None = None  # the folder of its multirun
    made: Path | None = None  # the folder that was made for its run, which may go on in another one
    # Why it cannot start, which the other ranks that a launcher has started are still to be told.
    failed: Exception | None = None
    joined: bool = False  # it trained with ranks that a launcher had started


_command = _Command()


def _task(settings: DictConfig) -> float | None:
    """One job; returns its last loss, that of an evaluation if there was one, for sweepers that minimize it. Raises
    JobFailed where it failed, and has said why, and SystemExit where it was stopped."""
    with loading():
        from graphmod.cli.job import Job, run_job, run_one_of
        from graphmod.train.result import RunResult
    config = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(config.overrides.task, resolve=False)
    job = Job(
        folder=Path(config.runtime.output_dir),
        overrides=overrides,
        alone=config.mode is not RunMode.MULTIRUN,
        given=TRAIN.given,
        named=_command.made is None,
        sweep=Path(config.runtime.cwd, config.sweep.dir) if config.mode is RunMode.MULTIRUN else None,
        cwd=config.runtime.cwd if config.job.chdir else None,
        logging={"job_logging": OmegaConf.to_container(config.job_logging, resolve=True), "verbose": config.verbose},
    )
    _command.joined = ranks_started() > 1
    if job.alone:
        folder = run_job(settings, job, _command.start, _command.failed)
    else:
        folder = run_one_of(settings, job, config.job.num, lambda: _require_job(TRAIN.typed(settings), job.overrides))
    with suppress(OSError, ValueError, TypeError):  # it only checked, or is another rank than the first
        return RunResult.read(folder).last_loss
    return None


def _finish(status: int) -> int:
    """Compares the jobs of a multirun, and gives folders back; returns the exit status."""
    global _command
    command, _command = _command, _Command()
    with command.held:
        if command.sweep is not None and status < 128:  # else those that would follow did not run
            with loading():
                from graphmod.cli.job import conclude_sweep
            status = max(status, conclude_sweep(command.sweep, failed=status > 0))
    if command.made is not None:
        with suppress(OSError):  # it holds something: the run began there
            command.made.rmdir()
    if status and command.joined:
        end_at_once(status)  # a process group whose ranks are gone may wait for them
    return status


def main(arguments: list[str]) -> int:
    """Runs `train.py` with these arguments; returns the exit status."""
    if ranks_started() > 1 and own_rank():
        stay_silent(lambda text: None)  # the first rank says it
    return TRAIN.run(arguments, _task, _finish)


def _require_one_length(overrides: list[str]) -> None:
    given = {key: value for one in overrides for key, _, value in [one.lstrip("+").partition("=")]}
    lengths = [f"{key}={given[key]}" for key in ("train.steps", "train.epochs") if given.get(key, "null") != "null"]
    if len(lengths) > 1:
        raise ConfigError(f"{' and '.join(lengths)} both say how long to train; give one of them")


def _require_one_run(config: RunConfig) -> None:
    """Raises ConfigError for settings that a single run cannot have."""
    check_resume(config.train.resume)
    if config.train.resume not in _NAMES_NO_FOLDER:
        return  # it has settings that are not known yet
    check(config)
    if config.parallel.mode is ParallelMode.none:
        require_one_process("parallel=none trains in one; add parallel=ddp")
        if config.parallel.gpus is not None:
            raise ConfigError("parallel.gpus does nothing with parallel=none; add parallel=ddp, or leave it out")


def _require_job(config: RunConfig | DictConfig, overrides: list[str]) -> None:
    """Raises ConfigError for settings that one of several jobs cannot have."""
    _require_one_length(overrides)
    if config.train.profile:
        raise ConfigError(
            "train.profile=true in a multirun would slow the graph launches of every later job, because a profiler "
            "stays attached to the process; drop it (the comparison shows how busy the GPU was), or run it alone"
        )
    if config.graph.check:
        raise ConfigError("graph.check=true checks a single run; drop --multirun")


def _require_multirun(config: RunConfig | DictConfig, overrides: list[str], several: bool) -> None:
    """Raises ConfigError for what all jobs would be refused for, one after the other."""
    if (count := ranks_started()) > 1:
        raise ConfigError(
            f"--multirun with a launcher (WORLD_SIZE={count}) is not supported; leave the launcher out, each job "
            "starts its own ranks: --multirun parallel=ddp parallel.gpus=2"
        )
    _require_job(config, overrides)
    if config.train.resume not in _NAMES_NO_FOLDER and several:
        raise ConfigError(
            f"train.resume={config.train.resume} in a multirun would make all its jobs resume one run; drop "
            "--multirun, or resume each job in its folder: hydra.sweep.dir=FOLDER train.resume=auto"
        )


def _folder(config: DictConfig, what: str) -> Path:
    """The folder to write to; the default one is made, under a name that nothing has."""
    folder = str(config.hydra[what].dir)
    return Path(unused(folder) if default_folder(config, what) else folder).absolute()


def _set(config: DictConfig, **values: Any) -> None:
    """Sets what Hydra goes by from here on, by full name with `__` for the dots."""
    with read_write(config.hydra), open_dict(config.hydra):
        for name, value in values.items():
            OmegaConf.update(config.hydra, name.replace("__", "."), value, force_add=True)


class TrainCallback(CommandCallback):
    """What comes before the folder of a run is made, and before the jobs of a multirun."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Refuses what cannot be, and finds out where the run starts: a run that it resumes has a folder already.
        Raises ConfigError where the settings cannot be meant, or a folder is in use."""
        super().on_run_start(config)
        _set(config, runtime__output_dir=str(Path(str(config.hydra.run.dir)).absolute()))  # which settings may name
        HydraConfig.instance().set_config(config)
        settings, overrides = without_hydra(config), given_overrides(config, "task")
        _require_one_length(overrides)
        resumed = str(settings.train.resume) not in _NAMES_NO_FOLDER
        _require_one_run(TRAIN.typed(settings, resumed))
        if own_rank():  # another than the first writes nowhere, and is told which folder the run has
            _set(config, **_NOWHERE)
            return
        with loading():
            from graphmod.cli.job import Job, started
        default = default_folder(config, "run")
        folder = _folder(config, "run")
        _command.made = folder if default else None
        _set(config, runtime__output_dir=str(folder))
        job = Job(folder, overrides, True, TRAIN.given, named=not default)
        job.cwd = str(Path.cwd()) if config.hydra.job.chdir else None
        try:
            start = _command.start = _command.held.enter_context(started(settings, job))
        except Exception as error:
            if ranks_started() == 1:
                raise
            _command.failed = error  # the others wait, and are told
            _set(config, **_NOWHERE)
            return
        TRAIN.folder = start.folder
        _set(config, run__dir=str(start.folder), **({} if start.point else {"output_subdir": None}))
        if start.resumed:  # its files in .hydra should say with which settings it goes on
            with read_write(config), open_dict(config):
                for group, values in OmegaConf.merge(
                    OmegaConf.structured(RunConfig), plain_config(start.config)
                ).items():
                    config[group] = values

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Refuses what cannot be, and takes the folder of the multirun. Raises ConfigError where the settings cannot be
        meant, or the folder is in use, or holds another multirun."""
        super().on_multirun_start(config)
        overrides = given_overrides(config, "task")
        HydraConfig.instance().set_config(config)
        settings, swept = without_hydra(config), _swept(config)
        try:
            TRAIN.typed(settings)
        except ConfigError as error:  # what only a job has, such as its number
            if not isinstance(error.__cause__, InterpolationResolutionError):
                raise
        _require_multirun(settings, overrides, any(swept.values()))
        with loading():
            from graphmod.cli.job import require_new
        folder = _folder(config, "sweep")
        shown = from_here(folder)
        _command.made = folder if default_folder(config, "sweep") else None
        _command.held.enter_context(owned(folder))
        require_new(folder, settings.train.resume)
        _command.sweep = TRAIN.folder = folder
        # Jobs are composed anew from these, maybe in another process.
        apart = sorted(
            {*config.hydra.job.config.override_dirname.exclude_keys, *(key for key in swept if not swept[key])}
        )
        same = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(quoted, apart))}]"
        more = [f"hydra.sweep.dir={quoted(shown)}", same]
        _set(config, sweep__dir=shown, overrides__hydra=[*given_overrides(config, "hydra"), *more])


def _swept(config: DictConfig) -> dict[str, bool]:
    """The keys that are given -> whether they have several values."""
    basic = config.hydra.sweeper["_target_"] == BASIC_SWEEPER
    parser, params = OverridesParser.create(), OmegaConf.select(config.hydra, "sweeper.params") or {}
    found = {}
    for one in [*(f"{key}={value}" for key, value in params.items()), *given_overrides(config, "task")]:
        with suppress(OverrideParseException):
            (override,) = parser.parse_overrides([one])
            found[override.get_key_element()] = override.is_sweep_override()
            if basic and override.is_sweep_override():
                _require_jobs(one, override)
    return found


def _require_jobs(given: str, override: Override) -> None:
    """Raises ConfigError where there are no jobs for several values, or one job twice."""
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{given} names no values; list them, or choose a sweeper that searches: hydra/sweeper=optuna "
            "(pip install hydra-optuna-sweeper)"
        )
    sweep = override.value()
    values = [*map(str, sweep.list)] if isinstance(sweep, ChoiceSweep) else []
    if len({*values}) < len(values):
        raise ConfigError(f"{given} gives a value twice, and its jobs would share a folder; give each value once")
