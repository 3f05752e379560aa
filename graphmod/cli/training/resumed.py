"""The settings of a run that is resumed: those it had and, over them, what the command line gives."""

import copy
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from graphmod.cli.errors import unknown_key
from graphmod.cli.start import CONFIGS, ranks_started
from graphmod.errors import ConfigError
from graphmod.train.device import pick_device
from graphmod.train.folders import DamagedCheckpoint, read_manifest
from graphmod.train.resume import (
    AUTO,
    NONE,
    ResumePoint,
    all_settings,
    newest_readable,
    require_same,
    run_of,
    with_changes,
)
from graphmod.train.settings import DeviceName, ParallelMode, RunConfig

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


def _folded(given: dict[str, Any], saved: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is given, with settings that hold several values whole: what they were with what is given over it. So are
    the arguments of a part of the user's own, in `target`.

    Raises:
        ConfigError: a setting that there is not, for a run without such a part.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        group, *keys = name.split(".")
        if keys and keys[0] not in saved[group]:
            keys = ["target", *keys]
        if len(keys) < 2 or keys[0] == "lora":
            found[name] = value
            continue
        was = saved[group].get(keys[0]) or {}
        if keys[0] == "target":
            target = given.get(f"{group}._target_", was.get("_target_"))
            if target is None:
                raise ConfigError(unknown_key(name, RunConfig, str(value)))
            if was.get("_target_") != target:
                was = {}
        place = found.setdefault(f"{group}.{keys[0]}", copy.deepcopy(was))
        for part in keys[1:-1]:
            place = place.setdefault(part, {})
        place[keys[-1]] = value
    return found


def _named(resume: str) -> ResumePoint | None:
    folder, run = Path(resume).absolute(), run_of(resume)
    if run == folder:
        return newest_readable(run)
    try:
        return ResumePoint(run, folder, read_manifest(folder))
    except DamagedCheckpoint:
        return None


def _start_as_many(settings: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Has as many ranks started as the run had, where a launcher had started them, or its settings left the number to
    the GPUs of its machine; this one may have too few."""
    parallel = settings["parallel"]
    shared = parallel.get("mode", ParallelMode.none.value) not in (ParallelMode.none, ParallelMode.none.value)
    count = manifest["processes"]
    if not shared or parallel.get("gpus") is not None or count == 1:
        return
    if pick_device(DeviceName(settings["train"]["device"])).type == "cpu" or count <= torch.cuda.device_count():
        parallel["gpus"] = count


def job_settings(cfg: DictConfig, overrides: list[str]) -> tuple[DictConfig | dict[str, Any], list[str]]:
    """The settings of a job that Hydra has composed: with `train.resume=FOLDER` those of that run and, over them, what
    the command line gives.

    Args:
        cfg: composed by Hydra.
        overrides: the job's.

    Returns:
        All settings, by group, to be parsed; and in words what the command line changes of the run that is resumed.

    Raises:
        ConfigError: the folder holds no run, or a setting is to change that decides its numbers.
    """
    resume = str(cfg.train.resume)
    point = None if resume in (NONE, AUTO) else _named(resume)
    if point is None:  # where a folder was named, whoever looks for its checkpoints says what is wrong with them
        return cfg, []
    assert point.checkpoint is not None
    manifest = point.manifest
    saved = all_settings(manifest)
    given = _folded(_given(cfg, overrides), saved)
    # At once, because a change that may not be can also be one that does not fit to the rest.
    require_same(point.checkpoint, manifest, with_changes(manifest["settings"], given))
    settings = copy.deepcopy(saved)
    changed = []
    for name, value in {**given, _RESUME: resume}.items():
        *path, key = name.split(".")
        was, place = saved, settings
        for part in path:
            was, place = was.get(part, {}), place.setdefault(part, {})
        if name not in _SAID and key in was and was[key] != value:
            changed.append(f"{name} was {was[key]} and is now {value}")
        place[key] = value
    if "parallel.gpus" not in given and "parallel.mode" not in given and ranks_started() == 1:
        _start_as_many(settings, manifest)
    if "train.steps" in given and "train.epochs" not in given:
        settings["train"]["epochs"] = None  # which would decide otherwise
    return settings, changed
