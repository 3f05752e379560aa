"""Products of one small batch with several weights (query, key and value; gate and up, with SiLU) by one kernel, and of
a narrow weight (the output of attention, down) by enough programs to fill a GPU.

With few rows a product takes a GPU little more than its launch and the way of the first bytes from memory, and the
products of one input do not wait for each other. Compiled decode steps call these operations in place of linear layers;
the weights stay where they are.
"""

import operator
from collections import defaultdict
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, library
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["divided_product", "gated_product", "join_products", "products"]

MOST_WEIGHTS = 3  # of one kernel
_MOST_ROWS = 128
_LARGEST_WEIGHT = 16 * 2**20  # bytes; for more, reading takes longer than a launch, and the kernel was not measured
_FEWEST_COLUMNS = 48 * 64  # of all weights of an operation; with fewer, most of a large GPU would read nothing
_FULL, _MOST_PARTS = 96, 8  # programs that fill a GPU; parts of a weight's features
_OUT, _DEPTH = 64, 128  # the kernel takes weights of multiples of these


@library.custom_op("graphmod::products", mutates_args=())
def products(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """`[x @ weight.T for weight in weights]`, summed in float32.

    Args:
        x: (..., features) of 1 to 128 rows in bfloat16 or float16; features a multiple of 128.
        weights: up to three, (out features, features), contiguous; out features a multiple of 64.
    """
    if not x.is_cuda:
        return [torch.nn.functional.linear(x, weight) for weight in weights]
    from graphmod.decode.step import products_kernel

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    outs = [flat.new_empty(len(flat), len(weight)) for weight in weights]
    with torch.cuda.device_of(x):
        products_kernel.products(flat, weights, outs)
    return [out.view(*x.shape[:-1], -1) for out in outs]


@products.register_fake
def _(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], len(weight)) for weight in weights]


