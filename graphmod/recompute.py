"""Backwards without a graph: the forward runs again, eagerly, and is differentiated. May import what `forward` may and
`forward`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from graphmod.flattening import rebuild
from graphmod.forward import ForwardGraph
from graphmod.hook_watch import without_gradient_hooks
from graphmod.modes import entered_again
from graphmod.placement import Gradients
from graphmod.tape import Ticket


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
        if grad is None:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)
        else:
            parameter.grad.add_(grad)


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
    its attention kernels hold their random state as device addresses. Gradients of the parameters `pending` wait for
    their other uses in this backward.
    """
    module, backend = graph.module, graph.module._group.backend
    changed = [(tensor, tensor.clone()) for tensor in graph.graph.seen.written.values()]
    now = backend.random_state() if graph.random else None
    if graph.random:
        backend.set_random_state(ticket.random_state)
    try:
        leaves = [s.tensor.detach().requires_grad_(s.tensor.requires_grad) for s in graph.inputs]
        args, kwargs = rebuild(graph.entry.signature.structure, leaves)
        with torch.enable_grad(), entered_again(graph.entry.signature.modes, backend.device_type):
            outputs = graph.results.of_node(module._call(*args, **kwargs))
    finally:
        if graph.random:
            backend.set_random_state(now)
        for tensor, before in changed:
            tensor.copy_(before)
    modified = [out for out, static in zip(outputs, graph.results.with_grad, strict=True) if static.changed()]
    torch.autograd.graph.increment_version(modified)  # so that autograd refuses them where it needs them, as in eager
    direct = graph.direct if accumulates else []
    through, gradients = differentiate(graph, outputs, leaves, grads, direct, {})
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
