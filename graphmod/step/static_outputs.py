"""The tensors that a graph hands out: whose memory they share, and when a result that is held moves to a copy."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from graphmod.step.entry import Entry
from graphmod.torch_private import from_dlpack, storage_uses, to_dlpack

_SMALL = 1024  # bytes


class StaticOutput:
    """One tensor result of a graph; `entry` is the signature it belongs to.

    Every call hands out a tensor over the same memory, with a storage that is not the graph's. If the caller still
    holds it (or a view of it) when the graph is about to overwrite that memory, the storage is moved to a copy first,
    so that no result ever changes in the caller's hands, and the next call gets another storage. Nothing is copied for
    results that were dropped. Before torch 2.13 only a result without views can be moved: where views are held, its
    signature is captured anew and hands out copies from then on.

    `copied` says whether a result without gradient is better copied at once: on the CPU, where numpy may look at the
    same memory, and such a view cannot be moved; and where it is small, like a loss, which most loops still hold when
    the next step begins.

    `counted` says whether changes that the caller makes in place are to be noticed; only a result that a backward reads
    again needs that.
    """

    __slots__ = ("_alias", "_out", "_pointer", "_source", "_storage", "_twin", "copied", "counted", "entry", "tensor")

    def __init__(self, tensor: Tensor, entry: Entry, counted: bool = False) -> None:
        self.tensor, self.entry, self.counted = tensor, entry, counted
        self.copied = not tensor.is_cuda or tensor.nbytes <= _SMALL
        self._pointer = tensor.data_ptr()
        self._source: Tensor | None = None  # what results are made of: they share its storage
        self._storage: Any = None
        self._twin: Tensor | None = None  # shares the version counter of the last result
        self._out = False  # a result may be in somebody's hands
        self._alias: Any = None

    def hand_out(self) -> Tensor:
        source = self._source
        if source is None or source.data_ptr() != self._pointer:  # others may move a storage too (share_memory_)
            source = storage_over(self.tensor)
            self._storage = source.untyped_storage()  # first: an interrupt may come between the two
            self._source = source
        self._out = True
        alias = source.data  # with a version counter of its own
        self._twin = alias.detach() if self.counted else None
        self._alias = weakref.ref(alias)
        return alias

    def changed(self) -> bool:
        """Whether the caller changed the last handed-out result in place; always False if that is not counted."""
        return self._twin is not None and self._twin._version != 0

    def _holders(self) -> int:
        """Who shares the storage of the last result, besides this object."""
        return storage_uses(self._storage._cdata) - (2 if self._twin is None else 3)

    def held(self) -> bool:
        """Whether somebody still holds the last handed-out result."""
        return self._out and self._holders() > 0

    def let_go(self) -> None:
        """Forgets the last handed-out result if nobody holds it: then there will be nothing to move."""
        if not self.held():
            self._out, self._twin = False, None

    def evacuate(self) -> bool:
        """Moves the last handed-out result to memory of its own if somebody holds it.

        Returns:
            Whether the memory may be overwritten now. False only where this torch cannot move a storage (before 2.13)
            and views of the result are held.
        """
        if self.held():
            with torch.inference_mode(False), torch.no_grad():  # a call in inference mode may be what writes there
                if can_swap():
                    swap_for_copy(self._storage, self.tensor.device)
                else:
                    alias = self._alias()
                    if self._holders() > 1 or alias is None:
                        return False
                    alias.data = alias.detach().clone()
            self._source = self._storage = None
        self._out, self._twin = False, None
        return True


_can_swap = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def can_swap() -> bool:
    """Whether this torch can exchange the memory of a storage (from 2.13 on)."""
    return _can_swap


def storage_over(tensor: Tensor) -> Tensor:
    """A tensor over the same memory, which it keeps alive, with a storage of its own."""
    return from_dlpack(to_dlpack(tensor)) if tensor.numel() else torch.empty_like(tensor)


def swap_for_copy(storage: Any, device: torch.device) -> None:
    """Gives a storage, and so all who hold it, a copy of what it holds."""
    old = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    storage._swap_data_ptr_(old.clone().untyped_storage())
