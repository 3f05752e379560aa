"""The capture of a backward inside the real one (R2, R6)."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.graph.backward import BackwardGraph
from graphmod.graph.buffers import OwnedBuffer, StaticInput, StaticOutput, adopted
from graphmod.graph.differentiate import changed_in_place, differentiate
from graphmod.graph.forward import ELSEWHERE, ForwardGraph
from graphmod.graph.gradients import Loans
from graphmod.graph.group import Group
from graphmod.graph.placement import Place, buffers_for, find_places, real, store, targets_for
from graphmod.graph.split import Whole, is_split, part
from graphmod.graph.watch import refuse_unseen
from graphmod.guards.changes import what_changed
from graphmod.guards.guards import Guards
from graphmod.guards.notes import Notes
from graphmod.ranks.board import LateRanks
from graphmod.reads.watching import noting
from graphmod.trace import dispatch
from graphmod.trace.operations import address
from graphmod.trace.recorder import Recorder

USES_UP = (
    "does something else in its backward when that runs again: it uses up what its forward kept, and a capture may run "
    "it twice"
)


def capture_backward(graph: ForwardGraph, grads: tuple[Tensor | None, ...]) -> BackwardGraph | None:
    """Captures the backward of a forward that was captured in this pass, replays it once, and appends it to the tape.

    Returns:
        None where that failed; the failure has been counted and logged, and the tape was dropped.

    Raises:
        RuntimeError: something saved for the backward was changed in place since, as eager says it.
    """
    context, entry, group, arena = graph.context, graph.entry, graph.context.group, graph.tape.arena
    began = time.perf_counter()
    known = BackwardGraph()
    known.graph = None
    noted: list[Notes] = []
    known_steps: list[tuple] = []  # of the capture before
    try:
        known.inputs = [None if grad is None else _static_gradient(graph, grad) for grad in grads]
        static = [None if item is None else item.tensor for item in known.inputs]
        direct = graph.direct
        buffers = buffers_for(group, direct)
        known.passed = group.passing
        known.passing = Loans(passing) if (passing := [one for one in buffers if one.passing]) else None
        if known.passing is not None and not group.passing.claim(known.passing):
            raise CaptureRefused("leaves gradients where views of another layer's are held")
        into = targets_for(buffers, entry.adds_apart)
        given = [tensor for tensor in static if tensor is not None]

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
                    noted[:] = [notes]
                    through, gradients = differentiate(
                        graph, graph.results.retained, inputs, static, direct, graph.edges
                    )
                    steps = [(step.op, repr(step.scalars)) for step in dispatch.current().trace]
                if steps != (known_steps or steps):
                    raise CaptureRefused(USES_UP)
                known_steps[:] = steps
                taken = {address(tensor) for tensor in (*given, *(buffer.memory for buffer in buffers))}
                known.wholes = [Whole(item) if item is not None and is_split(item) else None for item in through]
                known.results = [None if item is None else _own(_there(part(item)), taken) for item in through]
                before = list(gradients)
                known.written, known.accumulated, missed = store(gradients, buffers, into, aimed)
                return before

            def check(recorder: Recorder, gradients: Any) -> None:
                refused = what_changed(noted[0])
                if recorder.collectives and context.agreement is None:
                    refused = refused or "communicates with other processes, which its forward does not; wrap the step"
                if refused is not None:
                    raise CaptureRefused(refused)
                found.extend(find_places(gradients, recorder))

            known.graph, _ = group.backend.capture(run, arena.pool, given, graph.recording.generators, check, targets)
            return found, missed

        sizes = tuple((tensor.size(), tensor.dtype) for tensor in (*direct, *given, *(s.tensor for s in graph.inputs)))
        trained = tuple(item.tensor.requires_grad for item in graph.inputs)
        shape = (type(context.root), len(graph.graph.seen.trace), trained, *sizes)
        state = group.backend.random_state()
        # A compiled backward writes over what its forward saved, so that there is only one of it. And nobody sees where
        # it makes its gradients.
        once = graph.graph.seen.ran_compiled
        places = None if once else group.places.get(shape)
        found, missed = capture(places)
        if not once and (places is None or missed):  # the first of its kind, or other operations than the first had
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
        known.weights = [p for p in graph.parameters if address(part(p)) in known.graph.seen.read]
        known.weights_at = [part(p).data_ptr() for p in known.weights]
        known_places = {address(tensor) for tensor in (*given, *(buffer.memory for buffer in buffers))}
        _watch_others(graph, known, Guards(noted[0]), known_places)
        # From now on these: what was recorded keeps what that one call had saved.
        graph.recording.its_backward.guards[tuple(grad is not None for grad in grads)] = (
            [] if known.guards is None else [known.guards]
        )
        if any(output.changed() for output in known.saved):
            raise changed_in_place(context)
        if context.agreement is not None and not context.agreement.captured(True):
            raise CaptureRefused(ELSEWHERE)
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
        context.drop(graph.tape)
        if context.agreement is not None:
            context.agreement.captured(False)
        changed = "modified by an inplace operation" in str(error)
        if changed or isinstance(error, LateRanks) or not isinstance(error, Exception):
            raise  # as eager does: something saved for the backward was changed since
        context.failed(entry, error, "its backward")
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
    known.launched_in, known.unwatched = arena.passes, graph.summed
    graph.backward = known
    for place in graph.summed:
        if known.results[place] is not None:
            group.sums[known.results[place].tensor.data_ptr()] = graph
    for item in known.inputs:
        if item is not None and item.buffer is None:
            _watch_sum(group, item)
    if graph.tape.fresh_grads is None and graph.parameters:
        graph.tape.fresh_grads = group.found_fresh
    entry.finished(graph)
    graph.forget_autograd()
    context.counters.captures += 1
    context.counters.replays += 1
    context.counters.capture_seconds += time.perf_counter() - began
    return known


def _watch_others(graph: ForwardGraph, known: BackwardGraph, guards: Guards, given: set[int]) -> None:
    """Lets go of the saved activations, whose memory is the next layers' to use; what else the backward reads, such as
    a table of an `autograd.Function`, is held and watched."""
    seen, before = known.graph.seen, graph.graph.seen
    given |= {address(static.tensor) for static in graph.inputs} | {address(part(p)) for p in graph.parameters}
    given |= {address(part(p.grad)) for p in graph.parameters if p.grad is not None}
    others = {
        where: tensor
        for where, tensor in seen.outside.items()
        if where not in given and where not in before.outside and not before.made(where)
    }
    if others:
        places = {address(tensor) for tensor in guards.tensors}
        refuse_unseen(seen, [where for where in others if where not in places])
    known.guards, known.held = guards or None, list(others.values())
    seen.outside.clear()


def _watch_sum(group: Group, gradient: StaticInput) -> None:
    """Has the one backward that makes a gradient leave it to the other, which reads it at its place, to notice when
    autograd adds more to it."""
    maker = group.sums.get(gradient.pointer)
    if maker is not None and maker.backward is not None:
        noticed = maker.backward.place_of(gradient.pointer)
        maker.backward.unwatched = [place for place in maker.backward.unwatched if place != noticed]


def _static_gradient(graph: ForwardGraph, grad: Tensor) -> StaticInput:
    memory = adopted(grad, graph.context.group.static)
    buffer = None
    if memory is None:
        buffer = OwnedBuffer(grad)
        graph.context.counters.copied_bytes += buffer.load(grad, graph.tape.arena.passes, graph)
        memory = buffer.tensor.detach()
    return StaticInput(memory, buffer, "gradient")


def _there(grad: Tensor) -> Tensor:
    """A gradient that has arrived: other ranks may have a part in it, for which nobody has waited yet."""
    return grad.trigger_wait() if hasattr(grad, "trigger_wait") else grad


def _own(grad: Tensor, taken: set[int]) -> Tensor:
    """`grad` in memory that nothing else uses; copied only where it is a view, or another gradient too."""
    if grad._is_zerotensor():
        return real(grad)
    if address(grad) in taken or 0 in grad.stride():
        return torch.empty_like(grad).copy_(grad)
    taken.add(address(grad))
    return grad
