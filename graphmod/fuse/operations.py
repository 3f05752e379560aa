"""Operations in the place of others in a compiled step: products of few rows, and reductions of long rows.

With few rows a product takes a GPU little more than its launch and the way of the first bytes from memory, and the
products of one input do not wait for each other. So linear layers become products with several weights (query, key and
value; gate and up, with SiLU) by one kernel, and with a narrow one (the output of attention, down) by enough programs
for a GPU. The weights stay where they are. The kernels read them before the one before has ended, so no kernel of a
step may write to them. A long row is reduced in two stages, because compilers give each row to a single multiprocessor.
"""

import operator
from collections import defaultdict
from importlib.util import find_spec
from itertools import zip_longest
from math import ceil
from typing import Any

import torch
from torch import Tensor, library
from torch.fx import GraphModule, Node

from graphmod.torch_private import OpOverload, is_traceable_wrapper_subclass, to_copy
from graphmod.wrap.extension import facts, written

_aten = torch.ops.aten
MOST_ROWS = 128
MOST_WEIGHTS = 3  # of one launch
FEWEST_IN_BULK = 65  # rows; with 64 both kernels take as long, with 32 `multiply_bulk` takes longer
OUT, DEPTH = 64, 128  # out features and features of weights are multiples of these
_LARGEST_WEIGHT = 16 * 2**20  # bytes, of several rows; for more, reading takes longer than a launch
_FEWEST_COLUMNS = 48 * 64  # of all weights of an operation; with fewer, most of a large GPU would read nothing
_FULL, _MOST_PARTS = 96, 8  # programs that fill a GPU; parts of a weight's features
_FULL_OF_8_BITS = 160  # programs that convert what they load


def join_products(graph: GraphModule, device: str = "cuda") -> int:
    """Lets linear layers of a graph that take the same input be one operation, and divides those that stay alone and
    are narrow. With a single row, those that stay alone are operations, too, where kernels may be launched early: else
    the compiler's are as fast. Returns how many there are.

    Args:
        graph: of aten operations, each with its result as `meta["val"]`, and with `meta["is_weight"]` those inputs
            that no operation of a step writes; changed in place.
        device: where the products are; there are no kernels for others than GPUs.
    """
    if device == "cuda" and not _has_kernel():
        return 0
    early = True
    if device == "cuda":
        from graphmod.fuse.kernels import can_start_early

        early = can_start_early(torch.device("cuda", torch.cuda.current_device()))
    groups: defaultdict[tuple[Node, int, torch.dtype], list[Node]] = defaultdict(list)
    writes = 0  # so far: what is on the two sides of one may not see the same input
    for node in graph.graph.nodes:
        writes += is_write(node)
        if node.target in LINEAR and _fits(node, device, 1 if early else 2):
            groups[operands(node)[0], writes, operands(node)[1].meta["val"].dtype].append(node)
    joined = 0
    for nodes in groups.values():
        for start in range(0, len(nodes), MOST_WEIGHTS):
            some = nodes[start : start + MOST_WEIGHTS]
            x = operands(some[0])[0]  # of now: what it was may have been joined
            columns, _ = _extent(some)
            together = _rows(x) == 1 or (columns >= _FEWEST_COLUMNS and len(some) > 1)
            if together and _join_gated(graph, x, some):
                joined += 1
                continue
            full = _FULL_OF_8_BITS if _scales(*some) else _FULL // 2 if early and _rows(x) >= FEWEST_IN_BULK else _FULL
            whole = _rows(x) == 1 or (together and not _scales(*some))
            for each in [some] if together else [[node] for node in some]:
                parts = 1 if whole else _parts(full, *_extent(each))
                if parts > 1:
                    _divide(graph, x, each, parts)
                elif together:
                    _join(graph, x, each)
                joined += together or parts > 1
    if joined:
        graph.recompile()
    return joined


def multiplies_row(graph: GraphModule) -> bool:
    """Whether a product that it was given here is of a single row."""
    own = torch.ops.graphmod.products.default, torch.ops.graphmod.gated_product.default
    return any(node.target in own and _rows(node.args[0]) == 1 for node in graph.graph.nodes)


def operands(node: Node) -> list[Any]:
    """Its arguments, which are nodes but for plain values."""
    return list(node.args)


def is_write(node: Node) -> bool:
    """Whether an operation writes to memory that it is given."""
    return isinstance(node.target, OpOverload) and bool(written(facts(node.target), node.args, node.kwargs))


def _has_kernel() -> bool:
    if find_spec("triton") is None or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (8, 0)  # before, Triton multiplies without tensor cores


