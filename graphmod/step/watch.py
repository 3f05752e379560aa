"""Whether a graph may still stand for its call (rule R8): the guards of the recorded call, the gradients it met, and
the tensors it reads by address, which are held.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.guards.guards import Guards
from graphmod.guards.hooks import HookWatch
from graphmod.step.gradients import is_split, part
from graphmod.trace.operations import address
from graphmod.trace.recorder import Follower

_grad, _data_ptr, _requires_grad = operator.attrgetter("grad"), Tensor.data_ptr, operator.attrgetter("requires_grad")


def _where(grad: Tensor | None) -> int:
    return 0 if grad is None else part(grad).data_ptr()


class Watch:
    """Compares the present with the moment of a capture.

    Args:
        guards: of the recorded call.
        outside: address -> tensor, what the capture read without being given it; held from now on.
        parameters: leaf tensors whose `.grad` the capture may have read or set.
        grads: their gradients before the capture.
        backward: whether a backward pass ran inside the capture.
        differentiated: the leaf tensors whose gradients the graph computes, or leaves behind.
        early: the tensors that it may read before it changes any.

    Attributes:
        unseen: the addresses of `outside` to which no guard leads, so that what takes their place goes unnoticed.
    """

    def __init__(
        self,
        guards: Guards,
        outside: dict[int, Tensor],
        parameters: list[Tensor],
        grads: list[Tensor | None],
        backward: bool,
        differentiated: list[Tensor],
        early: list[Tensor],
    ) -> None:
        self._guards = guards
        self.held = list(outside.values())
        self._early = early
        self._early_at = list(map(_data_ptr, self._early))
        found_at = {address(tensor) for tensor in guards.tensors}
        found_at.update(address(part(grad)) for grad in grads if grad is not None)
        self.unseen = [where for where in outside if where not in found_at]
        self._hooks = HookWatch(differentiated)
        self._differentiated = differentiated
        self._watch_grads(parameters, grads, outside, backward)

    def _watch_grads(
        self, parameters: list[Tensor], grads: list[Tensor | None], outside: dict[int, Tensor], backward: bool
    ) -> None:
        """A gradient that was read must be the same. One that was absent must be absent again if a backward ran, and
        one that was there but never read had been cleared inside, and may be anything."""
        watched = [
            (p, g)
            for p, g in zip(parameters, grads, strict=True)
            if (backward if g is None else address(part(g)) in outside)
        ]
        self._with_grads = [p for p, _ in watched]
        self._grads = [g for _, g in watched]
        self._split = any(is_split(g) for g in self._grads if g is not None)  # whose part may be exchanged
        self._grad_addresses = list(map(_where, self._grads))

    def gone(self) -> bool:
        """Whether memory is gone that is read before anything lasting is changed: all that has to be known before that
        part is launched. What was read is held, but a storage can be emptied (`resize_(0)`) or moved, and its memory
        given back, all the same."""
        return list(map(_data_ptr, self._early)) != self._early_at

    def changed(self) -> str | None:
        """What is no longer as it was, in words; None when nothing changed."""
        reason = self._guards.moved() or self._guards.changed()
        if reason is not None:
            return reason
        return self._hooks.changed() or (self._moved_grads() if self._with_grads else None)

    def differentiated_otherwise(self) -> str | None:
        """What has been done since to the parameters, so that autograd would treat their gradients otherwise, in
        words."""
        if not all(map(_requires_grad, self._differentiated)):
            return "a parameter does not require grad any more"
        return self._hooks.added()

    def _moved_grads(self) -> str | None:
        now: list[Any] = list(map(_grad, self._with_grads))
        if not self._split and all(map(operator.is_, now, self._grads)):
            return None
        if list(map(_where, now)) != self._grad_addresses:
            return "the gradients it accumulates into or reads differ from those at capture"
        return None


def refuse_unseen(seen: Follower, unseen: Iterable[int]) -> None:
    """Refuses tensors that a graph would read by address although no guard leads to them: nobody would notice if the
    code found another in their place.

    Args:
        seen: the record of the capture.
        unseen: their addresses.

    Raises:
        CaptureRefused: naming the first of them.
    """
    for where in unseen:
        tensor, index = seen.outside[where], seen.first_seen.get(where)
        if index is None:
            continue  # returned as it is, and never read
        step = seen.trace[index]
        if step.op is torch.ops.aten.lift_fresh.default or where in seen.static:
            continue  # a number in the code; or promised to stay
        kind = f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
        raise CaptureRefused(
            f"reads a {kind} at {step.place} that was found neither among its arguments nor in an attribute, variable "
            "or item that its code reads, so that another in its place would go unnoticed. Pass it as an argument, or "
            "mark_static(tensor) if it stays for good"
        )
