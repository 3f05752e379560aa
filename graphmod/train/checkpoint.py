"""The format of a checkpoint: a folder that `from_pretrained` loads, and beside the weights what resuming needs.

Which checkpoint a run resumes from, and how it is put back, is in `train/resume.py`. A checkpoint appears whole or not
at all: it is written under another name, forced to the disk, and renamed; what it says of itself, `train/folders.py`
knows.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

import graphmod
from graphmod.errors import GraphmodError
from graphmod.torch_private import REDISTRIBUTE
from graphmod.train.folders import (
    EMA_FOLDER,
    FORMAT,
    MANIFEST_FILE,
    MERGED_FOLDER,
    PARTS,
    STATE_FILE,
    WEIGHTS_FILE,
    DamagedCheckpoint,
    checkpoint_name,
    checkpoints,
    checksum,
    clear_leftovers,
    meanwhile,
)
from graphmod.train.model import dims_of, load_weights, no_transformers_bars, save_merged
from graphmod.train.parallel import local, shards, spread, whole
from graphmod.train.step import TrainStep

# -- how far a run is --------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """How far a run is and what it was told; the part of a checkpoint that is not tensors of the model."""

    steps_done: int  # optimizer steps; also the position in the data
    config: dict[str, Any] = field(default_factory=dict)  # all settings, as plain values, by group
    # Those that decide the numbers (see `train/resume.py`), by their full name.
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = ""  # fingerprint of the training tokens
    losses: list[float] = field(default_factory=list)  # one a step so far
    eval_losses: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    ranks: int = 1  # how many trained together on different batches
    processes: int = 1  # how many there were in all
    arrangement: str = ""  # how all ranks shared the model, in words
    seen: tuple[int, int] | None = None  # how much of the data they had seen, and how much an epoch has (`Place`)
    random: list[dict[str, torch.Tensor]] = field(default_factory=list)  # the random state of each rank


# -- the weights of a model that is not of transformers, in one file, as `safetensors.torch` has them ------------------

_KIND = "format"


def save_plain(weights: Mapping[str, Tensor], file: Path) -> None:
    """Writes `weights`, of which those that are the same memory are written once; `safetensors.torch.load_model` reads
    them. Raises GraphmodError where something in it is no tensor."""
    kept: dict[str, Tensor] = {}
    tied, known = {}, {}
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise GraphmodError(
                f"the model's state_dict holds a {type(value).__name__} as {name!r}, and a checkpoint holds tensors "
                "only; keep it in a buffer"
            )
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        if same in known:
            tied[name] = known[same]
            continue
        known[same], kept[name] = name, value.detach().to("cpu", copy=True).contiguous()
    save_file(kept, file, {_KIND: "pt", **tied})


def load_plain(file: Path) -> dict[str, Tensor]:
    """All that `save_plain` was given, on the CPU."""
    with safe_open(file, framework="pt") as found:
        weights = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
        tied = {name: kept for name, kept in (found.metadata() or {}).items() if name != _KIND}
    return weights | {name: weights[kept] for name, kept in tied.items()}


# -- of a split model, each rank's part of the rest --------------------------------------------------------------------
# They hold the optimizer's state and the averaged weights, by the names of parameters (torch.distributed.checkpoint),
# so that other ranks, however many and however they share the model, find their parts in them.

SHARDS = "shards"
_OPTIMIZER, _EMA = "optimizer", "ema"


def _trained(step: TrainStep) -> dict[str, Tensor]:
    """The trained parameters by name, in the order of the optimizer."""
    known = {id(parameter): name for name, parameter in step.model.named_parameters()}
    return {known[id(parameter)]: parameter for parameter in step.iteration.trained}


def _state(step: TrainStep) -> dict[str, Tensor]:
    """The optimizer's state and the averaged weights, of a split model this rank's part of them, by name."""
    trained = _trained(step)
    found = {
        f"{_OPTIMIZER}/{name}/{kind}": value
        for name, parameter in trained.items()
        for kind, value in step.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return found | {f"{_EMA}/{name}": value for name, value in zip(trained, step.iteration.ema, strict=False)}


def save_shards(folder: Path, step: TrainStep, group: Any) -> dict[str, list[int]]:
    """Writes this rank's part into `folder`, which there is; all ranks, of `group` for what the host says, have to call
    this. Returns size and checksum of each file that this rank wrote. Raises OSError where a rank could not write."""
    from torch.distributed import checkpoint

    writer = checkpoint.FileSystemWriter(folder, sync_files=True)
    try:
        checkpoint.save(_state(step), storage_writer=writer, process_group=group)
    except checkpoint.CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        if not isinstance(reason, OSError):
            raise RuntimeError(f"rank {rank}: {reason}") from error
        raise OSError(f"rank {rank}: {reason}") from error
    mine = sorted(folder.glob(f"__{distributed.get_rank(group)}_*"))
    return {path.name: [path.stat().st_size, checksum(path)] for path in mine}


def load_shards(folder: Path, step: TrainStep) -> dict[str, Tensor]:
    """This rank's part, which may be all, of the optimizer's state and the averaged weights, by name. Raises
    DamagedCheckpoint where `folder` cannot be read."""
    from torch.distributed import checkpoint

    parameters = _trained(step)
    reader = checkpoint.FileSystemReader(folder)
    try:
        wanted = {}
        of_tensors: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for key, saved in of_tensors.items():
            name = key.split("/")[1]
            if key.startswith(f"{_EMA}/") and not step.has_ema:
                continue
            like, dtype = parameters[name].detach(), saved.properties.dtype
            alike = tuple(saved.size) == tuple(like.shape)  # else a count of steps, say
            wanted[key] = torch.zeros_like(like, dtype=dtype) if alike else torch.zeros(saved.size, dtype=dtype)
        with warnings.catch_warnings():  # that each rank reads for itself, as it is told
            warnings.simplefilter("ignore", UserWarning)
            checkpoint.load(wanted, storage_reader=reader, no_dist=True)
    except (Exception, checkpoint.CheckpointException) as error:
        raise DamagedCheckpoint(f"{folder} cannot be read: {error}") from error
    return wanted


def put_state(step: TrainStep, saved: dict[str, Tensor]) -> None:
    """Puts an optimizer's state and averaged weights into `step`, as they were saved by name: this rank's part of them,
    or all."""
    trained = _trained(step)
    state: dict[int, dict[str, Any]] = {}
    places = {name: index for index, name in enumerate(trained)}
    for key, value in saved.items():
        if key.startswith(f"{_OPTIMIZER}/"):
            name, _, kind = key.removeprefix(f"{_OPTIMIZER}/").rpartition("/")
            state.setdefault(places[name], {})[kind] = spread(value, trained[name])
    groups = step.optimizer.state_dict()["param_groups"]
    step.optimizer.load_state_dict({"state": state, "param_groups": groups})
    with torch.no_grad():
        for name, average in zip(trained, step.iteration.ema, strict=False):
            local(average).copy_(local(spread(saved[f"{_EMA}/{name}"], average)))


def whole_weights(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """All weights of a split model by name, on the CPU, where this rank is to `keep` them, else none; all ranks have to
    call this. Tied ones are one tensor."""
    found, known = {}, {}
    # Torch would say that to collect what is split in two ways takes two steps.
    with patch.object(logging.getLogger(REDISTRIBUTE), "disabled", True):
        for name, value in model.state_dict(keep_vars=True).items():
            if id(value) not in known:
                collected = whole(value.detach())
                known[id(value)] = collected.to("cpu", copy=True) if keep else None  # of what may change again
            found[name] = known[id(value)]
    return found if keep else {}


# -- writing -----------------------------------------------------------------------------------------------------------

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


# All weights of a model, and the averaged ones, by name, None where it has them itself; and of files that ranks have
# written size and checksum, by path.
_Parts = tuple[dict[str, Tensor] | None, dict[str, Tensor] | None, dict[str, list[int]]]


def _save_parts(partial: Path, model: nn.Module, step: TrainStep, ranks: Any) -> _Parts:
    """Writes this rank's part; all ranks call this. Returns what the first one is handed."""
    if ranks.first:
        (partial / SHARDS).mkdir()
    ranks.wait()
    weights, averages = whole_weights(model, ranks.first), None
    if step.has_ema:
        with step.ema_weights():
            averages = whole_weights(model, ranks.first)
    written = ranks.all(save_shards(partial / SHARDS, step, ranks.host))
    return weights, averages, {f"{SHARDS}/{name}": listed for files in written for name, listed in files.items()}


