"""One job of `train.py`: its settings, its run, and each way it can end in words and an exit status."""

import copy
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from graphmod.cli.app import TRAIN, parse
from graphmod.cli.errors import JobFailed, conclude, unknown_key
from graphmod.cli.start import CONFIGS, complain_for_all, ranks_started, say_plainly, stay_silent, tell, words
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.device import pick_device
from graphmod.train.display import Journal
from graphmod.train.folders import CHECKPOINTS, checkpoints, from_here, link_latest, owned, read_manifest
from graphmod.train.ranks import ALONE, Ranks, joined, ranks_of
from graphmod.train.result import RESULT_FILE, RunResult, median
from graphmod.train.resume import (
    AUTO,
    NONE,
    ResumePoint,
    all_settings,
    by_full_name,
    claimed,
    decisive_settings,
    holds_finished_runs,
    require_left,
    require_same,
    resumable,
)
from graphmod.train.run import CHECK_FILE, Aborted, check_training, train
from graphmod.train.settings import DeviceName, ParallelMode, RunConfig
from graphmod.words import as_yaml

if TYPE_CHECKING:
    from graphmod.cli.launch import Peers

# -- the settings of a run that is resumed: those it had and, over them, what the command line gives -------------------

_RESUME = "train.resume"
_SAID = (_RESUME, "train.steps", "train.epochs")  # what more steps mean for a run, the run says itself


def _plain(settings: DictConfig, name: str) -> Any:
    value = OmegaConf.select(settings, name)
    plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return plain.value if isinstance(plain, Enum) else plain


def _other_than_by_default(cfg: DictConfig) -> Iterator[str]:
    """The settings, by full name, that are not what they are without any argument."""
    if not GlobalHydra.instance().is_initialized():
        return
    defaults = compose(HydraConfig.get().job.config_name, [])
    for group in cfg:
        for name in cfg[group]:
            if _plain(cfg, f"{group}.{name}") != _plain(defaults, f"{group}.{name}"):
                yield f"{group}.{name}"


def _given(cfg: DictConfig, overrides: list[str]) -> dict[str, Any]:
    """The settings that the command line gives, by full name. The choice of a group gives all those that files of that
    group set: another file than the chosen one may have set them before. A file of the user's own, such as an
    experiment, gives all that it makes different."""
    names: list[str] = []
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        files = [OmegaConf.load(path) for path in (CONFIGS / key).glob("*.yaml")]
        if ("." not in key and not (CONFIGS / key / f"{override.value()}.yaml").is_file()) or key == "experiment":
            names += _other_than_by_default(cfg)
        elif files:
            names += {f"{key}.{name}" for file in files for name in file}
        else:
            names.append(key)
    return {name: _plain(cfg, name) for name in sorted({*names})}


