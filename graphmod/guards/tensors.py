"""Whether tensors are where and what they were: address, shape, strides, dtype, class and `requires_grad`."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphmod.torch_private import alike

_data_ptr, _size, _stride = Tensor.data_ptr, Tensor.size, Tensor.stride
_requires_grad = operator.attrgetter("requires_grad")
_PLAIN = (Tensor, nn.Parameter)


def _form(tensor: Tensor) -> tuple:
    return type(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _parts(tensor: Tensor) -> list[tuple[Tensor, str, Tensor]]:
    """The tensors with memory that one without (a DTensor) stands for, each with whose and which attribute it is."""
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        return []
    found = []
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        found += [(tensor, name, part), *_parts(part)] if isinstance(part, Tensor) else []
    return found


class TensorWatch:
    """Compares tensors with what they were when it was made.

    Args:
        tensors: those to watch.
        names: by identity of a tensor, under which code reads it.

    Attributes:
        exchanged: whether what `moved` found is more than another `requires_grad`.
        tensors: those of `tensors` that have memory, and those that one without stands for.
    """

    def __init__(self, tensors: list[Tensor], names: dict[int, str]) -> None:
        self.exchanged, self._names = True, names
        self._parts = [part for tensor in tensors for part in _parts(tensor)]
        found = {id(tensor): tensor for tensor in (*tensors, *(part for _, _, part in self._parts))}
        self.tensors = [tensor for tensor in found.values() if tensor.layout is torch.strided]
        self._addresses = list(map(_data_ptr, self.tensors))
        self._sizes = list(map(_size, self.tensors))
        self._strides = list(map(_stride, self.tensors))
        self._flags = list(map(_requires_grad, self.tensors))
        self._forms = list(map(_form, self.tensors))
        self._alike: Callable[..., bool] | None = None

    def moved(self) -> str | None:
        """A tensor that is no longer where or what it was, in words."""
        tensors = self.tensors
        self.exchanged = True
        for tensor, name, part in self._parts:
            if getattr(tensor, name) is not part:
                return f"{name} of a {type(tensor).__name__} it reads is another"
        if list(map(_data_ptr, tensors)) != self._addresses:
            return f"{self._named(self._addresses, _data_ptr)} has moved to another address"
        return None if self._alike is not None and self._alike(*tensors) else self._of_other_kind()

    def _of_other_kind(self) -> str | None:
        """A tensor of another shape, or that requires grad where it did not, in words."""
        tensors = self.tensors
        if list(map(_stride, tensors)) != self._strides or list(map(_size, tensors)) != self._sizes:
            return "a tensor it reads has another shape or other strides than when it was recorded"
        if list(map(_requires_grad, tensors)) != self._flags:
            self.exchanged = False
            return f"requires_grad of {self._named(self._flags, _requires_grad)} changed"
        if list(map(_form, tensors)) != self._forms:
            return "a tensor it reads has another dtype or class than when it was recorded"
        self._alike = alike(tensors)  # which depends on modes, such as autocast, as they are now
        return None

    def _named(self, before: list, read: Callable) -> str:
        """The first tensor that is other than before, by the name under which it is read."""
        now = next(one for one, known in zip(self.tensors, before, strict=True) if read(one) != known)
        name = self._names.get(id(now))
        return "a tensor it reads" if name is None else f"{name!r}, a tensor it reads,"
