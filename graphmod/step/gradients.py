"""The memory in which graphs leave gradients, and what the user holds of it (rule R6).

Graphs write to an address; `.grad` is a tensor over the same memory with a storage of its own. So a gradient that the
user keeps beyond `zero_grad()` can be moved to a copy before its memory is written again, as results are.

Of parameters and gradients of which each rank holds a part (DTensor), memory is that of the part of this rank, around
which one is made again. Their gradients go through autograd, which accumulates them as it does in an eager step.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphmod.step.arena import Arena
from graphmod.step.entry import Entry
from graphmod.step.results import of_argument, of_gradient
from graphmod.step.static_outputs import can_swap, storage_over, swap_for_copy
from graphmod.torch_private import is_traceable_wrapper_subclass, storage_uses
from graphmod.trace.operations import address

_data_ptr = torch.Tensor.data_ptr
_tensor, _where = operator.attrgetter("tensor"), operator.attrgetter("where")


class GradientBuffer:
    """One parameter's gradient.

    Args:
        whole: makes a DTensor around memory of this rank's part, where that is what the gradient is; None of others.

    Attributes:
        parameter: whose gradient it is; kind: see `kind_of`.
        memory: what captures read and write.
        tensor: what is `.grad`, over the same memory.
        where: the storage of `tensor`, as a number.
        passing: the parameters (by identity) whose gradients are taken together with this one, where its memory is that
            of other parameters' gradients, too (see `Passing`); else empty.
        entry: the signature whose captured call left it behind; None of one that a backward graph writes.
        arena: in whose pool the memory is, where graphs in it may use the same for something else; else None.
    """

    def __init__(
        self, parameter: Tensor, memory: Tensor, entry: Entry | None = None, whole: Whole | None = None
    ) -> None:
        self.parameter, self.memory, self.entry, self._whole = parameter, memory, entry, whole
        self.passing: tuple[int, ...] = ()
        self.arena: Arena | None = None
        self.kind = kind_of(parameter)
        self._lend()

    def _lend(self) -> None:
        # No other name for either, not even a local one: references are counted.
        if self._whole is None:
            self._part, self.tensor = None, storage_over(self.memory)
            self._storage = self.tensor.untyped_storage()
        else:
            self._part = storage_over(self.memory)
            self.tensor = self._whole.around(self._part)
            self._alone = getrefcount(self._part)
            self._storage = self._part.untyped_storage()
        self.where = self._storage._cdata
        if self._part is None and self.memory.numel():
            _lent[self.memory.data_ptr()] = self

    def held(self) -> bool:
        """Whether anybody but the parameter holds the gradient, or a view of it."""
        if self._part is not None and getrefcount(self._part) > self._alone:
            return True
        alone = unheld()
        most = alone.as_gradient if self.parameter.grad is self.tensor else alone.references
        return _references(self) > most or storage_uses(self.where) > alone.uses

    def evacuate(self, for_another: bool = False) -> bool:
        """Moves what is held to memory of its own.

        Args:
            for_another: the memory is about to be another parameter's gradient, so that its own parameter counts, too.

        Returns:
            Whether the memory may be written now. False only where this torch cannot move a storage (before 2.13), and
            views of the gradient are held, or it is a DTensor.
        """
        # Somebody has given the tensor other memory (`p.grad.data = ...`, `module.to(memory_format=...)`).
        elsewhere = part(self.tensor).data_ptr() != self.memory.data_ptr()
        elsewhere = elsewhere or (self._part is not None and part(self.tensor) is not self._part)
        if not elsewhere and not (self.held() or (for_another and self.parameter.grad is self.tensor)):
            return True
        with torch.inference_mode(False), torch.no_grad():  # a replay in inference mode may be what writes there
            if can_swap():
                swap_for_copy(self._storage, self.memory.device)
            elif self._part is not None or storage_uses(self.where) > unheld().uses - elsewhere:
                return False
            elif not elsewhere:
                self.tensor.data = self.tensor.detach().clone()
            self._lend()
        return True

    def copy(self) -> Tensor:
        """A copy of what a graph has left."""
        copied = self.memory.clone()
        return copied if self._whole is None else self._whole.around(copied)

    def let_go(self) -> None:
        """Nothing to forget: what holds a gradient is counted when its memory is about to be written."""


def kind_of(parameter: Tensor) -> tuple:
    """What decides how the memory of a parameter's gradient is laid out."""
    return parameter.size(), parameter.stride(), parameter.dtype, parameter.device


# Address -> the gradient lent out over it.
_lent: weakref.WeakValueDictionary[int, GradientBuffer] = weakref.WeakValueDictionary()


class _Counts(NamedTuple):
    """Of a gradient that nobody holds: references to its tensor, in a list and as `.grad`, and uses of its storage."""

    references: int
    as_gradient: int
    uses: int


def _references(buffer: GradientBuffer) -> int:
    """To its tensor, counted as `Loans` counts them."""
    tensors = list(map(_tensor, (buffer,)))
    return max(map(getrefcount, tensors))


