"""Lets a compiler spread the reduction of a long row over a GPU."""

from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_PART = 1024  # numbers of a row that are looked at together
_aten = torch.ops.aten


def divide_reductions(graph: GraphModule) -> int:
    """Finds the largest of a long row, and the logarithm of its sum of exponentials, in two stages; returns how many
    were. Inductor gives each row of one stage to a single multiprocessor.

    Args:
        graph: of aten operations, each with its result as `meta["val"]`; changed in place.
    """
    divided = 0
    for node in list(graph.graph.nodes):
        two_stages = _TWO_STAGES.get(node.target)
        if two_stages is None:
            continue
        x, dim, keepdim = _given(node)
        if _is_long(x.meta["val"], dim):
            with graph.graph.inserting_before(node):
                _replace(graph, node, two_stages(graph, x, keepdim))
            divided += 1
    if divided:
        graph.recompile()
    return divided


def _given(node: Node) -> tuple[Node, Any, bool]:
    """What is reduced, along what, and whether that stays a dimension."""
    named = dict(zip(("self", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    return named["self"], named.get("dim"), named.get("keepdim", False)


def _is_long(value: Tensor, dim: Any) -> bool:
    """Whether rows along the last dimension are reduced, of two parts or more."""
    along = dim if isinstance(dim, list) else [dim]
    last = value.dim() > 0 and along in ([-1], [value.dim() - 1])
    return last and value.is_floating_point() and isinstance(value.shape[-1], int) and value.shape[-1] >= 2 * _PART


def _logsumexp(graph: GraphModule, x: Node, keepdim: bool) -> Node:
    of_parts = _call(graph, _aten.logsumexp.default, _parts(graph, x), [-1])
    return _call(graph, _aten.logsumexp.default, of_parts, [-1], keepdim)


def _argmax(graph: GraphModule, x: Node, keepdim: bool) -> Node:
    """In the part that holds the largest: to carry places along with all numbers costs more than to read them."""
    parts = _parts(graph, x)
    part = _call(graph, _aten.argmax.default, _call(graph, _aten.amax.default, parts, [-1]), -1, True)
    *outer, _, length = _shape_of_parts(x)
    chosen = _call(graph, _aten.expand.default, _call(graph, _aten.unsqueeze.default, part, -1), [*outer, 1, length])
    largest = _call(graph, _aten.squeeze.dim, _call(graph, _aten.gather.default, parts, -2, chosen), -2)
    within = _call(graph, _aten.argmax.default, largest, -1, True)
    place = _call(graph, _aten.add.Tensor, _call(graph, _aten.mul.Tensor, part, length), within)
    return place if keepdim else _call(graph, _aten.squeeze.dim, place, -1)


def _shape_of_parts(x: Node) -> list[int]:
    *outer, length = x.meta["val"].shape
    return [*outer, ceil(length / _PART), _PART]


def _parts(graph: GraphModule, x: Node) -> Node:
    """(..., parts, numbers of a part), with -inf behind the last."""
    missing = -x.meta["val"].shape[-1] % _PART
    padded = _call(graph, _aten.constant_pad_nd.default, x, [0, missing], float("-inf"))
    return _call(graph, _aten.reshape.default, padded, _shape_of_parts(x))


def _call(graph: GraphModule, op: Any, *args: Any) -> Node:
    return graph.graph.call_function(op, args)


def _replace(graph: GraphModule, node: Node, other: Node) -> None:
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    graph.graph.erase_node(node)


_TWO_STAGES = {_aten.argmax.default: _argmax, _aten.logsumexp.default: _logsumexp}
