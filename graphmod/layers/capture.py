"""The capture of a backward inside the real one (R2, R6)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.guards.changes import what_changed
from graphmod.guards.guards import Guards
from graphmod.layers.graph import BackwardGraph, Gradients, LayerGraph, changed_in_place
from graphmod.layers.group import LayerGroup, Loans
from graphmod.ranks.agreement import LateRanks
from graphmod.ranks.fully_shard import taken_together
from graphmod.reads.frames import noting
from graphmod.step.arena import Arena
from graphmod.step.gradients import GradientBuffer, Whole, is_split, kind_of, part
from graphmod.step.graph import ELSEWHERE, refuse_unseen
from graphmod.step.static_inputs import StaticInput, static_memory
from graphmod.step.static_outputs import StaticOutput
from graphmod.torch_private import foreach_add_
from graphmod.trace import dispatch
from graphmod.trace.operations import address
from graphmod.trace.recorder import Follower, Producer
from graphmod.trace.undo import Undo, is_interrupt, undoing

USES_UP = (
    "does something else in its backward when that runs again: it uses up what its forward kept, and a capture may run "
    "it twice"
)


def capture_backward(graph: LayerGraph, grads: tuple[Tensor | None, ...], modes: tuple) -> BackwardGraph | None:
    """Captures the backward of a forward that was captured in this pass, replays it once, and appends it to the tape.

    Args:
        modes: of PyTorch, in which it runs.

    Returns:
        None where that failed; the failure has been counted and logged, and the tape was dropped.

    Raises:
        RuntimeError: something saved for the backward was changed in place since, as eager says it.
    """
    context, entry, group = graph.context, graph.entry, graph.group
    began = time.perf_counter()
    capture = _Capture(graph)
    try:
        known = capture.of(grads)
        # From now on these: what was recorded keeps what that one call had saved.
        graph.recording.its_backward.guards[tuple(grad is not None for grad in grads)] = (
            [] if known.guards is None else [known.guards]
        )
        if any(output.changed() for output in known.saved):
            raise changed_in_place(context.name)
        if context.agreement is not None and not context.agreement.captured(True):
            raise CaptureRefused(ELSEWHERE)
        with group.backend.in_turn():  # the capture made gradient accumulators, and eager code may use them now
            known.launch_first()
    except BaseException as error:  # whatever user code or CUDA raised: the eager backward decides what the user sees
        capture.discard()
        context.drop(graph.tape)
        if context.agreement is not None:
            context.agreement.captured(False)
        changed = "modified by an inplace operation" in str(error) and not capture.repeats
        if changed or isinstance(error, LateRanks) or is_interrupt(error):
            raise  # as eager does: something saved for the backward was changed since
        context.failed(entry, error, "its backward")
        return None
    for output in graph.results.with_grad:
        output.counted = output in known.saved
    graph.add_backward(known, modes)
    entry.finished(graph)
    graph.forget_autograd()
    context.counters.captures += 1
    context.counters.replays += 1
    context.counters.capture_seconds += time.perf_counter() - began
    return known


class _Capture:
    """The capture of one backward. Where gradients have buffers, it may run several times: the first of its kind shows
    where they are made, the next computes them straight into their buffers.

    Args:
        graph: of the forward.
    """

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        self._group = graph.group
        self._captured: Any = None
        self._steps: list[tuple] = []  # of the run before
        self.repeats = False  # code that ran once runs again, and may have changed itself what it needs
        self._again = True  # what the forward has saved stays for another run

    def of(self, grads: tuple[Tensor | None, ...]) -> BackwardGraph:
        """The captured backward of these gradients, which has not run yet.

        Raises:
            CaptureRefused: with a reason for the user.
            Exception: whatever the captured code raised.
        """
        graph, group = self._graph, self._group
        inputs = [
            None if grad is None else StaticInput(*static_memory(graph, grad, graph), "gradient") for grad in grads
        ]
        self._grads = [None if item is None else item.tensor for item in inputs]
        self._given = [tensor for tensor in self._grads if tensor is not None]
        arena = graph.tape.arena
        self._buffers = buffers_for(group, graph.direct, arena, self._may_stay())
        shared = [buffer for buffer in self._buffers if buffer is not None and buffer.passing]
        claim = functools.partial(group.passing.claim, Loans(shared, graph.entry)) if shared else None
        if claim is not None and not claim():
            raise CaptureRefused("leaves gradients where views of another layer's are held")
        # What each gradient is added to: the buffer, or what the user put in its place; None where it overwrites it.
        self._into: list[Tensor | None] = []
        for parameter, buffer in zip(graph.direct, self._buffers, strict=True):
            grad = parameter.grad
            own = buffer is not None and grad is not None and grad.data_ptr() == buffer.memory.data_ptr()
            self._into.append(buffer.memory if own else None if graph.entry.adds_apart else grad)
        self._in_place()
        for parameter, memory in self._stayed:
            buffer = group.gradients[id(parameter)] = GradientBuffer(parameter, memory)
            buffer.arena = arena
            self._written.append(buffer)
        self.repeats = False
        seen = self._captured.seen
        guards = Guards(self._notes)
        held = self._others(guards)
        seen.outside.clear()
        return BackwardGraph(
            self._captured,
            inputs,
            [None if item is None else StaticOutput(item.detach(), graph.entry) for item in self._results],
            self._wholes,
            self._written,
            self._accumulated,
            saved=[output for output in graph.results.with_grad if address(output.tensor) in seen.read],
            weights=[p for p in graph.parameters if address(part(p)) in seen.read],
            guards=guards or None,
            held=held,
            claim=claim,
            entry=graph.entry,
        )

    def _may_stay(self) -> bool:
        """Whether gradients may lie in the pool, where activations were: each pass begins without them."""
        graph = self._graph
        alone = graph.context.agreement is None and not graph.entry.copies_out
        return alone and not self._group.keeps_gradients

    def discard(self) -> None:
        """Undoes what the last run changed."""
        if self._captured is not None:
            self._captured.discard()
            self._captured = None
        if not self._again:
            self._graph.forget_autograd()

    def _in_place(self) -> None:
        """Captures, with the gradients computed straight into their buffers where that can be."""
        graph, group = self._graph, self._group
        tensors = (*graph.direct, *self._given, *(item.tensor for item in graph.inputs))
        trained = tuple(item.tensor.requires_grad for item in graph.inputs)
        sizes = [(tensor.size(), tensor.dtype) for tensor in tensors]
        shape = (type(graph.context.root), len(graph.graph.seen.trace), trained, *sizes)
        state = group.backend.random_state()
        # A compiled backward writes over what its forward saved, so that there is only one of it. And nobody sees where
        # it makes its gradients.
        to_fill = any(b is not None and target is None for b, target in zip(self._buffers, self._into, strict=True))
        # An eager backward needs what the forward saved where a parameter was changed since, if the capture fails.
        ticket = None if graph.ticket is None else graph.ticket()
        changed = ticket is None or bool(ticket.changed())
        compiled = graph.graph.seen.ran_compiled
        self._again = not compiled and (to_fill or changed)
        if compiled or not to_fill:
            self._once(None)
            return
        producers = group.producers.get(shape)
        if producers is not None:
            if not self._once(producers):
                return
            self.discard()  # other operations than the first of its kind had
            group.backend.set_random_state(state)
        group.producers[shape] = producers = self._find_producers()
        self.discard()
        group.backend.set_random_state(state)
        self._once(producers)

    def _find_producers(self) -> list[Producer | None]:
        """Captures only to see which operation makes each parameter's gradient; None where nothing can compute it
        straight into a buffer, or where it makes two of them. No gradient is kept, so this takes no memory for all of
        them at once."""
        graph, group = self._graph, self._group
        found: list[Producer | None] = [None] * len(graph.direct)
        instead = [p.detach().new_empty(()).expand(p.size()) for p in graph.direct]

        def run() -> None:
            undoing(functools.partial(self._differentiate, hooks=hooks))
            self._compare_steps()

        def arrived(position: int, grad: Tensor | None) -> Tensor | None:
            if grad is None:  # a custom function may give a parameter that it reads no gradient
                return None
            lazy = grad.is_conj() or grad.is_neg()
            producer = None if lazy else _follower().producer_of(grad)
            if producer is not None and grad.stride() == graph.direct[position].stride():
                found[position] = producer
            return instead[position]

        hooks = [functools.partial(arrived, position) for position in range(len(graph.direct))]
        pool, generators = graph.tape.arena.pool, graph.recording.generators
        self._captured, _ = group.backend.capture(run, pool, self._given, generators)
        first = {one.index: position for position, one in reversed(list(enumerate(found))) if one is not None}
        return [one if one and first[one.index] == position else None for position, one in enumerate(found)]

    def _once(self, producers: list[Producer | None] | None) -> bool:
        """Captures with the gradients that `producers` make computed straight into their buffers; returns whether one
        of them made something else."""
        graph, buffers = self._graph, self._buffers
        self._aimed = {
            position: producer
            for position, (producer, target) in enumerate(zip(producers or (), self._into, strict=bool(producers)))
            if producer is not None and target is None and buffers[position] is not None
        }
        targets = {
            producer.index: buffer.memory.as_strided(producer.size, producer.stride)
            for position, producer in self._aimed.items()
            if (buffer := buffers[position]) is not None
        }
        self._captured, _ = self._group.backend.capture(
            self._run,
            graph.tape.arena.pool,
            self._given,
            graph.recording.generators,
            self._check,
            targets,
            made_before=None if self._again else graph.graph.seen.made,
        )
        return self._missed

    def _run(self) -> None:
        through, gradients = undoing(self._differentiate)
        self._compare_steps()
        taken = self._given_at()
        self._wholes = [Whole(item) if item is not None and is_split(item) else None for item in through]
        self._results = [None if item is None else _own(_there(part(item)), taken) for item in through]
        self._stayed = [
            (parameter, _alone(parameter, _dense(parameter, grad), taken))
            for (parameter, grad), buffer in zip(gradients, self._buffers, strict=True)
            if buffer is None and grad is not None
        ]
        self._written, self._accumulated, self._missed = store(gradients, self._buffers, self._into, self._aimed)

    def _given_at(self) -> set[int]:
        """The addresses of what it is given, and of the buffers that it fills."""
        buffers = [buffer.memory for buffer in self._buffers if buffer is not None]
        return set(map(address, (*self._given, *buffers)))

    def _compare_steps(self) -> None:
        steps = [(step.op, repr(step.scalars)) for step in _follower().trace]
        if steps != (self._steps or steps):
            raise CaptureRefused(USES_UP)
        self._steps = steps

    def _differentiate(self, undo: Undo, hooks: Sequence[Callable] = ()) -> Any:
        """Differentiates, with gradient hooks of the direct parameters, or of what stands in for them."""
        graph = self._graph
        self._notes = undo.enter(noting())
        for parameter, hook in zip(graph.direct, hooks, strict=False):
            end = graph.stand_ins.get(id(parameter), parameter)
            undo.then(functools.partial(_remove_hooks, end))
            end.register_hook(hook)
        self.repeats = bool(self._steps)
        inputs = [item.tensor for item in graph.inputs]
        return graph.differentiate(
            graph.results.retained, inputs, self._grads, graph.direct, graph.edges, again=self._again
        )

    def _check(self, recorder: Follower, result: None) -> None:
        refused = what_changed(self._notes)
        if recorder.collectives and self._graph.context.agreement is None:
            refused = refused or "communicates with other processes, which its forward does not; wrap the step"
        if refused is not None:
            raise CaptureRefused(refused)

    def _others(self, guards: Guards) -> list[Tensor]:
        """What the backward reads besides the saved activations, whose memory is the next layers' to use: a table of
        an `autograd.Function`, for one. It is to be held, and `guards` must lead to it."""
        graph, seen, before = self._graph, self._captured.seen, self._graph.graph.seen
        given = self._given_at()
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
        return list(others.values())


def _follower() -> Follower:
    """What follows the capture under way."""
    follower = dispatch.current()
    assert isinstance(follower, Follower)
    return follower


def _remove_hooks(tensor: Tensor, _: BaseException | None) -> None:
    """Removes the gradient hooks of a tensor that has none but ours."""
    if tensor._backward_hooks is not None:
        tensor._backward_hooks.clear()  # which the node that made a view goes on with
    tensor._backward_hooks = None


def _there(grad: Tensor) -> Tensor:
    """A gradient that has arrived: other ranks may have a part in it, for which nobody has waited yet."""
    return grad.trigger_wait() if hasattr(grad, "trigger_wait") else grad


def _own(grad: Tensor, taken: set[int]) -> Tensor:
    """`grad` in memory that nothing else uses; copied only where it is a view, or another gradient too."""
    if grad._is_zerotensor():
        return real(grad)
    grad = grad.resolve_conj().resolve_neg()  # who gets it sees the memory alone
    if address(grad) in taken or 0 in grad.stride():
        return torch.empty_like(grad).copy_(grad)
    taken.add(address(grad))
    return grad


def _alone(parameter: Tensor, grad: Tensor, taken: set[int]) -> Tensor:
    """The gradient of a parameter in memory of the capture that nothing else uses, laid out as the parameter is."""
    made = not grad._is_zerotensor() and _follower().made(address(grad))
    if made and address(grad) not in taken and grad.stride() == parameter.stride() and 0 not in grad.stride():
        taken.add(address(grad))
        return grad
    return torch.empty_like(parameter, requires_grad=False).copy_(real(grad))


def buffers_for(
    group: LayerGroup, parameters: list[Tensor], arena: Arena, may_stay: bool
) -> list[GradientBuffer | None]:
    """The gradient buffer of each parameter, made where it has none. The memory may be written where the gradient is
    not there now; that of those that are passing, once `Passing.claim` has said so.

    Args:
        arena: of the graph that writes there.
        may_stay: whether a gradient that has no buffer may lie in the pool of that; then there is None for it.
    """
    buffers: list[GradientBuffer | None] = []
    together = taken_together(parameters)
    others = {one for members in together.values() for one in members} - set(map(id, parameters))
    taken = {buffer.memory.data_ptr() for one in others if (buffer := group.gradients.get(one)) and buffer.passing}
    for parameter in parameters:
        buffer = group.gradients.get(id(parameter))
        passes = id(parameter) in together and parameter.grad is None
        if buffer is not None and (buffer.kind != kind_of(parameter) or bool(buffer.passing) is not passes):
            buffer = None
        if buffer is not None and buffer.arena is not None and (buffer.arena is not arena or group.keeps_gradients):
            buffer = None
        if buffer is None and may_stay and not passes:
            buffers.append(None)
            continue
        if passes:
            if buffer is None or buffer.memory.data_ptr() in taken:
                buffer = GradientBuffer(parameter, group.passing.memory_for(parameter, taken))
                buffer.passing = together[id(parameter)]
            taken.add(buffer.memory.data_ptr())
        elif buffer is None or not (_lies_in(parameter.grad, buffer) or buffer.evacuate()):
            buffer = GradientBuffer(parameter, torch.empty_like(parameter, requires_grad=False))
        group.gradients[id(parameter)] = buffer
        buffers.append(buffer)
    return buffers


def _lies_in(grad: Tensor | None, buffer: GradientBuffer) -> bool:
    """Whether a gradient is that of a buffer, and nobody has given it other memory: the buffer's may be another's."""
    return grad is buffer.tensor and buffer.tensor.data_ptr() == buffer.memory.data_ptr()


def store(
    gradients: Gradients, buffers: list[GradientBuffer | None], into: list[Tensor | None], aimed: Collection[int]
) -> tuple[list[GradientBuffer], list[tuple[GradientBuffer, Tensor]], bool]:
    """Inside a capture: brings the gradients to their buffers.

    Args:
        into: what each is added to, None where it is written to its buffer.
        aimed: positions of the parameters for whose gradient an operation was given the buffer.

    Returns:
        The buffers that are written, those that are added to with the tensor that is, and whether something else than
        the gradient was computed into any of the buffers.

    Raises:
        CaptureRefused: a gradient is sparse.
    """
    written: list[GradientBuffer] = []
    accumulated, parts = [], []
    missed = False
    for position, ((parameter, grad), buffer, target) in enumerate(zip(gradients, buffers, into, strict=True)):
        if grad is None:
            missed = missed or position in aimed
            continue
        if buffer is None:
            continue
        grad = _dense(parameter, grad)
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


def _dense(parameter: Tensor, grad: Tensor) -> Tensor:
    """A gradient whose memory holds its values. Raises CaptureRefused where it is sparse."""
    if grad.layout is not torch.strided:
        raise CaptureRefused(
            f"has a sparse gradient for a parameter of shape {tuple(parameter.shape)}, whose size may be another "
            "in each step; use sparse=False, or keep that module out of the graph"
        )
    return grad if grad._is_zerotensor() else grad.resolve_conj().resolve_neg()


def real(tensor: Tensor) -> Tensor:
    """The tensor itself, or zeros in memory of their own for what autograd only says is zero."""
    if not tensor._is_zerotensor():
        return tensor
    return torch.zeros(tensor.size(), dtype=tensor.dtype, device=tensor.device)
