"""At which AccumulateGrad nodes the autograd graph of a capture ends.

Such a node keeps the stream on which it was made, and lives as long as anything that leads to it. A capture that ended
at one of the caller's stream would fork to that stream; gradients that eager code accumulated at one of the capture
stream would run there, where nothing is to run. So captures get nodes, or views in front of them, of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphmod.guards.guards import Guards
from graphmod.guards.hooks import has_gradient_hooks
from graphmod.signature.modes import AUTOCAST


def _runs_backward(graph: Any) -> bool:
    """Whether the callable runs a backward itself."""
    if isinstance(graph.context.root, nn.Module):
        return False
    return graph.recording.backward


@contextlib.contextmanager
def stood_in(graph: Any, found: Guards) -> Iterator[None]:
    """Gives the modules a view of each parameter whose node must stay as it is, and notes it in `graph.stand_ins`.

    Those are parameters that are used outside of this graph too, those with gradient hooks, which the node runs, and
    all of them while an eager call of the module waits for its backward. The capture ends at the view. Code that runs
    its backward inside gets views of shared ones only: its gradients must reach the parameters themselves.

    Args:
        graph: about to be captured.
        found: what the recorded call read.
    """
    context, entry = graph.context, graph.entry
    owned = found.parameters()
    inside = _runs_backward(graph)
    kept = owned if context.waiting() else [parameter for parameter in owned if has_gradient_hooks(parameter)]
    kept = [] if inside else kept
    held = {id(names) for names, _, _ in found.attributes}
    elsewhere = {id(tensor) for container, _, tensor in found.slots if id(container) not in held}
    wanted = {*context.group.shared, *map(id, kept)} - elsewhere if torch.is_grad_enabled() else set()
    # Autocast keeps its casts of parameters, not of views. What a first attempt trips over, a second goes without.
    casts = entry.signature.modes[AUTOCAST]
    if (casts is not None and casts[-1]) or entry.failures_in_a_row:
        wanted = set()
    places = [place for place in found.attributes if id(place[2]) in wanted and place[2].requires_grad]
    parameters = list({id(parameter): parameter for _, _, parameter in places}.values())
    backend = context.group.backend
    within = inside and not context.group.busy  # the backward goes on behind the views, to nodes of the capture too
    if within:
        backend.renew_accumulators(parameters)
    views = backend.views(parameters, within)
    graph.stand_ins = {id(parameter): view for parameter, view in zip(parameters, views, strict=True)}
    try:
        for names, key, parameter in places:
            names[key] = graph.stand_ins[id(parameter)]
        yield
    finally:
        for names, key, parameter in places:
            names[key] = parameter
        if within:
            backend.renew_accumulators(parameters)


@contextlib.contextmanager
def own_accumulators(graph: Any, found: Guards, given: set[int]) -> Iterator[None]:
    """Lets a capture make nodes of its own, for all parameters but those that must keep theirs; and whoever comes after
    it make others again.

    Args:
        graph: about to be captured; its stand-ins are in place.
        found: what the recorded call read.
        given: the identities of its arguments. It has aliases of those, and calls before this one led to their nodes.
    """
    context, backend = graph.context, graph.context.group.backend
    known = {id(parameter): parameter for parameter in (*found.parameters(), *context.around.parameters)}
    keep = (
        context.group.shared.keys()
        | graph.stand_ins.keys()
        | (given - {id(one) for *_, one in (*found.attributes, *found.slots)})
    )
    if context.group.busy or not _runs_backward(graph):  # whoever leads to the node of now runs the hooks, too
        keep |= {key for key, parameter in known.items() if has_gradient_hooks(parameter)}
    renewed = [parameter for key, parameter in known.items() if key not in keep] if torch.is_grad_enabled() else []
    backend.renew_accumulators(renewed)
    try:
        yield
    finally:
        backend.renew_accumulators(renewed)
