"""A captured backward: captured inside the real backward, replayed by an autograd node, gradients left in place (R6).

May import what `forward` may, `forward` and `placement`.
"""

from __future__ import annotations

import logging
import operator
import time
import weakref
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from graphmod.buffers import OwnedBuffer, StaticInput, StaticOutput, adopted
from graphmod.errors import BackwardUnavailable
from graphmod.forward import ForwardGraph
from graphmod.placement import Gradients, Place, buffers_for, find_places, store
from graphmod.recorder import Recorder, address
from graphmod.signature import AUTOCAST, rebuild
from graphmod.tape import Ticket
from graphmod.watch import without_gradient_hooks

log = logging.getLogger("graphmod")


_is_not, _grad, _NOTHING = operator.is_not, operator.attrgetter("grad"), repeat(None)


class Replayed(torch.autograd.Function):
    """The autograd node of one replayed forward.

    The inputs are the arguments that require grad, the parameters whose gradients go through autograd, and maybe one
    witness of the others, which gets no gradient here but lets `torch.autograd.grad` for parameters reach this node.
    `anchor` is a leaf that makes the outputs require grad also where parameters are all there is to differentiate;
    whether autograd means to accumulate into it tells `.backward()` from `torch.autograd.grad`.
    """

    @staticmethod
    def forward(ctx: Any, ticket: Ticket, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ticket = ticket
        ticket.node = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return tuple([output.hand_out() for output in ticket.graph.grad_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        found = run_backward(ctx.ticket, grads)
        return (None, None, *found, None) if ctx.ticket.graph.witness is not None else (None, None, *found)


apply_replayed = super(torch.autograd.Function, Replayed).apply  # without the wrapper for functorch transforms


class BackwardGraph:
    """One captured backward.

    Attributes:
        index: its place on the tape of its forward.
        inputs: per output of the forward, where its gradient is read, or None if there was none at capture.
        results: per differentiable input and hooked parameter of the forward, its gradient, or None.
        saved, weights: outputs and parameters of the forward that the backward reads again.
        written, accumulated: `(parameter, buffer)` pairs whose gradient the graph overwrites or adds to.
        parameters: those of `written`.
    """

    __slots__ = ("accumulated", "graph", "index", "inputs", "parameters", "results", "saved", "weights", "written")

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
        for static, grad in zip(self.inputs, grads, strict=True):
            if static is not None and static.buffer is not None:
                copied += static.buffer.load(grad, passes)
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


def run_backward(ticket: Ticket, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    """The backward of one replayed forward: a replay where that is safe, a capture the first time, else eager.

    Raises:
        BackwardUnavailable: for a second-order gradient, or when the forward's values were overwritten since.
    """
    graph: ForwardGraph = ticket.graph
    module = graph.module
    if torch.is_grad_enabled():
        raise BackwardUnavailable(
            f"{module.name!r} was replayed from a graph, which has no gradient of its gradient (create_graph=True); "
            "run this part eagerly: graph=none, ungraph(model), or call the module as .module"
        )
    if not ticket.current:
        raise BackwardUnavailable(
            f"the values that {module.name!r} saved for this backward were overwritten by a later call. Run each "
            "backward before the forward after next, or keep the parts whose backward comes late out of the graphs "
            "(ungraph, or call .module)"
        )
    try:
        return _backward(ticket, graph, grads)
    finally:
        ticket.finish()


def _backward(ticket: Ticket, graph: ForwardGraph, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    module, tape = graph.module, graph.tape
    accumulates = torch._C._will_engine_execute_node(module.anchor_node)
    if not accumulates and graph.witness is not None and _wanted(graph.witness):
        raise BackwardUnavailable(
            f"the gradients of the parameters inside {module.name!r} go straight to .grad and cannot be had through "
            "torch.autograd.grad or backward(inputs=...); call loss.backward(), or run this part eagerly (ungraph, or "
            "call .module)"
        )
    if ticket.done or not accumulates:
        return _recompute(ticket, graph, grads, accumulates)
    if ticket.versions != [parameter._version for parameter in ticket.weights]:
        raise _changed_in_place(module)
    if module.group.context is not None:
        module.group.first_backward()
    on_tape = tape.arena.active is tape
    known = graph.backward
    if known is None:
        if graph.captured_in != tape.arena.passes:
            # The optimizer has changed what the retained autograd graph saved: it is good for its own pass only.
            module.drop(tape)
            return _recompute(ticket, graph, grads, accumulates)
        pending = _used_later(ticket, graph)
        stash = module.group.stash
        shared = [p for p in graph.direct if id(p) in pending or id(p) in stash or _used_eagerly(p, graph)]
        if shared:
            # Captured anew with these gradients going through autograd; this once, summed up here.
            module.group.share(shared)
            module.drop(tape)
        elif on_tape and tape.at_end and not tape.dropped:
            return _capture(ticket, graph, grads, pending)
        return _recompute(ticket, graph, grads, accumulates, pending)
    if any(output.changed() for output in known.saved):
        raise _changed_in_place(module)
    if on_tape and known.index >= tape.cursor and known.fits(grads, tape.arena.passes):
        copied, as_captured = known.launch(grads, tape.arena.passes)
        module.stats_.copied_bytes += copied
        if module.group.stash:
            _deliver([(p, module.group.stash.pop(id(p), None)) for p in graph.direct])
        tape.cursor = known.index + 1
        module.stats_.replays += 1
        _count_mismatch(graph, as_captured)
        return _hand_out(known, graph.entry)
    _count_mismatch(graph, False)
    return _recompute(ticket, graph, grads, accumulates)


def _hand_out(known: BackwardGraph, entry: Any) -> list[Tensor | None]:
    copies = entry.copies_out
    return [
        None if result is None else result.tensor.clone() if copies else result.hand_out() for result in known.results
    ]


def _changed_in_place(module: Any) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a result or "
        f"a parameter of {module.name!r}, which its backward reads again; use the out-of-place operation"
    )


def _used_later(ticket: Ticket, graph: ForwardGraph) -> set[int]:
    """The identities of the parameters whose gradients other forwards still to come in this very backward add to."""
    found: set[int] = set()
    for arena in graph.module.group.arenas:
        for other in arena.active.owners if arena.active is not None else ():
            there = other.ticket() if other.ticket is not None else None
            if there is None or there is ticket or there.done or not there.current or there.node is None:
                continue
            node = there.node()
            if node is not None and torch._C._will_engine_execute_node(node):
                found |= {id(parameter) for parameter in other.parameters}
    return found


def _wanted(parameter: Tensor) -> bool:
    """Whether the present backward, which is not a plain one, was asked for this parameter's gradient."""
    with torch.enable_grad():
        accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # autograd does not answer for leaves that torch.autograd.grad was asked for
        return True


def _used_eagerly(parameter: Tensor, graph: ForwardGraph) -> bool:
    """Whether autograd itself is going to accumulate into this parameter in the present backward. Nobody can tell for
    the witness, which autograd always visits."""
    if parameter is graph.witness:
        return False
    with torch.enable_grad():
        accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
    return torch._C._will_engine_execute_node(accumulator)


def _count_mismatch(graph: ForwardGraph, matched: bool) -> None:
    """Several backwards in a row that the captured one did not fit: this is how it is from now on, capture anew."""
    graph.mismatches = 0 if matched else graph.mismatches + 1
    entry, config = graph.entry, graph.module.config
    if matched:
        entry.recaptures = 0
    elif graph.mismatches > config.warmup_steps and not entry.recaptures:
        entry.recaptures += 1  # once: where that does not help, the slower replay is as good as it gets
        graph.module.drop(graph.tape)


def _differentiate(
    graph: ForwardGraph,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    direct: Sequence[Tensor],
    hooked: Sequence[Tensor],
) -> tuple[list[Tensor | None], Gradients]:
    """Gradients of `outputs`: of the differentiable inputs and `hooked` parameters, and of the `direct` parameters."""
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    through = [*(inputs[i] for i in graph.differentiable), *hooked]
    wanted = [*through, *direct]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        with without_gradient_hooks(graph.hooked):  # autograd runs them when the gradients come out of this node
            found = torch.autograd.grad(
                [out for out, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                retain_graph=True,  # a capture may be made twice
                allow_unused=True,
            )
    return list(found[: len(through)]), list(zip(direct, found[len(through) :], strict=True))


def _capture(
    ticket: Ticket, graph: ForwardGraph, grads: tuple[Tensor | None, ...], pending: set[int]
) -> Sequence[Tensor | None]:
    module, entry, group, arena = graph.module, graph.entry, graph.module.group, graph.tape.arena
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
                hooked = [graph.stand_ins.get(id(parameter), parameter) for parameter in graph.hooked]
                through, gradients = _differentiate(graph, graph.retained, inputs, static, direct, hooked)
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
        shape = (type(module.root), *sizes)
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
        known.saved = [output for output in graph.grad_outputs if address(output.tensor) in known.graph.seen.read]
        known.weights = [p for p in graph.parameters if address(p) in known.graph.seen.read]
        known.graph.seen.outside.clear()  # the saved activations: their memory is the next layers' to use
        known.graph.replay()
    except Exception as error:  # whatever user code or CUDA raised: the eager backward decides what the user sees
        if "modified by an inplace operation" in str(error):
            raise  # as eager does: something saved for the backward was changed since
        module.capture_failed(entry, error, "its backward")
        module.drop(graph.tape)
        return _recompute(ticket, graph, grads, True, pending)
    if any(output.changed() for output in known.saved):
        module.drop(graph.tape)
        raise _changed_in_place(module)
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
    graph.backward, graph.retained, graph.stand_ins = known, None, {}
    module.stats_.captures += 1
    module.stats_.replays += 1
    module.stats_.capture_seconds += time.perf_counter() - began
    return _hand_out(known, graph.entry)


def _static_gradient(graph: ForwardGraph, grad: Tensor) -> StaticInput:
    memory = adopted(grad, graph.module.group.static)
    buffer = None
    if memory is None:
        buffer = OwnedBuffer(grad)
        graph.module.stats_.copied_bytes += buffer.load(grad, graph.tape.arena.passes)
        memory = buffer.tensor.detach()
    return StaticInput(memory, buffer, "gradient")


def _own(grad: Tensor | None, taken: set[int]) -> Tensor | None:
    """`grad` in memory that nothing else uses; copied only where it is a view, or another gradient too."""
    if grad is None:
        return None
    if address(grad) in taken or 0 in grad.stride():
        return torch.empty_like(grad).copy_(grad)
    taken.add(address(grad))
    return grad


def _deliver(direct: list[tuple[Tensor, Tensor | None]]) -> None:
    """What AccumulateGrad does, for gradients computed eagerly."""
    for parameter, grad in direct:
        if grad is None:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)
        else:
            parameter.grad.add_(grad)


def _recompute(
    ticket: Ticket,
    graph: ForwardGraph,
    grads: Sequence[Tensor | None],
    accumulates: bool,
    pending: Collection[int] = (),
) -> list[Tensor | None]:
    """Runs the forward again, eagerly, on the inputs that are still in place, and differentiates that.

    For a backward that has no graph yet, or comes out of tape order, a second time, with other gradients than at
    capture, or through `torch.autograd.grad`. The autograd graph of the capture itself is no use outside of a capture:
    its attention kernels hold their random state as device addresses. Gradients of the parameters `pending` wait for
    their other uses in this backward.
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
    finally:
        if graph.random:
            backend.set_random_state(now)
        for tensor, before in changed:
            tensor.copy_(before)
    modified = [out for out, static in zip(outputs, graph.grad_outputs, strict=True) if static.changed()]
    torch.autograd.graph.increment_version(modified)  # so that autograd refuses them where it needs them, as in eager
    direct = graph.direct if accumulates else []
    through, gradients = _differentiate(graph, outputs, leaves, grads, direct, graph.hooked)
    stash, ready = module.group.stash, []
    for parameter, grad in gradients:
        earlier = stash.pop(id(parameter), None)
        if earlier is not None:
            grad = earlier if grad is None else earlier + grad
        if grad is not None and id(parameter) in pending:
            stash[id(parameter)] = grad.clone()
        else:
            ready.append((parameter, grad))
    _deliver(ready)
    module.stats_.eager_calls += 1
    return through
