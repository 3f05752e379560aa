"""A decode step in pieces, each up to the attention of a layer, of which those that are alike are compiled once.

A compiler takes as long for each of a model's layers as for the first, although they are the same operations with other
weights. Nothing is lost by the cuts: no kernel reaches across an attention, and in a CUDA graph calls cost nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphmod.decode.step.program import Operation, Program, Ref, Unsupported, refs, used_by, with_refs
from graphmod.wrap.exchange import CompiledGraph, facts

_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class Piece(NamedTuple):
    """Some successive operations.

    Attributes:
        operations: in their order; before them the views that they take of what other pieces made.
        inputs: numbers of the tensors that they are given, in the order of their first use.
        outputs: numbers of the tensors that they make and that are used after them.
        weights: those of the inputs that linear layers multiply by and that no operation of the step changes.
        is_compiled: whether it was compiled before.
    """

    operations: list[Operation]
    inputs: list[int]
    outputs: list[int]
    weights: set[int]
    is_compiled: bool


def cut(program: Program) -> list[Piece]:
    """The pieces of a step, in order.

    Raises:
        Unsupported: a piece would change memory that it is given in two ways, or its kernels may start too early.
    """
    values, parts = program.values, list(_parts(program.operations))
    if any(map(_is_compiled, parts)) and torch._inductor.config.triton.enable_pdl:
        raise Unsupported("it has code of torch.compile with torch._inductor.config.triton.enable_pdl; turn that off")
    made_in = {n: place for place, part in enumerate(parts) for one in part for n in _made(one)}
    made_in |= dict.fromkeys(program.inputs, -1)
    maker = {n: one for part in parts for one in part for n in _made(one)}

    def views(number: int) -> Iterator[Operation]:
        """What makes a tensor that is a view, from what is none."""
        one = maker.get(number)
        if one is not None and facts(one.op).views:
            base = next((n for n in used_by(one) if values[n].storage == values[number].storage), None)
            if base is not None:
                yield from views(base)
                yield one

    found: list[list[Operation]] = []
    for place, part in enumerate(parts):
        if _is_compiled(part):
            found.append(part)
            continue
        again: dict[int, Operation] = {}
        for number in dict.fromkeys(n for one in part for n in used_by(one) if made_in[n] != place):
            again |= {id(one): one for one in views(number)}
        found.append([*again.values(), *part])
    given = [_given(part) for part in found]
    later: set[int] = set()
    pieces: list[Piece] = []
    for place in reversed(range(len(parts))):
        own = dict.fromkeys(n for one in parts[place] for n in _made(one) if made_in[n] == place)
        outputs = [n for n in own if n in later]
        weights = program.unchanged & set(_weights(parts[place]))
        piece = Piece(found[place], given[place], outputs, weights, _is_compiled(parts[place]))
        later |= set(piece.inputs)
        pieces.insert(0, piece)
    for piece in pieces:
        if not piece.is_compiled:
            _require_single_ways(piece, program)
    return pieces


def _parts(operations: list[Operation]) -> Iterator[list[Operation]]:
    part: list[Operation] = []
    for one in operations:
        alone = isinstance(one.op, CompiledGraph)
        if alone and part:
            yield part
            part = []
        part.append(one)
        if alone or _is_attention(one.op):
            yield part
            part = []
    if part:
        yield part


def _is_attention(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload):
        return False
    own = op.namespace == "graphmod" and op._opname.endswith("_decode")
    return own or op.overloadpacket is torch.ops.aten.scaled_dot_product_attention


def _is_compiled(part: list[Operation]) -> bool:
    return isinstance(part[0].op, CompiledGraph)


def _made(one: Operation) -> list[int]:
    """Numbers of what an operation returns and was not given."""
    before = set(used_by(one))
    return [ref.number for ref in refs(one.result) if ref.number not in before]


def _weights(operations: list[Operation]) -> Iterator[int]:
    for one in operations:
        if one.op is torch.ops.aten.linear.default:
            yield from (ref.number for ref in refs(one.args[1:2]))


def _given(operations: list[Operation]) -> list[int]:
    made: set[int] = set()
    found: dict[int, None] = {}
    for one in operations:
        found |= dict.fromkeys(n for n in used_by(one) if n not in made)
        made |= set(_made(one))
    return list(found)


def _require_single_ways(piece: Piece, program: Program) -> None:
    values = program.values
    written = {values[n].storage for one in piece.operations for n in one.writes}
    storages = [values[n].storage for n in piece.inputs]
    if any(storages.count(one) > 1 for one in written):
        raise Unsupported("it changes memory that it is given as two tensors")


def description(piece: Piece, program: Program) -> str:
    """The same for two pieces that compute the same of what they are given, and for no others.

    Raises:
        Unsupported: an operation is given something whose value cannot be told.
    """
    names = {number: place for place, number in enumerate(piece.inputs)}
    memory: dict[int, int] = {}

    def kind(number: int) -> str:
        value = program.values[number]
        return f"{value[:5]} {memory.setdefault(value.storage, len(memory))}"

    def told(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names.setdefault(value.number, len(names)))
        if isinstance(value, (list, tuple)):
            return [told(one) for one in value]
        if not isinstance(value, _PLAIN):
            raise Unsupported(f"it is given a {type(value).__name__}")
        return value

    lines = [f"{kind(number)} {number in piece.weights}" for number in piece.inputs]
    for one in piece.operations:
        given = [told(list(one.args)), {key: told(value) for key, value in one.kwargs.items()}, told(one.result)]
        lines.append(f"{one.op} {given} {[kind(ref.number) for ref in refs(one.result)]}")
    return "\n".join([*lines, f"{[names[number] for number in piece.outputs]}"])


def graph_of(piece: Piece) -> GraphModule:
    """A graph of a piece: its inputs are placeholders, of which weights have `meta["is_weight"]`, and it returns its
    outputs as a tuple."""
    graph = Graph()
    nodes: dict[int, Node] = {number: graph.placeholder(f"given_{place}") for place, number in enumerate(piece.inputs)}
    for number, node in nodes.items():
        node.meta["is_weight"] = number in piece.weights

    def name(result: Any, node: Node) -> None:
        if isinstance(result, Ref):
            nodes.setdefault(result.number, node)
        elif refs(result):
            for place, one in enumerate(result):
                name(one, graph.call_function(operator.getitem, (node, place)))

    for one in piece.operations:
        args = tuple(with_refs(list(one.args), nodes.__getitem__))
        kwargs = {key: with_refs(value, nodes.__getitem__) for key, value in one.kwargs.items()}
        name(one.result, graph.call_function(one.op, args, kwargs))
    graph.output(tuple(nodes[number] for number in piece.outputs))
    return GraphModule(torch.nn.Module(), graph)


def as_observed(function: Callable) -> Callable:
    """Operations are observed below autocast, whose casts are among them."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return function(*args)

    return run


