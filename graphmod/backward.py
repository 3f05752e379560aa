"""A captured backward: captured inside the real backward, replayed by an autograd node, gradients left in place (R6).

May import what `forward` may, and `forward`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphmod.buffers import OwnedBuffer, StaticInput, StaticOutput, adopted
from graphmod.errors import BackwardUnavailable
from graphmod.forward import ForwardGraph
from graphmod.recorder import address
from graphmod.signature import AUTOCAST, rebuild
from graphmod.tape import Ticket

log = logging.getLogger("graphmod")


class Replayed(torch.autograd.Function):
    """The autograd node of one replayed forward.

    `anchor` is a leaf that makes the outputs require grad also where parameters are all there is to differentiate;
    whether autograd means to accumulate into it tells `.backward()` from `torch.autograd.grad`.
    """

    @staticmethod
    def forward(ctx: Any, ticket: Ticket, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ticket = ticket
        ctx.set_materialize_grads(False)
        return tuple([output.hand_out() for output in ticket.graph.grad_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return (None, None, *run_backward(ctx.ticket, grads))


class BackwardGraph:
    """One captured backward.

    Attributes:
        index: its place on the tape of its forward.
        inputs: per output of the forward, where its gradient is read, or None if there was none at capture.
        results: per differentiable input and hooked parameter of the forward, its gradient, or None.
        written, accumulated: `(parameter, buffer)` pairs whose gradient the graph overwrites or adds to.
    """

    __slots__ = ("index", "graph", "inputs", "results", "written", "accumulated")

    def fits(self, grads: Sequence[Tensor | None], passes: int) -> bool:
        for static, grad in zip(self.inputs, grads, strict=True):
            if (static is None) is not (grad is None):
                return False
            if static is not None and not static.fits(grad, passes, 1):
                return False
        return all([result is None or result.evacuate() for result in self.results])

    def launch(self, grads: Sequence[Tensor | None], passes: int) -> int:
        """Replays into the parameters' gradients, whatever state they are in; returns the bytes copied in."""
        copied = 0
        for static, grad in zip(self.inputs, grads, strict=True):
            if static is not None and static.buffer is not None:
                copied += static.buffer.load(grad, passes)
        add_after = self._make_room()
        self.graph.replay()
        for target, part in add_after:
            target.add_(part)
        return copied

    def _make_room(self) -> list[tuple[Tensor, Tensor]]:
        """Makes gradients that are not as they were at capture fit; returns additions to do after the replay.

        Normally every gradient is as it was and this only assigns `p.grad`. Addition of two terms does not depend on
        their order, so the results stay those of eager accumulation.
        """
        later = []
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
            if grad is None:
                buffer.zero_()
                parameter.grad = buffer
            elif grad.data_ptr() != buffer.data_ptr():
                buffer.zero_()
                later.append((grad, buffer))
        return later


