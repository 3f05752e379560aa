"""Lets the reduction of a long row be spread over a GPU: compilers give each row to a single multiprocessor."""

import operator
from math import ceil
from typing import Any

import torch
from torch import Tensor, library
from torch.fx import GraphModule, Node

from graphmod.fuse.products import is_write, operands
from graphmod.torch_private import to_copy

_LENGTH = 2048  # of a part; for 1, 32 and 128 rows of 151,936 the fastest on an H200, or within 0.3 us of it
_LONGEST = 2**16 * _LENGTH  # more parts than a launch may have
_aten = torch.ops.aten


@library.custom_op("graphmod::reduce_parts", mutates_args=())
def reduce_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each part of a row, of 2,048 numbers but for the last: its largest number, the place of that in the row, and
    the sum of `exp(number - largest)`, or of `exp(number)` where the largest is infinite. NaN is larger than any
    number.

    Args:
        x: (..., numbers), floating point of at most four bytes.

    Returns:
        (..., parts) each: float32, int64, float32.
    """
    if x.is_cuda:
        from graphmod.fuse import kernels

        with torch.cuda.device_of(x):
            return kernels.reduce_parts(x, _LENGTH)
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % _LENGTH), value=float("-inf"))
    parts = padded.unflatten(-1, (-1, _LENGTH))
    largest, place = parts.max(-1)
    shift = largest.where(largest.isfinite(), 0)
    begin = torch.arange(0, padded.shape[-1], _LENGTH, device=x.device)
    return largest, place + begin, (parts - shift.unsqueeze(-1)).exp().sum(-1)


@reduce_parts.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = [*x.shape[:-1], ceil(x.shape[-1] / _LENGTH)]
    largest = x.new_empty(shape, dtype=torch.float32)
    return largest, x.new_empty(shape, dtype=torch.int64), torch.empty_like(largest)


def divide_reductions(graph: GraphModule) -> int:
    """Finds the largest of a long row, and the logarithm of its sum of exponentials, in two stages; returns how many
    were. Those of the same row share the first stage.

    Args:
        graph: of aten operations, each with its result as `meta["val"]`; changed in place.
    """
    divided, writes = 0, 0
    before: dict[Node, int] = {}  # of each node how many writes came before it
    parts: dict[tuple[Node, int], Node] = {}
    for node in list(graph.graph.nodes):
        writes += is_write(node)
        before[node] = writes
        second_stage = _SECOND_STAGE.get(node.target)
        x, dim, keepdim = _given(node) if second_stage else (node, None, False)
        if second_stage is None or not _is_long(x.meta["val"], dim):
            continue
        if _widens(x) and before[x] == writes:
            x = operands(x)[0]
        with graph.graph.inserting_before(node):
            if (x, writes) not in parts:
                parts[x, writes] = _call(graph, torch.ops.graphmod.reduce_parts.default, x)
            largest, place, total = (_call(graph, operator.getitem, parts[x, writes], which) for which in range(3))
            other = second_stage(graph, largest, place, total, keepdim, node.meta["val"].dtype)
        other.meta = dict(node.meta)
        node.replace_all_uses_with(other)
        graph.graph.erase_node(node)
        divided += 1
    if divided:
        graph.recompile()
    return divided


def _given(node: Node) -> tuple[Node, Any, bool]:
    """What is reduced, along what, and whether that stays a dimension."""
    named: dict[str, Any] = {**dict(zip(("self", "dim", "keepdim"), operands(node), strict=False)), **node.kwargs}
    return named["self"], named.get("dim"), named.get("keepdim", False)


def _is_long(value: Tensor, dim: Any) -> bool:
    """Whether rows along the last dimension are reduced, long ones of numbers that float32 holds."""
    along = dim if isinstance(dim, list) else [dim]
    last = value.dim() > 0 and along in ([-1], [value.dim() - 1])
    plain = value.is_floating_point() and value.itemsize in (2, 4) and value.numel() > 0
    return last and plain and isinstance(value.shape[-1], int) and 2 * _LENGTH <= value.shape[-1] < _LONGEST


def _widens(x: Node) -> bool:
    """Whether it is what another node gives, in float32, of which both hold the same numbers."""
    if x.target not in (_aten.to.dtype, to_copy) or x.meta["val"].dtype != torch.float32:
        return False
    source = operands(x)[0].meta["val"]
    return source.dtype in (torch.bfloat16, torch.float16) and source.device == x.meta["val"].device


def _logsumexp(graph: GraphModule, largest: Node, place: Node, total: Node, keepdim: bool, dtype: torch.dtype) -> Node:
    whole = _call(graph, _aten.add.Tensor, _call(graph, _aten.log.default, total), largest)
    result = _call(graph, _aten.logsumexp.default, whole, [-1], keepdim)
    if dtype != torch.float32:
        result = graph.graph.call_function(to_copy, (result,), {"dtype": dtype})
    return result


def _argmax(graph: GraphModule, largest: Node, place: Node, total: Node, keepdim: bool, dtype: torch.dtype) -> Node:
    part = _call(graph, _aten.argmax.default, largest, -1, True)
    found = _call(graph, _aten.gather.default, place, -1, part)
    return found if keepdim else _call(graph, _aten.squeeze.dim, found, -1)


def _call(graph: GraphModule, op: Any, *args: Any) -> Node:
    return graph.graph.call_function(op, args)


_SECOND_STAGE = {_aten.argmax.default: _argmax, _aten.logsumexp.default: _logsumexp}
