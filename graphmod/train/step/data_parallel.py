"""One model on several ranks, each of which differentiates the loss of its own microbatches.

A sharded model averages its gradients itself (`fully_sharded.py`). Around the loss of any other one
DistributedDataParallel is put, not around the model alone: torch.compile, which makes a piece for each bucket of
gradients there, then compiles the loss with it. So that what is averaged over the ranks is the mean over all targets,
losses are weighted by how many targets their rank has (`Iteration`).
"""

import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from graphmod.errors import ConfigError
from graphmod.ranks.data_parallel import take_over
from graphmod.train.step.parts import is_split, shards

# The buffers of the first rank in each forward of all; no layer here has any that a step changes, as batch norms do.
# Torch 2.13 deprecates the second name, the only one before.
_SPREADS_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class _Loss(nn.Module):
    """What is differentiated: the loss of a microbatch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss_fn: Callable, microbatch: Any) -> Tensor:
        return loss_fn(self.model, microbatch)


class _OverRanks:
    """What both kinds of models of a step have.

    Attributes:
        ranks: how many there are with different batches.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group, self.ranks = group, distributed.get_world_size(group)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        distributed.all_reduce(value, group=self.group)
        return value


class DataParallel(_OverRanks):
    """The model of a step on the ranks of a process group.

    Args:
        model: on its device; that of the first rank is given to all others.
        group: the process group.
        captured: whether graphs will hold what averages gradients.

    Raises:
        ConfigError: the gradients of this model cannot be averaged in a graph.
    """

    def __init__(self, model: nn.Module, group: distributed.ProcessGroup, captured: bool) -> None:
        super().__init__(group)
        _give_to_all(model, group)
        settings: dict[str, Any] = {_SPREADS_BUFFERS: False, "init_sync": False}
        self._loss = DistributedDataParallel(_Loss(model), process_group=group, **settings)
        if captured and (why := take_over(self._loss)) is not None:
            raise ConfigError(f"gradients cannot be averaged over ranks in a graph, because of {why}; use graph=none")

    def __call__(self, loss_fn: Callable, microbatch: Any) -> Tensor:
        """The loss of a microbatch, whose backward averages gradients unless it is run under `apart`."""
        return self._loss(loss_fn, microbatch)

    def apart(self, wanted: bool) -> AbstractContextManager:
        """Inside, if wanted, forwards whose backwards only add to the gradients of this rank, as all but those of the
        last microbatch do."""
        return self._loss.no_sync() if wanted else nullcontext()

    def settle(self) -> None:
        """After forwards without a backward; here these leave nothing behind."""


class FullySharded(_OverRanks):
    """A sharded model in a step; of the same form as `DataParallel`.

    Args:
        model: `fully_shard` was applied to it.
        group: of the ranks with different batches.
    """

    def __init__(self, model: nn.Module, group: distributed.ProcessGroup) -> None:
        super().__init__(group)
        self._model: Any = model
        self._sharded: list[Any] = [module for module in model.modules() if shards(module)]

    def __call__(self, loss_fn: Callable, microbatch: Any) -> Tensor:
        """The loss of a microbatch, whose backward averages gradients unless it is run under `apart`."""
        return loss_fn(self._model, microbatch)

    def apart(self, wanted: bool) -> AbstractContextManager:
        """Inside, if wanted, backwards only add to whole gradients on this rank, as all but those of the last
        microbatch do: these take memory, and spare sending them more than once."""
        return self._without_sync() if wanted else nullcontext()

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)

    def settle(self) -> None:
        """After forwards without a backward: lets go of whole parameters, which a later forward would take for those of
        now."""
        for module in self._sharded:
            module.reshard()


def over_ranks(
    model: nn.Module, group: distributed.ProcessGroup | None, captured: bool
) -> DataParallel | FullySharded | None:
    """What averages the gradients of a model over a process group: what shards it, or DistributedDataParallel; None
    without a group.

    Raises:
        ConfigError: the model is sharded and there is no group, or it is split and not sharded over this one; or
            there are several processes, none of which made a process group.
    """
    if shards(model):
        if group is None:
            raise ConfigError(
                "the model is sharded by fully_shard, and its gradients are means over ranks; give TrainStep the "
                "process group of these, so that losses are, too: process_group=mesh.get_group()"
            )
        return FullySharded(model, group)
    ranks = os.environ.get("WORLD_SIZE", "1")
    if group is None and ranks.isdigit() and int(ranks) > 1 and not distributed.is_initialized():
        raise ConfigError(  # `distributed.group.WORLD` is None then
            f"WORLD_SIZE={ranks} says that {ranks} processes train together, and they have no process group: call "
            "torch.distributed.init_process_group() before, or unset WORLD_SIZE where each trains by itself"
        )
    if group is None:
        return None
    if is_split(model):
        raise ConfigError(
            "the model has parameters that are split over ranks, and process_group is for ranks with different "
            "batches; leave it out where all take the same, or apply fully_shard to the model over the mesh of these"
        )
    return DataParallel(model, group, captured)


@torch.no_grad()
def _give_to_all(model: nn.Module, group: distributed.ProcessGroup) -> None:
    """Gives all ranks what the first one has. DistributedDataParallel does so on a second stream, after which each
    kernel of every graph starts later.

    Raises:
        ConfigError: another rank has other parameters.
    """
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    shapes = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, shapes, group=group)
    for rank, other in enumerate(found):
        name = next((name for name in {**shapes, **other} if other.get(name) != shapes.get(name)), None)
        if name is not None:
            raise ConfigError(
                f"ranks train different models: {name} is {shapes.get(name)} here and {other.get(name)} on rank {rank}"
            )
    first = distributed.get_global_rank(group, 0)
    for tensor in tensors.values():
        whole = tensor.detach().contiguous()
        distributed.broadcast(whole, first, group=group)
        tensor.copy_(whole)