def run_backward(ticket: Ticket, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    """The backward of one replayed forward: a replay where that is safe, a capture the first time, else eager.

    Raises:
        BackwardUnavailable: for a second-order gradient, or when the forward's values were overwritten since.
    """
    graph: ForwardGraph = ticket.graph
    module = graph.module
    if torch.is_grad_enabled():
        raise BackwardUnavailable(
            f"{module.name!r} was replayed from a graph, which has no gradient of its gradient (create_graph=True); run "
            "this part eagerly: graph.scope=none, or call the module as .module"
        )
    if not ticket.current:
        raise BackwardUnavailable(
            f"the values that {module.name!r} saved for this backward were overwritten by a later call. Run each "
            "backward before the forward after next, or keep the parts whose backward comes late out of the graphs "
            "(ungraph, or call .module)"
        )
    try:
        with torch.no_grad():
            return _backward(ticket, graph, grads)
    finally:
        ticket.finish()


def _backward(ticket: Ticket, graph: ForwardGraph, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    module, tape = graph.module, graph.tape
    accumulates = torch._C._will_engine_execute_node(module.anchor_node)
    if ticket.done or not accumulates:
        return _recompute(ticket, graph, grads, accumulates)
    module.group.first_backward()
    on_tape = tape.arena.active is tape
    known = graph.backward
    if known is None:
        if graph.captured_in != tape.arena.passes:
            # The optimizer has changed what the retained autograd graph saved: it is good for its own pass only.
            module.drop(tape)
            return _recompute(ticket, graph, grads, accumulates)
        if on_tape and tape.at_end and not tape.dropped:
            return _capture(graph, grads)
        return _from_retained(graph, grads)
    if on_tape and known.index >= tape.cursor and known.fits(grads, tape.arena.passes):
        module.stats_.copied_bytes += known.launch(grads, tape.arena.passes)
        tape.cursor = known.index + 1
        module.stats_.replays += 1
        graph.mismatches = 0
        return [None if result is None else result.hand_out() for result in known.results]
    graph.mismatches += 1
    if graph.mismatches > module.config.warmup_steps:
        module.drop(tape)  # this is how it is from now on: capture it anew
    return _recompute(ticket, graph, grads, accumulates)


def _differentiate(graph: ForwardGraph, grads: Sequence[Tensor | None]) -> tuple[list, list]:
    """Gradients of the retained outputs: of `(differentiable inputs + hooked parameters, other parameters)`."""
    pairs = [(out, grad) for out, grad in zip(graph.retained, grads, strict=True) if grad is not None]
    through = [graph.inputs[i].tensor for i in graph.differentiable] + graph.hooked
    hooked = {id(parameter) for parameter in graph.hooked}
    direct = [parameter for parameter in graph.parameters if id(parameter) not in hooked]
    if not pairs or not through + direct:
        return [None] * len(through), [(parameter, None) for parameter in direct]
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        through + direct,
        [grad for _, grad in pairs],
        retain_graph=True,  # a failed capture still needs it
        allow_unused=True,
    )
    return list(found[: len(through)]), list(zip(direct, found[len(through) :], strict=True))


def _capture(graph: ForwardGraph, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    module, entry, group, arena = graph.module, graph.entry, graph.module.group, graph.tape.arena
    fresh = not any(p.grad is not None for p in graph.parameters)
    began = time.perf_counter()
    known = BackwardGraph()
    known.inputs = [None if grad is None else _static_gradient(graph, grad) for grad in grads]
    static = [None if item is None else item.tensor for item in known.inputs]

    def run() -> list:
        through, direct = _differentiate(graph, static)
        taken = {address(tensor) for tensor in static if tensor is not None}
        known.results = [_own(item, None, taken) for item in through]
        known.written, known.accumulated = _store(group, direct, taken)
        return through

    try:
        known.graph, _ = group.backend.capture(run, arena.pool, [t for t in static if t is not None], entry.generators)
        known.graph.replay()
    except Exception as error:  # whatever user code or CUDA raised: the eager backward decides what the user sees
        module.capture_failed(entry, error, "its backward")
        module.drop(graph.tape)
        return _from_retained(graph, grads)
    known.index = graph.tape.append(graph)
    known.results = [None if item is None else StaticOutput(item.detach()) for item in known.results]
    for parameter, buffer in known.written:
        group.keep_gradient_buffer(parameter, buffer)
        parameter.grad = buffer
    for result in known.results:
        if result is not None:
            group.static[result.tensor.data_ptr()] = result.tensor
    if graph.tape.fresh_grads is None and graph.parameters:
        graph.tape.fresh_grads = fresh
    graph.backward, graph.retained = known, None
    entry.succeeded()
    module.stats_.captures += 1
    module.stats_.replays += 1
    module.stats_.capture_seconds += time.perf_counter() - began
    return [None if result is None else result.hand_out() for result in known.results]


def _static_gradient(graph: ForwardGraph, grad: Tensor) -> StaticInput:
    memory = adopted(grad, graph.module.group.static)
    buffer = None
    if memory is None:
        buffer = OwnedBuffer(torch.empty_like(grad))  # dense: a later gradient need not be broadcast as this one is
        graph.module.stats_.copied_bytes += buffer.load(grad, graph.tape.arena.passes)
        memory = buffer.tensor.detach()
    return StaticInput(memory, buffer, "gradient")


def _own(grad: Tensor | None, like: Tensor | None, taken: set[int]) -> Tensor | None:
    """`grad` in memory that nothing else uses and, for a parameter, in the parameter's own layout, as eager's
    AccumulateGrad has it. Copies only where it must."""
    if grad is None:
        return None
    dense = like is None or grad.stride() == like.stride()
    if dense and address(grad) not in taken and 0 not in grad.stride():
        taken.add(address(grad))
        return grad
    mine = torch.empty_like(grad if like is None else like, requires_grad=False)
    mine.copy_(grad)
    return mine


def _store(group: Any, direct: list[tuple[Tensor, Tensor | None]], taken: set[int]) -> tuple[list, list]:
    """Inside a capture: writes the parameters' gradients where they stay; returns what is written and what added to."""
    written, accumulated, targets, parts = [], [], [], []
    for parameter, grad in direct:
        if grad is None:
            continue
        present = parameter.grad
        if present is not None:
            accumulated.append((parameter, present))
            targets.append(present)
            parts.append(grad)
            continue
        buffer = group.gradient_buffer(parameter)
        if buffer is not None and buffer.size() == parameter.size() and buffer.dtype == parameter.dtype:
            buffer.copy_(grad)
        else:
            buffer = _own(grad, parameter, taken)
        written.append((parameter, buffer))
    if targets:
        torch._foreach_add_(targets, parts)
    return written, accumulated


def _deliver(direct: list[tuple[Tensor, Tensor | None]]) -> None:
    """What AccumulateGrad does, for gradients computed eagerly."""
    for parameter, grad in direct:
        if grad is None:
            continue
        if parameter.grad is None:
            parameter.grad = _own(grad, parameter, {address(grad)})
        else:
            parameter.grad.add_(grad)


def _from_retained(graph: ForwardGraph, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The backward of a forward that has no backward graph yet, from the autograd graph its capture left behind: the
    replay has just filled the values that graph saved."""
    through, direct = _differentiate(graph, grads)
    _deliver(direct)
    return [None if grad is None else grad.clone() for grad in through]


def _recompute(
    ticket: Ticket, graph: ForwardGraph, grads: Sequence[Tensor | None], accumulates: bool
) -> list[Tensor | None]:
    """Runs the forward again, eagerly, on the inputs that are still in place, and differentiates that.

    For a backward that comes out of tape order, a second time, with other gradients than at capture, or through
    `torch.autograd.grad`.
    """
    module, backend = graph.module, graph.module.group.backend
    changed = [(tensor, tensor.clone()) for tensor in graph.graph.seen.written.values()]
    now = backend.random_state() if graph.random else None
    if graph.random:
        backend.set_random_state(ticket.random_state)
    try:
        leaves = [s.tensor.detach().requires_grad_(s.tensor.requires_grad) for s in graph.inputs]
        args, kwargs = rebuild(graph.entry.signature.structure, leaves)
        dtype = graph.entry.signature.modes[AUTOCAST]
        with torch.enable_grad(), torch.autocast(backend.device_type, dtype, enabled=dtype is not None):
            outputs = module.differentiable_outputs(module.call(*args, **kwargs))
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        through = [leaves[i] for i in graph.differentiable] + graph.hooked
        hooked = {id(parameter) for parameter in graph.hooked}
        direct = [p for p in graph.parameters if id(p) not in hooked] if accumulates else []
        found: Sequence = [None] * len(through + direct)
        if pairs and through + direct:
            found = torch.autograd.grad(
                [out for out, _ in pairs], through + direct, [grad for _, grad in pairs], allow_unused=True
            )
    finally:
        if graph.random:
            backend.set_random_state(now)
        for tensor, before in changed:
            tensor.copy_(before)
    _deliver(list(zip(direct, found[len(through) :], strict=True)))
    module.stats_.eager_calls += 1
    return list(found[: len(through)])
