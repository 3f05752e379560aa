"""Which operation of a call made a tensor, so that a capture can compute it into other memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from graphmod.trace.operations import address


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
