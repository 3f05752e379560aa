"""Parameters, and gradients, of which each rank holds a part (DTensor): where that part lies, and how one is made again
around other memory.

Their gradients go through autograd, which accumulates them as it does in an eager step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphmod.torch_private import is_traceable_wrapper_subclass

_PART = "_local_tensor"


def is_split(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh") and is_traceable_wrapper_subclass(tensor)


def part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return getattr(tensor, _PART) if is_split(tensor) else tensor


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are split in the same way, or both not at all."""
    if not (is_split(one) and is_split(other)):
        return is_split(one) is is_split(other)
    return one.device_mesh == other.device_mesh and one.placements == other.placements


class Whole:
    """Makes the like of a DTensor around other memory.

    Args:
        like: the DTensor.
    """

    __slots__ = ("_form", "_held", "_kind", "_size", "_stride")

    def __init__(self, like: Tensor) -> None:
        names, self._form = like.__tensor_flatten__()
        self._held = {name: getattr(like, name) for name in names if name != _PART}
        self._kind: Any = type(like)
        self._size, self._stride = like.size(), like.stride()

    def around(self, memory: Tensor) -> Tensor:
        """A DTensor of which this rank holds `memory`."""
        return self._kind.__tensor_unflatten__({**self._held, _PART: memory}, self._form, self._size, self._stride)