def _changed(saved: dict[str, dict[str, Any]], given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a run with what is given, by full name, over them. What only a part of the user's own knows is an
    argument of it; another part has none of those that the one before had. Raises ConfigError for a setting that there
    is not, for a run without such a part."""
    settings = copy.deepcopy(saved)
    for name, value in given.items():
        group, *keys = name.split(".")
        if keys[0] not in saved[group]:
            keys = ["target", *keys]
            was = (settings[group].get("target") or {}).get("_target_")
            target = given.get(f"{group}._target_", was)
            if target is None:
                raise ConfigError(unknown_key(name, RunConfig, str(value)))
            if was != target:
                settings[group]["target"] = {"_target_": target}
        place = settings[group]
        for part in keys[:-1]:
            place[part] = place = place.get(part) or {}
        place[keys[-1]] = value
    return settings


def _start_as_many(settings: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Has as many ranks started as the run had, where a launcher had started them, or its settings left the number to
    the GPUs of its machine; this one may have too few."""
    parallel, count = settings["parallel"], manifest["processes"]
    if parallel["mode"] == ParallelMode.none or parallel["gpus"] is not None or count == 1:
        return
    if pick_device(DeviceName(settings["train"]["device"])).type == "cpu" or count <= torch.cuda.device_count():
        parallel["gpus"] = count


def job_settings(cfg: DictConfig, overrides: list[str]) -> tuple[DictConfig | dict[str, Any], list[str]]:
    """The settings of a job that Hydra has composed: with `train.resume=FOLDER` those of that run and, over them, what
    the command line gives.

    Returns:
        All settings, by group, to be parsed; and in words what the command line changes of the run that is resumed.

    Raises:
        ConfigError: the folder holds no run, or a setting is to change that decides its numbers.
    """
    resume = str(cfg.train.resume)
    point = None if resume in (NONE, AUTO) else resumable(resume, read_manifest)[0]
    if point is None:  # where a folder was named, whoever looks for its checkpoints says what is wrong with them
        return cfg, []
    assert point.checkpoint is not None
    manifest = point.manifest
    saved = all_settings(manifest)
    given = _given(cfg, overrides) | {_RESUME: resume}
    settings = _changed(saved, given)
    # At once, because a change that may not be can also be one that does not fit to the rest. The device is asked for
    # as it may be, such as auto.
    require_same(point.checkpoint, manifest, decisive_settings(settings, manifest["settings"]["train.device"]))
    was = by_full_name(saved)
    changed = [
        f"{name} was {as_yaml(was[name])} and is now {as_yaml(value)}"
        for name, value in sorted(by_full_name(settings).items())
        if name in was and name not in _SAID and was[name] != value
    ]
    if "parallel.gpus" not in given and "parallel.mode" not in given and ranks_started() == 1:
        _start_as_many(settings, manifest)
    if "train.steps" in given and "train.epochs" not in given:
        settings["train"]["epochs"] = None  # which would decide otherwise
    return settings, changed


# -- the comparison of the jobs of a multirun --------------------------------------------------------------------------
# Jobs may run in other processes, and on other machines; so each leaves a line in the folder of the multirun.
# How busy the GPU is takes a profiler, which slows later graph launches of the process; so that is looked at last,
# when all times have been taken, in a few steps of each run anew.

_COMPARISONS = Path("runs/compare")  # of train.yaml
_PROFILED = {
    "steps": 8,
    "epochs": None,
    "sample_every": 0,
    "eval_every": 0,
    "checkpoint": False,
    "checkpoint_every": 0,
    "resume": "none",
    "log": [],
    "profile": True,
    "ema_decay": None,
}


_JOBS = ".jobs"
_SWEEP_FILE = "multirun.yaml"  # Hydra's


def require_new(sweep: Path, resume: str) -> None:
    """Clears what jobs of an earlier multirun have left in its folder for the comparison. Raises ConfigError where it
    holds finished runs of another multirun, and is not to be resumed."""
    if resume == NONE and holds_finished_runs(sweep):
        raise ConfigError(
            f"hydra.sweep.dir={from_here(sweep)} holds runs of an earlier multirun, and new ones would mix with them; "
            "give another folder, or delete that one (train.resume=auto resumes runs that have checkpoints)"
        )
    shutil.rmtree(sweep / _JOBS, ignore_errors=True)


def leave(sweep: Path, number: int, **what: Any) -> None:
    """Leaves what there is to know of a job for the comparison: `name`, `folder`, `scope`, `status` (of a process with
    this job alone) and `error`."""
    with suppress(OSError):  # a full disk: the job itself has said so
        (sweep / _JOBS).mkdir(exist_ok=True)
        (sweep / _JOBS / f"{number:06}.json").write_text(json.dumps(what), encoding="utf-8")


def conclude_sweep(sweep: Path, failed: bool) -> int:
    """Compares the jobs that have left something; returns the highest of their exit statuses. Raises ConfigError where
    there was no job, unless it has failed and said why, and GraphmodError where the comparison cannot be written."""
    jobs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((sweep / _JOBS).glob("*.json"))]
    shutil.rmtree(sweep / _JOBS, ignore_errors=True)
    if not jobs:
        (sweep / _SWEEP_FILE).unlink(missing_ok=True)
        if not failed:
            raise ConfigError("these settings make no job; look for a choice(), range() or glob() without values")
        return 0
    results = {}
    for job in jobs:
        unfinished = RunResult(scope=job["scope"], status="failed", error=job["error"])
        name = job["name"] if job["name"] not in results else f"{job['name']} ({len(results)})"
        results[name] = unfinished if job["error"] else _result(job["scope"], Path(job["folder"]))
    _compare(Path(from_here(sweep)), results)
    return max(job["status"] for job in jobs)


