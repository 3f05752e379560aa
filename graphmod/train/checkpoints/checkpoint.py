"""The format of a checkpoint: a folder that `from_pretrained` loads, and beside the weights what resuming needs.

Which checkpoint a run resumes from is decided in `train/run/resume.py`. A checkpoint appears whole or not at all: it is
written under another name, forced to the disk, and renamed; what it says of itself, `manifest.py` writes down.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import graphmod
from graphmod.errors import GraphmodError
from graphmod.train.checkpoints.plain import save_plain
from graphmod.train.checkpoints.progress import Progress, random_state
from graphmod.train.checkpoints.shards import FOLDER as SHARDS
from graphmod.train.checkpoints.shards import save_shards, whole_weights
from graphmod.train.folders import (
    EMA_FOLDER,
    FORMAT,
    MANIFEST_FILE,
    PARTS,
    STATE_FILE,
    WEIGHTS_FILE,
    being_replaced,
    being_written,
    checkpoint_name,
    checkpoints,
    checksum,
    clear_leftovers,
)
from graphmod.train.model import has_adapters, no_transformers_bars, save_merged
from graphmod.train.settings import MERGED_FOLDER
from graphmod.train.step import TrainStep

log = logging.getLogger("graphmod")

_LEAST_FREE = 1 << 22
# Weights and AdamW's two moments in the parameters' dtype, and a margin for what is small.
_COPIES, _MARGIN = 3, 1.05


def _sync(path: Path) -> None:
    # Without this a power cut after the rename may leave a whole name on half the content.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass
class _Parts:
    """What ranks that have parts of a model hand to the first one.

    Attributes:
        weights, averages: all weights, and the averaged ones, by name; None where the model has them.
        files: that ranks have written: size and checksum, by path.
    """

    weights: dict[str, torch.Tensor] | None = None
    averages: dict[str, torch.Tensor] | None = None
    files: dict[str, list[int]] = field(default_factory=dict)


def _save_parts(partial: Path, model: nn.Module, step: TrainStep, ranks: Any) -> _Parts:
    """Writes this rank's part; all ranks call this."""
    if ranks.first:
        (partial / SHARDS).mkdir()
    ranks.wait()
    found = _Parts(whole_weights(model, ranks.first))
    if step.has_ema:
        with step.ema_weights():
            found.averages = whole_weights(model, ranks.first)
    for files in ranks.all(save_shards(partial / SHARDS, step, ranks.host, checksum)):
        found.files |= {f"{SHARDS}/{name}": listed for name, listed in files.items()}
    return found


def _save_model(model: nn.Module, folder: Path, merge: bool, weights: dict[str, torch.Tensor] | None) -> None:
    if not isinstance(model, PreTrainedModel):
        folder.mkdir(exist_ok=True)
        save_plain(model.state_dict() if weights is None else weights, folder / WEIGHTS_FILE)
        return
    model.save_pretrained(folder, state_dict=weights)
    if merge and has_adapters(model):  # of which alone transformers writes the weights
        save_merged(model, folder, folder / MERGED_FOLDER)


def _save_weights(folder: Path, model: nn.Module, step: TrainStep, merge: bool, parts: _Parts) -> None:
    with no_transformers_bars(), _config_to_generate(model):
        _save_model(model, folder, merge, parts.weights)
        if step.has_ema:
            with step.ema_weights() if parts.averages is None else nullcontext():
                _save_model(model, folder / EMA_FOLDER, merge, parts.averages)


@contextmanager
def _config_to_generate(model: nn.Module) -> Iterator[None]:
    """Training has no use for a key-value cache; whoever loads the model to generate has."""
    if not isinstance(model, PreTrainedModel):
        yield
        return
    before = dict(vars(model.config))  # saving writes dtype and architectures there, which a captured step may read
    try:
        model.config.use_cache = True
        yield
    finally:
        vars(model.config).clear()
        vars(model.config).update(before)


