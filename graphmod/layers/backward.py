"""One captured backward: where it leaves the parameters' gradients, and its replay into them (R6).

Gradients lie in buffers outside the pool, and are written there without a copy. The operation whose result becomes a
gradient is found from a first capture, which is thrown away; in the second that operation computes straight into the
buffer. Layers of one kind share what the first of them found. So the gradients need no extra kernel, no replay of
another graph can touch them, and all graphs of a parameter (other shapes, other microbatches) share one buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch import Tensor

from graphmod.guards.guards import Guards
from graphmod.step.buffers import StaticInput, StaticOutput
from graphmod.step.gradients import GradientBuffer, Loans, Passing, Whole, is_split, part

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


@dataclass(eq=False, repr=False)
class BackwardGraph:
    """One captured backward.

    Attributes:
        index: its place on the tape of its forward.
        inputs: per output of the forward, where its gradient is read, or None if there was none at capture.
        copied: of those, index and buffer of each that is copied.
        results: per differentiable input and hooked parameter of the forward, its gradient, or None.
        wholes: per result, what makes it again where it is a DTensor, or None.
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

    graph: Any
    inputs: list[StaticInput | None]
    results: list[StaticOutput | None]
    wholes: list[Whole | None]
    written: list[GradientBuffer]
    accumulated: list[tuple[GradientBuffer, Tensor]]
    saved: list[StaticOutput]
    weights: list[Tensor]
    guards: Guards | None
    held: list[Tensor]
    passing: Loans | None
    passed: Passing

    def __post_init__(self) -> None:
        self._any_split = any(map(is_split, self.weights))
        self.weights_at = self._addresses()
        self.copied = [(i, item.buffer) for i, item in enumerate(self.inputs) if item is not None and item.buffer]
        self.parameters, self.loans = [buffer.parameter for buffer in self.written], Loans(self.written)
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
