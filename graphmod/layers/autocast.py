"""Casts that autocast keeps: whether a call shares some with others, and stays eager for it.

Within one `with torch.autocast(...)` a weight is cast once, and the gradients of all its uses are added up in 16 bits
before they are cast back. A graph casts what it uses itself, so its gradient would be added up in 32 bits, and differ
in the last bits. A layer whose weights have other uses in the same block therefore stays eager, and so do its
neighbours, whose captures may make autocast forget all casts: that of a call which uses one cast several times does, of
other code too, this once. The capture of any other call keeps none, and forgets none.

A second call in a block is seen whenever it comes (`block_of_now`). Where the first was a replay, the log says that its
last bits may differ. Other uses are learned from the backward of the recorded call: one that begins later, or gave no
gradient then, is missed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from graphmod.layers.uses import Sum, nodes_behind, times, uses_of
from graphmod.signature.call import Call
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.recording import keeping_none
from graphmod.torch_private import any_autocast

_REMEDY = "Keep that as it is, or pass cache_enabled=False to torch.autocast, where each use is cast for itself"


class Block:
    """Stands for an autocast block, as long as autocast keeps its casts."""

    __slots__ = ("__weakref__",)


_open: dict[torch.device, weakref.ref[Block]] = {}


def block_of_now(device: torch.device) -> Block:
    """The autocast block that the program is in, which keeps casts."""
    block = open_block(device)
    if block is None:
        block = Block()
        keep_open(device, block)
        _open[device] = weakref.ref(block)
    return block


def keep_open(device: torch.device, block: Block | None) -> None:
    """Lets a block last as long as the casts that autocast keeps from here on. Nothing but the cast of the probe holds
    its node, and nothing but that node the block."""
    if block is None:
        return
    probe = _probe(device)
    with torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is):  # of which a checkpoint around must not know
        cast: Any = torch.nn.functional.linear(probe, probe).grad_fn
        node = cast.next_functions[0][0]
    node.metadata["graphmod"] = block


def open_block(device: torch.device) -> Block | None:
    """The last block that was asked for, if it is still open."""
    known = _open.get(device)
    return None if known is None else known()


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@cache
def _probe(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, 1, device=device, requires_grad=True)


def shares_casts(context: Context, entry: Entry, again: bool) -> bool:
    """Whether a call, whose signature keeps casts, shares some with others. Then the signature stays eager from now on.

    Args:
        again: the wrapper was called before in this autocast block.
    """
    context.group.shares_casts = context.group.shares_casts or again
    if again and entry.graphs:
        context.log_once(
            f"{context.name!r} was replayed before in this autocast block. The last bits of its gradients may differ "
            "from eager's, this once",
            key="casts, once",
        )
    if context.group.shares_casts:
        _stay_eager(context, entry)
    return context.group.shares_casts


def _stay_eager(context: Context, entry: Entry) -> None:
    context.group.shares_casts = True
    context.keep_eager(
        entry,
        "its weights, or those of layers captured with it, have other uses in the same autocast block, for all of "
        "which autocast casts a weight once, and adds their gradients up in 16 bits",
    )
    context.drop(*{graph.tape for graph in entry.graphs}, why=entry.reason)
    context.log_once(f"{context.name!r} stays eager: {entry.reason}. {_REMEDY}", key="casts")


def learn_casts(context: Context, entry: Entry, call: Call) -> None:
    """Lets an entry stay eager if an eager call used casts that were there before it, or if, in its backward, the casts
    of its weights get more gradients than those that the call gives."""
    outputs = call.result.differentiable
    edges = dict(enumerate(_casts_in(call.leaves, outputs)))
    if any(edge.node._sequence_nr() < call.oldest for edge in edges.values()):
        _stay_eager(context, entry)
        return
    found = uses_of(edges, outputs)
    entry.cast_apart(once=all(times(uses) == 1 for uses in found.values()))
    for uses, edge in zip(found.values(), edges.values(), strict=True):
        Sum(uses, edge, lambda: _stay_eager(context, entry))


@contextlib.contextmanager
def casts_of_its_own(context: Context, entry: Entry) -> Iterator[None]:
    """For a capture, which casts what it uses itself.

    Where each weight has one use, or none has a gradient, autocast keeps nothing meanwhile, and what it kept of others
    stays. Else it forgets all casts, before and after: nobody can tell it to forget some.
    """
    if entry.casts_once or (any_autocast() and not torch.is_grad_enabled()):
        with keeping_none():
            yield
        return
    device = context.group.backend.device
    block = open_block(device) if entry.keeps_casts else None
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        keep_open(device, block)


def _casts_in(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[GradientEdge]:
    """The casts of leaf tensors in the autograd graph between some tensors."""

    def is_cast(node: Node) -> bool:
        return node.name().startswith("ToCopyBackward") and any(
            hasattr(following, "variable") for following, _ in node.next_functions
        )

    nodes = nodes_behind(outputs, {tensor.grad_fn for tensor in given}, lambda node: not is_cast(node))
    return [GradientEdge(node, 0) for node in nodes if is_cast(node)]