@functools.cache
def unheld() -> _Counts:
    """How often torch itself counts, which differs from version to version."""
    with torch.inference_mode(False), torch.no_grad():
        buffer = GradientBuffer(nn.Parameter(torch.zeros(1)), torch.zeros(1))
        alone = _references(buffer)
        buffer.parameter.grad = buffer.tensor
        return _Counts(alone, _references(buffer), storage_uses(buffer.where))


def out_of_pool(grad: Tensor | None) -> bool:
    """Moves a gradient that lies where graphs have activations, too, to memory of its own, where it stays. False where
    it cannot be moved."""
    buffer = None if grad is None or grad.layout is not torch.strided else _lent.get(grad.data_ptr())
    if buffer is None or buffer.arena is None or buffer.tensor is not grad:
        return True
    return buffer.evacuate(for_another=True)


def memory_of(grad: Tensor | None) -> Tensor | None:
    """What a capture is to see in the place of a gradient: the memory itself, which stays where it is."""
    buffer = None if grad is None or grad.layout is not torch.strided else _lent.get(grad.data_ptr())
    return buffer.memory if buffer is not None and buffer.tensor is grad else grad


def _lent_over(memory: Tensor | None) -> Tensor | None:
    """What users have in the place of such memory."""
    buffer = None if memory is None or memory.layout is not torch.strided else _lent.get(memory.data_ptr())
    return buffer.tensor if buffer is not None and buffer.memory is memory else memory


class as_memory:
    """Lets what runs inside see the memory of gradients in their place. May be left and entered again."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)

    def __enter__(self) -> None:
        self._exchange(memory_of)

    def __exit__(self, *_: object) -> None:
        self._exchange(_lent_over)

    def _exchange(self, other: Callable[[Tensor | None], Tensor | None]) -> None:
        for parameter in self._parameters:
            if other(parameter.grad) is not parameter.grad:
                parameter.grad = other(parameter.grad)


Left = GradientBuffer | Tensor | Callable[[Sequence[Tensor]], Tensor] | None
"""What code leaves behind as a gradient; a callable finds it among what a replay is given."""


def left_behind(
    parameters: Iterable[Tensor],
    before: Iterable[Tensor | None],
    given: Sequence[Tensor],
    made: Callable[[int], bool],
    entry: Entry,
) -> list[tuple[Tensor, Left]]:
    """The gradients that captured code has left to parameters, which are lent from now on.

    Args:
        before: their gradients until then.
        given: the tensors that the capture was given.
        made, entry: see `_lend`.
    """
    left = [
        (parameter, parameter.grad)
        for parameter, grad in zip(parameters, before, strict=True)
        if parameter.grad is not grad
    ]
    owners = {id(grad): parameter for parameter, grad in reversed(left)}  # the first, where several have the same

    def taken(parameter: Tensor, grad: Tensor | None) -> Left:
        if grad is None:
            return None
        if owners[id(grad)] is not parameter:
            return of_gradient(owners[id(grad)])
        return of_argument(grad, given) or _lend(parameter, grad, made, entry)

    return [(parameter, taken(parameter, grad)) for parameter, grad in left]


def _lend(parameter: Tensor, grad: Tensor, made: Callable[[int], bool], entry: Entry) -> GradientBuffer | Tensor:
    """Sets `.grad` to a tensor that may be kept while a graph writes `grad`, which its capture left there.

    Args:
        made: whether the capture made what lies at an address.
        entry: the signature of the call.

    Returns:
        The buffer; `grad` itself if it is another's.
    """
    if grad.requires_grad or grad._is_zerotensor() or not made(address(part(grad))):
        return grad
    buffer = GradientBuffer(parameter, part(grad), entry, Whole(grad) if is_split(grad) else None)
    parameter.grad = buffer.tensor
    return buffer


def leave_behind(gradients: Iterable[tuple[Tensor, Left]], given: Sequence[Tensor], copies: bool) -> None:
    """Gives parameters the gradients that captured code has left to them.

    Args:
        given: the tensors that the replay was given.
        copies: of memory that a graph writes again.
    """
    for parameter, left in gradients:
        grad = left.tensor if isinstance(left, GradientBuffer) else left(given) if callable(left) else left
        if isinstance(left, GradientBuffer) and copies:
            grad = left.copy()
        if parameter.grad is not grad:
            parameter.grad = grad


_PART = "_local_tensor"


def is_split(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh") and is_traceable_wrapper_subclass(tensor)


def part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return getattr(tensor, _PART) if is_split(tensor) else tensor


def alike(one: Any, other: Any) -> bool:
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

    def __init__(self, like: Any) -> None:
        names, self._form = like.__tensor_flatten__()
        self._held = {name: getattr(like, name) for name in names if name != _PART}
        self._kind: Any = type(like)
        self._size, self._stride = like.size(), like.stride()

    def around(self, memory: Tensor) -> Tensor:
        """A DTensor of which this rank holds `memory`."""
        return self._kind.__tensor_unflatten__({**self._held, _PART: memory}, self._form, self._size, self._stride)
