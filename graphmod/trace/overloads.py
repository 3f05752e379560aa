"""Runs operators into given memory: which can, by which overload, and which operation of a call made a tensor."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.trace.operations import address

_FACTORY_ARGUMENTS = {"dtype", "layout", "device", "pin_memory"}
_known: dict[Any, tuple[Any, list[str], set[str]] | None] = {}


def out_overload(op: Any) -> tuple[Any, list[str], set[str]] | None:
    """The overload that writes an operator's results into given tensors: itself, the names of those arguments, and the
    names of the others. None where there is none that takes the same arguments."""
    if op not in _known:
        _known[op] = _find(op)
    return _known[op]


def _find(op: Any) -> tuple[Any, list[str], set[str]] | None:
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    lists = [str(r.type).startswith("List") for r in op._schema.returns]
    for name in op.overloadpacket.overloads():
        candidate = getattr(op.overloadpacket, name)
        outs = [a for a in candidate._schema.arguments if a.is_out]
        others = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
        same = [argument for argument in wanted if argument in others]
        missing = {argument[0] for argument in wanted if argument not in others}
        if not outs or same != others or not missing <= _FACTORY_ARGUMENTS:
            continue
        if [str(a.type).startswith("List") for a in outs] == lists:
            return candidate, [a.name for a in outs], {argument[0] for argument in others}
    return None


def _sum_size(tensor: Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> torch.Size:
    wanted = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    sizes = [1 if i in wanted else size for i, size in enumerate(tensor.size()) if keepdim or i not in wanted]
    return torch.Size(sizes)


def _broadcast_size(one: Any, other: Any, **_: Any) -> torch.Size | None:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return None
    return torch.broadcast_shapes(one.size(), other.size())


_aten = torch.ops.aten
# The operations whose results usually are gradients, and the size of their results: an `out` of another size would be
# resized under everybody who holds it.
_SIZES = {
    _aten.mm.default: lambda a, b: torch.Size((a.size(0), b.size(1))),
    _aten.bmm.default: lambda a, b: torch.Size((a.size(0), a.size(1), b.size(2))),
    _aten.sum.dim_IntList: _sum_size,
    _aten._to_copy.default: lambda a, **_: a.size(),
    _aten.add.Tensor: _broadcast_size,
    _aten.mul.Tensor: _broadcast_size,
}


def writes_directly(op: Any) -> bool:
    """Whether `run_into` can compute the operator's result into given memory without a copy."""
    return op in _SIZES


def fits_into(op: Any, args: tuple, kwargs: dict, target: Tensor) -> bool:
    """Whether the operator's result has the shape of `target`."""
    return op in _SIZES and _SIZES[op](*args, **kwargs) == target.size()


def run_into(op: Any, args: tuple, kwargs: dict, target: Tensor) -> Tensor:
    """The operator's result, computed into `target`, which has the result's shape, strides and dtype."""
    if op is _aten._to_copy.default:
        return target.copy_(args[0])
    overload, names, others = out_overload(op)
    passed = {key: value for key, value in kwargs.items() if key in others}
    return overload(*args, **passed, **{names[0]: target})


class Place(NamedTuple):
    """The operation that makes a tensor: its index in the trace and the layout of its result, of which the tensor may
    be a view."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]


def place_of(tensor: Tensor, made_by: dict[int, tuple[int, torch.Size, tuple]]) -> Place | None:
    """Where a call made a tensor; None where no operation could have computed it straight into other memory (no such
    overload, a tensor that is only part of its memory).

    Args:
        made_by: see `EagerRecorder`.
    """
    if address(tensor) not in made_by:
        return None
    index, size, stride = made_by[address(tensor)]
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and size.numel() == tensor.numel()
    return Place(index, size, stride) if whole else None
