"""What `train.py` does: compose the config with Hydra, run the job or jobs, and word every error for its reader.

Imports hydra and the loop. Exit status: 0 all went well, 1 a run failed, 2 the command line, a config or the data
cannot be used, 128 + N stopped by signal N (130 is Ctrl-C, 143 SIGTERM).
"""

import functools
import itertools
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

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.config import parse, register
from graphmod.train.explain import explain, system_error, unknown_flag
from graphmod.train.loop import resume_point, train
from graphmod.train.result import RESULT_FILE, RunResult
from graphmod.train.resume import holds_finished_runs

_FULL_ERROR = "HYDRA_FULL_ERROR"
_NO_PROFILE = (
    "train.profile=true in a multirun would slow the graph launches of every later job, because a profiler stays "
    "attached to the process; drop it (the comparison tells how busy the GPU was), or run it alone"
)
_ONE_FOR_ALL = (
    "train.resume={} in a multirun would let all its jobs go on with one run; drop --multirun, or go on with each "
    "job in its folder: hydra.sweep.dir=FOLDER train.resume=auto"
)
_SWEPT_ALREADY = (
    "hydra.sweep.dir={} holds runs of an earlier multirun, and new ones would mix with them; give another folder, or "
    "delete that one (train.resume=auto goes on with runs that have checkpoints)"
)
_TEXTS = ("train.sample_prompt",)
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
_FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc", "--info", "-i"),
)
_FLAGS_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    "--experimental-rerun",
)


def _complain(message: object) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def flags_first(arguments: list[str]) -> list[str]:
    """The arguments, flags before settings: Hydra does not understand `graph=none --multirun train.steps=9`.

    Raises:
        ConfigError: a flag that Hydra does not have.
    """
    flags, settings, left = [], [], list(arguments)
    while left:
        argument = left.pop(0)
        name = argument.partition("=")[0]
        if not argument.startswith("-"):
            settings.append(argument)
        elif name in _FLAGS:
            flags.append(argument)
            if name in ("--info", "-i") and left and "=" not in left[0] and not left[0].startswith("-"):
                flags[-1] = f"--info={left.pop(0)}"
            elif argument in ("--info", "-i"):
                flags[-1] = "--info=all"  # it would take the first setting for its value
        elif name in _FLAGS_WITH_VALUE:
            flags.append(argument)
            if "=" not in argument and left:
                flags.append(left.pop(0))
        else:
            raise ConfigError(unknown_flag(argument, left[0] if left else "", [*_FLAGS, *_FLAGS_WITH_VALUE]))
    return [*flags, *settings]


def quoted(text: str) -> str:
    """`text` so that Hydra and omegaconf, which resolves twice, read it as it is."""
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 4 + r"\\\${", text)
    text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


def for_hydra(arguments: list[str]) -> list[str]:
    """The arguments as Hydra wants them: flags first, and texts in quotes, as generate.py takes them without.

    Raises:
        ConfigError: an unknown flag, a folder without a name, a profile of several jobs, one run that all of them
            would go on with, or a folder with the runs of another multirun.
    """
    found, several = [], bool({"--multirun", "-m"} & set(arguments))
    resumes = any(re.match(r"train\.resume=(?!none$)", argument) for argument in arguments)
    for argument in flags_first(arguments):
        key, equals, value = argument.partition("=")
        if key in _FOLDERS and value.strip("'\" ") == "" and equals:
            raise ConfigError(f"{key} is empty; give the folder to write to, such as {key}=runs/mine, or leave it out")
        # Said here, because the jobs, one by one, would compare what is new without what they may not touch.
        if several and not resumes and key == "hydra.sweep.dir" and holds_finished_runs(Path(value.strip("'\" "))):
            raise ConfigError(_SWEPT_ALREADY.format(value))
        if several and key == "train.resume" and value not in ("none", "auto") and "," not in value:
            raise ConfigError(_ONE_FOR_ALL.format(value))
        if several and key == "train.profile" and {"true", "yes", "on", "1"} & set(value.lower().split(",")):
            raise ConfigError(_NO_PROFILE)
        found.append(f"{key}={quoted(value)}" if key in _TEXTS and value else argument)
    return found


def groups(config_dir: Path) -> str:
    """The groups and their choices, a line each, with the default one marked; for --help."""
    defaults: dict[str, str] = {}
    for entry in OmegaConf.load(config_dir / "config.yaml").defaults:
        if isinstance(entry, DictConfig):
            defaults |= {str(group): str(choice) for group, choice in entry.items()}
    lines = []
    for folder in sorted(path for path in config_dir.iterdir() if path.is_dir() and path.name in defaults):
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        marked = (f"{name} (default)" if name == defaults[folder.name] else name for name in names)
        lines.append(f"  {folder.name}: {', '.join(marked)}")
    return "\n".join(lines) + "\n"


