"""What a captured step does, operation by operation, as its capture showed it, and the pieces that are compiled of it.

A captured step is a straight line: the same operations on the same memory in each replay, whatever Python led to them.
So nothing has to be traced again, and no Python is read: what that depends on, the guards of the graph compare.

A piece goes up to the attention of a layer, and those that are alike are compiled once: a compiler takes as long for
each of a model's layers as for the first, although they are the same operations with other weights. Nothing is lost by
the cuts: no kernel reaches across an attention, and in a CUDA graph calls cost nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

from graphmod.fuse.operations import LINEAR
from graphmod.torch_private import NoAutocast, OpOverload, is_traceable_wrapper_subclass
from graphmod.wrap.extension import CompiledGraph, Facts, address, draws, each_tensor, facts, written

_ONLY_CHECK = ("aten::_assert", "aten::sym_constrain", "profiler::")
_OF_SHAPES = ("aten::new_", "aten::ones_like", "aten::zeros_like", "aten::full_like", "aten::empty_like")
_UNFILLED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class Unsupported(Exception):
    """A step that cannot be compiled, and why."""


class Ref(NamedTuple):
    """Stands for a tensor among the arguments of an operation."""

    number: int


class Value(NamedTuple):
    """What is known of a tensor.

    Attributes:
        storage: which memory it lies in; those that share some have the same.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage: int


class Operation(NamedTuple):
    """One operation.

    Attributes:
        op: an overload, or code that was compiled before.
        args, kwargs, result: with a `Ref` in the place of each tensor.
        writes: numbers of the arguments that it changes.
    """

    op: Any
    args: tuple
    kwargs: dict[str, Any]
    result: Any
    writes: tuple[int, ...]


class Program(NamedTuple):
    """Operations in order. It holds no tensors.

    Attributes:
        values: of all tensors, by number.
        inputs: numbers of those that were there before.
        unchanged: those of them in whose memory no operation writes.
    """

    operations: list[Operation]
    values: list[Value]
    inputs: list[int]
    unchanged: set[int]


