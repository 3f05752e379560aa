"""Gradients side by side in one piece of memory, which one collective sums.

A capture computes gradients straight into that memory where it can (`Script.aims`). So that it does the operations of
the call it was recorded from all the same, there are two operators for what it may leave out: `bucket`, which makes the
memory where no gradient is in it yet, and `gather_`, which copies those that are not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import Diverged
from graphmod.trace.dispatch import beside_the_call

_use_count = torch._C._storage_Use_Count
_operators = torch.library.Library("graphmod", "FRAGMENT")
_operators.define("bucket(Tensor[] gradients) -> Tensor")
_operators.define("gather_(Tensor(a!) bucket, Tensor[] gradients) -> ()")


def alone(gradient: Tensor, arriving: bool) -> bool:
    """Whether no other tensor shares its memory, as the gradient of a sum and of a view of one of its terms do: the
    backward would go on to read what has been summed by then.

    Args:
        arriving: it is the one whose hook runs, which autograd itself may still hold.
    """
    uses = uses_alone()[arriving]
    return uses is not None and _use_count(gradient.untyped_storage()._cdata) <= uses


@functools.cache
def uses_alone() -> tuple[int | None, int | None]:
    """How many uses the memory of a gradient has if no other tensor shares it, later in the backward that made it and
    in its own hook; None where shared memory has no more, so that it cannot be told. Autograd changed what it holds
    between versions of torch, so a small backward shows it. To be asked first where no backward runs."""
    with beside_the_call(), torch.inference_mode(False), torch.enable_grad():
        apart, shared = (_uses_in_hooks(share) for share in (False, True))
    later, arriving = ((few if few < many else None) for few, many in zip(apart, shared, strict=True))
    return later, arriving


def _uses_in_hooks(share: bool) -> tuple[int, int]:
    """Uses of the memory of the first of two gradients in the hook of the second, and in its own."""
    first, second = (torch.ones(2, device="cpu", requires_grad=True) for _ in range(2))
    found: list[int] = []
    hold: list[Tensor] = []

    def look(_: Tensor) -> None:
        if first.grad is None:
            return
        if share and not hold:
            hold.append(first.grad.view(2))
        found.append(_use_count(first.grad.untyped_storage()._cdata))

    for leaf in (first, second):
        leaf.register_post_accumulate_grad_hook(look)
    late = second * 2  # made first, so its backward comes last
    (late + first * 3).sum().backward()
    arriving, later = found
    return later, arriving


class Bucket:
    """Gradients that are summed in one collective.

    Attributes:
        members: the indices of their parameters.
        pending: how many are still to come in this backward.
        parts: where they lie, in one piece of memory, once they are being summed.
    """

    def __init__(self, members: list[int], parameters: list[Tensor]) -> None:
        self.members, self.pending = members, len(members)
        self.parts: list[Tensor] = []
        self._like = [parameters[index] for index in members]
        self._lasting: tuple[Tensor, Any, int] | None = None  # its storage, and its uses while nobody holds a part
        self._aimed: tuple[Tensor, list[Tensor]] | None = None
        self._made: set[int] = set()  # members that an operation was to compute into their parts

    def forget(self) -> None:
        """There is no backward any more that fills it."""
        self.parts, self.pending, self._aimed = [], len(self.members), None
        self._made.clear()

    def part_for(self, member: int) -> Tensor:
        """In a capture: where the gradient that is `member`-th among its members is to be computed."""
        if self._aimed is None:
            flat = _empty_for(self._like)
            self._aimed = flat, _parts_for(flat, self._like)
        self._made.add(member)
        return self._aimed[1][member]

    def place(self, gradients: list[Tensor], recorded: bool) -> Tensor:
        """The memory in which the gradients are to lie side by side, and `parts` of it for them.

        Args:
            recorded: the call is recorded, or captured.

        Raises:
            Diverged: something else was computed where a gradient was to be.
        """
        if not recorded:
            flat = self._lasting_for(gradients)
            self.parts = _parts_for(flat, gradients)
            return flat
        if any(gradients[i].data_ptr() != self._aimed[1][i].data_ptr() for i in self._made):
            raise Diverged("a gradient was made by another operation than in the call before")
        with _meeting(self._aimed):
            flat = torch.ops.graphmod.bucket(gradients)
        self.parts = _parts_for(flat, gradients)
        return flat

    def _lasting_for(self, gradients: list[Tensor]) -> Tensor:
        """The same memory as the last time, unless somebody still holds gradients there: an optimizer's graph reads
        them at their address."""
        if self._lasting is None or _use_count(self._lasting[1]._cdata) > self._lasting[2]:
            flat = _empty_for(gradients)
            storage = flat.untyped_storage()
            self._lasting = flat, storage, _use_count(storage._cdata)
        return self._lasting[0]


_aimed: tuple[Tensor, list[Tensor]] | None = None


@contextlib.contextmanager
def _meeting(aimed: tuple[Tensor, list[Tensor]] | None) -> Iterator[None]:
    """Lets `bucket` give memory that some of its gradients already lie in."""
    global _aimed
    _aimed = aimed
    try:
        yield
    finally:
        _aimed = None


def _bucket(gradients: list[Tensor]) -> Tensor:
    return _empty_for(gradients) if _aimed is None else _aimed[0]


def _gather(bucket: Tensor, gradients: list[Tensor]) -> None:
    parts = _parts_for(bucket, gradients)
    apart = [i for i, (part, one) in enumerate(zip(parts, gradients, strict=True)) if part.data_ptr() != one.data_ptr()]
    if apart:
        torch._foreach_copy_([parts[i] for i in apart], [gradients[i] for i in apart])


_operators.impl("bucket", _bucket, "CompositeExplicitAutograd")
_operators.impl("gather_", _gather, "CompositeExplicitAutograd")


def _sizes_of(tensors: list[Tensor]) -> list[int]:
    """Elements for each. They begin at multiples of 16 bytes, as kernels need it to read several elements at once;
    others would add up a norm in another order."""
    step = 16 // tensors[0].element_size()
    return [-(-tensor.numel() // step) * step for tensor in tensors]


def _empty_for(tensors: list[Tensor]) -> Tensor:
    """New memory for tensors of one dtype side by side; the gaps between them are zero."""
    size = sum(_sizes_of(tensors))
    make = torch.empty if size == sum(tensor.numel() for tensor in tensors) else torch.zeros
    return make(size, dtype=tensors[0].dtype, device=tensors[0].device)


def _parts_for(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The part of each in such memory, contiguous."""
    parts = zip(flat.split(_sizes_of(tensors)), tensors, strict=True)
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in parts]
