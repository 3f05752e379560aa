"""What a value looks like when it was taken apart: what stands for its tensors, its objects and its containers."""

import contextlib
import dataclasses
import types
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphmod.torch_private import weak_reference

PLAIN_KINDS = frozenset(
    {
        int,
        float,
        bool,
        str,
        bytes,
        complex,
        range,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        torch.memory_format,
        type(...),
    }
)


class Leaf:
    """Stands for the i-th tensor in a structure. One object per index, so that comparing is an identity test."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"tensor {self.index}"


@dataclasses.dataclass(frozen=True)
class Again:
    """Stands for the n-th container that can be changed, where it comes a second time."""

    index: int


class Opaque:
    """An object graphmod cannot look into: equal to itself only, and kept alive so that its identity stays its own."""

    __slots__ = ("_hash", "_held", "_weak")

    def __init__(self, value: Any) -> None:
        self._held, self._weak, self._hash = value, None, id(value)

    @property
    def value(self) -> Any:
        """The object; None once it is gone."""
        return self._held if self._weak is None else self._weak()

    def let_go(self) -> None:
        """Keeps the object alive no longer, where Python can tell when it is gone."""
        if self._weak is None:
            with contextlib.suppress(TypeError):  # not all kinds of objects can be held weakly
                self._weak = weak_reference(self._held)
                self._held = None

    def hold(self) -> None:
        """Keeps the object alive again, if it is there."""
        self._held, self._weak = self.value, None

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        value = self.value
        return other.__class__ is self.__class__ and value is not None and other.value is value

    def __hash__(self) -> int:
        return self._hash


class Constant(Opaque):
    """An object that never changes and of which there is one: a member of an enumeration."""

    __slots__ = ()


class Unrepeatable(Opaque):
    """An object whose use in one call is gone, or cannot be told, in the next.

    Attributes:
        why: in words, to follow "is".
    """

    __slots__ = ("why",)

    def __init__(self, value: Any, why: str) -> None:
        super().__init__(value)
        self.why = why


class Content:
    """A value of numpy, which counts by what is in it. Each `make` is a copy."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value.copy()
        self.key = (value.__class__, value.dtype.str, value.shape, value.tobytes())

    def __eq__(self, other: object) -> bool:
        return other.__class__ is Content and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)

    def make(self) -> Any:
        return self.value.copy()


class Keys(tuple):
    """How each part of an object is reached: `(how, key, type of the key)`, where `how` is "[" for an item of a
    sequence, ":" for one of a mapping, "." for an attribute, "(" for what it is made with."""

    __slots__ = ()


def children(structure: Any) -> list[tuple[str, Any]] | None:
    """The `(how to get there, structure)` of the parts of a container, None for anything else."""
    if structure.__class__ is not tuple or structure[0] in PLAIN_KINDS:
        return None
    kind = structure[0]
    if kind is types.MethodType:
        return [(".__func__", structure[1]), (".__self__", structure[2])]
    if kind is slice:
        return [(f".{name}", item) for name, item in zip(("start", "stop", "step"), structure[1:], strict=True)]
    if len(structure) > 1 and structure[1].__class__ is Keys:
        named = zip(structure[1], structure[2:], strict=True)
        return [(f".{key}" if how in ".(" or key.__class__ is str else f"[{key!r}]", i) for (how, key, _), i in named]
    if kind is dict or kind is OrderedDict:
        return [(f".{name}", item) for name, item in zip(structure[1], structure[2:], strict=True)]
    return [(f"[{index}]", item) for index, item in enumerate(structure[1:])]


def parts(structure: Any) -> "Iterator[Any]":
    """Everything inside a structure that is no container."""
    inside = children(structure)
    if inside is None:
        yield structure
    for _, item in inside or ():
        yield from parts(item)


def opaque_parts(structure: Any) -> "Iterator[Opaque]":
    """What stands for objects inside a structure that `flatten` could not look into, and that may change."""
    return (part for part in parts(structure) if part.__class__ is Opaque)


def unrepeatable(structure: Any, path: str = "", named: Sequence[str] = ()) -> tuple[str, str] | None:
    """Where in a structure something stands that no second call can be told to have, and what it is; or None.

    Args:
        named: names of the first parts.
    """
    if structure.__class__ is Unrepeatable:
        return path.removeprefix("."), structure.why
    for index, (step, item) in enumerate(children(structure) or ()):
        found = unrepeatable(item, path + (f".{named[index]}" if index < len(named) else step))
        if found is not None:
            return found
    return None
