"""Which checkpoint a run goes on from, and whether it may: the settings that decide the numbers must be the same."""

import itertools
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from graphmod.errors import ConfigError
from graphmod.train.checkpoints.checkpoint import (
    FOLDER,
    MANIFEST_FILE,
    DamagedCheckpoint,
    checkpoints,
    read_manifest,
    verify,
)
from graphmod.train.report.result import RESULT_FILE, RunResult

log = logging.getLogger("graphmod")

NONE, AUTO = "none", "auto"
# What is not here may change on resuming: where graphs are used, what is logged, evaluated and saved.
_DECISIVE = {
    "model": None,
    "data": None,
    "optim": None,
    "graph": {"compile"},
    "train": {"steps", "epochs", "grad_accumulation", "precision", "seed", "deterministic", "nonfinite", "ema_decay"},
}
# The text itself is compared instead, by fingerprint; the weights come from the checkpoint.
_BY_CONTENT = {
    *("model.path", "data.source", "data.path", "data.pattern", "data.tokenizer", "data.max_bytes", "data.column"),
    *("data.train_on", "data.split", "data.cache"),
}


@dataclass
class ResumePoint:
    """Where a run goes on: the folder of the run, the checkpoint in it (None: from the start) and its manifest."""

    run_dir: Path
    checkpoint: Path | None = None
    manifest: dict[str, Any] | None = None


def decisive_settings(config: dict[str, Any], device: str) -> dict[str, Any]:
    """The settings that decide the numbers of a run, by their full name.

    Args:
        config: all settings as plain values, by group.
        device: kind of device, `cpu` or `cuda`.
    """
    found = {
        f"{group}.{name}": value
        for group, names in _DECISIVE.items()
        for name, value in config[group].items()
        if (names is None or name in names) and f"{group}.{name}" not in _BY_CONTENT
    }
    found["model.lora"] = {name: value for name, value in found["model.lora"].items() if name != "merge"}
    if found["model.lora"]["r"] is None:
        del found["model.lora"]
    if not config["data"]["packing"]:
        del found["data.packing_attention"]
    # How many steps an epoch has is not known before the data is read, and then its fingerprint is compared.
    del found["train.epochs" if found["train.epochs"] is None else "train.steps"]
    return {**found, "train.device": device}


def fingerprint(tokens: Tensor) -> str:
    """Length and checksum of the tokens of a run."""
    return f"{len(tokens)}-{tokens.dtype}-{zlib.crc32(tokens.contiguous().numpy()):08x}".replace("torch.", "")


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Each decisive setting that is not what it was, in words."""
    if saved.get("data.packing"):
        saved = {"data.packing_attention": "mask", **saved}  # all that there was before the setting came
    return [
        f"{name} was {saved.get(name)} and is now {now.get(name)}"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]


def require_same(point: ResumePoint, settings: dict[str, Any], data: str) -> None:
    """Raises ConfigError when the run of `point` had other settings, or other text, than this one."""
    changed = differences(point.manifest["settings"], settings)
    if changed:
        raise ConfigError(
            f"{point.checkpoint} was trained with other settings: {'; '.join(changed)}. Use those it had, or start "
            f"anew from its weights: train.resume=none model=local model.path={point.checkpoint}"
        )
    if point.manifest["data"] != data:
        raise ConfigError(
            f"{point.checkpoint} was trained on another text ({point.manifest['data']}, now {data}: number of tokens "
            "and checksum); bring back the data it had, or start anew from its weights: train.resume=none model=local "
            f"model.path={point.checkpoint}"
        )


def newest_whole(run_dir: Path) -> tuple[ResumePoint | None, list[str]]:
    """The newest checkpoint of a run that is not damaged, or None; and what is wrong with each one after it."""
    damage = []
    for folder in checkpoints(run_dir / FOLDER):
        try:
            return ResumePoint(run_dir, folder, verify(folder)), damage
        except DamagedCheckpoint as error:
            damage.append(str(error))
    return None, damage


def _skipping(point: ResumePoint, damage: list[str]) -> ResumePoint:
    for what in damage:
        log.warning(f"{what}; it is skipped")
    return point


def _unfinished(run_dir: Path) -> bool:
    try:
        return RunResult.read(run_dir).status != "finished"
    except (OSError, ValueError, TypeError):
        return True  # killed before it could write one


def holds_finished_runs(folder: Path) -> bool:
    """Whether a folder of several runs, such as a multirun's, has one that is finished."""
    return any(not _unfinished(path.parent) for path in folder.glob(f"*/{RESULT_FILE}"))


def _settings_of(run_dir: Path) -> dict[str, Any] | None:
    for folder in checkpoints(run_dir / FOLDER):
        try:
            return read_manifest(folder)["settings"]
        except DamagedCheckpoint:
            continue
    return None


