"""The format of a checkpoint: a folder that `from_pretrained` loads, and beside the weights what resuming needs.

Which checkpoint a run resumes from is decided in `train/run/resume.py`. A checkpoint appears whole or not at all: it is
written under another name, forced to the disk, and renamed; what it says of itself, `manifest.py` writes down.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import graphmod
from graphmod.errors import GraphmodError
from graphmod.train.checkpoints.manifest import (
    EMA_FOLDER,
    FORMAT,
    MANIFEST_FILE,
    STATE_FILE,
    DamagedCheckpoint,
    being_replaced,
    being_written,
    checkpoint_name,
    checkpoints,
    checksum,
    clear_leftovers,
)
from graphmod.train.lora import has_adapters, save_merged
from graphmod.train.model import no_transformers_bars
from graphmod.train.schema.model import MERGED_FOLDER
from graphmod.train.step import TrainStep

_LEAST_FREE = 1 << 22
# Weights and AdamW's two moments in the parameters' dtype, and a margin for what is small.
_COPIES, _MARGIN = 3, 1.05


@dataclass
class Progress:
    """How far a run is and what it was told; the part of a checkpoint that is not tensors of the model.

    Attributes:
        steps_done: optimizer steps; also the position in the data.
        config: all settings, as plain values, by group.
        settings: those that decide the numbers (see `train/run/decisive.py`), by their full name.
        data: fingerprint of the training tokens.
        losses: one a step so far.
        eval_losses: (steps done, loss).
        ranks: how many trained together.
        seen: how much of the data they had seen, and how much an epoch has (`Place`).
        random: the random state of each rank; empty where that of this process is meant.
    """

    steps_done: int
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    losses: list[float] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    ranks: int = 1
    seen: tuple[int, int] | None = None
    random: list[dict[str, torch.Tensor]] = field(default_factory=list)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the random generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Puts the generators back to what `random_state` found."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _sync(path: Path) -> None:
    # Without this a power cut after the rename may leave a whole name on half the content.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST_FILE)


def _save_model(model: PreTrainedModel, folder: Path, merge: bool) -> None:
    model.save_pretrained(folder)
    if merge and has_adapters(model):  # of which alone transformers writes the weights
        save_merged(model, folder, folder / MERGED_FOLDER)


def _save_weights(folder: Path, model: PreTrainedModel, step: TrainStep, merge: bool) -> None:
    before = dict(vars(model.config))  # saving writes dtype and architectures there, which a captured step may read
    try:
        # Training has no use for a key-value cache; whoever loads the model to generate has.
        model.config.use_cache = True
        with no_transformers_bars():
            _save_model(model, folder, merge)
            if step.has_ema:
                with step.ema_weights():
                    _save_model(model, folder / EMA_FOLDER, merge)
    finally:
        vars(model.config).clear()
        vars(model.config).update(before)


def _write(
    partial: Path, model: PreTrainedModel, step: TrainStep, progress: Progress, tokenizer: Any, merge: bool
) -> None:
    _save_weights(partial, model, step, merge)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
        if step.has_ema:  # a model of its own, which is sampled from as such
            tokenizer.save_pretrained(partial / EMA_FOLDER)
    state = {
        "steps_done": progress.steps_done,
        "optimizer": step.optimizer.state_dict(),
        "step": step.state_dict(),
        "random": progress.random[0] if progress.random else random_state(model.device),
        "random_of_others": progress.random[1:],
        "losses": torch.tensor(progress.losses, dtype=torch.float32),
        "eval_losses": [list(entry) for entry in progress.eval_losses],
    }
    torch.save(state, partial / STATE_FILE)
    listed = {}
    for path in _files(partial):
        _sync(path)
        listed[path.relative_to(partial).as_posix()] = [path.stat().st_size, checksum(path)]
    manifest = {
        "format": FORMAT,
        "graphmod": graphmod.__version__,
        "steps_done": progress.steps_done,
        "config": progress.config,
        "settings": progress.settings,
        "data": progress.data,
        "ranks": progress.ranks,
        "seen": progress.seen,
        "loss": progress.losses[-1] if progress.losses else None,
        "files": listed,
    }
    (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _sync(partial / MANIFEST_FILE)
    for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        _sync(folder)


def save_checkpoint(
    parent: Path,
    model: PreTrainedModel,
    step: TrainStep,
    progress: Progress,
    tokenizer: Any,
    keep: int,
    merge: bool = False,
) -> Path:
    """Writes `parent/step_N`: safetensors and `config.json`, the tokenizer if there is one, `training_state.pt`
    (optimizer, schedule, random state, losses) and `checkpoint.json`. Averaged weights go into its folder `ema`.
    Of a model with adapters these are saved alone, and with `merge` the whole model beside them in the folder `merged`.

    Earlier checkpoints are removed once this one is on the disk, so that `keep` remain; this one always does.

    Raises:
        GraphmodError: the disk is full, or may not be written to. Earlier checkpoints are untouched then.
    """
    folder = parent / checkpoint_name(progress.steps_done)
    partial, replaced = being_written(folder), being_replaced(folder)
    try:
        clear_leftovers(parent)
        partial.mkdir(parents=True)
        _write(partial, model, step, progress, tokenizer, merge)
        if folder.exists():
            os.replace(folder, replaced)
        os.replace(partial, folder)
        _sync(parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        full = _no_space(parent)
        clear_leftovers(parent)
        # Writers of tensors report a full disk as errors of their own; anything else they raise is a bug.
        if not isinstance(error, Exception) or not (
            full or isinstance(error, (OSError, RuntimeError)) or type(error).__module__.startswith("safetensors")
        ):
            raise
        raise _cannot_save(folder, "no space left on the disk" if full else error) from error
    for old in [path for path in checkpoints(parent) if path != folder][max(keep - 1, 0) :]:
        _remove(old)
    return folder


def _remove(folder: Path) -> None:
    # Under another name first: what is ended in the middle of it should not look like a damaged checkpoint.
    partial = being_written(folder)
    with suppress(OSError):
        os.replace(folder, partial)
    shutil.rmtree(partial, ignore_errors=True)


def _no_space(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE
    except OSError:
        return False


def _cannot_save(folder: Path, error: Exception | str) -> GraphmodError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    earlier = checkpoints(folder.parent)
    left = f"; the newest one there is {earlier[0]}" if earlier else ""
    way_out = "make room, or resume from that one in another folder (train.resume=CHECKPOINT hydra.run.dir=FOLDER)"
    return GraphmodError(f"cannot save the checkpoint {folder}: {reason}{left}; {way_out}")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def check_room(folder: Path, model: PreTrainedModel, with_ema: bool) -> None:
    """Raises GraphmodError when `folder` cannot be written to, or its disk has no room for one checkpoint."""
    size = sum(parameter.nbytes for parameter in {id(p): p for p in model.parameters()}.values())
    ema = sum(4 * p.numel() + p.nbytes for p in model.parameters()) if with_ema else 0
    needed = int((_COPIES * size + ema) * _MARGIN)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"\0")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise GraphmodError(f"cannot write checkpoints to {folder}: {error.strerror}") from error
    if free < needed:
        with suppress(OSError):
            folder.rmdir()  # else a run that never began leaves a folder behind; it stays where it holds anything
        raise GraphmodError(
            f"a checkpoint takes about {_size(needed)}, and the disk of {folder} has {_size(free)} free; make "
            "room, write elsewhere (hydra.run.dir=FOLDER), or train.checkpoint=false"
        )


def load_training_state(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` put beside the model, on the CPU. Raises DamagedCheckpoint when it cannot be read."""
    try:
        return torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise DamagedCheckpoint(f"{folder / STATE_FILE} cannot be read: {error}") from error


