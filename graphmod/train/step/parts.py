"""Tensors of which each rank holds a part (DTensor), beside others that each holds as a whole.

An operation on a list of tensors (norms, clipping, fused optimizers, averages) takes those of one device mesh only. So
what works on all parameters of a model goes through them mesh by mesh; a model that is not split is one list, as ever.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
    """Of a whole tensor, which each rank has, the part that this rank has of `like`; one that is spread already, or
    where `like` is whole, stays as it is."""
    if not _is_spread(like) or _is_spread(value):
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