class Compiled:
    """A program whose pieces were compiled: calling it does once what the step does.

    Args:
        functions: of each piece.
        inputs: by number.
    """

    def __init__(
        self, program: Program, pieces: list[Piece], functions: list[Callable], inputs: dict[int, Tensor]
    ) -> None:
        self._inputs, self._ran = inputs, False
        last = {number: place for place, piece in enumerate(pieces) for number in (*piece.inputs, *piece.outputs)}
        self._steps = [
            (run, piece, [n for n, end in last.items() if end == place and n not in inputs])
            for place, (run, piece) in enumerate(zip(functions, pieces, strict=True))
        ]

    @as_observed
    def __call__(self) -> None:
        if not self._ran:  # not in a graph, which waits: kernels may read weights before what runs now has ended
            for device in {one.device for one in self._inputs.values() if one.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
            self._ran = True
        values: dict[int, Tensor] = dict(self._inputs)
        for run, piece, dead in self._steps:
            if piece.is_compiled:
                (one,) = piece.operations
                _name(one.result, run([with_refs(arg, values.__getitem__) for arg in one.args]), values)
            else:
                values.update(zip(piece.outputs, run(*[values[n] for n in piece.inputs]), strict=True))
            for number in dead:
                values.pop(number, None)


def _name(result: Any, value: Any, values: dict[int, Tensor]) -> None:
    if isinstance(result, Ref):
        values[result.number] = value
    elif isinstance(result, (list, tuple)):
        for one, part in zip(result, value, strict=True):
            _name(one, part, values)
