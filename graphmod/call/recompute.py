"""Backwards without a graph: the forward runs again, eagerly, and is differentiated. May import what `forward` may and
`forward`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from graphmod.errors import BackwardUnavailable
from graphmod.graph.forward import ForwardGraph
from graphmod.graph.placement import Gradients
from graphmod.graph.tape import Ticket
from graphmod.guards.hooks import without_gradient_hooks
from graphmod.signature.flattening import rebuild
from graphmod.signature.modes import entered_again


def differentiate(
    graph: ForwardGraph,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    direct: Sequence[Tensor],
    edges: Mapping[int, GradientEdge],
) -> tuple[list[Tensor | None], Gradients]:
    """Gradients of `outputs`: of the differentiable inputs and hooked parameters, and of the `direct` parameters.

    Args:
        edges: parameter (by identity) -> where the autograd graph of `outputs` ends for it, if not at the
            AccumulateGrad node that the parameter has now.
    """
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    through = [*(inputs[i] for i in graph.differentiable), *(edges.get(id(p), p) for p in graph.hooked)]
    wanted = [*through, *(edges.get(id(p), p) for p in direct)]
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


def deliver(direct: list[tuple[Tensor, Tensor | None]]) -> None:
    """What AccumulateGrad does, for gradients computed eagerly."""
    for parameter, grad in direct:
        before = parameter.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            parameter.grad = grad.detach() if before is None else before + grad
        elif before is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)
        elif before.layout is not torch.strided:
            parameter.grad = grad + before
        else:
            before.add_(grad)


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
    module, backend = graph.module, graph.module._group.backend
    if ticket.changed():
        outputs, leaves, edges = _as_captured(ticket, graph)
    else:
        outputs, leaves, edges = _run_again(ticket, graph)
    modified = [out for out, static in zip(outputs, graph.results.with_grad, strict=True) if static.changed()]
    if not edges:
        torch.autograd.graph.increment_version(modified)  # so that autograd refuses them where it needs them
    direct = graph.direct if accumulates else []
    through, gradients = differentiate(graph, outputs, leaves, grads, direct, edges)
    stash, ready = module._group.stash, []
    for parameter, grad in gradients:
        earlier = stash.pop(id(parameter), None)
        if earlier is not None:
            grad = earlier if grad is None else earlier + grad
        if grad is not None and id(parameter) in pending:
            stash[id(parameter)] = grad.clone()
        else:
            ready.append((parameter, grad))
    with backend.in_turn():
        deliver(ready)
    module._counters.eager_calls += 1
    return through


def _as_captured(ticket: Ticket, graph: ForwardGraph) -> tuple[Sequence[Tensor], list[Tensor], dict]:
    """What the capture of the forward left behind, if that was in this pass."""
    known = graph.backward
    if known is not None and any(parameter is weight for parameter in ticket.changed() for weight in known.weights):
        raise changed_in_place(graph.module)
    if (
        not graph.results.retained
        or (graph.random and graph.module._group.backend.on_gpu)
        or graph.captured_in != ticket.arena.passes
    ):
        raise BackwardUnavailable(
            f"a tensor that {graph.module._name!r} reads was changed in place between its forward and this backward, "
            "which comes in another order than when it was captured. Run the backward before the change, or keep this "
            "part out of the graphs (ungraph, or call .module)"
        )
    return graph.results.retained, [item.tensor for item in graph.inputs], graph.edges


def _run_again(ticket: Ticket, graph: ForwardGraph) -> tuple[Sequence[Tensor], list[Tensor], dict]:
    module, backend = graph.module, graph.module._group.backend
    changed = [(tensor, tensor.clone()) for tensor in graph.graph.seen.written.values()]
    now = backend.random_state() if graph.random else None
    if graph.random:
        backend.set_random_state(ticket.random_state)
    try:
        for tensor, value in zip(graph.advanced, ticket.before or (), strict=True):
            tensor.copy_(value)
        leaves = [s.tensor.detach().requires_grad_(s.tensor.requires_grad) for s in graph.inputs]
        args, kwargs = rebuild(graph.entry.signature.structure, leaves)
        with torch.enable_grad(), entered_again(graph.entry.signature.modes, backend.device_type):
            outputs = graph.results.of_node(module._call(*args, **kwargs))
    finally:
        if graph.random:
            backend.set_random_state(now)
        for tensor, before in changed:
            tensor.copy_(before)
    return outputs, leaves, {}


def changed_in_place(module: Any) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a result or "
        f"a parameter of {module._name!r}, which its backward reads again; use the out-of-place operation"
    )
