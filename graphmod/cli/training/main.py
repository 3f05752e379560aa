"""What `train.py` does: one run, or with --multirun all combinations of settings with several values.

What takes no PyTorch to refuse is refused here, before it is loaded.
"""

import logging
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from graphmod.cli.environment import own_rank, ranks_started, require_one_process
from graphmod.cli.settings import Asked
from graphmod.cli.start import loading
from graphmod.cli.stdout import end_at_once, stay_silent
from graphmod.cli.training.compose import TRAIN
from graphmod.errors import ConfigError
from graphmod.train.run.folders import job_folder
from graphmod.train.schema.parallel import ParallelMode
from graphmod.train.schema.run import RunConfig, check
from graphmod.train.schema.train import check_resume


def main(arguments: list[str]) -> int:
    """Runs `train.py` with these arguments; returns the exit status."""
    if ranks_started() > 1 and own_rank():
        stay_silent(lambda text: None)  # the first rank says it
    return TRAIN.run(arguments, _train)


def _train(asked: Asked) -> int:
    lengths = [one for one in asked.overrides if one.key_or_group in ("train.steps", "train.epochs")]
    given = {one.key_or_group: one.input_line for one in lengths if one.value() is not None}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given.values())} both say how long to train; give one of them")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return _several(asked) if "--multirun" in asked.flags else _one(asked)


def _folder(hydra: DictConfig, what: str) -> Path:
    folder = str(hydra[what].dir)
    if not folder.strip():
        raise ConfigError(
            f"hydra.{what}.dir is empty; give the folder to write to, such as hydra.{what}.dir=runs/mine, or leave it "
            "out"
        )
    return Path(folder)


def _require_one_run(config: RunConfig) -> None:
    """Raises ConfigError for settings that a single run cannot have."""
    check_resume(config.train)
    if config.train.resume not in ("none", "auto"):
        return  # it has settings that are not known yet
    check(config)
    if config.parallel.mode is ParallelMode.none:
        require_one_process("parallel=none trains in one; add parallel=ddp")
        if config.parallel.gpus is not None:
            raise ConfigError("parallel.gpus does nothing with parallel=none; add parallel=ddp, or leave it out")


def _one(asked: Asked) -> int:
    _require_own_folder(asked, "sweep", "run")
    (overrides,) = asked.jobs()
    settings, hydra = TRAIN.compose(overrides)
    _require_one_run(TRAIN.typed(settings))
    with loading():
        from graphmod.cli.training.job import Job, attempt
    # Another rank than the first writes nowhere, and is told which folder the run has.
    folder = Path() if own_rank() else _folder(hydra, "run")
    try:
        status, outcome = attempt(settings, Job(folder, overrides, alone=True, given=asked.arguments))
    finally:
        with suppress(OSError):  # it holds something: the run began
            folder.rmdir()
    if isinstance(outcome, str) and ranks_started() > 1:
        end_at_once(status)  # a process group whose ranks are gone may wait for them
    return status


def _require_multirun(configs: list[RunConfig]) -> None:
    """Raises ConfigError for settings that one of several jobs cannot have."""
    if (count := ranks_started()) > 1:
        raise ConfigError(
            f"--multirun with a launcher (WORLD_SIZE={count}) is not supported; leave the launcher out, each job "
            "starts its own ranks: --multirun parallel=ddp parallel.gpus=2"
        )
    if any(config.train.profile for config in configs):
        raise ConfigError(
            "train.profile=true in a multirun would slow the graph launches of every later job, because a profiler "
            "stays attached to the process; drop it (the comparison shows how busy the GPU was), or run it alone"
        )
    if any(config.graph.check for config in configs):
        raise ConfigError("graph.check=true checks a single run; drop --multirun")
    resumed = [config.train.resume for config in configs if config.train.resume not in ("none", "auto")]
    if len({*resumed}) < len(resumed):
        raise ConfigError(
            f"train.resume={resumed[0]} in a multirun would make all its jobs resume one run; drop --multirun, or "
            "resume each job in its folder: hydra.sweep.dir=FOLDER train.resume=auto"
        )


def _require_own_folder(asked: Asked, other: str, own: str) -> None:
    """Raises ConfigError where the folder is given that the other kind of run has."""
    if any(argument.lstrip("+").startswith(f"hydra.{other}.dir=") for argument in asked.arguments):
        what = "a multirun" if own == "sweep" else "a single run"
        raise ConfigError(f"hydra.{other}.dir does nothing in {what}; give hydra.{own}.dir=FOLDER")


def _several(asked: Asked) -> int:
    _require_own_folder(asked, "run", "sweep")
    jobs = asked.jobs()
    composed = [TRAIN.compose(overrides) for overrides in jobs]
    _require_multirun([TRAIN.typed(settings) for settings, _ in composed])
    scope = str(composed[0][1].runtime.choices["graph"])  # names the only job, where nothing has several values
    names = [job_folder(asked.swept, overrides, scope) for overrides in jobs]
    with loading():
        from graphmod.cli.training.job import Job
        from graphmod.cli.training.sweep import run
    folder = _folder(composed[0][1], "sweep")
    made = [
        (settings, Job(folder / name, overrides, alone=False, given=asked.arguments))
        for name, overrides, (settings, _) in zip(names, jobs, composed, strict=True)
    ]
    return run(folder, made)
