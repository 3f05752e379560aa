"""Which checkpoint a run resumes from, which folder it owns meanwhile, which settings decide its numbers, and how its
model, step and random state are put back.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.checkpoint import SHARDS, Progress, load_shards, load_training_state, put_state
from graphmod.train.device import pick_device
from graphmod.train.folders import (
    CHECKPOINTS,
    MANIFEST_FILE,
    MERGED_FOLDER,
    DamagedCheckpoint,
    FolderInUse,
    checkpoints,
    clear_leftovers,
    first_whole,
    owned,
    read_manifest,
    verify,
)
from graphmod.train.optim import learning_rates
from graphmod.train.parallel import spread
from graphmod.train.result import RESULT_FILE, RunResult
from graphmod.train.settings import ADAPTER_FILE, RunConfig, check_resume, plain_config
from graphmod.train.step import TrainStep
from graphmod.words import as_yaml

# -- the settings and the text that decide the numbers of a run, and whether two runs have the same --------------------

# How long a run is may change, too; what that does to its numbers, `extension` says.
_LENGTH = {"train.steps"}
# What is not here may change on resuming: where graphs are used, what is logged, evaluated and saved.
_DECISIVE = {
    "model": None,
    "data": None,
    "optim": None,
    "graph": {"compile"},
    "train": {"steps", "grad_accumulation", "precision", "seed", "deterministic", "nonfinite", "ema_decay", "loss"},
}
# The text itself is compared instead, by fingerprint; the weights come from the checkpoint.
_BY_CONTENT = {
    *("model.path", "data.source", "data.path", "data.pattern", "data.tokenizer", "data.max_bytes", "data.column"),
    *("data.train_on", "data.split", "data.cache", "data.target"),
}
_OF_SAVING = {"model.lora.merge"}  # decides what is saved beside the weights


def by_full_name(config: dict[str, Any]) -> dict[str, Any]:
    """All settings by full name, from plain values by group. Those of adapters stand each by itself; others that hold
    several values are one."""
    found = {f"{group}.{name}": value for group, values in config.items() for name, value in values.items()}
    lora = found.pop("model.lora", None) or {}
    return found | {f"model.lora.{name}": value for name, value in lora.items()}


def decisive_settings(config: dict[str, Any], device: str) -> dict[str, Any]:
    """The settings that decide the numbers of a run, by their full name, from all settings as plain values, by group;
    `device` is `cpu` or `cuda`."""
    found: dict[str, Any] = {"train.device": device}
    for full, value in by_full_name(config).items():
        group, _, name = full.partition(".")
        names = _DECISIVE.get(group, ())
        if (names is None or name in names) and full not in (*_BY_CONTENT, *_OF_SAVING):
            found[full] = value
    if not config["data"]["packing"]:
        del found["data.packing_attention"]
    return found


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Each decisive setting that is not what it was, in words. One that `saved` lacks came later, and was what it is by
    default."""
    defaults = by_full_name(plain_config(RunConfig()))
    was = {name: defaults.get(name, value) for name, value in now.items()} | saved
    # Those that have nothing to do with this run are left out of its settings.
    changed = [(name, before, now.get(name)) for name, before in sorted(was.items()) if before != now.get(name)]
    return [f"{name} was {as_yaml(before)} and is now {as_yaml(after)}" for name, before, after in changed]


