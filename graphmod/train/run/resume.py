"""Which checkpoint a run resumes from, and which folder it owns meanwhile."""

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.device import pick_device
from graphmod.train.folders import (
    CHECKPOINTS,
    MANIFEST_FILE,
    DamagedCheckpoint,
    FolderInUse,
    checkpoints,
    clear_leftovers,
    first_whole,
    owned,
    read_manifest,
    verify,
)
from graphmod.train.result import RESULT_FILE, RunResult
from graphmod.train.run.decisive import decisive_settings, differences
from graphmod.train.settings import RunConfig, plain_config

log = logging.getLogger("graphmod")

NONE, AUTO = "none", "auto"
_ELSEWHERE = "write elsewhere (hydra.run.dir=FOLDER; in a multirun hydra.sweep.dir=FOLDER)"


@dataclass
class ResumePoint:
    """Where a run starts: the folder it writes to, the checkpoint it resumes from (None: it starts at the beginning),
    which may lie in another run, its manifest ({} without), and in words the settings that change."""

    run_dir: Path
    checkpoint: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)


def newest_whole(run_dir: Path) -> tuple[ResumePoint | None, list[str]]:
    """The newest checkpoint of a run that is not damaged, or None; and what is wrong with each one after it."""
    return first_whole(checkpoints(run_dir / CHECKPOINTS), lambda folder: ResumePoint(run_dir, folder, verify(folder)))


def _skipping(point: ResumePoint, damage: list[str]) -> ResumePoint:
    for what in damage:
        log.warning(f"{what}; it is skipped")
    return point


def _unfinished(run_dir: Path) -> bool:
    try:
        result = RunResult.read(run_dir)
    except (OSError, ValueError, TypeError):
        return True  # killed before it could write one
    newest = next(iter(checkpoints(run_dir / CHECKPOINTS)), None)
    # One that was extended, and killed then, has the result of before.
    return result.status != "finished" or (newest is not None and int(newest.name[5:]) > len(result.losses))


def holds_finished_runs(folder: Path) -> bool:
    """Whether a folder of several runs, such as a multirun's, has one that is finished."""
    return any(not _unfinished(path.parent) for path in folder.rglob(RESULT_FILE))


def newest_readable(run_dir: Path) -> ResumePoint | None:
    """The newest checkpoint of a run whose manifest can be read, whether the rest is whole or not; None without one."""
    return first_whole(checkpoints(run_dir / CHECKPOINTS), lambda one: ResumePoint(run_dir, one, read_manifest(one)))[0]