def _result(scope: str, folder: Path) -> RunResult:
    try:
        return RunResult.read(folder)
    except (OSError, ValueError, TypeError) as error:
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
    from graphmod.train import compare  # which no single run loads

    finished = {name: result for name, result in results.items() if result.status == "finished"}
    if any(not result.device.startswith("CPU") for result in finished.values()):
        tell("\nprofiling a few steps of each run, to see how busy the GPU is")
    busy = {name: ms for name, result in finished.items() if (ms := gpu_busy_ms(result)) is not None}
    rows = compare.compare(results, busy)
    tell(f"\n{compare.table(rows, compare.swept(results))}")
    for remark in compare.remarks(rows, results):
        tell(remark)
    if not finished and (sweep / compare.JSON_FILE).exists():
        tell(f"\nno run finished; the comparison in {sweep} is an earlier one")
        return
    try:
        files = compare.write_report(sweep, rows, results)
    except OSError as error:
        for path in sweep.glob("comparison*"):
            if path.is_file() and not path.stat().st_size:
                path.unlink()
        raise GraphmodError(
            f"cannot write the comparison to {sweep}: {error.strerror or error}; what the runs wrote is kept. Make "
            "room, or choose another folder with hydra.sweep.dir=FOLDER"
        ) from error
    tell(f"\nwritten to {', '.join(map(str, files))}")
    if sweep / compare.PLOT_FILE not in files:
        tell(f"no {compare.PLOT_FILE}: matplotlib is not installed (pip install matplotlib)")
    # A folder of one's own choice has nothing beside it that could be older.
    shown = link_latest(sweep) if sweep.absolute().parent == _COMPARISONS.absolute() else sweep
    if compare.on_tensorboard(results):
        tell(f"side by side: tensorboard --logdir {shown}")


# -- a job -------------------------------------------------------------------------------------------------------------

_LOST_SECONDS = 3.0
# Settings that may be paths, from the folder in which the command was typed.
_PATHS = ("data.path", "data.tokenizer", "data.cache", "model.path", "train.resume")


@dataclass
class Job:
    """What Hydra makes of a command line, or of one of the jobs of a multirun."""

    folder: Path  # made for it
    overrides: list[str]  # of its settings
    alone: bool  # it is not part of a multirun
    given: list[str]  # the arguments of the command line, as they were
    named: bool = False  # `folder` was named, and is no default
    cwd: str | None = None  # where the command was typed, if the job runs elsewhere (`hydra.job.chdir`)
    sweep: Path | None = None  # the folder of the multirun
    logging: dict[str, Any] = field(default_factory=dict)  # Hydra's settings of it, for ranks that are started


@dataclass
class Start:
    """A job with all that is known before it begins."""

    config: RunConfig  # its checked settings
    point: ResumePoint | None  # where it starts; None for one that only checks
    resumed: bool  # it has the settings of the run that it resumes
    folder: Path


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
    """Where a job starts, and with which settings. Inside, this process owns the folder that it, or ranks that it
    starts, write to. Raises ConfigError for settings that cannot be, or as `claimed`."""
    if job.cwd is not None and job.cwd not in sys.path:
        sys.path.insert(0, job.cwd)  # where parts of the user's own are
    settings, changed = job_settings(_anchored(cfg, job.cwd), job.overrides)
    config, resumed = parse(settings), isinstance(settings, dict)
    if config.graph.check:
        yield Start(config, None, resumed, job.folder)
        return
    # What lies beside a folder that was named is other jobs, which may be running.
    beside = job.alone and not job.named
    with claimed(config, job.folder, beside=beside, named=job.alone and job.named) as point:
        point.changed = changed
        if point.checkpoint is not None and config.train.epochs is None:
            require_left(point, config.train.steps)
        yield Start(config, point, resumed, point.run_dir)


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
        tell("\n  ".join(said))
    raise SystemExit(128 + signal.Signals[str(result.error)])


