"""Compares a call's arguments with a known signature without building a new one.

Taking arguments apart costs more than everything else about a replay of one layer. Most calls have the signature of the
call before, and whether they do can be told by a straight line of comparisons, which is generated here as Python code
for each signature.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from graphmod.signature.signature import HAS_NAMES, PLAIN_KEY, STATIC, Signature
from graphmod.signature.structure import PLAIN_KINDS, Constant, Keys, Leaf, Opaque

Matcher = Callable[[tuple, dict], list[Tensor] | None]


_MOST_TENSORS = 64  # beyond, comparing one by one in Python is no faster than taking the arguments apart


class _CannotTell(Exception):
    """The structure has a part that only `flatten` can compare."""


class _Writer:
    """Writes the body of one matcher, and collects the constants it compares with."""

    def __init__(self, tensors: tuple) -> None:
        self.tensors = tensors
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"marked": {STATIC: True}}
        self.leaves = 0
        self.mutable: list[str] = []
        self._values = 0

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def demand(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    def value(self, expression: str) -> str:
        self._values += 1
        self.lines.append(f"v{self._values} = {expression}")
        return f"v{self._values}"

    def part(self, expression: str, structure: Any) -> None:
        """Compares the value of an expression with a part of the signature's structure."""
        if structure is None:
            self.demand(f"{expression} is None")
            return
        value = self.value(expression)
        if structure.__class__ is Leaf:
            self.tensor(value, structure.index)
        elif structure.__class__ is Opaque or structure.__class__ is Constant:
            self.demand(f"{value} is {self.constant(structure.value)}")
        elif structure.__class__ is not tuple:
            raise _CannotTell
        elif structure[0] in PLAIN_KINDS:
            self.plain(value, structure)
        else:
            self.container(value, structure)

    def tensor(self, value: str, index: int) -> None:
        if index < self.leaves:
            self.demand(f"{value} is t{index}")
            return
        if len(self.tensors[index]) != PLAIN_KEY:
            raise _CannotTell
        self.leaves += 1
        shape, stride, dtype, device, _, kind = map(self.constant, self.tensors[index])
        grad = self.tensors[index][4]
        self.lines.append(f"t{index} = {value}")
        self.demand(f"{value}.__class__ is {kind} and {value}.shape == {shape} and {value}.stride() == {stride}")
        lazy = f"{value}.is_neg()" + (f" or {value}.has_names()" if HAS_NAMES else "")
        lazy += f" or {value}.is_conj()" if self.tensors[index][2].is_complex else ""
        self.demand(f"not ({lazy} or {value}.__dict__ and {value}.__dict__ != marked)")
        self.demand(f"{value}.dtype is {dtype} and {value}.device == {device} and {value}.requires_grad is {grad}")
        if grad:
            self.demand(f"not {value}.is_leaf or {value}.grad is None")

    def plain(self, value: str, structure: tuple) -> None:
        kind = self.constant(structure[0])
        if len(structure) == 3:  # a zero, which has a sign
            self.demand(f"{value}.__class__ is {kind} and repr({value}) == {structure[2]!r}")
            return
        wanted = self.constant(structure[1])
        self.demand(f"{value}.__class__ is {kind} and ({value} is {wanted} or {value} == {wanted})")

    def container(self, value: str, structure: tuple) -> None:
        kind = structure[0]
        if len(structure) > 1 and structure[1].__class__ is Keys:
            raise _CannotTell
        self.demand(f"{value}.__class__ is {self.constant(kind)}")
        if kind is not tuple:
            self.mutable.append(value)
        if kind is dict or kind is OrderedDict:
            self.demand(f"tuple({value}) == {self.constant(structure[1])}")
            for key, item in zip(structure[1], structure[2:], strict=True):
                self.part(f"{value}[{self.constant(key)}]", item)
        elif issubclass(kind, (tuple, list)):
            if getattr(kind, "__dictoffset__", 0):
                self.demand(f"not {value}.__dict__")
            self.demand(f"len({value}) == {len(structure) - 1}")
            for index, item in enumerate(structure[1:]):
                self.part(f"{value}[{index}]", item)
        else:
            raise _CannotTell


def matcher(signature: Signature) -> Matcher:
    """A function of `(args, kwargs)` that returns their tensors, in the order of `flatten`, if the arguments have this
    signature's structure and tensors, else None. Where only `flatten` can tell, it always returns None."""
    writer = _Writer(signature.tensors)
    _, args, kwargs = signature.structure
    try:
        writer.part("args", args)
        writer.part("kwargs", kwargs)
    except _CannotTell:
        return lambda args, kwargs: None
    if len(signature.tensors) > _MOST_TENSORS:
        return lambda args, kwargs: None
    # The same tensor twice is one leaf: two leaves are never one tensor.
    if writer.leaves == 2:
        writer.demand("t0 is not t1")
    elif writer.leaves > 2:
        identities = ", ".join(f"id(t{index})" for index in range(writer.leaves))
        writer.demand(f"len({{{identities}}}) == {writer.leaves}")
    # Nor are two containers one.
    if len(writer.mutable) > 2:  # `kwargs` is one, and a new one in each call
        identities = ", ".join(f"id({value})" for value in writer.mutable)
        writer.demand(f"len({{{identities}}}) == {len(writer.mutable)}")
    result = ", ".join(f"t{index}" for index in range(writer.leaves))
    body = "\n        ".join([*writer.lines, f"return [{result}]"])
    # Sparse and nested tensors have no strides, and say so by an error.
    guarded = f"try:\n        {body}\n    except RuntimeError:\n        return None"
    exec(f"def match(args, kwargs):\n    {guarded}", writer.names)
    return writer.names["match"]