def _join(graph: GraphModule, x: Node, nodes: list[Node]) -> None:
    """What has a bias is rounded once it is added, and not before, as by a linear layer."""
    dtype = torch.float32 if any(map(_bias, nodes)) else x.meta["val"].dtype
    with graph.graph.inserting_before(nodes[0]):
        given = (x, [node.args[1] for node in nodes], dtype, _scales(*nodes))
        joined = graph.graph.call_function(torch.ops.graphmod.products.default, given)
        parts = [graph.graph.call_function(operator.getitem, (joined, index)) for index in range(len(nodes))]
    for node, part in zip(nodes, parts, strict=True):
        with graph.graph.inserting_before(node):
            _replace(graph, node, part, rounds=dtype == torch.float32)


def _replace(graph: GraphModule, node: Node, product: Node, rounds: bool) -> None:
    """Lets a product take the place of a linear layer, plus its bias, and rounded to what that gives."""
    call = graph.graph.call_function
    if (bias := _bias(node)) is not None:
        product = call(_aten.add.Tensor, (product, bias))
    if rounds:
        product = call(to_copy, (product,), {"dtype": node.meta["val"].dtype})
    product.meta = dict(node.meta)
    node.replace_all_uses_with(product)
    graph.graph.erase_node(node)


def _bias(node: Node) -> Node | None:
    place = LINEAR[node.target]
    return operands(node)[place] if len(node.args) > place else None


def _scales(*nodes: Node) -> list[Node]:
    """Those of the weights, which are of one dtype, if it has some."""
    return [operands(node)[2] for node in nodes if node.target is torch.ops.graphmod.scaled_linear.default]


def _join_gated(graph: GraphModule, x: Node, nodes: list[Node]) -> bool:
    """Joins two products of which one is the gate of the other; returns whether they are that."""
    for gate, up in (nodes, nodes[::-1]) if len(nodes) == 2 else ():
        silu, whole = next(iter(gate.users), None), next(iter(up.users), None)
        if silu is None or whole is None or silu.target is not _aten.silu.default:
            continue
        # Nothing else uses them, so nothing can write to them.
        alone = [[*node.users] for node in (gate, up, silu)] == [[silu], [whole], [whole]]
        alone = alone and _bias(gate) is _bias(up) is None
        alike = {(one.meta["val"].shape, one.meta["val"].dtype) for one in (gate, up, whole)}
        if not alone or whole.target is not _aten.mul.Tensor or {*whole.args} != {silu, up} or len(alike) > 1:
            continue
        with graph.graph.inserting_before(nodes[0]):
            given = (x, gate.args[1], up.args[1], _scales(gate, up))
            joined = graph.graph.call_function(torch.ops.graphmod.gated_product.default, given)
        joined.meta = dict(whole.meta)
        whole.replace_all_uses_with(joined)
        for node in (whole, silu, up, gate):
            graph.graph.erase_node(node)
        return True
    return False


def _rows(x: Node) -> int:
    return x.meta["val"].numel() // max(1, x.meta["val"].shape[-1])


def _extent(nodes: list[Node]) -> tuple[int, int]:
    """The out features of some products together, and their features."""
    shapes = [operands(node)[1].meta["val"].shape for node in nodes]
    return sum(columns for columns, _ in shapes), shapes[0][1]


def _parts(full: int, columns: int, features: int) -> int:
    """Into how many parts the features of weights are divided, so that there are programs for a GPU: `full`."""
    parts = 1
    while parts < _MOST_PARTS and parts * columns < full * OUT and features % (2 * parts * DEPTH) == 0:
        parts *= 2
    return parts


def _divide(graph: GraphModule, x: Node, nodes: list[Node], parts: int) -> None:
    """The parts are added one by one, which a compiler does where it uses the sum."""
    call = graph.graph.call_function
    with graph.graph.inserting_before(nodes[0]):
        given = (x, [node.args[1] for node in nodes], parts, _scales(*nodes))
        divided = call(torch.ops.graphmod.divided_products.default, given)
        products = [call(operator.getitem, (divided, index)) for index in range(len(nodes))]
    for node, product in zip(nodes, products, strict=True):
        with graph.graph.inserting_before(node):
            total = call(_aten.select.int, (product, 0, 0))
            for part in range(1, parts):
                total = call(_aten.add.Tensor, (total, call(_aten.select.int, (product, 0, part))))
            _replace(graph, node, total, rounds=True)