def _in_own_folder(run_dir: Path) -> ResumePoint | None:
    """Where a job that is restarted in its folder goes on; None when it has saved nothing there. Where nothing whole is
    left it begins in a folder beside, because in its own it would delete and overlay what may still be rescued."""
    folder, damage = run_dir, []
    for number in itertools.count(1):
        point, found = newest_whole(folder)
        if point is not None:
            return _skipping(point, damage + found)
        if not found:
            break
        damage += found
        folder = run_dir.with_name(f"{run_dir.name}_restart{number}")
    if not damage:
        return None
    log.warning(f"{'; '.join(damage)}; all of it is left as it is, and this run starts at the beginning in {folder}")
    return ResumePoint(folder)


_ELSEWHERE = "write elsewhere (hydra.run.dir=FOLDER; in a multirun hydra.sweep.dir=FOLDER)"


def _require_no_result(run_dir: Path) -> None:
    if not _unfinished(run_dir):
        raise ConfigError(
            f"{run_dir} holds the result of an earlier run without checkpoints, and a new one would replace it; "
            f"{_ELSEWHERE}, or delete that folder"
        )


def _automatic(run_dir: Path, settings: dict[str, Any], beside: bool) -> ResumePoint:
    own = _in_own_folder(run_dir)
    if own is not None:
        return own
    others = []
    if beside:
        found = [path for path in run_dir.parent.iterdir() if path != run_dir and (path / FOLDER).is_dir()]
        others = sorted((path for path in found if _unfinished(path)), key=lambda path: path.name, reverse=True)
    known, damage = [], []
    for path in others:
        saved = _settings_of(path)
        if saved is not None:
            known.append((path, saved))
        if saved is None or saved == settings:
            point, found = newest_whole(path)
            damage += found
            if point is not None:
                return _skipping(point, damage)
    if known:
        path, saved = known[0]
        changed = differences(saved, settings)
        if changed:
            raise ConfigError(
                f"train.resume=auto: the newest unfinished run, {path}, had other settings: {'; '.join(changed)}. "
                "Use those it had, name another run (train.resume=FOLDER), or start anew (train.resume=none)"
            )
    if damage:
        log.warning(
            f"{'; '.join(damage)}; all of it is left as it is, and this run starts at the beginning in {run_dir}"
        )
    else:
        log.warning("train.resume=auto found no unfinished run; this one starts at the beginning")
    return ResumePoint(run_dir)


def locate(resume: str, run_dir: Path, settings: dict[str, Any], beside: bool) -> ResumePoint:
    """Where this run goes on.

    Args:
        resume: `none`, `auto` (a checkpoint in `run_dir`, else the newest unfinished run beside it with these
            settings; where all checkpoints in `run_dir` are damaged, from the start in another folder), or a folder: of
            a run, or of one checkpoint.
        run_dir: the folder Hydra made for this run.
        settings: the decisive ones.
        beside: whether `auto` may look at the neighbours of `run_dir`; not in a multirun nor where `run_dir` was named,
            because there they are other jobs.

    Raises:
        ConfigError: there is nothing whole to resume, what there is had other settings, or a new run would be written
            into the folder of an old one.
    """
    if resume == NONE:
        if checkpoints(run_dir / FOLDER):
            raise ConfigError(
                f"{run_dir} holds the checkpoints of an earlier run, and a new one would mix with it; go on with it "
                f"(train.resume=auto), or {_ELSEWHERE}"
            )
        _require_no_result(run_dir)
        return ResumePoint(run_dir)
    if resume == AUTO:
        point = _automatic(run_dir, settings, beside)
        if point.checkpoint is None:
            _require_no_result(point.run_dir)
        return point
    folder = Path(resume).absolute()
    if (folder / FOLDER).is_dir():
        point, damage = newest_whole(folder)
        if point is None:
            why = "; ".join(damage) or "there are none"
            raise ConfigError(
                f"train.resume={resume}: it has no whole checkpoint ({why}); start anew: train.resume=none"
            )
        return _skipping(point, damage)
    if not folder.is_dir():
        raise ConfigError(f"train.resume={resume} is not a folder; give that of a run or of a checkpoint, auto or none")
    if folder.parent.name != FOLDER or not (folder / MANIFEST_FILE).exists():
        raise ConfigError(
            f"train.resume={resume} is neither a run with checkpoints in it nor one of its checkpoints. To train on "
            "from a model's weights alone: model=local model.path=FOLDER"
        )
    try:
        return ResumePoint(folder.parent.parent, folder, verify(folder))
    except DamagedCheckpoint as error:
        raise ConfigError(f"{error}; to use the newest whole one: train.resume={folder.parent.parent}") from error


def finished_result(point: ResumePoint, steps: int, say: Callable[[str], None]) -> RunResult | None:
    """The result of a run that has no step left to do, if it got as far as writing one; `say` is told which it is."""
    done = point.manifest["steps_done"]
    if done >= steps and not _unfinished(point.run_dir):
        say(f"{point.run_dir} is finished; this is what it reported:")
        return RunResult.read(point.run_dir)
    say(f"going on after step {done} of {steps}: {point.checkpoint}")
    return None
