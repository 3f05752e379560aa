"""Which operation of a call made a tensor, so that a capture can compute it into other memory."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.trace.operations import address
from graphmod.trace.overloads import writes_directly


class Place(NamedTuple):
    """The operation that makes a tensor: its index in the trace and the layout of its result, of which the tensor may
    be a view."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]


def place_of(tensor: Tensor, made_by: dict[int, tuple[int, Any, torch.Size, tuple]]) -> Place | None:
    """Where a call made a tensor; None where no operation could have computed it straight into other memory (no such
    overload, a tensor that is only part of its memory).

    Args:
        made_by: see `MemoryTrace`.
    """
    index, op, size, stride = made_by.get(address(tensor), (0, None, None, None))
    if op is None or not writes_directly(op):
        return None
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and size.numel() == tensor.numel()
    return Place(index, size, stride) if whole else None
