"""At which AccumulateGrad nodes the autograd graph of a capture ends.

Such a node keeps the stream on which it was made, and lives as long as anything that leads to it. A capture that ended
at one of the caller's stream would fork to that stream; gradients that eager code accumulated at one of the capture
stream would run there, where nothing is to run. So captures get nodes, or views in front of them, of their own.
"""

from __future__ import annotations

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


class own_ends:
    """Lets the autograd graph of a capture end at nodes of its own; whoever comes after it makes others again.

    Where a parameter's node must stay as it is, modules have a view of it instead, at which the capture ends, and which
    is noted in `graph.stand_ins`. Those are parameters that are used outside of this graph too, those with gradient
    hooks, which the node runs, and all of them while an eager call of the module waits for its backward. Code that runs
    its backward inside gets views of shared ones only: its gradients must reach the parameters themselves.

    Args:
        graph: about to be captured.
        found: what the recorded call read.
        given: the identities of its arguments. It has aliases of those, and calls before this one led to their nodes.
    """

    def __init__(self, graph: Any, found: Guards, given: set[int]) -> None:
        self._graph, self._backend, self._places = graph, graph.context.group.backend, _replaced(graph, found)
        self._parameters = {id(parameter): parameter for _, _, parameter in self._places}
        # Then the backward goes on behind the views, to nodes of the capture too.
        self._within = _runs_backward(graph) and not graph.context.group.busy
        self._renewed = _to_renew(graph, found, given, set(self._parameters))
        self._renewed += self._parameters.values() if self._within else ()

    def __enter__(self) -> None:
        self._backend.renew_accumulators(self._renewed)
        views = self._backend.views(list(self._parameters.values()), self._within)
        self._graph.stand_ins = dict(zip(self._parameters, views, strict=True))
        for names, key, parameter in self._places:
            names[key] = self._graph.stand_ins[id(parameter)]

    def __exit__(self, *_: object) -> None:
        for names, key, parameter in self._places:
            names[key] = parameter
        self._backend.renew_accumulators(self._renewed)


def _replaced(graph: Any, found: Guards) -> list[tuple[dict, str, nn.Parameter]]:
    """The places of parameters in modules that are to be given views."""
    context, entry = graph.context, graph.entry
    owned = found.parameters()
    kept = owned if context.waiting() else [parameter for parameter in owned if has_gradient_hooks(parameter)]
    kept = [] if _runs_backward(graph) else kept
    held = {id(names) for names, _, _ in found.attributes}
    elsewhere = {id(tensor) for container, _, tensor in found.slots if id(container) not in held}
    wanted = {*context.group.shared, *map(id, kept)} - elsewhere if torch.is_grad_enabled() else set()
    # Autocast keeps its casts of parameters, not of views. What a first attempt trips over, a second goes without.
    casts = entry.signature.modes[AUTOCAST]
    if (casts is not None and casts[-1]) or entry.account.failures:
        wanted = set()
    return [place for place in found.attributes if id(place[2]) in wanted and place[2].requires_grad]


def _to_renew(graph: Any, found: Guards, given: set[int], stood_in: set[int]) -> list[nn.Parameter]:
    context = graph.context
    known = {id(parameter): parameter for parameter in (*found.parameters(), *context.around.parameters)}
    keep = stood_in | context.group.shared.keys()
    keep |= given - {id(one) for *_, one in (*found.attributes, *found.slots)}
    if context.group.busy or not _runs_backward(graph):  # whoever leads to the node of now runs the hooks, too
        keep |= {key for key, parameter in known.items() if has_gradient_hooks(parameter)}
    return [parameter for key, parameter in known.items() if key not in keep] if torch.is_grad_enabled() else []