def _save_model(
    model: nn.Module, folder: Path, tokenizer: Any, merge: bool, weights: dict[str, torch.Tensor] | None
) -> None:
    folders = [folder]
    if not isinstance(model, PreTrainedModel):
        folder.mkdir(exist_ok=True)
        save_plain(model.state_dict() if weights is None else weights, folder / WEIGHTS_FILE)
    else:
        model.save_pretrained(folder, state_dict=weights)
        if merge and getattr(model, "_hf_peft_config_loaded", False):  # else all weights have been written
            folders.append(folder / MERGED_FOLDER)
            save_merged(model, folder, folders[-1])
    for one in folders if tokenizer is not None else ():  # each is a model that is sampled from by itself
        tokenizer.save_pretrained(one)


def _write(
    partial: Path, model: nn.Module, step: TrainStep, progress: Progress, tokenizer: Any, merge: bool, parts: _Parts
) -> None:
    weights, averages, files = parts
    # Training has no use for a key-value cache; whoever loads the model to generate has. Saving writes dtype and
    # architectures to the config, too, which a captured step may read.
    config = vars(model.config) if isinstance(model, PreTrainedModel) else {}
    with no_transformers_bars(), patch.dict(config, use_cache=True):
        _save_model(model, partial, tokenizer, merge, weights)
        if step.has_ema:
            with step.ema_weights() if averages is None else nullcontext():
                _save_model(model, partial / EMA_FOLDER, tokenizer, merge, averages)
    of_step = step.state_dict()
    of_step.pop("ema", None)
    state = {
        "steps_done": progress.steps_done,
        "step": of_step,
        "trained": {} if files else _state(step),  # else it is in shards
        "random": progress.random,
        "losses": torch.tensor(progress.losses, dtype=torch.float32),
        "eval_losses": [list(entry) for entry in progress.eval_losses],
    }
    torch.save(state, partial / STATE_FILE)
    listed = {}
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):  # the manifest is not there yet
        _sync(path)
        name = path.relative_to(partial).as_posix()
        listed[name] = files.get(name) or [path.stat().st_size, checksum(path)]
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
    partial, replaced = meanwhile(folder, "partial"), meanwhile(folder, "replaced")
    owns = ranks is None or ranks.first
    try:
        if not owns:
            _save_parts(partial, model, step, ranks)
            return folder
        clear_leftovers(parent)
        partial.mkdir(parents=True)
        parts = (None, None, {}) if ranks is None else _save_parts(partial, model, step, ranks)
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
    partial = meanwhile(folder, "partial")
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
    """Raises GraphmodError when `folder` cannot be written to, or its disk has no room for one checkpoint. Where there
    is no room for the `at_once` that the run may have there, the log says so."""
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


# -- reading: by these ranks, or others that share the model in another way --------------------------------------------


def load_training_state(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` put beside the model, on the CPU. Raises DamagedCheckpoint when it cannot be read."""
    try:
        return torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise DamagedCheckpoint(f"{folder / STATE_FILE} cannot be read: {error}") from error


def saved_weights(folder: Path, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of `model` that a checkpoint holds, by name, on the CPU. Raises ConfigError where they cannot be
    read."""
    dims = dims_of(model)
    if dims is None:
        return load_plain(folder / WEIGHTS_FILE)
    kind = type(model).__mro__[2] if shards(model) else type(model)  # of one that is sharded, what it was
    return load_weights(folder, dims, dtype, kind).state_dict()