def _fits(node: Node, device: str, fewest_rows: int) -> bool:
    """Whether it is a product that the kernels can do: a linear layer, of a weight that nothing changes."""
    fewest = LINEAR[node.target]
    if node.kwargs or len(node.args) < fewest or not all(isinstance(one, Node) for one in node.args[:fewest]):
        return False
    (x, weight), scales, bias = operands(node)[:2], _scales(node), _bias(node)
    if not all(one.meta.get("is_weight") for one in (weight, *scales)):
        return False
    given: list[Any] = [one.meta.get("val") for one in (x, node, *([] if bias is None else [bias]))]
    left, right = given[0], weight.meta.get("val")
    if not all(map(_plain, (*given, right))):
        return False
    if right.dim() != 2 or not right.is_contiguous():
        return False
    if not all(isinstance(size, int) for size in (*left.shape, *right.shape)):
        return False
    return (
        all(one.device.type == device and one.dtype == left.dtype for one in given)  # not so under autocast
        and right.device.type == device
        and (right.itemsize == 1 if scales else right.dtype == left.dtype)
        and (bias is None or bias.meta["val"].dim() < 2)  # more are added to rows that are flattened
        and left.dtype in (torch.bfloat16, torch.float16)
        and fewest_rows <= _rows(x) <= MOST_ROWS
        and (_rows(x) == 1 or bool(scales) or 0 < right.nbytes < _LARGEST_WEIGHT)
        and _divides(right)
    )


def _divides(weight: Tensor) -> bool:
    return weight.shape[0] % OUT == 0 and weight.shape[1] % DEPTH == 0


def _plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)


# -- the operations ----------------------------------------------------------------------------------------------------


@library.custom_op("graphmod::products", mutates_args=())
def products(x: Tensor, weights: list[Tensor], dtype: torch.dtype, scales: list[Tensor]) -> list[Tensor]:
    """`[x @ weight.T for weight in weights]`, summed in float32.

    Args:
        x: (..., features) of 1 to 128 rows in bfloat16 or float16; features a multiple of 128.
        weights: up to three, (out features, features), contiguous; out features a multiple of 64. All of one dtype:
            that of `x`, or int8 or float8_e4m3fn with scales.
        dtype: of the results: that of `x`, or float32.
        scales: (out features,) float32 of each weight, which multiply its product; none where it has the dtype of `x`.
    """
    if not x.is_cuda:
        x = x.to(dtype)
        pairs = zip_longest(weights, scales)
        return [torch.nn.functional.linear(x, _unscaled(weight, scale, dtype)) for weight, scale in pairs]
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    outs = [flat.new_empty(len(flat), len(weight), dtype=dtype) for weight in weights]
    with torch.cuda.device_of(x):
        multiply(flat, weights, outs, scales)
    return [out.view(*x.shape[:-1], -1) for out in outs]


@products.register_fake
def _(x: Tensor, weights: list[Tensor], dtype: torch.dtype, scales: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], len(weight), dtype=dtype) for weight in weights]


