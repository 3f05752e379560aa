"""Runs operators into given memory."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


def _sum_size(tensor: Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> torch.Size:
    wanted = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    sizes = [1 if i in wanted else size for i, size in enumerate(tensor.size()) if keepdim or i not in wanted]
    return torch.Size(sizes)


def _broadcast_size(one: Any, other: Any, **_: Any) -> torch.Size | None:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return None
    return torch.broadcast_shapes(one.size(), other.size())


_aten = torch.ops.aten
# The operations whose results usually are gradients: what writes the result into given memory, and the result's size,
# because an `out` of another size would be resized under everybody who holds it.
_INTO = {
    _aten.mm.default: (_aten.mm.out, lambda a, b: torch.Size((a.size(0), b.size(1)))),
    _aten.bmm.default: (_aten.bmm.out, lambda a, b: torch.Size((a.size(0), a.size(1), b.size(2)))),
    _aten.sum.dim_IntList: (_aten.sum.IntList_out, _sum_size),
    _aten._to_copy.default: (lambda a, *, out, **_: out.copy_(a), lambda a, **_: a.size()),
    _aten.add.Tensor: (_aten.add.out, _broadcast_size),
    _aten.mul.Tensor: (_aten.mul.out, _broadcast_size),
}


def writes_directly(op: Any) -> bool:
    """Whether `run_into` can compute the operator's result into given memory without a copy."""
    return op in _INTO


def fits_into(op: Any, args: tuple, kwargs: dict, target: Tensor) -> bool:
    """Whether the operator's result has the shape of `target`."""
    return op in _INTO and _INTO[op][1](*args, **kwargs) == target.size()


def run_into(op: Any, args: tuple, kwargs: dict, target: Tensor) -> Tensor:
    """The operator's result, computed into `target`, which has the result's shape, strides and dtype."""
    return _INTO[op][0](*args, **kwargs, out=target)


class Place(NamedTuple):
    """The operation that makes a tensor: its index in the trace and the layout of its result, of which the tensor may
    be a view."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