def restore(
    folder: Path,
    model: PreTrainedModel,
    step: TrainStep,
    weights: PreTrainedModel,
    rank: int = 0,
    ranks: int = 1,
    seed: int = 0,
) -> Progress:
    """Puts a run back to where it was when `folder` was saved, in place: addresses stay.

    Args:
        folder: a verified checkpoint.
        model, step: built as they were for that run.
        weights: the model that `folder` holds.
        rank, ranks: which one this is, of how many. Where there were as many, each gets its random state back; else the
            first gets its own.
        seed: of the random numbers of a rank that has no random state from before.
    """
    state = load_training_state(folder)
    # Into the model built as before: buffers that are in no file, such as rotary frequencies, stay as they were then.
    model.load_state_dict(weights.state_dict())
    rates = [group["lr"] for group in step.optimizer.param_groups]
    step.optimizer.load_state_dict(state["optimizer"])
    for group, rate in zip(step.optimizer.param_groups, rates, strict=True):
        rate.copy_(group["lr"])
        group["lr"] = rate
    step.load_state_dict(state["step"])
    states = [state["random"], *state.get("random_of_others", ())]
    if rank == 0 or len(states) == ranks:
        set_random_state(states[rank], model.device)
    else:
        torch.manual_seed(seed)
    evaluated = [(done, loss) for done, loss in state["eval_losses"]]
    return Progress(state["steps_done"], losses=state["losses"].tolist(), eval_losses=evaluated)