def all_settings(manifest: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run that wrote the checkpoint with this manifest, by group: those that this version knows."""
    known = plain_config(RunConfig())
    return {
        group: {name: value for name, value in values.items() if name in known[group]}
        for group, values in manifest["config"].items()
        if group in known
    }


def extension(manifest: dict[str, Any], config: RunConfig) -> str | None:
    """What another number of steps than its checkpoint was made for means for a run; None where it is the same.

    The numbers are those of a run that had as many from the start, bit for bit, when the learning rates of the steps
    that are done are the same for both.
    """
    before, now, done = all_settings(manifest)["train"]["steps"], config.train.steps, manifest["steps_done"]
    if before == now:
        return None
    was, rates = learning_rates(config.optim, before), learning_rates(config.optim, now)
    if was[:done] == rates[:done]:
        return f"train.steps was {before}; the numbers are those of a run that had {now} steps from the start"
    then = f" (step {done}: {was[done - 1]:.3g}, step {done + 1}: {rates[done]:.3g})" if done < now else ""
    return (
        f"train.steps was {before}; the learning rate now follows the schedule for {now} steps{then}. The numbers "
        f"differ from those of a run that had {now} steps from the start"
    )


def _anew(where: Path, manifest: dict[str, Any]) -> str:
    """How to go on with the weights of a checkpoint alone."""
    run, steps = where.parent.parent, manifest["steps_done"]
    if (where / MERGED_FOLDER).is_dir():
        where = where / MERGED_FOLDER
    elif (where / ADAPTER_FILE).is_file():
        # Adapters are no model to start from; a checkpoint of the same run may hold one.
        return (
            f"have a whole model saved (train.resume={run} model.lora.merge=true train.steps={steps + 1}) and start "
            "anew from that: train.resume=none model=local "
            f"model.path={where.with_name(f'step_{steps + 1:08d}') / MERGED_FOLDER}"
        )
    elif not (where / "config.json").is_file():  # a model of one's own, which is not loaded by its folder
        return "start anew: train.resume=none"
    return f"start anew from its weights: train.resume=none model=local model.path={where}"


def other_ranks(manifest: dict[str, Any], config: RunConfig, ranks: int, arranged: str) -> str | None:
    """What it means that other ranks wrote a checkpoint; None where they were the same: so many with different batches,
    arranged as these words say."""
    before, so = manifest["ranks"], manifest["arrangement"]
    if before == ranks and so == arranged:
        return None
    was, now = before * all_settings(manifest)["train"]["grad_accumulation"], ranks * config.train.grad_accumulation
    times = f"{Fraction(now, was)} {'of' if now < was else 'times'}"
    size = (
        "a step has as many sequences as before, so the numbers differ only by rounding and dropout"
        if was == now
        else f"a step has {times} the sequences it had, so the numbers differ"
        f"{f' (train.grad_accumulation={was // ranks} keeps them)' if was % ranks == 0 else ''}"
    )
    return (
        f"resuming with {arranged}, after {so}: steps, learning rates, optimizer and the position in the data "
        f"continue; {size}"
    )


def require_same(
    where: Path, manifest: dict[str, Any], settings: dict[str, Any], data: str | None = None, ranks: int | None = None
) -> None:
    """Raises ConfigError when the run that wrote a checkpoint had other settings, the number of steps apart, or another
    text.

    Args:
        where: the checkpoint, for the message.
        settings: the decisive ones of now.
        data: fingerprint of the tokens of now; None does not compare them.
        ranks: how many there are now. Where they were more or fewer, or it is not known yet, the number of microbatches
            may be another, too.
    """
    anew = _anew(where, manifest)
    free = _LENGTH if ranks == manifest["ranks"] else {*_LENGTH, "train.grad_accumulation"}
    saved = {name: value for name, value in manifest["settings"].items() if name not in free}
    changed = differences(saved, {name: value for name, value in settings.items() if name not in free})
    if changed:
        raise ConfigError(
            f"{where} was trained with different settings, which decide its numbers: {'; '.join(changed)}. Use those "
            f"it had, or {anew}"
        )
    if data is not None and manifest["data"] != data:
        raise ConfigError(
            f"{where} was trained on different data ({manifest['data']}, now {data}: number of tokens and checksum); "
            f"bring back the data it had, or {anew}"
        )


# -- where a run starts ------------------------------------------------------------------------------------------------

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


def _in_own_folder(run_dir: Path, held: ExitStack) -> ResumePoint | None:
    """Where a job that is restarted in its folder resumes; None when it has saved nothing there. Where nothing whole is
    left it begins in a folder beside, because in its own it would delete and overlay what may still be rescued."""
    folder, damage = run_dir, []
    for number in itertools.count(1):
        point, found = resumable(str(folder)) if (folder / CHECKPOINTS).is_dir() else (None, [])
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


def _automatic(run_dir: Path, settings: dict[str, Any], beside: bool, held: ExitStack) -> ResumePoint:
    own = _in_own_folder(run_dir, held)
    if own is not None:
        return own
    others, damage = [], []
    runs = sorted(run_dir.parent.iterdir(), key=lambda path: path.name, reverse=True) if beside else []
    for path in runs:
        if path == run_dir or not (path / CHECKPOINTS).is_dir() or not _unfinished(path):
            continue
        known, _ = resumable(str(path), read_manifest)
        changed = differences(known.manifest["settings"], settings) if known else []
        with ExitStack() as candidate:
            try:
                candidate.enter_context(owned(path))
            except GraphmodError as error:
                why = str(error).partition(". ")[0] if isinstance(error, FolderInUse) else error
                log.warning(f"{why}; it is skipped")
                continue
            if changed:
                others.append((path, changed))
                continue
            clear_leftovers(path / CHECKPOINTS)
            point, found = resumable(str(path))
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
    """The folder of the run that `train.resume=FOLDER` names, itself or by one of its checkpoints. Raises ConfigError
    where it is neither."""
    check_resume(resume)
    folder = Path(resume).absolute()
    if (folder / CHECKPOINTS).is_dir():
        return folder
    if folder.parent.name != CHECKPOINTS or not (folder / MANIFEST_FILE).exists():
        raise ConfigError(
            f"train.resume={resume} is neither a run with checkpoints in it nor one of its checkpoints. To train on "
            "from a model's weights alone: model=local model.path=FOLDER"
        )
    return folder.parent.parent


def resumable(resume: str, look: Callable[[Path], dict[str, Any]] = verify) -> tuple[ResumePoint | None, list[str]]:
    """The checkpoint that `train.resume=FOLDER` names, or the newest one of that run, which is not damaged as far as
    `look` can tell, with the manifest that it returns; None without one. And what is wrong with each one after it.
    Raises ConfigError as `run_of`."""
    run, folder = run_of(resume), Path(resume).absolute()
    found = checkpoints(run / CHECKPOINTS) if run == folder else [folder]
    return first_whole(found, lambda one: ResumePoint(run, one, look(one)))


def _whole(resume: str) -> ResumePoint:
    point, damage = resumable(resume)
    if point is not None:
        return _skipping(point, damage)
    run, why = run_of(resume), "; ".join(damage) or "there are none"
    if run != Path(resume).absolute():
        raise ConfigError(f"{why}; to use the newest whole one: train.resume={run}")
    raise ConfigError(
        f"train.resume={resume}: it has no undamaged checkpoint ({why}); to start a new run: train.resume=none"
    )


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
    point = _whole(resume)
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
    """Raises ConfigError where a run has done more steps than are asked for (`epochs` of them, where not None), or all
    of them in another folder."""
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
    """The result of a run that has no step left to do, if it got as far as writing one; `say` is told which it is, or
    what is resumed. Raises ConfigError where it has done more steps than are asked for (`epochs` of them, where not
    None), or its folder is another's."""
    require_left(point, steps, epochs)
    assert point.checkpoint is not None
    done, run = point.manifest["steps_done"], point.checkpoint.parent.parent
    if done == steps and not _unfinished(run):
        say(f"{run} is finished; to extend it: train.resume={run} {_more(done, epochs)}. Its report:")
        return RunResult.read(run)
    say("\n  ".join([f"resuming from step {done} of {steps}: {point.checkpoint}", *point.changed]))
    return None


# -- model, step and random state as a checkpoint has them -------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the random generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(
    folder: Path,
    model: nn.Module,
    step: TrainStep,
    weights: dict[str, Tensor],
    rank: int = 0,
    ranks: int = 1,
    seed: int = 0,
) -> Progress:
    """Puts a run back to where it was when `folder`, a verified checkpoint with these weights, was saved, in place:
    addresses stay. Model and step are built as they were for that run. Where there were as many ranks, each gets its
    random state back; else the first gets its own, and others begin with `seed`."""
    state = load_training_state(folder)
    rates = [group["lr"] for group in step.optimizer.param_groups]
    # Into the model built as before: buffers that are in no file, such as rotary frequencies, stay as they were then.
    here = model.state_dict(keep_vars=True)
    model.load_state_dict({name: spread(value, here[name]) for name, value in weights.items()})
    in_shards = (folder / SHARDS).is_dir()  # else it is here, and empty of an optimizer without a state
    put_state(step, load_shards(folder / SHARDS, step) if in_shards else state["trained"])
    for group, rate in zip(step.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # which the next step fills
    step.load_state_dict(state["step"])
    if rank == 0 or len(state["random"]) == ranks:
        torch.set_rng_state(state["random"][rank]["cpu"])
        if step.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"][rank]["cuda"], step.device)
    else:
        torch.manual_seed(seed)
    evaluated = [(done, loss) for done, loss in state["eval_losses"]]
    return Progress(state["steps_done"], losses=state["losses"].tolist(), eval_losses=evaluated)