def run_job(cfg: DictConfig, job: Job, start: Start | None = None, failed: Exception | None = None) -> Path:
    """Runs one job, composed by Hydra; returns the folder it wrote to. Where it starts (`start`) or why it cannot
    (`failed`) may be known; of ranks that a launcher has started the first one knows it. Raises JobFailed where it
    failed, and has said why, and SystemExit where it was stopped, or what it checked would not be captured."""
    try:
        if ranks_started() > 1:
            return among_ranks(lambda: _device(cfg, job), job, lambda ranks: _of_first(start, failed, ranks))
        with _said(job), nullcontext(start) if start is not None else started(cfg, job) as found:
            if found.point is None or (count := ranks_of(found.config)) == 1:
                return _run(found, job, ALONE)
            from graphmod.cli.launch import launch  # which a run alone does not load

            launch((found, job), count)
            return found.folder
    except JobFailed as error:
        if error.status >= 128:  # nobody wants what follows, either
            raise SystemExit(error.status) from error
        raise


def run_one_of(cfg: DictConfig, job: Job, number: int, require: Callable[[], None]) -> Path:
    """Runs the job of that number in a multirun as `run_job` does, after `require` has raised no ConfigError for its
    settings, and leaves what the comparison needs."""
    assert job.sweep is not None
    about = {"name": os.path.relpath(job.folder, job.sweep), "folder": str(job.folder), "scope": cfg.graph.scope.value}
    try:
        with _said(job):
            require()
        folder = run_job(cfg, job)
    except JobFailed as error:
        leave(job.sweep, number, **about, status=error.status, error=str(error))
        if not (job.folder / RESULT_FILE).exists():  # else an earlier run's, with which this one may not mix
            with suppress(OSError, GraphmodError), owned(job.folder):  # nor one that another process writes to
                RunResult(scope=about["scope"], status="failed", error=str(error)).write(job.folder)
        raise
    leave(job.sweep, number, **{**about, "folder": str(folder)}, status=0, error=None)
    return folder


def among_ranks(device: Callable[[], DeviceName], job: Job, start: Callable[[Ranks], Start]) -> Path:
    """Runs a job on the ranks that a launcher has started, all of which call this; returns the folder it wrote to. They
    join on a `device`, and start where the first one found. Raises what `run_job` does."""
    from graphmod.cli.launch import Peers

    with _said(job), joined(device()) as ranks:
        peers = Peers(ranks, complain_for_all)
        if not ranks.first:
            stay_silent(peers.say)
        status, failed = 0, False
        try:
            with _said(job, ranks, peers):
                return _run(start(ranks), job, ranks, peers)
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
def _said(job: Job, ranks: Ranks = ALONE, peers: "Peers | None" = None) -> Iterator[None]:
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


def _of_first(start: Start | None, failed: Exception | None, ranks: Ranks) -> Start:
    """Where a job of ranks starts; the first rank has found that out, and owns the folder for all."""
    if failed is not None:
        raise failed
    found = ranks.told(start)
    assert found is not None
    return found


def _run(start: Start, job: Job, ranks: Ranks, peers: "Peers | None" = None) -> Path:
    config, point = start.config, start.point
    if point is None:
        if ranks.first:
            report = check_training(config, job.folder)
            tell(f"{report}\n  written to {job.folder / CHECK_FILE}")
            if not report.captured:
                raise SystemExit(1)
        return job.folder
    if peers is not None:
        ranks_of(config)  # whether so many can be
        peers.way_on = lambda: _kept(point.run_dir, job)
        peers.speak = lambda text: _say_and_note(text, point.run_dir)
    result = train(config, point.run_dir, point, say=tell, ranks=ranks)
    if result.status == "interrupted":
        _say_stopped(result, point.run_dir, job)
    tell(f"{result.report()}\n  written to {point.run_dir}")
    return point.run_dir


def _say_and_note(text: str, folder: Path) -> None:
    complain_for_all(text)
    with suppress(OSError):
        Journal(folder).write(f"error: {text}")


def _kept(folder: Path, job: Job) -> str:
    newest = next(iter(checkpoints(folder / CHECKPOINTS)), None)
    if newest is None:
        return "; no checkpoint was saved"
    return f"; the newest checkpoint is {newest}\n  to resume: {_way_on(folder, job)}"
