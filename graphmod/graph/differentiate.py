"""Gradients of a graph's outputs, computed by autograd, and what AccumulateGrad does with them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphmod.graph.context import Context
from graphmod.graph.forward import ForwardGraph
from graphmod.graph.placement import Gradients
from graphmod.graph.uses import apart
from graphmod.guards.hooks import without_gradient_hooks


def differentiate(
    graph: ForwardGraph,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    direct: Sequence[Tensor],
    edges: Mapping[int, GradientEdge],
    several: Collection[int] = (),
) -> tuple[list[Tensor | None], Gradients]:
    """Gradients of `outputs`: of the differentiable inputs and hooked parameters, one for each use that is to be kept
    apart, and of the `direct` parameters.

    Args:
        several: those of the direct parameters (by identity) of which there is one for each use, too.
        edges: parameter (by identity) -> where the autograd graph of `outputs` ends for it, if not at the
            AccumulateGrad node that the parameter has now.
    """
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    times = Counter(graph.differentiable)
    with torch.enable_grad():
        ends = [get_gradient_edge(inputs[i]) for i in times]
        ends += [edges.get(id(p)) or get_gradient_edge(p) for p in graph.hooked]
    counts = [*times.values(), *graph.hooked_uses]
    wanted = [*ends, *(edges.get(id(p), p) for p in direct)]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    parts: dict[int, list[Tensor]] = {}
    if pairs and wanted:
        repeated = {place: ends[place] for place, count in enumerate(counts) if count > 1}
        with torch.enable_grad():
            for place, parameter in enumerate(direct, len(ends)):
                if id(parameter) in several:
                    repeated[place] = edges.get(id(parameter)) or get_gradient_edge(parameter)
        separately = apart(repeated, outputs) if repeated else contextlib.nullcontext(parts)
        # Autograd runs the hooks when the gradients come out of this node.
        with separately as parts, without_gradient_hooks(graph.hooked):
            found = torch.autograd.grad(
                [out for out, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                retain_graph=not graph.graph.seen.ran_compiled,  # a capture may be made twice; see `capture_backward`
                allow_unused=True,
            )
    through: list[Tensor | None] = []
    for place, count in enumerate(counts):
        whole = found[place]
        of_uses = parts.get(place, [] if whole is None else [whole])
        through += [*of_uses, *[None] * (count - len(of_uses))]
    of_direct = [(p, one) for place, p in enumerate(direct, len(ends)) for one in parts.get(place) or [found[place]]]
    return through, of_direct


def deliver(direct: list[tuple[Tensor, Tensor | None]]) -> None:
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


def changed_in_place(context: Context) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a result or "
        f"a parameter of {context.name!r}, which its backward reads again; use the out-of-place operation"
    )
