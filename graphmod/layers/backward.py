"""One captured backward: where it leaves the parameters' gradients, and its replay into them (R6).

Gradients lie in buffers outside the pool, and are written there without a copy. The operation whose result becomes a
gradient is found from a first capture, which is thrown away; in the second that operation computes straight into the
buffer. Layers of one kind share what the first of them found. So the gradients need no extra kernel, no replay of
another graph can touch them, and all graphs of a parameter (other shapes, other microbatches) share one buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.guards.guards import Guards
from graphmod.ranks.fully_shard import taken_together
from graphmod.step.buffers import StaticInput, StaticOutput
from graphmod.step.gradients import GradientBuffer, Loans, Passing, Whole, is_split, kind_of, part
from graphmod.step.group import Group
from graphmod.torch_private import foreach_add_

Gradients = list[tuple[Tensor, Tensor | None]]  # (parameter, its gradient)
_is_not, _NOTHING = operator.is_not, repeat(None)
_grad, _tensor = operator.attrgetter("grad"), operator.attrgetter("tensor")
_data_ptr = Tensor.data_ptr


class GradientsExchanged(Exception):
    """The user has put other tensors in the place of the gradients that a graph adds to."""


class Outvoted(Exception):
    """Another rank runs this backward without a graph."""


def changed_in_place(name: str) -> RuntimeError:
    """What autograd says where a backward reads something that was changed since."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a result "
        f"or a parameter of {name!r}, which its backward reads again; use the out-of-place operation"
    )


