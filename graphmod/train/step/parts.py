"""Tensors of which each rank holds a part (DTensor), beside others that each holds as a whole.

An operation on a list of tensors (norms, clipping, fused optimizers, averages) takes those of one device mesh only. So
what works on all parameters of a model goes through them mesh by mesh; a model that is not split is one list, as ever.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MODULE, _SHARDED = "torch.distributed.tensor", "torch.distributed.fsdp"


def mesh_of(tensor: Tensor) -> Any:
    """The device mesh over which a tensor is spread; None where this rank has all of it."""
    module = sys.modules.get(_MODULE)  # to load it takes a second, and nothing is spread where nobody has
    return tensor.device_mesh if module is not None and isinstance(tensor, module.DTensor) else None


def is_split(model: nn.Module) -> bool:
    """Whether this rank holds a part only of a parameter of the model."""
    return any(mesh_of(parameter) is not None for parameter in model.parameters())


def shards(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module."""
    return _SHARDED in sys.modules and isinstance(module, sys.modules[_SHARDED].FSDPModule)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, at the same address."""
    return tensor if mesh_of(tensor) is None else tensor._local_tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on each rank; all ranks of its mesh have to call this."""
    return tensor if mesh_of(tensor) is None else tensor.full_tensor()


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
