"""Backwards without a graph: the forward runs again, eagerly, and is differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from graphmod.call.together import run_again
from graphmod.errors import BackwardUnavailable
from graphmod.graph.buffers import apart
from graphmod.graph.forward import ForwardGraph
from graphmod.graph.tape import Ticket
from graphmod.graph.uses import watch_sums
from graphmod.guards.hooks import has_gradient_hooks, without_gradient_hooks
from graphmod.signature.flattening import rebuild
from graphmod.signature.modes import entered_again


def recompute(
    ticket: Ticket,
    graph: ForwardGraph,
    grads: Sequence[Tensor | None],
    accumulates: bool,
    pending: Collection[int] = (),
) -> list[Tensor | None]:
    """Runs the forward again, eagerly, on the inputs that are still in place, and differentiates that.

    For a backward that has no graph yet, or comes out of tape order, a second time, with other gradients than at
    capture, or through `torch.autograd.grad`. The autograd graph of the capture itself is no use outside of a capture:
    its attention kernels hold their random state as device addresses. Only where a parameter was changed since, so that
    another forward would have other values, is it that or nothing. Gradients of the parameters `pending` wait for their
    other uses in this backward.

    Raises:
        BackwardUnavailable: a parameter was changed since the forward, whose values can no longer be had.
        RuntimeError: the backward reads it again, as eager says it.
    """
    context, backend = graph.context, graph.context.group.backend
    direct = graph.direct if accumulates else []
    stash, sums = context.group.stash, {}
    with _trained(graph.parameters):
        if ticket.changed():
            outputs, leaves, edges = _as_captured(ticket, graph)
        else:
            outputs, leaves, edges = _run_again(ticket, graph)
        modified = [out for out, static in zip(outputs, graph.results.with_grad, strict=True) if static.changed()]
        if not edges:
            torch.autograd.graph.increment_version(modified)  # so that autograd refuses them where it needs them
        # Autograd visits the witness, and would run hooks that were put there since once more.
        late = graph.witness if direct and graph.witness is not None and has_gradient_hooks(graph.witness) else None
        with without_gradient_hooks([] if late is None else [late]):
            through, gradients = graph.differentiate(outputs, leaves, grads, direct, edges, {*pending, *stash})
    for parameter, grad in gradients:  # those of several uses one by one, as autograd adds them up
        earlier = sums[parameter] if parameter in sums else stash.pop(id(parameter), None)
        sums[parameter] = grad if earlier is None else earlier if grad is None else earlier + grad
    stash.update({id(p): grad.clone() for p, grad in sums.items() if grad is not None and id(p) in pending})
    ticket.of_witness = None if late is None or id(late) in stash else sums.pop(late, None)
    ready = [(p, grad) for p, grad in sums.items() if id(p) not in stash]
    with backend.in_turn():
        _deliver(ready)
    context.counters.eager_calls += 1
    if graph.summed and ticket.node is not None:
        watch_sums(graph, ticket.node(), graph.summed, through)
    return through


def _deliver(direct: list[tuple[Tensor, Tensor | None]]) -> None:
    """What AccumulateGrad does, for gradients computed eagerly."""
    for parameter, grad in direct:
        before = parameter.grad
        if grad is None or not parameter.requires_grad:
            continue
        if grad.layout is not torch.strided:
            parameter.grad = grad.detach() if before is None else before + grad
        elif before is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)
        elif before.layout is not torch.strided:
            parameter.grad = grad + before
        else:
            before.add_(grad)
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)  # which has come since the forward


@contextlib.contextmanager
def _trained(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Lets parameters require grad, as they did in the forward."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _as_captured(ticket: Ticket, graph: ForwardGraph) -> tuple[Sequence[Tensor], list[Tensor], dict]:
    """What the capture of the forward left behind, if that was in this pass."""
    known = graph.backward
    if known is not None and any(parameter is weight for parameter in ticket.changed() for weight in known.weights):
        raise graph.context.changed_in_place()
    if (
        not graph.results.retained
        or (graph.random and graph.context.group.backend.on_gpu)
        or graph.captured_in != ticket.arena.passes
    ):
        raise BackwardUnavailable(
            f"a tensor that {graph.context.name!r} reads was changed in place between its forward and this backward, "
            "which comes in another order than when it was captured. Run the backward before the change, or keep this "
            "part out of the graphs (ungraph, or call .module)"
        )
    return graph.results.retained, [item.tensor for item in graph.inputs], graph.edges


def _run_again(ticket: Ticket, graph: ForwardGraph) -> tuple[Sequence[Tensor], list[Tensor], dict]:
    backend = graph.context.group.backend
    changed = [(tensor, tensor.clone()) for tensor in graph.graph.seen.written.values()]
    now, depth = graph.random_state(), run_again.count
    graph.set_random_state(ticket.random_state)
    try:
        run_again.count = depth + 1
        for tensor, value in zip(graph.advanced, ticket.before or (), strict=True):
            tensor.copy_(value)
        leaves = [apart(static.tensor) for static in graph.inputs]
        args, kwargs = rebuild(graph.entry.signature.structure, leaves)
        modes = entered_again(graph.entry.signature.modes, backend.device_type)
        with torch.enable_grad(), modes, graph.recording.guards.as_recorded():
            outputs = graph.results.of_node(graph.function(*args, **kwargs))
    finally:
        run_again.count = depth
        graph.set_random_state(now)
        for tensor, before in changed:
            tensor.copy_(before)
    return outputs, leaves, {}
