"""What a checkpoint of a split model holds beside the files of a whole one: `shards`, each rank's part of the rest.

They hold the optimizer's state and the averaged weights, by the names of parameters (torch.distributed.checkpoint), so
that other ranks, however many and however they share the model, find their parts in them.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from graphmod.torch_private import REDISTRIBUTE
from graphmod.train.folders import DamagedCheckpoint
from graphmod.train.parallel import local, spread, whole
from graphmod.train.step import TrainStep

FOLDER = "shards"
_OPTIMIZER, _EMA = "optimizer", "ema"


def _names(step: TrainStep) -> list[str]:
    """The names of the trained parameters, in the order of the optimizer."""
    known = {id(parameter): name for name, parameter in step.model.named_parameters()}
    return [known[id(parameter)] for parameter in step.iteration.trained]


def _state(step: TrainStep) -> dict[str, Tensor]:
    """This rank's part of what is saved, by name."""
    found = {}
    names, trained = _names(step), step.iteration.trained
    for name, parameter in zip(names, trained, strict=True):
        for kind, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{_OPTIMIZER}/{name}/{kind}"] = value
    return found | {f"{_EMA}/{name}": value for name, value in zip(names, step.iteration.ema, strict=False)}


def save_shards(folder: Path, step: TrainStep, group: Any, checksum: Callable[[Path], int]) -> dict[str, list[int]]:
    """Writes this rank's part into `folder`, which there is; all ranks have to call this.

    Args:
        group: of the ranks, for what the host says.

    Returns:
        Size and checksum of each file that this rank wrote.

    Raises:
        OSError: a rank could not write.
    """
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


def load_shards(folder: Path, step: TrainStep) -> None:
    """Puts this rank's part, which may be all, into the optimizer and the averaged weights of `step`.

    Raises:
        DamagedCheckpoint: `folder` cannot be read.
    """
    from torch.distributed import checkpoint

    parameters = dict(zip(_names(step), step.iteration.trained, strict=True))
    reader = checkpoint.FileSystemReader(folder)
    try:
        wanted = {}
        of_tensors: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for key, saved in of_tensors.items():
            name = key.split("/")[1]
            if key.startswith(f"{_EMA}/") and not step.has_ema:
                continue
            like = parameters[name].detach()
            if tuple(saved.size) == tuple(like.shape):
                wanted[key] = torch.zeros_like(like, dtype=saved.properties.dtype)
            else:  # a count of steps, say
                wanted[key] = torch.zeros(saved.size, dtype=saved.properties.dtype)
        with warnings.catch_warnings():  # that each rank reads for itself, as it is told
            warnings.simplefilter("ignore", UserWarning)
            checkpoint.load(wanted, storage_reader=reader, no_dist=True)
    except (Exception, checkpoint.CheckpointException) as error:
        raise DamagedCheckpoint(f"{folder} cannot be read: {error}") from error
    kinds: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    averages = {}
    for key, value in wanted.items():
        first, name, *kind = key.split("/")
        if first == _EMA:
            averages[name] = value
        else:
            kinds[name][kind[0]] = value
    put_state(step, kinds, averages)


def put_state(step: TrainStep, kinds: dict[str, dict[str, Any]], averages: dict[str, Tensor]) -> None:
    """Puts an optimizer's state and averaged weights, by the names of parameters, into `step`.

    Args:
        kinds: the state of each parameter; of this rank's part, or whole.
        averages: likewise; empty where there are none.
    """
    names, trained = _names(step), step.iteration.trained
    state = {}
    for index, (name, parameter) in enumerate(zip(names, trained, strict=True)):
        if kinds.get(name):
            state[index] = {kind: _part(value, parameter) for kind, value in kinds[name].items()}
    groups = step.optimizer.state_dict()["param_groups"]
    step.optimizer.load_state_dict({"state": state, "param_groups": groups})
    with torch.no_grad():
        for name, average in zip(names, step.iteration.ema, strict=False):
            local(average).copy_(local(_part(averages[name], average)))


def _part(value: Any, like: Tensor) -> Any:
    return spread(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value


def by_name(step: TrainStep, saved: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """The optimizer's state and averaged weights that a whole model was saved with, for `put_state`.

    Args:
        saved: what `load_training_state` found. It has them in the order of the optimizer of a whole model: matrices,
            then vectors.
    """
    known = {id(parameter): name for name, parameter in step.model.named_parameters()}
    trained = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    ordered = sorted(trained, key=lambda parameter: parameter.dim() <= 1)
    names = [known[id(parameter)] for parameter in ordered]
    state = saved["optimizer"]["state"]
    averages = dict(zip(names, saved["step"].get("ema", ()), strict=False))
    return {names[index]: kinds for index, kinds in state.items()}, averages


def put_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies whole weights, by name, to this rank's part of a model."""
    here = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in weights:
            local(here[name]).copy_(local(spread(value, here[name])))


def whole_weights(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """All weights of a split model by name, on the CPU; all ranks have to call this. Tied ones are one tensor.

    Args:
        keep: whether this rank wants them; others get an empty dict.
    """
    found, known = {}, {}
    with _without_advice():
        for name, value in model.state_dict(keep_vars=True).items():
            if id(value) not in known:
                collected = whole(value.detach())
                known[id(value)] = collected.to("cpu", copy=True) if keep else None  # of what may change again
            found[name] = known[id(value)]
    return found if keep else {}


@contextmanager
def _without_advice() -> Iterator[None]:
    """Torch would say that to collect what is split in two ways takes two steps."""
    logger = logging.getLogger(REDISTRIBUTE)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