class BackwardGraph:
    """One captured backward.

    Attributes:
        index: its place on the tape of its forward.
        inputs: per output of the forward, where its gradient is read, or None if there was none at capture.
        copied: of those, index and buffer of each that is copied.
        results: per differentiable input and hooked parameter of the forward, its gradient, or None.
        wholes: likewise, what makes it again of that where it is a DTensor, or None.
        saved, weights: outputs and parameters of the forward that the backward reads again; `weights_at` their
            addresses.
        written: the buffers of the gradients that the graph overwrites.
        accumulated: those of gradients that it adds to, each with what it adds to: the buffer's memory, or a tensor
            that the user had put in place.
        parameters, loans: those of `written`.
        passing, passed: those of `written` whose memory other graphs write, too, and what says who may.
        guards: what its code read; None where it reads nothing.
        held: what it reads by address besides what it is given and what the forward reads.
        apart: whether it was captured with gradients there that the user had put in place, to which the buffers were
            added afterwards.
    """

    def __init__(
        self,
        graph: Any,
        inputs: list[StaticInput | None],
        results: list[StaticOutput | None],
        wholes: list[Whole | None],
        written: list[GradientBuffer],
        accumulated: list[tuple[GradientBuffer, Tensor]],
        *,
        saved: list[StaticOutput],
        weights: list[Tensor],
        guards: Guards | None,
        held: list[Tensor],
        passing: Loans | None,
        passed: Passing,
    ) -> None:
        self.graph, self.inputs, self.results, self.wholes = graph, inputs, results, wholes
        self.written, self.accumulated, self.saved, self.held = written, accumulated, saved, held
        self.weights, self._any_split = weights, any(map(is_split, weights))
        self.weights_at = self._addresses()
        self.guards = guards
        self.passing, self.passed = passing, passed
        self.copied = [(i, item.buffer) for i, item in enumerate(inputs) if item is not None and item.buffer]
        self.parameters, self.loans = [buffer.parameter for buffer in written], Loans(written)
        self.index = -1
        self.apart = False

    def launch_first(self) -> None:
        """Replays for the first time, among the gradients that were there at capture."""
        self.graph.replay()
        for buffer in self.written:
            if buffer.parameter.grad is None:
                buffer.parameter.grad = buffer.tensor
            else:
                self.apart = True
                buffer.parameter.grad.add_(buffer.memory)

    def _addresses(self) -> list[int]:
        return list(map(_data_ptr, map(part, self.weights) if self._any_split else self.weights))

    def fits(self, grads: Sequence[Tensor | None], passes: int) -> bool:
        if self._addresses() != self.weights_at:
            return False  # `fully_shard` may have collected them elsewhere than for the forward
        for static, grad in zip(self.inputs, grads, strict=True):
            if (static is None) is not (grad is None):
                return False
            if static is None or grad is None:
                continue
            if static.tensor.stride() != grad.stride():
                return False  # kernels for another layout may round otherwise
            if static.buffer is None:
                if static.pointer != grad.data_ptr():
                    return False
            elif not (static.buffer.free_for(grad, passes) and static.buffer.aligned_as(grad)):
                return False
        return True

    def changed(self) -> str | None:
        """What its code would read that is no longer as it was, in words."""
        return None if self.guards is None else self.guards.moved() or self.guards.changed()

    def launch(self, grads: Sequence[Tensor | None], passes: int, agrees: Callable[[], bool]) -> tuple[int, bool]:
        """Replays into the parameters' gradients, whatever state they are in; returns the bytes copied in, and whether
        the gradients were in the state they had at capture.

        Args:
            agrees: asked before anything changes, once it is known that it can.

        Raises:
            GradientsExchanged: that is not possible; nothing has changed.
            Outvoted: others do not agree; nothing has changed.
            Exception: whatever the launch raised; the gradients are in their places.
        """
        copied = 0
        if self.passing is not None and not self.passed.claim(self.passing):
            raise GradientsExchanged("views of another layer's gradient are held, which this torch cannot move")
        for index, buffer in self.copied:
            grad = grads[index]
            assert grad is not None, "of gradients that fit"
            copied += buffer.load(grad, passes, self)
        if not self.accumulated and not any(map(_is_not, map(_grad, self.parameters), _NOTHING)):
            tensors = self.loans.free() or self._free()
            if not agrees():
                raise Outvoted
            try:
                self.graph.replay()
                for parameter, tensor in zip(self.parameters, tensors, strict=True):
                    parameter.grad = tensor
            except BaseException:
                for parameter in self.parameters:
                    parameter.grad = None
                raise
            return copied, True
        return copied, self._launch_among_others(agrees)

    def _free(self) -> list[Tensor]:
        """The tensors for gradients, none of which is there now; what the user holds of those before is moved away."""
        if not all(buffer.evacuate() for buffer in self.written):
            raise GradientsExchanged("views of a gradient are held, which this version of torch cannot move")
        return list(map(_tensor, self.written))

    def _launch_among_others(self, agrees: Callable[[], bool]) -> bool:
        """Replays where gradients may not be as they were at capture; returns whether they were.

        The sum of two terms does not depend on their order, so the results are those of eager accumulation.
        """
        fill, before = [], []  # parameters without a gradient; copies of gradients that the graph is going to overwrite
        add: list[tuple[Tensor, Tensor]] = []
        clear: list[Tensor] = []
        for buffer, target in (*zip(self.written, _NOTHING, strict=False), *self.accumulated):
            grad, memory = buffer.parameter.grad, buffer.memory
            if target is None or target is memory:
                if grad is not None and grad.data_ptr() == memory.data_ptr():
                    if target is None:
                        before.append((grad, grad.clone()))
                    continue
                if not buffer.evacuate():
                    raise GradientsExchanged("views of a gradient are held, which this version of torch cannot move")
                if target is not None:
                    clear.append(memory)
                if grad is None:
                    fill.append(buffer)
                else:
                    add.append((grad, memory))
            elif grad is None or (grad is not target and grad.data_ptr() != target.data_ptr()):
                raise GradientsExchanged("gradients that the graph adds to were exchanged")
        if not agrees():
            raise Outvoted
        for memory in clear:
            memory.zero_().neg_()  # -0, to which anything may be added
        try:
            self.graph.replay()
        except BaseException:
            for grad, kept in before:
                grad.copy_(kept)
            raise
        for buffer in fill:
            buffer.parameter.grad = buffer.tensor
        for grad, more in (*before, *add):
            grad.add_(more)
        return not clear and not before and (self.apart or not add)


