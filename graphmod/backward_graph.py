"""One captured backward: its capture inside the real backward, and its replay into the parameters' gradients (R6).

May import what `forward` may, `forward`, `failures`, `placement` and `recompute`.
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
from graphmod.failures import capture_failed, tell_of_unseen
from graphmod.forward import ForwardGraph
from graphmod.placement import Place, buffers_for, find_places, store
from graphmod.recompute import differentiate
from graphmod.recorder import Recorder
from graphmod.trace import address

_is_not, _grad, _NOTHING = operator.is_not, operator.attrgetter("grad"), repeat(None)


class BackwardGraph:
    """One captured backward.

    Attributes:
        index: its place on the tape of its forward.
        inputs: per output of the forward, where its gradient is read, or None if there was none at capture.
        copied: of those, index and buffer of each that is copied.
        results: per differentiable input and hooked parameter of the forward, its gradient, or None.
        saved, weights: outputs and parameters of the forward that the backward reads again.
        written, accumulated: `(parameter, buffer)` pairs whose gradient the graph overwrites or adds to.
        parameters: those of `written`.
    """

    __slots__ = (
        "accumulated",
        "copied",
        "graph",
        "index",
        "inputs",
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
        the gradients were in the state they had at capture."""
        copied = 0
        for index, buffer in self.copied:
            copied += buffer.load(grads[index], passes)
        as_captured, add_after = self._make_room()
        self.graph.replay()
        for target, part in add_after:
            target.add_(part)
        return copied, as_captured

    def _make_room(self) -> tuple[bool, list[tuple[Tensor, Tensor]]]:
        """Makes gradients that are not as they were at capture fit; returns whether they were, and the additions to do
        after the replay.

        Normally every gradient is as it was and this only assigns `p.grad`. Addition of two terms does not depend on
        their order, so the results stay those of eager accumulation.
        """
        later: list[tuple[Tensor, Tensor]] = []
        as_captured = True
        if not self.accumulated and not any(map(_is_not, map(_grad, self.parameters), _NOTHING)):
            for parameter, buffer in self.written:
                parameter.grad = buffer
            return True, later
        for parameter, buffer in self.written:
            grad = parameter.grad
            if grad is None:
                parameter.grad = buffer
            elif grad is buffer or grad.data_ptr() == buffer.data_ptr():
                later.append((grad, grad.clone()))
            else:
                later.append((grad, buffer))
        for parameter, buffer in self.accumulated:
            grad = parameter.grad
            if grad is buffer:
                continue
            as_captured = as_captured and grad is not None and grad.data_ptr() == buffer.data_ptr()
            if grad is None:
                buffer.zero_()
                parameter.grad = buffer
            elif grad.data_ptr() != buffer.data_ptr():
                buffer.zero_()
                later.append((grad, buffer))
        return as_captured and not later, later


def changed_in_place(module: Any) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a result or "
        f"a parameter of {module._name!r}, which its backward reads again; use the out-of-place operation"
    )


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
    try:
        known.inputs = [None if grad is None else _static_gradient(graph, grad) for grad in grads]
        static = [None if item is None else item.tensor for item in known.inputs]
        direct = graph.direct
        buffers = buffers_for(group, direct)
        given = [tensor for tensor in static if tensor is not None]

        def capture(places: list[Place | None] | None) -> tuple[list[Place | None], int]:
            """Captures with the gradients at `places` computed straight into their buffers; returns where the
            gradients were made, and how many had to be copied although they had a place."""
            targets = {
                place.index: buffer.as_strided(place.size, place.stride)
                for place, parameter, buffer in zip(places or [None] * len(direct), direct, buffers, strict=True)
                if place is not None and parameter.grad is None
            }
            found: list[Place | None] = []
            copies = 0

            def run() -> Any:
                nonlocal copies
                inputs = [item.tensor for item in graph.inputs]
                through, gradients = differentiate(graph, graph.results.retained, inputs, static, direct, graph.edges)
                taken = {address(tensor) for tensor in (*given, *buffers)}
                known.results = [_own(item, taken) for item in through]
                before = list(gradients)
                known.written, known.accumulated, copies = store(gradients, buffers)
                return before

            def check(recorder: Recorder, gradients: Any) -> None:
                found.extend(find_places(gradients, recorder))

            known.graph, _ = group.backend.capture(run, arena.pool, given, entry.generators, check, targets)
            return found, copies - sum(place is None for place in places or ())

        sizes = tuple((tensor.size(), tensor.dtype) for tensor in (*direct, *given, *(s.tensor for s in graph.inputs)))
        shape = (type(module._root), *sizes)
        state = group.backend.random_state()
        places = group.places.get(shape)
        found, missed = capture(places)
        if places is None or missed > 0:  # the first of its kind, or not the operations that the first of its kind had
            if places is not None:
                known.graph.discard()
                group.backend.set_random_state(state)
                found, _ = capture(None)
            group.places[shape] = found
            if any(place is not None for place in found):
                known.graph.discard()
                group.backend.set_random_state(state)
                capture(found)
        known.saved = [output for output in graph.results.with_grad if address(output.tensor) in known.graph.seen.read]
        known.weights = [p for p in graph.parameters if address(p) in known.graph.seen.read]
        _watch_others(graph, known, {address(tensor) for tensor in (*given, *buffers)})
        with group.backend.in_turn():  # the capture made gradient accumulators, and eager code may use them now
            known.graph.replay()
    except Exception as error:  # whatever user code or CUDA raised: the eager backward decides what the user sees
        if "modified by an inplace operation" in str(error):
            raise  # as eager does: something saved for the backward was changed since
        capture_failed(module, entry, error, "its backward")
        module._drop(graph.tape)
        return None
    if any(output.changed() for output in known.saved):
        module._drop(graph.tape)
        raise changed_in_place(module)
    for output in graph.results.with_grad:
        output.counted = output in known.saved
    known.copied = [(i, item.buffer) for i, item in enumerate(known.inputs) if item is not None and item.buffer]
    known.index = graph.tape.append(graph)
    known.parameters = [parameter for parameter, _ in known.written]
    known.results = [None if item is None else StaticOutput(item.detach(), entry) for item in known.results]
    for parameter, buffer in known.written:
        parameter.grad = buffer
    for result in known.results:
        if result is not None:
            group.static[result.tensor.data_ptr()] = result.tensor
            graph.tape.outputs.append(result)
    if graph.tape.fresh_grads is None and graph.parameters:
        graph.tape.fresh_grads = fresh
    graph.backward = known
    graph.forget_autograd()
    module._counters.captures += 1
    module._counters.replays += 1
    module._counters.capture_seconds += time.perf_counter() - began
    return known


def _watch_others(graph: ForwardGraph, known: BackwardGraph, given: set[int]) -> None:
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
        found = graph.module._around.now()
        places = {address(tensor) for _, _, tensor in found.slots}
        if before.seen_until is None:
            tell_of_unseen(graph.module, seen, [where for where in others if where not in places])
        else:  # compiled code may have made the others in the forward: activations too
            others = {where: tensor for where, tensor in others.items() if where in places}
        graph.watch.also(found, others)
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
    if grad._is_zerotensor():  # has no memory
        return torch.zeros(grad.size(), dtype=grad.dtype, device=grad.device)
    if address(grad) in taken or 0 in grad.stride():
        return torch.empty_like(grad).copy_(grad)
    taken.add(address(grad))
    return grad
