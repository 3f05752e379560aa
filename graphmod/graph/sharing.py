"""Results that share memory: with an argument, with something outside, or with each other. In eager code, what is
written into one is seen in the other, and so it must be after a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from graphmod.errors import CaptureRefused
from graphmod.trace.operations import address


class PartOf:
    """A view, without a history of its own, of another tensor of the same call.

    Args:
        index: which tensor it is a view of.
        whole: that tensor in the capture.
        part: the view in the capture.
        argument: `index` counts the arguments, else the results.

    Raises:
        CaptureRefused: it is no view that can be made of `whole` alone.
    """

    __slots__ = ("_offset", "_size", "_stride", "argument", "index")

    def __init__(self, index: int, whole: Tensor, part: Tensor, argument: bool = False) -> None:
        if part.dtype is not whole.dtype:
            raise CaptureRefused("returns two tensors of other dtypes over the same memory; return copies")
        if not argument and torch.empty_like(whole, device="meta").stride() != whole.stride():
            raise CaptureRefused("returns tensors that are parts of a tensor with gaps; return copies of them")
        self.index, self.argument = index, argument
        self._size, self._stride = part.size(), part.stride()
        self._offset = part.storage_offset() - whole.storage_offset()

    def of(self, whole: Tensor) -> Tensor:
        """The view of the tensor that stands for `whole` in a replay."""
        whole = whole.detach() if whole.requires_grad else whole
        return whole.as_strided(self._size, self._stride, whole.storage_offset() + self._offset)


def fresh_view(tensor: Tensor) -> Callable[[], Tensor]:
    """What makes another tensor object over the same memory in each call, as the code does."""
    return tensor.detach


def shared_parts(tensors: list[Tensor | None]) -> dict[int, int]:
    """Which of some tensors lie wholly inside another one of them: place -> place of the other.

    Raises:
        CaptureRefused: two share some of their elements only.
    """
    by_storage: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None and address(tensor):
            by_storage.setdefault(address(tensor), []).append(place)
    found: dict[int, int] = {}
    for places in by_storage.values():
        places.sort(key=lambda place: (-tensors[place].numel(), not tensors[place].requires_grad, place))
        owners: list[int] = []
        for place in places:
            for owner in owners:
                if _within(tensors[place], tensors[owner]):
                    found[place] = owner
                    break
            else:
                owners.append(place)
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies."""
    first = tensor.storage_offset() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def _within(part: Any, whole: Any) -> bool:
    """Whether all elements of a tensor are elements of another; False where none is."""
    (start, end), (from_, to) = _span(part), _span(whole)
    if end <= from_ or to <= start:
        return False
    if part.dtype is not whole.dtype:
        raise CaptureRefused("returns two tensors of other dtypes over the same memory; return copies")
    with _disable_current_modes(), torch.inference_mode(False):
        last = max(end, to) // part.element_size()
        taken = torch.zeros(last, dtype=torch.bool)
        taken.as_strided(whole.size(), whole.stride(), whole.storage_offset()).fill_(True)
        inside = taken.as_strided(part.size(), part.stride(), part.storage_offset())
        every, none = bool(inside.all()), not bool(inside.any())
    if not every and not none:
        raise CaptureRefused("returns two tensors that overlap in part; return copies")
    return every