def buffers_for(group: Group, parameters: list[Tensor]) -> list[GradientBuffer]:
    """The gradient buffer of each parameter, made where it has none. The memory may be written where the gradient is
    not there now; that of those that are passing, once `Passing.claim` has said so."""
    buffers, together = [], taken_together(parameters)
    others = {one for members in together.values() for one in members} - set(map(id, parameters))
    taken = {buffer.memory.data_ptr() for one in others if (buffer := group.gradients.get(one)) and buffer.passing}
    for parameter in parameters:
        buffer = group.gradients.get(id(parameter))
        passes = id(parameter) in together and parameter.grad is None
        if buffer is not None and (buffer.kind != kind_of(parameter) or bool(buffer.passing) is not passes):
            buffer = None
        if passes:
            if buffer is None or buffer.memory.data_ptr() in taken:
                buffer = GradientBuffer(parameter, group.passing.memory_for(parameter, taken))
                buffer.passing = together[id(parameter)]
            taken.add(buffer.memory.data_ptr())
        elif buffer is None or (parameter.grad is not buffer.tensor and not buffer.evacuate()):
            buffer = GradientBuffer(parameter, torch.empty_like(parameter, requires_grad=False))
        group.gradients[id(parameter)] = buffer
        buffers.append(buffer)
    return buffers


def targets_for(buffers: list[GradientBuffer], apart: bool) -> list[Tensor | None]:
    """What a captured backward adds each gradient to; None where it overwrites the buffer.

    Args:
        apart: gradients that the user put in place are added to outside of the graph.
    """
    found: list[Tensor | None] = []
    for buffer in buffers:
        grad = buffer.parameter.grad
        own = grad is not None and grad.data_ptr() == buffer.memory.data_ptr()
        found.append(buffer.memory if own else None if apart else grad)
    return found


def store(
    gradients: Gradients, buffers: list[GradientBuffer], into: list[Tensor | None], aimed: Collection[int]
) -> tuple[list[GradientBuffer], list[tuple[GradientBuffer, Tensor]], bool]:
    """Inside a capture: brings the gradients to where they stay.

    Args:
        into: what each is added to, None where it is written to its buffer.
        aimed: positions of the parameters for whose gradient an operation was given the buffer.

    Returns:
        The buffers that are written, those that are added to with the tensor that is, and whether something else than
        the gradient was computed into any of the buffers.

    Raises:
        CaptureRefused: a gradient is sparse.
    """
    written, accumulated, parts = [], [], []
    missed = False
    for position, ((parameter, grad), buffer, target) in enumerate(zip(gradients, buffers, into, strict=True)):
        if grad is None:
            missed = missed or position in aimed
            continue
        if grad.layout is not torch.strided:
            raise CaptureRefused(
                f"has a sparse gradient for a parameter of shape {tuple(parameter.shape)}, whose size may be another "
                "in each step; use sparse=False, or keep that module out of the graph"
            )
        if target is not None:
            accumulated.append((buffer, target))
            parts.append(real(grad))
            continue
        memory = buffer.memory
        if grad._is_zerotensor() or grad.data_ptr() != memory.data_ptr() or grad.stride() != memory.stride():
            memory.copy_(real(grad))
            missed = missed or position in aimed
        written.append(buffer)
    if accumulated:
        foreach_add_([target for _, target in accumulated], parts)
    return written, accumulated, missed


def real(tensor: Tensor) -> Tensor:
    """The tensor itself, or zeros in memory of their own for what autograd only says is zero."""
    if not tensor._is_zerotensor():
        return tensor
    return torch.zeros(tensor.size(), dtype=tensor.dtype, device=tensor.device)
