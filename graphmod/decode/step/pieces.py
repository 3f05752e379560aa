"""A traced decode step in pieces, each up to the attention of a layer, of which those that are alike are compiled once.

A compiler takes as long for each of a model's layers as for the first, although they are the same code with other
weights. Nothing is lost by the cuts: no kernel reaches across an attention, and in a CUDA graph calls cost nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_FEWEST = 3  # attentions: then there are two pieces that may be alike


class _Piece(NamedTuple):
    """Some successive nodes of a graph.

    Attributes:
        nodes: in their order.
        inputs: nodes before it that it uses, in the order of their first use.
        outputs: of its nodes, those that are used after it.
    """

    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]


class _Place(NamedTuple):
    """Stands for a node in what describes a graph: which one it is of the inputs, or of the nodes."""

    of: str
    number: int


def compile_pieces(graph: GraphModule, inputs: list[Any], compile: Callable[[GraphModule, list[Any]], Callable]) -> Any:
    """`compile(graph, inputs)`, in pieces where some of them are alike.

    Args:
        graph: of `torch.compile`, with example values.
    """
    pieces = list(_cut(graph))
    names = [_description(graph, piece.nodes, piece.inputs, piece.outputs) for piece in pieces]
    results = _nodes(graph, "output")[0].args[0]
    passed = [node for piece in pieces for node in (*piece.inputs, *piece.outputs)]
    can_pass = all(map(_is_fixed, map(_example, passed))) and all(isinstance(one, Node) for one in results)
    if len(set(names)) == len(names) or not can_pass:
        return compile(graph, inputs)
    compiled: dict[str, Callable] = {}
    for piece, name in zip(pieces, names, strict=True):
        if name not in compiled:
            compiled[name] = compile(_module(graph, piece), [_example(node) for node in piece.inputs])
    steps = [(compiled[name], piece) for piece, name in zip(pieces, names, strict=True)]
    return _Pieces(_nodes(graph, "placeholder"), steps, results)


class _Pieces:
    """Calls compiled pieces one after the other, and lets go of what no later one uses."""

    def __init__(self, given: list[Node], pieces: list[tuple[Callable, _Piece]], results: Sequence[Node]) -> None:
        self._given, self._results = [node.name for node in given], [node.name for node in results]
        last: dict[str, int] = {}
        for number, (_, piece) in enumerate(pieces):
            last |= {node.name: number for node in (*piece.inputs, *piece.outputs)}
        self._steps = [
            (
                run,
                [node.name for node in piece.inputs],
                [node.name for node in piece.outputs],
                [name for name, end in last.items() if end == number and name not in self._results],
            )
            for number, (run, piece) in enumerate(pieces)
        ]

    def __call__(self, *given: Any) -> tuple:
        values = dict(zip(self._given, given, strict=True))
        for run, inputs, outputs, dead in self._steps:
            values.update(zip(outputs, run(*[values[name] for name in inputs]), strict=True))
            for name in dead:
                del values[name]
        return tuple(values[name] for name in self._results)


def _nodes(graph: GraphModule, *kinds: str) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op in kinds]


def _work(graph: GraphModule) -> list[Node]:
    """All nodes but what a graph is given, what it has and what it returns."""
    return _nodes(graph, "call_function", "call_method", "call_module")


def _example(node: Node) -> Any:
    return node.meta.get("example_value")


def _is_attention(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "graphmod" and target._opname.endswith("_decode")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() == "flex_attention"
    return target is torch.nn.functional.scaled_dot_product_attention


def _ends(nodes: list[Node]) -> Iterator[int]:
    """Where attentions end, with the parts of their results."""
    for number, node in enumerate(nodes):
        if _is_attention(node):
            number += 1
            while number < len(nodes) and nodes[number].target is operator.getitem and nodes[number].args[0] is node:
                number += 1
            yield number


def _cut(graph: GraphModule) -> Iterator[_Piece]:
    """The work of a graph; one piece where there are few attentions."""
    nodes = _work(graph)
    ends = list(_ends(nodes))
    ends = [*(ends if len(ends) >= _FEWEST else []), len(nodes)]
    parts = [nodes[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    where = {node: number for number, part in enumerate(parts) for node in part}
    for number, part in enumerate(parts):
        used = dict.fromkeys(given for node in part for given in node.all_input_nodes if given.op != "get_attr")
        inputs = [node for node in used if where.get(node) != number]
        yield _Piece(part, inputs, [node for node in part if any(where.get(user) != number for user in node.users)])


def _module(graph: GraphModule, piece: _Piece) -> GraphModule:
    """A graph of its own."""
    own = Graph()
    known: dict[Node, Node] = {}
    for node in piece.inputs:
        known[node] = own.placeholder(node.name)
        known[node].meta = dict(node.meta)

    def copied(node: Node) -> Node:
        if node not in known:  # an attribute of the whole
            known[node] = own.node_copy(node)
        return known[node]

    for node in piece.nodes:
        known[node] = own.node_copy(node, copied)
    own.output(tuple(known[node] for node in piece.outputs))
    return GraphModule(graph, own)


def _description(graph: GraphModule, nodes: Sequence[Node], inputs: Sequence[Node], results: Any) -> str:
    """The same for two parts of graphs that compute the same of what they are given, and for no others."""
    places = {node: _Place("input", number) for number, node in enumerate(inputs)}
    places |= {node: _Place("node", number) for number, node in enumerate(nodes)}

    def told(node: Node) -> Any:
        return places[node] if node in places else _attribute(graph, node.target)

    memory: dict[int, int] = {}
    lines = [_kind(_example(node), memory) for node in inputs]
    for node in nodes:
        target = node.target if isinstance(node.target, str) else id(node.target)
        lines.append(f"{node.op} {target} {map_arg((node.args, node.kwargs), told)!r} {_kind(_example(node), memory)}")
    return "\n".join([*lines, repr(map_arg(results, told))])


def _attribute(graph: GraphModule, name: str) -> str:
    """What a graph has: another graph is described, all else counts as itself."""
    found = operator.attrgetter(name)(graph)
    if not isinstance(found, GraphModule):
        return f"{id(found)}"
    return _description(found, _work(found), _nodes(found, "placeholder"), _nodes(found, "output")[0].args)


def _kind(value: Any, memory: dict[int, int]) -> str:
    """What a compiler may rely on in a value.

    Args:
        memory: the storages that were met so far; which values share one counts as well.
    """
    if not _is_fixed(value):
        return repr(type(value))
    shared = memory.setdefault(value.untyped_storage()._cdata, len(memory))
    size = tuple(value.shape), value.stride(), value.storage_offset()
    return f"{size} {value.dtype} {value.device} {value.requires_grad} {type(value)} {shared}"


def _is_fixed(value: Any) -> bool:
    """Whether it is a plain tensor of sizes that are known."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    if is_traceable_wrapper_subclass(value) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    return all(isinstance(size, int) for size in (*value.shape, *value.stride(), value.storage_offset()))
