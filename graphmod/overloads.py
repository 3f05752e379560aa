"""Finds, for an operator, the overload that writes into given tensors, and runs operators into given memory.

Imports nothing of graphmod.
"""

from typing import Any

import torch
from torch import Tensor

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


def writes_directly(op: Any) -> bool:
    """Whether the operator can compute into given memory without a copy. Overloads that PyTorch generates from the
    functional form compute elsewhere and copy."""
    if op is torch.ops.aten._to_copy.default:
        return True
    found = out_overload(op) if isinstance(op, torch._ops.OpOverload) else None
    return found is not None and len(found[1]) == 1 and torch.Tag.generated not in found[0].tags


def run_into(op: Any, args: tuple, kwargs: dict, target: Tensor) -> Tensor:
    """The operator's result, computed into `target`, which has the result's shape, strides and dtype."""
    if op is torch.ops.aten._to_copy.default:
        return target.copy_(args[0])
    overload, names, others = out_overload(op)
    passed = {key: value for key, value in kwargs.items() if key in others}
    return overload(*args, **passed, **{names[0]: target})
