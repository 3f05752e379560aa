"""The format of a checkpoint: a folder that `from_pretrained` loads, and beside the weights what resuming needs.

Which checkpoint a run goes on from is decided in `train/run/resume.py`. A checkpoint appears whole or not at all: it is
written under another name, forced to the disk, and renamed; `checkpoint.json`, written last, lists every file with its
size and checksum, by which damage is noticed.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from graphmod.errors import GraphmodError
from graphmod.train.lora import MERGED_FOLDER, has_adapters, save_merged
from graphmod.train.model import no_transformers_bars
from graphmod.train.step import TrainStep

STATE_FILE = "training_state.pt"
MANIFEST_FILE = "checkpoint.json"
FOLDER = "checkpoints"
EMA_FOLDER = "ema"
_CHUNK = 1 << 22
# Weights and AdamW's two moments in the parameters' dtype, and a margin for what is small.
_COPIES, _MARGIN = 3, 1.05


class DamagedCheckpoint(GraphmodError):
    """A checkpoint that is not what was written; the message names the file and what is wrong with it."""


@dataclass
class Progress:
    """How far a run is and what it was told; the part of a checkpoint that is not tensors of the model.

    Attributes:
        steps_done: optimizer steps; also the position in the data.
        settings: those that decide the numbers (see `train/run/resume.py`), as plain values.
        data: fingerprint of the training tokens.
        losses: one a step so far.
        eval_losses: (steps done, loss).
    """

    steps_done: int
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    losses: list[float] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)


def checkpoint_name(steps_done: int) -> str:
    """The folder name of the checkpoint after that many steps."""
    return f"step_{steps_done:08d}"


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


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


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
    state = {
        "steps_done": progress.steps_done,
        "optimizer": step.optimizer.state_dict(),
        "step": step.state_dict(),
        "random": random_state(model.device),
        "losses": torch.tensor(progress.losses, dtype=torch.float32),
        "eval_losses": [list(entry) for entry in progress.eval_losses],
    }
    torch.save(state, partial / STATE_FILE)
    listed = {}
    for path in _files(partial):
        _sync(path)
        listed[path.relative_to(partial).as_posix()] = [path.stat().st_size, _checksum(path)]
    manifest = {
        "steps_done": progress.steps_done,
        "settings": progress.settings,
        "data": progress.data,
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
    partial, replaced = parent / f".{folder.name}.partial", parent / f".{folder.name}.replaced"
    try:
        remove_leftovers(parent)
        partial.mkdir(parents=True)
        _write(partial, model, step, progress, tokenizer, merge)
        if folder.exists():
            os.replace(folder, replaced)
        os.replace(partial, folder)
        _sync(parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except Exception as error:
        full = _no_space(parent)
        shutil.rmtree(partial, ignore_errors=True)
        # Writers of tensors report a full disk as errors of their own; anything else they raise is a bug.
        if not (full or isinstance(error, (OSError, RuntimeError)) or type(error).__module__.startswith("safetensors")):
            raise
        raise _cannot_save(folder, "no space left on the disk" if full else error) from error
    for old in [path for path in checkpoints(parent) if path != folder][max(keep - 1, 0) :]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _no_space(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _CHUNK
    except OSError:
        return False


def _cannot_save(folder: Path, error: Exception | str) -> GraphmodError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    earlier = checkpoints(folder.parent)
    left = f"; the newest one there is {earlier[0]}" if earlier else ""
    way_out = "make room, or go on in another folder (hydra.run.dir=FOLDER train.resume=CHECKPOINT)"
    return GraphmodError(f"cannot save the checkpoint {folder}: {reason}{left}; {way_out}")


def remove_leftovers(parent: Path) -> None:
    """Removes what a run that was killed while it saved left half-written."""
    for path in (*parent.glob(".step_*.partial"), *parent.glob(".step_*.replaced")):
        shutil.rmtree(path, ignore_errors=True)


def checkpoints(parent: Path) -> list[Path]:
    """The checkpoint folders in `parent`, the one with most steps first; damaged ones are among them."""
    found = [path for path in parent.glob("step_*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


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


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `checkpoint.json` says. Raises DamagedCheckpoint when there is none that can be read."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        if not {"steps_done", "settings", "data", "files"} <= set(manifest):
            raise ValueError("it lacks some of its parts")
        return manifest
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST_FILE}: {reason}") from error


def verify(folder: Path) -> dict[str, Any]:
    """The manifest, after every file it lists was found to be as it was written.

    Raises:
        DamagedCheckpoint: one is not.
    """
    manifest = read_manifest(folder)
    for name, (size, checksum) in manifest["files"].items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                raise DamagedCheckpoint(f"{folder} is damaged: {name} has {found} bytes, {size} were written")
            if _checksum(path) != checksum:
                raise DamagedCheckpoint(f"{folder} is damaged: the content of {name} is not what was written")
        except OSError as error:
            raise DamagedCheckpoint(f"{folder} is damaged: {name}: {error.strerror}") from error
    return manifest


def load_training_state(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` put beside the model, on the CPU. Raises DamagedCheckpoint when it cannot be read."""
    try:
        return torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise DamagedCheckpoint(f"{folder / STATE_FILE} cannot be read: {error}") from error


def restore(folder: Path, model: PreTrainedModel, step: TrainStep, weights: PreTrainedModel) -> Progress:
    """Puts a run back to where it was when `folder` was saved, in place: addresses stay.

    Args:
        folder: a verified checkpoint.
        model, step: built as they were for that run.
        weights: the model that `folder` holds.
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
    set_random_state(state["random"], model.device)
    evaluated = [(done, loss) for done, loss in state["eval_losses"]]
    return Progress(state["steps_done"], losses=state["losses"].tolist(), eval_losses=evaluated)