@library.custom_op("graphmod::gated_product", mutates_args=())
def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, computed in float32 and rounded once.

    Args:
        x: (..., features) of 1 to 128 rows in bfloat16 or float16; features a multiple of 128.
        gate, up: (out features, features) each, contiguous; out features a multiple of 64.
    """
    if not x.is_cuda:
        opened, given = (torch.nn.functional.linear(x.float(), weight.float()) for weight in (gate, up))
        return (torch.nn.functional.silu(opened) * given).to(x.dtype)
    from graphmod.decode.step import products_kernel

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = flat.new_empty(len(flat), len(gate))
    with torch.cuda.device_of(x):
        products_kernel.products(flat, [gate, up], [out], gated=True)
    return out.view(*x.shape[:-1], -1)


@gated_product.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(gate))


@library.custom_op("graphmod::divided_product", mutates_args=())
def divided_product(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """(parts, ..., out features) in float32, whose sum over the parts is `x @ weight.T`: of each part of the features.

    Args:
        x: (..., features) of 1 to 128 rows in bfloat16 or float16.
        weight: (out features, features), contiguous; out features a multiple of 64.
        parts: each of a multiple of 128 features.
    """
    if not x.is_cuda:
        pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
        return torch.stack([torch.nn.functional.linear(some.float(), other.float()) for some, other in pairs])
    from graphmod.decode.step import products_kernel

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = flat.new_empty(parts, len(flat), len(weight), dtype=torch.float32)
    with torch.cuda.device_of(x):
        products_kernel.products(flat, [weight], [out], parts)
    return out.view(parts, *x.shape[:-1], -1)


@divided_product.register_fake
def _(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    return x.new_empty(parts, *x.shape[:-1], len(weight), dtype=torch.float32)


def join_products(graph: GraphModule, fewest_rows: int = 1, device: str = "cuda") -> int:
    """Lets linear layers of a graph that take the same input be one operation, and divides those that stay alone and
    are narrow; returns how many operations there are.

    Args:
        graph: of aten operations, each with its result as `meta["val"]`; changed in place.
        fewest_rows: of the input; less is left to the compiler.
        device: where the products are; there are no kernels for others than GPUs.
    """
    if device == "cuda" and not _has_kernel():
        return 0
    groups: defaultdict[tuple[Node, int], list[Node]] = defaultdict(list)
    writes = 0  # so far: what is on the two sides of one may not see the same input
    for node in graph.graph.nodes:
        writes += isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if node.target is torch.ops.aten.linear.default and _fits(node, fewest_rows, device):
            groups[node.args[0], writes].append(node)
    joined = 0
    for nodes in groups.values():
        for start in range(0, len(nodes), MOST_WEIGHTS):
            some = nodes[start : start + MOST_WEIGHTS]
            x = some[0].args[0]  # of now: what it was may have been joined
            if sum(len(node.args[1].meta["val"]) for node in some) >= _FEWEST_COLUMNS and len(some) > 1:
                if not _join_gated(graph, x, some):
                    _join(graph, x, some)
                joined += 1
                continue
            for node in some:
                if (parts := _parts(*node.args[1].meta["val"].shape)) > 1:
                    _divide(graph, x, node, parts)
                    joined += 1
    if joined:
        graph.recompile()
    return joined


def _has_kernel() -> bool:
    if find_spec("triton") is None or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (8, 0)  # before, Triton multiplies without tensor cores


def _join(graph: GraphModule, x: Node, nodes: list[Node]) -> None:
    with graph.graph.inserting_before(nodes[0]):
        joined = graph.graph.call_function(torch.ops.graphmod.products.default, (x, [node.args[1] for node in nodes]))
        for index, node in enumerate(nodes):
            part = graph.graph.call_function(operator.getitem, (joined, index))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.graph.erase_node(node)


def _join_gated(graph: GraphModule, x: Node, nodes: list[Node]) -> bool:
    """Joins two products of which one is the gate of the other; returns whether they are that."""
    aten = torch.ops.aten
    for gate, up in (nodes, nodes[::-1]) if len(nodes) == 2 else ():
        silu, whole = next(iter(gate.users), None), next(iter(up.users), None)
        if silu is None or whole is None or silu.target is not aten.silu.default:
            continue
        # Nothing else uses them, so nothing can write to them.
        alone = [[*node.users] for node in (gate, up, silu)] == [[silu], [whole], [whole]]
        alike = {(one.meta["val"].shape, one.meta["val"].dtype) for one in (gate, up, whole)}
        if not alone or whole.target is not aten.mul.Tensor or {*whole.args} != {silu, up} or len(alike) > 1:
            continue
        with graph.graph.inserting_before(nodes[0]):
            given = (x, gate.args[1], up.args[1])
            joined = graph.graph.call_function(torch.ops.graphmod.gated_product.default, given)
        joined.meta = dict(whole.meta)
        whole.replace_all_uses_with(joined)
        for node in (whole, silu, up, gate):
            graph.graph.erase_node(node)
        return True
    return False


def _parts(columns: int, features: int) -> int:
    """Into how many parts the features of a weight are divided, so that there are programs for a GPU."""
    parts = 1
    while parts < _MOST_PARTS and parts * columns < _FULL * _OUT and features % (2 * parts * _DEPTH) == 0:
        parts *= 2
    return parts


def _divide(graph: GraphModule, x: Node, node: Node, parts: int) -> None:
    """The parts are added one by one, which a compiler does where it uses the sum."""
    call, aten = graph.graph.call_function, torch.ops.aten
    with graph.graph.inserting_before(node):
        divided = call(torch.ops.graphmod.divided_product.default, (x, node.args[1], parts))
        total = call(aten.select.int, (divided, 0, 0))
        for part in range(1, parts):
            total = call(aten.add.Tensor, (total, call(aten.select.int, (divided, 0, part))))
        whole = call(aten._to_copy.default, (total,), {"dtype": node.meta["val"].dtype})
    whole.meta = dict(node.meta)
    node.replace_all_uses_with(whole)
    graph.graph.erase_node(node)


def _fits(node: Node, fewest_rows: int, device: str) -> bool:
    """Whether it is a product that the kernel can do: `linear(x, weight)`, of a weight that the graph is given."""
    x, weight, bias = (*node.args, None)[:3] if 2 <= len(node.args) <= 3 and not node.kwargs else (None, None, None)
    if not isinstance(x, Node) or not isinstance(weight, Node) or bias is not None or weight.op != "placeholder":
        return False
    left, right, out = (one.meta.get("val") for one in (x, weight, node))
    if not _plain(left) or not _plain(right) or not _plain(out) or right.dim() != 2 or not right.is_contiguous():
        return False
    if not all(isinstance(size, int) for size in (*left.shape, *right.shape)):
        return False
    rows = left.numel() // max(1, left.shape[-1])
    return (
        left.device.type == right.device.type == device
        and left.dtype == right.dtype == out.dtype  # not so under autocast
        and left.dtype in (torch.bfloat16, torch.float16)
        and fewest_rows <= rows <= _MOST_ROWS
        and 0 < right.nbytes < _LARGEST_WEIGHT
        and right.shape[0] % _OUT == 0
        and right.shape[1] % _DEPTH == 0
    )


def _plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)