class Observer:
    """Takes down the operations of a capture; for `wrap.extension.observed`. It keeps no tensor alive but those that
    were there before, as the memory of a graph is that of tensors which are gone."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._values: list[Value] = []
        self._inputs: dict[int, Tensor] = {}
        self._numbers: Any = WeakTensorKeyDictionary()
        self._latest: dict[int, int] = {}  # address -> what was made or found there last
        self._input_storages: set[int] = set()
        self._unwritten: set[int] = set()  # storages of what was made and not filled yet
        self._constants: set[int] = set()
        self._guessed: set[int] = set()  # addresses of what was found to share memory with what was made
        self._reason: str | None = None

    @property
    def saw_any(self) -> bool:
        """Whether there was a capture."""
        return bool(self._operations) or self._reason is not None

    def __call__(self, op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        """Takes down one operation. It raises nothing, for the capture goes on."""
        if self._reason is None:
            try:
                self._take(op, args, kwargs, result, fresh)
            except Unsupported as reason:
                self._reason = str(reason)
            except Exception as error:
                self._reason = f"{facts(op).name} cannot be followed ({type(error).__name__}: {error})"

    def _take(self, op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        about = facts(op)
        if draws(about, args, kwargs):
            raise Unsupported("it draws random numbers")
        if about.name == "aten::detach_":  # says that it writes, and changes no memory
            return
        if about.lifts:  # a number, or a list of them, that Python code has: the same in each replay
            number = self._add(result, None)
            self._inputs[number], self._latest[address(result)] = result.detach().clone(), number
            self._constants.add(number)
            return
        given = tuple(each_tensor(list(args), self._ref))
        named = {key: each_tensor(one, self._ref) for key, one in kwargs.items()}
        changed = written(about, args, kwargs)
        writes = [one for place, one in (*enumerate(given), *named.items()) if place in changed]
        new, at = set(map(id, fresh)), {}

        def made(tensor: Tensor) -> Ref:
            number = self._numbers.get(tensor)
            if number is None:
                where = address(tensor)
                known = at.get(where) if id(tensor) in new else self._latest.get(where)
                number = self._add(tensor, None if known is None else self._values[known].storage)
                at[where] = self._latest[where] = number
            return Ref(number)

        outcome, filled = each_tensor(result, made), tuple(ref.number for ref in refs(writes))
        if not filled and not refs(outcome):
            if about.name.startswith(_ONLY_CHECK):
                return
            raise Unsupported(f"{about.name} returns nothing and does not say what it writes")
        self._note_memory(about, [*given, *named.values()], outcome, filled)
        self._operations.append(Operation(op, given, named, outcome, filled))

    def _note_memory(self, about: Facts, given: list[Any], outcome: Any, writes: tuple[int, ...]) -> None:
        """Takes in what is filled. Memory that is read before any operation has filled it was filled by a kernel that
        no operation has launched."""
        filled = {self._values[number].storage for number in writes}
        read = {self._values[ref.number].storage for ref in refs(given) if all(self._values[ref.number].size)} - filled
        if not about.views and not about.name.startswith(_OF_SHAPES) and read & self._unwritten:
            raise Unsupported("a kernel writes memory that no operation of PyTorch has launched")
        self._unwritten -= filled
        if about.name.removeprefix("aten::") in _UNFILLED:
            self._unwritten |= {self._values[ref.number].storage for ref in refs(outcome)}

    def note_launch(self) -> None:
        """Takes in that a kernel is launched that is no operation of PyTorch."""
        self._reason = self._reason or "it launches a Triton kernel that is no operation of PyTorch"

    def program(self, outside: set[int], kept: set[int]) -> tuple[Program, dict[int, Tensor]]:
        """All of it, and its inputs by number.

        Args:
            outside: addresses of the memory that was there before the capture.
            kept: addresses of tensors that the capture took over from the recorded call.

        Raises:
            Unsupported: it did something that cannot be repeated by other kernels.
        """
        if self._reason is not None:
            raise Unsupported(self._reason)
        changed = {self._values[number].storage for one in self._operations for number in one.writes}
        if any(self._values[number].storage in changed for number in self._constants):
            raise Unsupported("it changes a tensor that it makes of Python values")
        found = {
            address(tensor)
            for number, tensor in self._inputs.items()
            if number not in self._constants and tensor.numel()  # else it may have no address
        }
        if (found | self._guessed) & kept:
            raise Unsupported("it works on a tensor of constants that is made on the host in each call")
        if not found <= outside:
            raise Unsupported("it works on a tensor whose origin was not seen")
        return Program(self._operations, self._values, list(self._inputs), self._unchanged(changed)), self._inputs

    def _unchanged(self, changed: set[int]) -> set[int]:
        """Inputs in whose memory nothing is written, not by way of another storage over the same memory either."""
        memory = {number: _memory(tensor) for number, tensor in self._inputs.items()}
        written = [memory[number] for number in memory if self._values[number].storage in changed]
        return {
            number
            for number, (begin, end) in memory.items()
            if not any(begin < other_end and other < end for other, other_end in written)
        }

    def _ref(self, tensor: Tensor) -> Ref:
        number = self._numbers.get(tensor)
        if number is not None:
            if self._values[number][:4] != _geometry(tensor)[:4]:
                raise Unsupported("it changes how a tensor looks at its memory")
            return Ref(number)
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            raise Unsupported(f"it works on a {type(tensor).__name__} of layout {tensor.layout}")
        where = address(tensor)
        known = self._latest.get(where)
        if known is None or self._values[known].storage in self._input_storages:
            number = self._add(tensor, None if known is None else self._values[known].storage)
            self._inputs[number] = tensor
            self._input_storages.add(self._values[number].storage)
            self._latest[where] = number
            return Ref(number)
        # A view that was taken where nobody looks, in the code around what was compiled.
        base = self._values[known]
        if base.dtype is not tensor.dtype:
            raise Unsupported("it works on a view of another dtype that was taken out of sight")
        self._guessed.add(where)
        number = self._add(tensor, base.storage)
        value = self._values[number]
        given = (Ref(known), list(value.size), list(value.stride), value.offset)
        self._operations.append(Operation(torch.ops.aten.as_strided.default, given, {}, Ref(number), ()))
        return Ref(number)

    def _add(self, tensor: Tensor, storage: int | None) -> int:
        number = len(self._values)
        size, stride, offset, dtype, device = _geometry(tensor)
        self._values.append(Value(size, stride, offset, dtype, device, number if storage is None else storage))
        self._numbers[tensor] = number
        return number


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's storage begins and ends."""
    begin = address(tensor)
    return begin, begin + (tensor.untyped_storage().nbytes() if begin else 0)


def _geometry(tensor: Tensor) -> tuple:
    return tuple(tensor.size()), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


def refs(value: Any) -> list[Ref]:
    """Those in an argument or result, in order."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, (list, tuple)):
        return [ref for one in value for ref in refs(one)]
    return []


def used_by(operation: Operation) -> list[int]:
    """Numbers of the tensors that an operation is given, in order."""
    return [ref.number for ref in refs([*operation.args, *operation.kwargs.values()])]


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
    from graphmod.torch_private import inductor_config

    values, parts = program.values, list(_parts(program.operations))
    if any(map(_is_compiled, parts)) and inductor_config.triton.enable_pdl:
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
    if not isinstance(op, OpOverload):
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
        if one.op in LINEAR:  # scales of a weight are read with it
            yield from (ref.number for ref in refs(one.args[1 : LINEAR[one.op]]))


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
    """A text that two pieces share if they compute the same of what they are given, and no others.

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
        args = each_tensor(one.args, lambda ref: nodes[ref.number], Ref)
        kwargs = {key: each_tensor(value, lambda ref: nodes[ref.number], Ref) for key, value in one.kwargs.items()}
        name(one.result, graph.call_function(one.op, args, kwargs))
    graph.output(tuple(nodes[number] for number in piece.outputs))
    return GraphModule(torch.nn.Module(), graph)


def as_observed(function: Callable) -> Callable:
    """Operations are observed below autocast, whose casts are among them."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with NoAutocast():
            return function(*args)

    return run


class Compiled:
    """A program whose pieces were compiled: calling it does once what the step does.

    Args:
        functions: of each piece.
        inputs: by number.
    """

    def __init__(self, pieces: list[Piece], functions: list[Callable], inputs: dict[int, Tensor]) -> None:
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
                _name(one.result, run(each_tensor([*one.args], lambda ref: values[ref.number], Ref)), values)
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