def swept_keys(arguments: list[str]) -> list[str]:
    """The keys that a multirun gives several values to, such as `graph` in `graph=none,per_layer`."""
    parser, keys = OverridesParser.create(), []
    for argument in arguments:
        if argument.startswith("-"):
            continue
        try:
            override = parser.parse_override(argument)
        except HydraException:
            continue  # Hydra will say so itself, and better
        if override.is_sweep_override():
            keys.append(override.get_key_element())
    return keys


@functools.cache
def unused(folder: str) -> str:
    """`folder`, made for this process alone: where there is one already, as of a run that was started in the same
    second, its name gets a number."""
    for number in itertools.count(1):
        name = folder if number == 1 else f"{folder}_{number}"
        try:
            Path(name).mkdir(parents=True)
        except OSError:
            if Path(name).is_dir():
                continue
        return name  # where it cannot be made, whoever writes to it says so


def job_folder(keys: list[str], overrides: list[str], number: object) -> str:
    """The name of a job's folder: `none` for graph=none; keys that are no group keep their name, as in `train.seed=1`.

    Args:
        keys: the swept ones.
        overrides: all of the job's.
        number: of the job; its name when nothing is swept.
    """
    parts = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in keys:
            parts.append(override if "." in key else value)
    return "_".join(parts).replace(os.sep, "-")[:200] or str(number)


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


def _from_here(path: str | Path) -> str:
    """`path` as one would type it here."""
    full = Path(path).absolute()
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else str(full)


def _way_on(folder: Path, given: list[str]) -> str:
    """The command that goes on with the run in `folder`, which was started with the arguments `given`."""
    again = [f"train.resume={_from_here(folder)}"]
    if {"--multirun", "-m"} & set(given):  # whose jobs would all go on with that one
        again = [f"hydra.sweep.dir={_from_here(folder.parent)}", "train.resume=auto"]
    changed = tuple(argument.partition("=")[0] + "=" for argument in again)
    given = [argument for argument in given if not argument.startswith(changed)]
    return shlex.join([_from_here(sys.executable), _from_here(sys.argv[0]), *given, *again])


def _say_stopped(result: RunResult, folder: Path, given: list[str]) -> int:
    done, steps = len(result.losses), result.config["train"]["steps"]
    print(f"stopped by {result.error} after step {done} of {steps}")
    if result.config["train"]["checkpoint"]:
        print(f"  saved in {folder / result.checkpoint}\n  to go on: {_way_on(folder, given)}")
    else:
        print("  nothing was saved, because train.checkpoint=false")
    return 128 + signal.Signals[result.error]


def _bug(error: Exception) -> tuple[int, str]:
    # All of it is shown, but the other jobs of a multirun go on.
    traceback.print_exception(error)
    _complain("this is a bug in graphmod or in a library it uses; the lines above say where")
    return 1, f"{type(error).__name__}: {error}"


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
            raise ConfigError(_NO_PROFILE)  # a file of configs/ says so; the command line was looked at before
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
    except torch.OutOfMemoryError as error:
        reason = f"out of GPU memory; lower data.batch_size or data.seq_len. {str(error).splitlines()[0]}"
        _complain(reason)
        return 1, reason
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            return _bug(error)
        reason = f"out of memory; lower data.batch_size or data.seq_len. {error}".splitlines()[0]
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


def main(config_dir: Path) -> int:
    """Runs `train.py` with the arguments in `sys.argv`; returns the exit status.

    Args:
        config_dir: the folder with `config.yaml` and the groups.
    """
    statuses: list[int] = []
    given, show_all = sys.argv[1:], _FULL_ERROR in os.environ

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
        OmegaConf.register_new_resolver("groups", lambda: groups(config_dir), replace=True)
        with _hydra_raises():
            hydra.main(config_path=str(config_dir.resolve()), config_name="config", version_base="1.3")(job)()
    except KeyboardInterrupt:
        if statuses and statuses[-1] >= 128:
            return statuses[-1]
        print("interrupted", file=sys.stderr)
        return 130
    except ConfigError as error:
        _complain(error)
        return 2
    except (HydraException, OmegaConfBaseException) as error:
        if show_all:
            traceback.print_exc()
        _complain(explain(error))
        return 2
    except OSError as error:  # Hydra could not make the folder of the run
        _complain(f"cannot write to {error.filename or 'the folder of the run'}: {error.strerror or error}")
        return 1
    finally:
        sys.argv[1:] = given
    return max(statuses, default=0)