def _in_own_folder(run_dir: Path, held: ExitStack) -> ResumePoint | None:
    """Where a job that is restarted in its folder resumes; None when it has saved nothing there. Where nothing whole is
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
        held.enter_context(owned(folder))
        clear_leftovers(folder / CHECKPOINTS)
    if not damage:
        return None
    log.warning(f"{'; '.join(damage)}; nothing of it is changed, and this run starts from the beginning in {folder}")
    return ResumePoint(folder)


def _require_no_result(run_dir: Path) -> None:
    if not _unfinished(run_dir):
        raise ConfigError(
            f"{run_dir} holds the result of an earlier run without checkpoints, and a new one would replace it; "
            f"{_ELSEWHERE}, or delete that folder"
        )


def _unfinished_beside(run_dir: Path) -> list[Path]:
    found = [path for path in run_dir.parent.iterdir() if path != run_dir and (path / CHECKPOINTS).is_dir()]
    return sorted((path for path in found if _unfinished(path)), key=lambda path: path.name, reverse=True)


def _automatic(run_dir: Path, settings: dict[str, Any], beside: bool, held: ExitStack) -> ResumePoint:
    own = _in_own_folder(run_dir, held)
    if own is not None:
        return own
    others, damage = [], []
    for path in _unfinished_beside(run_dir) if beside else ():
        known = newest_readable(path)
        changed = differences(known.manifest["settings"], settings) if known else []
        with ExitStack() as candidate:
            try:
                candidate.enter_context(owned(path))
            except FolderInUse as error:
                log.warning(f"{str(error).partition('. ')[0]}; it is skipped")
                continue
            except GraphmodError as error:
                log.warning(f"{error}; it is skipped")
                continue
            if changed:
                others.append((path, changed))
                continue
            clear_leftovers(path / CHECKPOINTS)
            point, found = newest_whole(path)
            damage += found
            if point is not None and _unfinished(path):  # else its last process has ended it just now
                held.push(candidate.pop_all())
                return _skipping(point, damage)
    if others:
        path, changed = others[0]
        raise ConfigError(
            f"train.resume=auto: the newest unfinished run, {path}, has different settings: {'; '.join(changed)}. "
            f"Resume it with its own (train.resume={path}), or start a new run (train.resume=none)"
        )
    if damage:
        log.warning(
            f"{'; '.join(damage)}; nothing of it is changed, and this run starts from the beginning in {run_dir}"
        )
    else:
        log.warning("train.resume=auto found no unfinished run to resume; this one starts from the beginning")
    return ResumePoint(run_dir)


def _require_newest(point: ResumePoint) -> None:
    """In its folder a run may resume from its newest checkpoint only: else those of two runs would mix."""
    for folder in checkpoints(point.run_dir / CHECKPOINTS):
        if folder == point.checkpoint:
            return
        try:
            verify(folder)
        except DamagedCheckpoint:
            continue
        raise ConfigError(
            f"train.resume={point.checkpoint}: {folder} comes after it, and what follows now would mix with that; "
            f"write elsewhere (hydra.run.dir=FOLDER), or delete the later ones"
        )


def run_of(resume: str) -> Path:
    """The folder of the run that `train.resume=FOLDER` names, itself or by one of its checkpoints.

    Raises:
        ConfigError: it is neither.
    """
    folder = Path(resume).absolute()
    if not folder.is_dir():
        raise ConfigError(f"train.resume={resume} is not a folder; give that of a run or of a checkpoint, auto or none")
    if (folder / CHECKPOINTS).is_dir():
        return folder
    if folder.parent.name != CHECKPOINTS or not (folder / MANIFEST_FILE).exists():
        raise ConfigError(
            f"train.resume={resume} is neither a run with checkpoints in it nor one of its checkpoints. To train on "
            "from a model's weights alone: model=local model.path=FOLDER"
        )
    return folder.parent.parent


def _named(resume: str) -> ResumePoint:
    run, folder = run_of(resume), Path(resume).absolute()
    if run == folder:
        point, damage = newest_whole(folder)
        if point is None:
            why = "; ".join(damage) or "there are none"
            raise ConfigError(
                f"train.resume={resume}: it has no undamaged checkpoint ({why}); to start a new run: train.resume=none"
            )
        return _skipping(point, damage)
    try:
        return ResumePoint(run, folder, verify(folder))
    except DamagedCheckpoint as error:
        raise ConfigError(f"{error}; to use the newest whole one: train.resume={run}") from error


def _require_new(run_dir: Path) -> None:
    if checkpoints(run_dir / CHECKPOINTS):
        raise ConfigError(
            f"{run_dir} holds the checkpoints of an earlier run, and a new one would mix with it; resume that one "
            f"(train.resume={run_dir}), or {_ELSEWHERE}"
        )
    _require_no_result(run_dir)


def _locate(resume: str, run_dir: Path, settings: dict[str, Any], beside: bool, held: ExitStack) -> ResumePoint:
    if resume == NONE:
        _require_new(run_dir)
        return ResumePoint(run_dir)
    if resume == AUTO:
        point = _automatic(run_dir, settings, beside, held)
        if point.checkpoint is None:
            _require_no_result(point.run_dir)
        return point
    point = _named(resume)
    if point.run_dir == run_dir:
        _require_newest(point)
        return point
    _require_new(run_dir)
    return ResumePoint(run_dir, point.checkpoint, point.manifest)


@contextmanager
def claimed(config: RunConfig, run_dir: Path, *, beside: bool = False, named: bool = False) -> Iterator[ResumePoint]:
    """Where this run starts. Inside, this process owns the folder that it writes to.

    With `train.resume=auto` it resumes from a checkpoint in `run_dir`, else the newest unfinished run beside it with
    these settings that no process is running; where all checkpoints in `run_dir` are damaged, it starts from the
    beginning in another folder.

    Args:
        config: checked settings.
        run_dir: the folder that was made for this run; one that it resumes takes its place.
        beside: whether `auto` may look at the neighbours of `run_dir`; not in a multirun nor where `run_dir` was named,
            because there they are other jobs.
        named: with a folder to resume from, write to `run_dir` all the same, and leave that folder as it is.

    Raises:
        FolderInUse: another process writes to the folder.
        ConfigError: there is nothing whole to resume, what there is had other settings, or a new run would be written
            into the folder of an old one.
        GraphmodError: the folder cannot be written to.
    """
    resume, run_dir = config.train.resume, run_dir.absolute()
    settings = decisive_settings(plain_config(config), pick_device(config.train.device).type)
    if resume not in (NONE, AUTO) and not named:
        run_dir = run_of(resume)
    with ExitStack() as held:
        held.enter_context(owned(run_dir))
        clear_leftovers(run_dir / CHECKPOINTS)
        yield _locate(resume, run_dir, settings, beside, held)


def require_left(point: ResumePoint, steps: int, epochs: int | None = None) -> None:
    """Raises ConfigError where a run has done more steps than are asked for, or all of them in another folder.

    Args:
        point: with a checkpoint.
        steps: that are asked for.
        epochs: that are asked for in their place, which are `steps`; None where steps are.
    """
    done, newest = point.manifest["steps_done"], point.checkpoint
    assert newest is not None
    asked = f"train.steps={steps}" if epochs is None else f"train.epochs={epochs}, which are {steps} steps,"
    if done > steps:
        raise ConfigError(f"{newest} has done {done} steps already, and {asked} asks for fewer")
    if done == steps and newest.parent.parent != point.run_dir:
        raise ConfigError(f"{newest} has done all of its {steps} steps; to extend the run: {_more(done, epochs)}")


def _more(done: int, epochs: int | None) -> str:
    return f"train.steps={2 * done}" if epochs is None else f"train.epochs={2 * epochs}"


def finished_result(point: ResumePoint, steps: int, epochs: int | None, say: Callable[[str], None]) -> RunResult | None:
    """The result of a run that has no step left to do, if it got as far as writing one; `say` is told which it is.

    Args:
        point: with a checkpoint.
        steps: that are asked for.
        epochs: that are asked for in their place, which are `steps`; None where steps are.
        say: told what is resumed, or which run is finished.

    Raises:
        ConfigError: it has done more steps than are asked for, or its folder is another's.
    """
    require_left(point, steps, epochs)
    assert point.checkpoint is not None
    done, run = point.manifest["steps_done"], point.checkpoint.parent.parent
    if done == steps and not _unfinished(run):
        say(f"{run} is finished; to extend it: train.resume={run} {_more(done, epochs)}. Its report:")
        return RunResult.read(run)
    say("\n  ".join([f"resuming from step {done} of {steps}: {point.checkpoint}", *point.changed]))
    return None