@library.custom_op("graphmod::gated_product", mutates_args=())
def gated_product(x: Tensor, gate: Tensor, up: Tensor, scales: list[Tensor]) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, computed in float32 and rounded once.

    Args:
        x: (..., features) of 1 to 128 rows in bfloat16 or float16; features a multiple of 128.
        gate, up: (out features, features) each, contiguous; out features a multiple of 64; as in `products`.
        scales: as in `products`.
    """
    if not x.is_cuda:
        weights = (_unscaled(weight, scale, torch.float32) for weight, scale in zip_longest((gate, up), scales))
        opened, given = (torch.nn.functional.linear(x.float(), weight) for weight in weights)
        return (torch.nn.functional.silu(opened) * given).to(x.dtype)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = flat.new_empty(len(flat), len(gate))
    with torch.cuda.device_of(x):
        multiply(flat, [gate, up], [out], scales, gated=True)
    return out.view(*x.shape[:-1], -1)


@gated_product.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, scales: list[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(gate))


@library.custom_op("graphmod::divided_products", mutates_args=())
def divided_products(x: Tensor, weights: list[Tensor], parts: int, scales: list[Tensor]) -> list[Tensor]:
    """As `products`, of each part of the features: of each weight (parts, ..., out features) in float32, whose sum over
    the parts is the product.

    Args:
        x, weights, scales: as in `products`.
        parts: each of a multiple of 128 features.
    """
    if not x.is_cuda:
        whole = [_unscaled(weight, scale, torch.float32) for weight, scale in zip_longest(weights, scales)]
        pairs = [zip(x.float().chunk(parts, -1), weight.chunk(parts, -1), strict=True) for weight in whole]
        return [torch.stack([torch.nn.functional.linear(*pair) for pair in some]) for some in pairs]
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    outs = [flat.new_empty(parts, len(flat), len(weight), dtype=torch.float32) for weight in weights]
    with torch.cuda.device_of(x):
        multiply(flat, weights, outs, scales, parts=parts)
    return [out.view(parts, *x.shape[:-1], -1) for out in outs]


@divided_products.register_fake
def _(x: Tensor, weights: list[Tensor], parts: int, scales: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(parts, *x.shape[:-1], len(weight), dtype=torch.float32) for weight in weights]


@library.custom_op("graphmod::scaled_linear", mutates_args=())
def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ (scale[:, None] * weight).T + bias`.

    Up to 128 rows read the weight as it is where `reads_8_bits`, on a GPU with Triton. Others are multiplied by a copy
    of the weight in the dtype of `x`, made anew in each call.

    Args:
        x: (..., features) floating point.
        weight: (out features, features), int8 or float8_e4m3fn.
        scale: (out features,) float32.
        bias: (out features,).
    """
    if not x.is_floating_point():
        raise TypeError(f"scaled_linear takes an input in floating point, got {x.dtype}")
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return torch.nn.functional.linear(x, _unscaled(weight, scale, x.dtype), bias)
    flat = x.reshape(-1, x.shape[-1])
    if 0 < len(flat) <= MOST_ROWS and _has_kernel() and reads_8_bits(weight, x.dtype):
        (found,) = products(flat, [weight], x.dtype if bias is None else torch.float32, [scale])
    else:  # which is rounded once, too
        found = torch.mm(flat, weight.to(x.dtype).T, out_dtype=torch.float32).mul_(scale)
    found = found if bias is None else found.add_(bias)
    return found.to(x.dtype).view(*x.shape[:-1], len(weight))


@scaled_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def reads_8_bits(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels multiply rows of a dtype by a weight of 8 bits, on a GPU that has them."""
    return dtype in (torch.bfloat16, torch.float16) and _divides(weight) and weight.is_contiguous()


def _unscaled(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A weight in `dtype`, multiplied by its scales if there are some."""
    if scale is None:
        return weight.to(dtype)
    return weight.to(torch.promote_types(dtype, scale.dtype)).mul_(scale.unsqueeze(1)).to(dtype)


# What multiplies by a weight, its second argument, and the place of a bias.
LINEAR: dict[Any, int] = {_aten.linear.default: 2, torch.ops.graphmod.scaled_linear.default: 3}


def multiply(
    x: Tensor,
    weights: list[Tensor],
    outs: list[Tensor],
    scales: list[Tensor],
    parts: int = 1,
    gated: bool = False,
) -> None:
    """`outs[i] = x @ weights[i].T`, for up to three.

    Args:
        x: (rows, features), contiguous, of two bytes a number.
        weights: (out features, features) each, contiguous; out features a multiple of 64; as in `products`.
        outs: (rows, out features) each, contiguous; (parts, rows, out features) of several parts.
        scales: as in `products`.
        parts: that features are divided into, each a multiple of 128; one for a single row.
        gated: then `outs[0] = silu(x @ weights[0].T) * (x @ weights[1].T)`, of two weights that are as large.
    """
    widths = [len(weight) for weight in weights] + (MOST_WEIGHTS - len(weights)) * [0]
    # Kernels take three of each; those too many are not used.
    weights, scales = ([*some, *(MOST_WEIGHTS - len(some)) * some[:1]] for some in (weights, scales))
    outs = [*outs, *(MOST_WEIGHTS - len(outs)) * outs[:1]]
    from graphmod.fuse import kernels

    early = kernels.can_start_early(x.device)
    if early and len(x) == 1 and parts == 1:
        kernels.multiply_row(x, weights, scales, widths, outs, gated)
    elif early and len(x) >= FEWEST_IN_BULK and not gated and not scales and _aligned(x, *weights):
        kernels.multiply_bulk(x, weights, widths, outs, parts)
    else:
        kernels.multiply_batch(x, weights, scales, widths, outs, parts, gated)


def _aligned(*tensors: Tensor) -> bool:
    """As the tensor memory accelerator needs it."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


# -- reductions --------------------------------------------------------------------------------------------------------

_LENGTH = 2048  # of a part; for 1, 32 and 128 rows of 151,936 the fastest on an H200, or within 0.3 us of it
_LONGEST = 2**16 * _LENGTH  # more parts than a launch may have


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