def _write(
    partial: Path,
    model: nn.Module,
    step: TrainStep,
    progress: Progress,
    tokenizer: Any,
    merge: bool,
    parts: _Parts,
) -> None:
    _save_weights(partial, model, step, merge, parts)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
        if step.has_ema:  # a model of its own, which is sampled from as such
            tokenizer.save_pretrained(partial / EMA_FOLDER)
    state = {
        "steps_done": progress.steps_done,
        **_trained(step, in_shards=bool(parts.files)),
        "random": progress.random[0] if progress.random else random_state(step.device),
        "random_of_others": progress.random[1:],
        "losses": torch.tensor(progress.losses, dtype=torch.float32),
        "eval_losses": [list(entry) for entry in progress.eval_losses],
    }
    torch.save(state, partial / STATE_FILE)
    listed = {}
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):  # the manifest is not there yet
        _sync(path)
        name = path.relative_to(partial).as_posix()
        listed[name] = parts.files.get(name) or [path.stat().st_size, checksum(path)]
    manifest = {
        "format": FORMAT,
        "graphmod": graphmod.__version__,
        **{name: getattr(progress, name) for name in PARTS},
        "loss": progress.losses[-1] if progress.losses else None,
        "files": listed,
    }
    (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _sync(partial / MANIFEST_FILE)
    for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        _sync(folder)


def _trained(step: TrainStep, in_shards: bool) -> dict[str, Any]:
    """The state of optimizer and step, as far as it is not in shards."""
    state = step.state_dict()
    if not in_shards:
        return {"optimizer": step.optimizer.state_dict(), "step": state}
    state.pop("ema", None)
    return {"learning_rate": float(step.learning_rate), "step": state}


def save_checkpoint(
    parent: Path,
    model: nn.Module,
    step: TrainStep,
    progress: Progress,
    tokenizer: Any,
    keep: int,
    merge: bool = False,
    ranks: Any = None,
) -> Path:
    """Writes `parent/step_N`: safetensors and, of a model of transformers, `config.json`; the tokenizer if there is
    one, `training_state.pt` (optimizer, schedule, random state, losses) and `checkpoint.json`. Averaged weights go into
    its folder `ema`.
    Of a model with adapters these are saved alone, and with `merge` the whole model beside them in the folder `merged`.

    Of a split model the state of the optimizer is in the folder `shards` instead, to which each rank writes its part.

    Earlier checkpoints are removed once this one is on the disk, so that `keep` remain; this one always does.

    Args:
        ranks: those that have a part each of the model, all of which call this; the first one owns the folder. None
            where this process has all of it.

    Raises:
        GraphmodError: the disk is full, or may not be written to. Earlier checkpoints are untouched then.
    """
    folder = parent / checkpoint_name(progress.steps_done)
    partial, replaced = being_written(folder), being_replaced(folder)
    owns = ranks is None or ranks.first
    try:
        if not owns:
            _save_parts(partial, model, step, ranks)
            return folder
        clear_leftovers(parent)
        partial.mkdir(parents=True)
        parts = _Parts() if ranks is None else _save_parts(partial, model, step, ranks)
        _write(partial, model, step, progress, tokenizer, merge, parts)
        if folder.exists():
            os.replace(folder, replaced)
        os.replace(partial, folder)
        _sync(parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        full = _no_space(parent)
        if owns:
            clear_leftovers(parent)
        # Writers of tensors report a full disk as errors of their own; anything else they raise is a bug, or another
        # rank is gone.
        known = (OSError, RuntimeError) if ranks is None else OSError
        if not isinstance(error, Exception) or not (
            full or isinstance(error, known) or type(error).__module__.startswith("safetensors")
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
    way_out = "make room, or write elsewhere (hydra.run.dir=FOLDER)"
    if earlier:
        way_out = (
            f"the newest one there is {earlier[0]}; make room, or resume from that one in another folder "
            f"(train.resume={earlier[0]} hydra.run.dir=FOLDER)"
        )
    return GraphmodError(f"cannot save the checkpoint {folder}: {reason}; {way_out}")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def check_room(folder: Path, model: nn.Module, with_ema: bool, at_once: int) -> None:
    """Raises GraphmodError when `folder` cannot be written to, or its disk has no room for one checkpoint.

    Args:
        at_once: how many the run may have there; where there is no room for so many, the log says so.
    """
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
    if free < needed * (more := at_once - len(checkpoints(folder))):
        log.warning(
            f"the disk of {folder} has {_size(free)} free, and {more} more checkpoints of about {_size(needed)} may be "
            "there at once: train.keep_checkpoints, and the one that is written; make room, or keep fewer"
        )
