"""Lets a compiler spread the reduction of a long row over a GPU."""

from math import ceil
from typing import Any

import torch
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
        if node.target is _aten.argmax.default and _is_long(node, *_given(node, None)):
            x, _, keepdim = _given(node, None)
            with graph.graph.inserting_before(node):
                _replace(graph, node, _argmax(graph, x, keepdim))
            divided += 1
        elif node.target is _aten.logsumexp.default and _is_long(node, *_given(node, [])):
            x, _, keepdim = _given(node, [])
            with graph.graph.inserting_before(node):
                some = _call(graph, _aten.logsumexp.default, _parts(graph, x), [-1])
                _replace(graph, node, _call(graph, _aten.logsumexp.default, some, [-1], keepdim))
            divided += 1
    if divided:
        graph.recompile()
    return divided


def _given(node: Node, dim: Any) -> tuple[Node, Any, bool]:
    """What is reduced, along what, and whether that stays a dimension."""
    named = {
        "dim": dim,
        "keepdim": False,
        **dict(zip(("self", "dim", "keepdim"), node.args, strict=False)),
        **node.kwargs,
    }
    return named["self"], named["dim"], named["keepdim"]


def _is_long(node: Node, x: Node, dim: Any, keepdim: bool) -> bool:
    """Whether rows along the last dimension are reduced, of two parts or more."""
    shape, along = x.meta["val"].shape, dim if isinstance(dim, list) else [dim]
    last = len(shape) > 0 and along in ([-1], [len(shape) - 1])
    return last and x.meta["val"].is_floating_point() and isinstance(shape[-1], int) and shape[-1] >= 2 * _PART


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
