"""Casts that autocast keeps.

Within one `with torch.autocast(...)` a weight is cast once, and the gradients of all its uses are added up in 16 bits
before they are cast back. A graph casts what it uses itself, so its gradient would be added up in 32 bits, and differ
in the last bits. A layer whose weights have other uses in the same block therefore stays eager, and so do its
neighbours: their captures would make autocast forget all casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from graphmod.graph.context import Context
from graphmod.graph.uses import Sum, uses_of
from graphmod.signature.modes import AUTOCAST, GRAD
from graphmod.state.entry import Entry

_REMEDY = "Keep that as it is, or pass cache_enabled=False to torch.autocast, where each use is cast for itself"


def block_of_now(context: Context) -> Node | None:
    """An object that stands for the autocast block that the program is in; None where none keeps casts of weights that
    are trained."""
    gpu = context.group.gpu
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    keeps = torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
    if not keeps or not any(p.requires_grad and p.dtype is torch.float32 for p in context.around.parameters):
        return None
    probe = _probe(device)
    return torch.nn.functional.linear(probe, probe).grad_fn.next_functions[0][0]


@cache
def _probe(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, 1, device=device, requires_grad=True)


def share_casts(context: Context, entry: Entry, block: Node | None) -> bool:
    """Whether a call shares casts with others; if so, its signature stays eager from now on."""
    if block is not None and block is context.in_block:
        context.group.shares_casts = True  # called before in this block
    context.in_block = block
    return block is not None and stays_eager(context, entry)


def stays_eager(context: Context, entry: Entry) -> bool:
    """Whether a signature is one under which casts are kept that this call or others of its group share."""
    casts = entry.signature.modes[AUTOCAST]
    shares = context.group.shares_casts and casts is not None and casts[-1] and entry.signature.modes[GRAD]
    if shares:
        _stay_eager(context, entry)
    return bool(shares)


def _stay_eager(context: Context, entry: Entry) -> None:
    context.group.shares_casts = True
    entry.disabled = True
    entry.reason = (
        "its weights, or those of layers captured with it, have other uses in the same autocast block, for all of "
        "which autocast casts a weight once, and adds their gradients up in 16 bits"
    )
    context.drop(*{graph.tape for graph in entry.graphs}, why=entry.reason)
    context.log_once(f"{context.name!r} stays eager: {entry.reason}. {_REMEDY}", key="casts")


def learn_casts(context: Context, entry: Entry, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Lets an entry stay eager if, in the backward of an eager call, the casts of its weights get more gradients than
    those that the call gives.

    Args:
        given: its tensor arguments; outputs: its results that have a backward.
    """
    edges = dict(enumerate(_casts_in(given, outputs)))
    for uses, edge in zip(uses_of(edges, outputs).values(), edges.values(), strict=True):
        Sum(uses, edge, lambda: _stay_eager(context, entry))


def _casts_in(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[GradientEdge]:
    """The casts of leaf tensors in the autograd graph between some tensors."""
    seen = {tensor.grad_fn for tensor in given}
    queue: list[Any] = [out.grad_fn for out in outputs if out.grad_fn not in seen]
    seen.update(queue)
    found = []
    while queue:
        node = queue.pop()
        following = [one for one, _ in node.next_functions if one is not None]
        if node.name().startswith("ToCopyBackward") and following and hasattr(following[0], "variable"):
            found.append(GradientEdge(node, 0))
            continue
        for one in following:
            if one not in seen:
                seen.add(one)
                queue.append(one)
    return found
