"""One captured backward: its capture inside the real backward, and its replay into the parameters' gradients (R6).

May import what `forward` may, `forward`, `failures`, `gradients`, `placement` and `recompute`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from graphmod.buffers import OwnedBuffer, StaticInput, StaticOutput, adopted
from graphmod.errors import CaptureRefused
from graphmod.failures import capture_failed, refuse_unseen
from graphmod.forward import ForwardGraph
from graphmod.gradients import Loans
from graphmod.guards.guards import Guards, what_changed
from graphmod.guards.notes import Notes, noting
from graphmod.placement import Place, buffers_for, find_places, real, store, targets_for
from graphmod.recompute import changed_in_place, differentiate
from graphmod.recorder import Recorder
from graphmod.trace import address

_is_not, _NOTHING = operator.is_not, repeat(None)
_grad, _tensor = operator.attrgetter("grad"), operator.attrgetter("tensor")


class GradientsExchanged(Exception):
    """The user has put other tensors in the place of the gradients that a graph adds to."""


class BackwardGraph:
    """One captured backward.

    Attributes:
        index: its place on the tape of its forward.
        inputs: per output of the forward, where its gradient is read, or None if there was none at capture.
        copied: of those, index and buffer of each that is copied.
        results: per differentiable input and hooked parameter of the forward, its gradient, or None.
        saved, weights: outputs and parameters of the forward that the backward reads again.
        written: the buffers of the gradients that the graph overwrites.
        accumulated: those of gradients that it adds to, each with what it adds to: the buffer's memory, or a tensor
            that the user had put in place.
        parameters, loans: those of `written`.
        apart: whether it was captured with gradients there that the user had put in place, to which the buffers were
            added afterwards.
    """

    __slots__ = (
        "accumulated",
        "apart",
        "copied",
        "graph",
        "index",
        "inputs",
        "loans",
        "parameters",
        "results",
        "saved",
        "weights",
        "written",
    )  # fmt: skip

    def fits(self, grads: Sequence[Tensor | None], passes: int) -> bool:
        for static, grad in zip(self.inputs, grads, strict=True):
            if (static is None) is not (grad is None):
                return False
            if static is None:
                continue
            if static.tensor.stride() != grad.stride():
                return False  # kernels for another layout may round otherwise
            if static.buffer is None:
                if static.pointer != grad.data_ptr():
                    return False
            elif not static.buffer.free_for(grad, passes):
                return False
        return True

    def launch(self, grads: Sequence[Tensor | None], passes: int) -> tuple[int, bool]:
        """Replays into the parameters' gradients, whatever state they are in; returns the bytes copied in, and whether
        the gradients were in the state they had at capture.

        Raises:
            GradientsExchanged: that is not possible; nothing has changed.
            Exception: whatever the launch raised; the gradients are in their places.
        """
        copied = 0
        for index, buffer in self.copied:
            copied += buffer.load(grads[index], passes)
        if not self.accumulated and not any(map(_is_not, map(_grad, self.parameters), _NOTHING)):
            tensors = self.loans.free() or self._free()
            try:
                self.graph.replay()
                for parameter, tensor in zip(self.parameters, tensors, strict=True):
                    parameter.grad = tensor
            except BaseException:
                for parameter in self.parameters:
                    parameter.grad = None
                raise
            return copied, True
        return copied, self._launch_among_others()

    def _free(self) -> list[Tensor]:
        """The tensors for gradients, none of which is there now; what the user holds of those before is moved away."""
        if not all(buffer.evacuate() for buffer in self.written):
            raise GradientsExchanged("views of a gradient are held, which this version of torch cannot move")
        return list(map(_tensor, self.written))

    def _launch_among_others(self) -> bool:
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
        for grad, part in (*before, *add):
            grad.add_(part)
        return not clear and not before and (self.apart or not add)


def capture_backward(graph: ForwardGraph, grads: tuple[Tensor | None, ...]) -> BackwardGraph | None:
    """Captures the backward of a forward that was captured in this pass, replays it once, and appends it to the tape.

    Returns:
        None where that failed; the failure has been counted and logged, and the tape was dropped.

    Raises:
        RuntimeError: something saved for the backward was changed in place since, as eager says it.
    """
    module, entry, group, arena = graph.module, graph.entry, graph.module._group, graph.tape.arena
    fresh = not any(p.grad is not None for p in graph.parameters)
    began = time.perf_counter()
    known = BackwardGraph()
    known.graph = None
    try:
        known.inputs = [None if grad is None else _static_gradient(graph, grad) for grad in grads]
        static = [None if item is None else item.tensor for item in known.inputs]
        direct = graph.direct
        buffers = buffers_for(group, direct)
        into = targets_for(buffers, entry.adds_apart)
        given = [tensor for tensor in static if tensor is not None]
        noted: list[Notes] = []

        def capture(places: list[Place | None] | None) -> tuple[list[Place | None], bool]:
            """Captures with the gradients at `places` computed straight into their buffers; returns where the
            gradients were made, and whether those were not the places for any of them."""
            aimed = {
                position: place
                for position, (place, target) in enumerate(zip(places or (), into, strict=bool(places)))
                if place is not None and target is None
            }
            targets = {
                place.index: buffers[position].memory.as_strided(place.size, place.stride)
                for position, place in aimed.items()
            }
            found: list[Place | None] = []
            missed = False

            def run() -> Any:
                nonlocal missed
                inputs = [item.tensor for item in graph.inputs]
                with noting() as notes:
                    through, gradients = differentiate(
                        graph, graph.results.retained, inputs, static, direct, graph.edges
                    )
                noted[:] = [notes]
                taken = {address(tensor) for tensor in (*given, *(buffer.memory for buffer in buffers))}
                known.results = [_own(item, taken) for item in through]
                before = list(gradients)
                known.written, known.accumulated, missed = store(gradients, buffers, into, aimed)
                return before

            def check(recorder: Recorder, gradients: Any) -> None:
                refused = what_changed(noted[0])
                if refused is not None:
                    raise CaptureRefused(refused)
                found.extend(find_places(gradients, recorder))

            known.graph, _ = group.backend.capture(run, arena.pool, given, graph.recording.generators, check, targets)
            return found, missed

        sizes = tuple((tensor.size(), tensor.dtype) for tensor in (*direct, *given, *(s.tensor for s in graph.inputs)))
        shape = (type(module._root), *sizes)
        state = group.backend.random_state()
        places = group.places.get(shape)
        found, missed = capture(places)
        if places is None or missed:  # the first of its kind, or not the operations that the first of its kind had
            if places is not None:
                known.graph.discard()
                known.graph = None
                group.backend.set_random_state(state)
                found, _ = capture(None)
            group.places[shape] = found
            if any(place is not None for place in found):
                known.graph.discard()
                known.graph = None
                group.backend.set_random_state(state)
                capture(found)
        known.saved = [output for output in graph.results.with_grad if address(output.tensor) in known.graph.seen.read]
        known.weights = [p for p in graph.parameters if address(p) in known.graph.seen.read]
        known_places = {address(tensor) for tensor in (*given, *(buffer.memory for buffer in buffers))}
        _watch_others(graph, known, Guards(noted[0]), known_places)
        if any(output.changed() for output in known.saved):
            raise changed_in_place(module)
        with group.backend.in_turn():  # the capture made gradient accumulators, and eager code may use them now
            known.graph.replay()
            known.apart = False
            for buffer in known.written:
                if buffer.parameter.grad is None:
                    buffer.parameter.grad = buffer.tensor
                else:
                    known.apart = True
                    buffer.parameter.grad.add_(buffer.memory)
    except BaseException as error:  # whatever user code or CUDA raised: the eager backward decides what the user sees
        if known.graph is not None:
            known.graph.discard()
        module._drop(graph.tape)
        if not isinstance(error, Exception) or "modified by an inplace operation" in str(error):
            raise  # as eager does: something saved for the backward was changed since
        capture_failed(module, entry, error, "its backward")
        return None
    for output in graph.results.with_grad:
        output.counted = output in known.saved
    known.copied = [(i, item.buffer) for i, item in enumerate(known.inputs) if item is not None and item.buffer]
    known.index = graph.tape.append(graph)
    known.parameters = [buffer.parameter for buffer in known.written]
    known.loans = Loans(known.written)
    known.results = [None if item is None else StaticOutput(item.detach(), entry) for item in known.results]
    results = [result for result in known.results if result is not None]
    graph.tape.hand_out(results)
    for result in results:
        group.static[result.tensor.data_ptr()] = result.tensor
    if graph.tape.fresh_grads is None and graph.parameters:
        graph.tape.fresh_grads = fresh
    graph.backward = known
    entry.finished(graph)
    graph.forget_autograd()
    module._counters.captures += 1
    module._counters.replays += 1
    module._counters.capture_seconds += time.perf_counter() - began
    return known


def _watch_others(graph: ForwardGraph, known: BackwardGraph, guards: Guards, given: set[int]) -> None:
    """Lets go of the saved activations, whose memory is the next layers' to use; what else the backward reads, such as
    a table of an `autograd.Function`, is held and watched with what the forward reads."""
    seen, before = known.graph.seen, graph.graph.seen
    given |= {address(static.tensor) for static in graph.inputs} | {address(p) for p in graph.parameters}
    given |= {address(p.grad) for p in graph.parameters if p.grad is not None}
    others = {
        where: tensor
        for where, tensor in seen.outside.items()
        if where not in given and where not in before.outside and not before.made(where)
    }
    if others:
        places = {address(tensor) for tensor in guards.tensors}
        if before.seen_until is None:
            refuse_unseen(seen, [where for where in others if where not in places])
        else:  # compiled code may have made the others in the forward: activations too
            others = {where: tensor for where, tensor in others.items() if where in places}
    graph.watch.also(guards, others)
    seen.outside.clear()


def _static_gradient(graph: ForwardGraph, grad: Tensor) -> StaticInput:
    memory = adopted(grad, graph.module._group.static)
    buffer = None
    if memory is None:
        buffer = OwnedBuffer(grad)
        graph.module._counters.copied_bytes += buffer.load(grad, graph.tape.arena.passes)
        memory = buffer.tensor.detach()
    return StaticInput(memory, buffer, "gradient")


def _own(grad: Tensor | None, taken: set[int]) -> Tensor | None:
    """`grad` in memory that nothing else uses; copied only where it is a view, or another gradient too."""
    if grad is None:
        return None
    if grad._is_zerotensor():
        return real(grad)
    if address(grad) in taken or 0 in grad.stride():
        return torch.empty_like(grad).copy_(grad)
    taken.add(address(grad))
    return grad
