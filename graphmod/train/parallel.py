"""A model on several ranks: whole on each (DistributedDataParallel), sharded (fully_shard), or split layer by layer."""

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from graphmod.errors import ConfigError
from graphmod.ranks.data_parallel import take_over
from graphmod.train.experts import experts_of
from graphmod.wrap.layers import find_layers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle

# -- tensors of which each rank holds a part (DTensor), beside others that each holds as a whole -----------------------
# An operation on a list of tensors (norms, clipping, fused optimizers, averages) takes those of one device mesh only.
# So what works on all parameters of a model goes through them mesh by mesh; a model that is not split is one list, as
# ever.

_FSDP = "torch.distributed.fsdp"


def mesh_of(tensor: Tensor) -> Any:
    """The device mesh over which a tensor is spread; None where this rank has all of it."""
    # Nothing that a captured step reads here may change when somebody imports DTensor.
    return getattr(tensor, "device_mesh", None)


def _is_spread(tensor: Tensor) -> "TypeGuard[DTensor]":
    return mesh_of(tensor) is not None


def is_split(model: nn.Module) -> bool:
    """Whether this rank holds a part only of a parameter of the model."""
    return any(mesh_of(parameter) is not None for parameter in model.parameters())


def shards(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module."""
    return _FSDP in sys.modules and isinstance(module, sys.modules[_FSDP].FSDPModule)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, at the same address."""
    return tensor._local_tensor if _is_spread(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on each rank; all ranks of its mesh have to call this."""
    return tensor.full_tensor() if _is_spread(tensor) else tensor


def spread(value: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, which each rank has, the part that this rank has of `like`; one that is spread already, or of
    another shape, such as a count of steps, or where `like` is whole, stays as it is."""
    if not _is_spread(like) or _is_spread(value) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    part._local_tensor = part._local_tensor.clone()  # else all of it would live on
    return part


def by_mesh(tensors: Iterable[Tensor], *others: Sequence[Any]) -> list[tuple[list, ...]]:
    """`tensors`, and what stands at the same places of `others`, in one list each for every mesh."""
    found: dict[Any, tuple[list, ...]] = {}
    for entry in zip(tensors, *others, strict=True):
        lists = found.setdefault(mesh_of(entry[0]), tuple([] for _ in entry))
        for one, value in zip(lists, entry, strict=True):
            one.append(value)
    return list(found.values())


def total_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, 0-d, the same on all ranks."""
    parts = by_mesh(p.grad for p in parameters if p.grad is not None)
    norms = [whole(nn.utils.get_total_norm(grads)) for (grads,) in parts]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip(parameters: list[Tensor], max_norm: float) -> Tensor:
    """Clips the gradients to a total 2-norm; returns the one they had."""
    parts = by_mesh(parameters)
    if len(parts) == 1 and mesh_of(parameters[0]) is None:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = total_norm(parameters)
    for (some,) in parts:
        nn.utils.clip_grads_with_norm_(some, max_norm, norm)
    return norm


# -- each rank differentiates the loss of its own microbatches ---------------------------------------------------------
# A sharded model averages its gradients itself. Around the loss of any other one DistributedDataParallel is put, not
# around the model alone: torch.compile, which makes a piece for each bucket of gradients there, then compiles the loss
# with it. So that what is averaged over the ranks is the mean over all targets, losses are weighted by how many targets
# their rank has (`Iteration`).

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


class OverRanks:
    """The model of a step on the `ranks` of a process group, which have different batches; unless it is sharded, that
    of the first rank is given to all others. Raises ConfigError where graphs will hold what averages gradients
    (`captured`), and those of this model cannot be averaged in a graph."""

    def __init__(self, model: nn.Module, group: distributed.ProcessGroup, captured: bool) -> None:
        self.group, self.ranks = group, distributed.get_world_size(group)
        self.experts = experts_of(model)
        self._model: Any = model
        self._sharded: list[Any] = [module for module in model.modules() if shards(module)]
        self._replicated: DistributedDataParallel | None = None
        if shards(model):
            return
        _give_to_all(model, group)
        settings: dict[str, Any] = {_SPREADS_BUFFERS: False, "init_sync": False}
        loss = _Loss(model)
        split = [name for name, parameter in loss.named_parameters() if _is_spread(parameter)]  # of experts
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, split)
        self._replicated = DistributedDataParallel(loss, process_group=group, **settings)
        if captured and (why := take_over(self._replicated)) is not None:
            raise ConfigError(f"gradients cannot be averaged over ranks in a graph, because of {why}; use graph=none")

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        distributed.all_reduce(value, group=self.group)
        return value

    def __call__(self, loss_fn: Callable, microbatch: Any) -> Tensor:
        """The loss of a microbatch, whose backward averages gradients unless it is run under `apart`."""
        return loss_fn(self._model, microbatch) if self._replicated is None else self._replicated(loss_fn, microbatch)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, backwards only add to the gradients of this rank, as all but those of the last microbatch do. Of a
        sharded model these are whole, which takes memory, and spares sending them more than once."""
        if self._replicated is not None:
            with self._replicated.no_sync():
                yield
            return
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


def over_ranks(model: nn.Module, group: distributed.ProcessGroup | None, captured: bool) -> OverRanks | None:
    """What averages the gradients of a model over a process group: what shards it, or DistributedDataParallel; None
    without a group. Raises ConfigError where the model is sharded and there is no group, or it is split and not sharded
    over this one; or there are several processes, none of which made a process group."""
    if shards(model):
        if group is None:
            raise ConfigError(
                "the model is sharded by fully_shard, and its gradients are means over ranks; give TrainStep the "
                "process group of these, so that losses are, too: process_group=mesh.get_group()"
            )
        return OverRanks(model, group, captured)
    ranks = os.environ.get("WORLD_SIZE", "1")
    if group is None and ranks.isdigit() and int(ranks) > 1 and not distributed.is_initialized():
        raise ConfigError(  # `distributed.group.WORLD` is None then
            f"WORLD_SIZE={ranks} says that {ranks} processes train together, and they have no process group: call "
            "torch.distributed.init_process_group() before, or unset WORLD_SIZE where each trains by itself"
        )
    if group is None:
        if experts_of(model) is not None:
            raise ConfigError(
                "the experts of the model are split over ranks, whose tokens they share; give TrainStep the process "
                "group of these: process_group=torch.distributed.group.WORLD"
            )
        return None
    experts = experts_of(model)
    if experts is not None and experts.group.group_name != group.group_name:
        raise ConfigError(
            "the experts of the model are split over another process group than TrainStep was given; give "
            "split_experts and TrainStep the same one"
        )
    if is_split(model) and experts is None:
        raise ConfigError(
            "the model has parameters that are split over ranks, and process_group is for ranks with different "
            "batches; leave it out where all take the same, or apply fully_shard to the model over the mesh of these"
        )
    return OverRanks(model, group, captured)


@torch.no_grad()
def _give_to_all(model: nn.Module, group: distributed.ProcessGroup) -> None:
    """Gives all ranks what the first one has. DistributedDataParallel does so on a second stream, after which each
    kernel of every graph starts later. Raises ConfigError where another rank has other parameters."""
    everything = itertools.chain(model.named_parameters(), model.named_buffers())
    tensors = {name: tensor for name, tensor in everything if not _is_spread(tensor)}
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


# -- each rank keeps a part of every parameter (fully_shard), on a batch of its own ------------------------------------
# A layer's parameters are collected before its forward and its backward; gradients are averaged where they are given
# back, to the rank that keeps that part of them.


def shard(model: nn.Module, mesh: Any, *, reshard_after_forward: bool, dtype: torch.dtype | None) -> nn.Module:
    """Leaves this rank its part of every parameter of `model`, in place, and returns it. All ranks, in the one
    dimension of `mesh`, must have built it alike. Each layer is collected by itself, and together what lies beside the
    layers.

    Args:
        reshard_after_forward: give a layer's parameters back after its forward, and collect them again in the backward.
        dtype: that of autocast, in which layers are collected: half of what would be sent in float32. Gradients are
            added up over ranks in float32 then. What lies beside the layers is collected as it is, so that what passes
            from layer to layer has the dtype that it has on one GPU. None collects everything as it is.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second, and few runs need it

    policy = MixedPrecisionPolicy()
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for name in find_layers(model):
        layer = model.get_submodule(name)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # After the last layer comes the backward, which needs this part at once.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


# -- the matrices of each layer split over ranks, which compute every sequence together --------------------------------
# The projections into attention and MLP are split by what they give (heads, channels), those out of them by what they
# take; what they give is added up, twice a layer. Norms, embeddings and the head are on every rank as a whole.

_INTO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_OUT_OF = ("self_attn.o_proj", "mlp.down_proj")
# Applied to each head by itself, (B, S, heads, head_dim): their weights are whole, their gradients sums over ranks.
_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
_HEADS = 2  # the dimension of these
_OTHERWISE = "train it whole (parallel=ddp) or sharded (parallel=fsdp)"


def split_layers(model: nn.Module, mesh: Any) -> nn.Module:
    """Leaves this rank its part of each layer of a transformers model with layers like Llama's, in place, and returns
    it. All ranks, in the one dimension of `mesh`, must have built it alike. Raises ConfigError where it has other
    layers, or they cannot be divided by so many ranks."""
    from torch.distributed.tensor.parallel import parallelize_module  # takes a second, and few runs need it

    ranks = mesh.size()
    _require_divisible(model.config, ranks)
    names = find_layers(model)
    plans = {name: _plan(name, model.get_submodule(name), model) for name in names}
    for name, plan in plans.items():
        parallelize_module(model.get_submodule(name), mesh, plan)
    return model


def _require_divisible(config: Any, ranks: int) -> None:
    counts = {
        "attention heads": getattr(config, "num_attention_heads", None),
        "key-value heads": getattr(config, "num_key_value_heads", None),
        "channels of the MLP (intermediate size)": getattr(config, "intermediate_size", None),
    }
    uneven = [f"{count} {name}" for name, count in counts.items() if count is not None and count % ranks]
    if uneven:
        raise ConfigError(
            f"tensor parallelism over {ranks} ranks needs numbers that {ranks} divides, and the model has "
            f"{' and '.join(uneven)}; choose a number of ranks that divides all of them (parallel.gpus, or parallel.tp "
            f"with parallel=fsdp_tp), or {_OTHERWISE}"
        )


def _plan(name: str, layer: nn.Module, model: nn.Module) -> dict[str, "ParallelStyle"]:
    """How each part of a layer is split."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    plan: dict[str, ParallelStyle] = {}
    config: Any = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    strange = []
    for part, module in layer.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if part in (*_INTO, *_OUT_OF) and type(module) is nn.Linear:
            plan[part] = ColwiseParallel() if part in _INTO else RowwiseParallel()
        elif part in _OF_HEADS and next(module.parameters()).shape == (head,):
            plan[part] = SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
        elif "." in part or not part.endswith("norm"):
            strange.append(f"{part or 'parameters of its own'} ({type(module).__name__})")
    missing = [part for part in (*_INTO, *_OUT_OF) if part not in plan]
    if strange or missing:
        got = f"has {', '.join(strange)}" if strange else f"lacks {', '.join(missing)}"
        raise ConfigError(
            f"{type(model).__name__} cannot be split over ranks: {name} {got}. Tensor parallelism is for layers with "
            f"the linear parts of Llama ({', '.join(one.rpartition('.')[2] for one in (*_INTO, *_OUT_OF))}) and norms; "
            f"{_OTHERWISE}"
        )
    return plan
