"""Taking values apart into tensors and a hashable structure, and putting them together again.

Owns what counts as a container and what of it counts, and what stands for tensors, objects and containers in a
structure.
"""

import contextlib
import copyreg
import dataclasses
import functools
import math
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from enum import Enum
from typing import Any

import numpy
from torch import Tensor, nn

from graphmod.guards.values import CONSTANTS, for_each_class, is_made_by_code
from graphmod.torch_private import pytree_nodes, weak_reference

PLAIN_KINDS = frozenset(CONSTANTS)


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
        self._held, self._hash = value, id(value)
        self._weak: weakref.ref | None = None

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


def parts(structure: Any) -> Iterator[Any]:
    """Everything inside a structure that is no container."""
    inside = children(structure)
    if inside is None:
        yield structure
    for _, item in inside or ():
        yield from parts(item)


def opaque_parts(structure: Any) -> Iterator[Opaque]:
    """What stands for objects inside a structure that `flatten` could not look into, and that may change."""
    return (part for part in parts(structure) if part.__class__ is Opaque)


def unrepeatable(structure: Any) -> Unrepeatable | None:
    """What stands in a structure for something that no second call can be told to have; None where nothing does."""
    return next((part for part in parts(structure) if part.__class__ is Unrepeatable), None)


_EQUAL_BUT_NOT_ALIKE = frozenset({float, complex, range})  # 0.0 is not -0.0
_MOST_BYTES = 65536  # of a numpy array that is compared by its content
_leaf = functools.cache(Leaf)
list(map(_leaf, range(64)))  # before two threads could make the same one
OBJECTS = -1
"""Put into what `flatten` has seen, has it look into objects of all classes that are written in Python."""
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: of a class that is written in C
_BASES = (tuple, list, OrderedDict, defaultdict, dict, deque, set, frozenset, types.SimpleNamespace)


@for_each_class
def _base(kind: type) -> Any:
    """The built-in container that a class is a kind of, `object` for a dataclass; None if it is not to be looked
    into."""
    built_in = [base for base in kind.__mro__ if not is_made_by_code(base)]
    found = next((base for base in _BASES if issubclass(kind, base)), None)
    if found is None and dataclasses.is_dataclass(kind) and not issubclass(kind, nn.Module):
        found = object
    known = {found, object, dict if found in (OrderedDict, defaultdict) else object}
    if found is tuple and _is_record(kind) and kind.n_fields == kind.n_sequence_fields:
        known.add(kind)
    return found if known.issuperset(built_in) else None


@for_each_class
def _is_of_python(kind: type) -> bool:
    """Whether all of an object is in attributes and slots that Python code has put there."""
    has_state = kind.__dictoffset__ or _slot_names(kind)
    plain = kind.__new__ is object.__new__ and has_state and not kind.__flags__ & _IMMUTABLE
    known = all(is_made_by_code(base) or base is object for base in kind.__mro__)
    return bool(plain and known) and not (issubclass(kind, nn.Module) or hasattr(kind, "__del__"))


def _is_record(kind: type) -> bool:
    """Whether a kind of tuple is made by C code (`torch.return_types`), and so from one sequence."""
    return hasattr(kind, "n_sequence_fields")


def flatten(value: Any, leaves: list[Tensor], seen: dict[int, Any]) -> Any:
    """Appends the tensors inside `value` to `leaves` and returns its structure, hashable and comparable.

    A tensor that occurs twice is one leaf, because code may ask whether two arguments are the same object; nor are
    lists and the like that occur twice told apart. Containers: tuple, list, dict, deque and classes derived from them,
    sets of plain values, dataclasses, with all their attributes. Numbers, strings and the like count by type and value,
    numpy's by content, other objects by identity.

    Args:
        seen: takes the identity of each tensor and each container that can be changed, in order, and keeps the latter
            alive.
    """
    kind = value.__class__
    if value is None:
        return None
    if kind is Tensor or isinstance(value, Tensor):
        leaf = seen.get(id(value))
        if leaf is None:
            leaf = seen[id(value)] = _leaf(len(leaves))
            leaves.append(value)
        return leaf
    if kind in PLAIN_KINDS:
        return (
            (kind, value)
            if kind not in _EQUAL_BUT_NOT_ALIKE or (kind is float and value == value != 0)
            else _number(kind, value)
        )
    if kind is tuple:
        return (kind, *[flatten(item, leaves, seen) for item in value])
    known = seen.get(id(value))
    if known is not None:
        return known[0]
    if kind is list:
        _note(value, seen)
        return (kind, *[flatten(item, leaves, seen) for item in value])
    if (kind is dict or kind is OrderedDict) and all(key.__class__ is str for key in value):
        _note(value, seen)
        return (kind, tuple(value), *[flatten(item, leaves, seen) for item in value.values()])
    if kind is slice:
        return (kind, *[flatten(item, leaves, seen) for item in (value.start, value.stop, value.step)])
    if isinstance(value, Enum):
        return Constant(value)
    if kind is types.MethodType:  # made anew by each access
        return (kind, Opaque(value.__func__), flatten(value.__self__, leaves, seen))
    return _object(value, kind, leaves, seen)


def _note(value: Any, seen: dict[int, Any]) -> None:
    count = seen[0] = seen.get(0, 0) + 1  # nothing has the identity 0, or -1
    seen[id(value)] = (Again(count - 1), value)


def _number(kind: type, value: Any) -> tuple:
    return (kind, math.nan if kind is float and value != value else value, repr(value))


def _object(value: Any, kind: type, leaves: list[Tensor], seen: dict[int, Any]) -> Any:
    base = None if isinstance(value, type) else _base(kind)
    if base is None and OBJECTS in seen and _is_of_python(kind):
        base = object
    if base is None:
        return _no_container(value, leaves, seen)
    parts: list[tuple[str, Any, Any]] = []
    if base is set or base is frozenset:
        items = list(base.__iter__(value))
        if not all(item.__class__ in PLAIN_KINDS for item in items) or list(base(items)) != items:
            return Unrepeatable(value, f"a {kind.__name__}, whose order is another in each call")
        parts += [("[", index, item) for index, item in enumerate(items)]
    elif base is deque:
        parts += [("(", "maxlen", value.maxlen), *(("[", index, item) for index, item in enumerate(deque.copy(value)))]
    elif base in (tuple, list):
        parts += [("[", index, item) for index, item in enumerate(base.__iter__(value))]
    elif issubclass(base, dict):
        if base is defaultdict:
            parts.append(("(", "default_factory", value.default_factory))
        items = (OrderedDict if base is OrderedDict else dict).items(value)
        parts += [(":", key, item) for key, item in items]
        if any(isinstance(key, Tensor) or key != key for _, key, _ in parts):
            return Unrepeatable(value, "a dict whose keys cannot be compared")
    _note(value, seen)
    attributes = getattr(value, "__dict__", None) or {}
    parts += [(".", name, item) for name, item in attributes.items()]
    parts += [(".", name, object.__getattribute__(value, name)) for name in _slots(value, kind)]
    if base in (tuple, list) and not attributes and parts and parts[-1][0] == "[":
        return (kind, *[flatten(item, leaves, seen) for _, _, item in parts])
    keys = Keys((how, key, key.__class__) for how, key, _ in parts)
    return (kind, keys, *[flatten(item, leaves, seen) for _, _, item in parts])


def _slot_names(kind: type) -> list[str]:
    # pyrefly: ignore[missing-attribute] -- typeshed leaves it out
    return copyreg._slotnames(kind)


def _slots(value: Any, kind: type) -> list[str]:
    found = []
    for name in _slot_names(kind):
        try:
            object.__getattribute__(value, name)
        except AttributeError:
            continue
        found.append(name)
    return found


def _no_container(value: Any, leaves: list[Tensor], seen: dict[int, Any]) -> Any:
    """The structure of an object that is no container of Python's."""
    if isinstance(value, (Iterator, AsyncIterator)):
        return Unrepeatable(value, f"a {type(value).__name__}, which is another after each use; pass what it yields")
    if isinstance(value, numpy.generic):
        return Unrepeatable(value, "an object of numpy") if value.dtype.hasobject else Content(value)
    if isinstance(value, numpy.ndarray):
        if type(value) is not numpy.ndarray or value.dtype.hasobject or not value.flags.c_contiguous:
            return Unrepeatable(value, "a numpy array of objects or of unusual strides; pass a tensor")
        if value.nbytes > _MOST_BYTES:
            return Unrepeatable(value, f"a numpy array of {value.nbytes} bytes, which may change; pass a tensor")
        return Content(value)
    caches = sys.modules.get("transformers.cache_utils")
    if caches is not None and isinstance(value, caches.Cache) and not value.is_compileable:  # which makes tensors anew
        return Unrepeatable(
            value,
            f"a {type(value).__name__}, a key-value cache that grows from call to call (so generate() is eager, and "
            "needs nothing); pass use_cache=False where nothing is generated, or generate with graphmod.DecodeEngine",
        )
    return _pytree(value, leaves, seen) if _is_pytree(type(value)) else Opaque(value)


def _is_pytree(kind: type) -> bool:
    """Whether a class has told PyTorch how to take its objects apart and put them together, as that of TensorDict."""
    return kind in pytree_nodes and _base(kind) is None and not issubclass(kind, nn.Module)


def _pytree(value: Any, leaves: list[Tensor], seen: dict[int, Any]) -> Any:
    """The structure of such an object, if all about it but what is inside can be compared with that of another."""
    kind = type(value)
    inside, context = pytree_nodes[kind].flatten_fn(value)
    tensors: list[Tensor] = []
    parts = list(opaque_parts(known := flatten(context, tensors, {OBJECTS: True})))
    if tensors or unrepeatable(known) or not all(isinstance(one.value, (type, types.FunctionType)) for one in parts):
        return Opaque(value)
    if _attributes(pytree_nodes[kind].unflatten_fn(inside, context)) != _attributes(value):
        return Opaque(value)
    _note(value, seen)
    keys = Keys([("(", "context", str), *(("[", index, int) for index in range(len(inside)))])
    return (kind, keys, _fixed(known), *[flatten(item, leaves, seen) for item in inside])


def _attributes(value: Any) -> tuple[Any, list[int]]:
    """What an object has besides what its class may compute: comparable, with tensors by identity."""
    tensors: list[Tensor] = []
    slots = [name for kind in type(value).__mro__ for name, one in vars(kind).items() if _is_slot(one)]
    held = {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})
    return flatten(held, tensors, {OBJECTS: True}), [*map(id, tensors)]


def _is_slot(member: Any) -> bool:
    return isinstance(member, types.MemberDescriptorType)


def _fixed(structure: Any) -> Any:
    """A structure without tensors, whose classes and functions stay."""
    if structure.__class__ is Opaque:
        return Constant(structure.value)
    return tuple(map(_fixed, structure)) if structure.__class__ is tuple else structure


def rebuild(structure: Any, leaves: list, made: list | None = None) -> Any:
    """The inverse of `flatten`: a new value of this structure around `leaves`. `made` takes the containers."""
    kind = structure.__class__
    if structure is None:
        return None
    if kind is Leaf:
        return leaves[structure.index]
    if kind is not tuple:
        if kind is Again:
            assert made is not None  # it is inside of what it stands for, or of what that is inside of
            return made[structure.index]
        return structure.make() if kind is Content else structure.value
    kind = structure[0]
    if kind in PLAIN_KINDS:
        return structure[1]
    made = [] if made is None else made
    if kind is tuple:
        return tuple([rebuild(item, leaves, made) for item in structure[1:]])
    if kind is slice:
        return slice(*[rebuild(item, leaves, made) for item in structure[1:]])
    if kind is types.MethodType:
        return types.MethodType(structure[1].value, rebuild(structure[2], leaves, made))
    if kind is list:
        made.append([])
        value = made[-1]
        value += [rebuild(item, leaves, made) for item in structure[1:]]
        return value
    if (kind is dict or kind is OrderedDict) and structure[1].__class__ is tuple:
        value = kind()
        made.append(value)
        for key, item in zip(structure[1], structure[2:], strict=True):
            value[key] = rebuild(item, leaves, made)
        return value
    return _build(structure, leaves, made)


def _build(structure: tuple, leaves: list, made: list) -> Any:
    kind = structure[0]
    base: Any = _base(kind) or object
    keyed = len(structure) > 1 and structure[1].__class__ is Keys
    keys = structure[1] if keyed else [("[", index, int) for index in range(len(structure) - 1)]
    items = structure[2:] if keyed else structure[1:]
    if _is_pytree(kind):
        place = len(made)
        made.append(None)
        context = rebuild(items[0], [])
        made[place] = pytree_nodes[kind].unflatten_fn([rebuild(item, leaves, made) for item in items[1:]], context)
        return made[place]
    if base in (tuple, frozenset, set):
        place = len(made)
        made.append(None)
        inside = [rebuild(item, leaves, made) for (how, _, _), item in zip(keys, items, strict=True) if how == "["]
        plain = base is tuple and not _is_record(kind)
        value = made[place] = tuple.__new__(kind, inside) if plain else kind(inside)
    else:
        value = base.__new__(kind)
        made.append(value)
    for (how, key, _), item in zip(keys, items, strict=True):
        if how == "[" and base in (tuple, frozenset, set):
            continue
        part = rebuild(item, leaves, made)
        if how == "[":
            base.append(value, part)
        elif how == ":":
            base.__setitem__(value, key, part)
        elif how == "(":
            base.__init__(value, *(((), part) if base is deque else (part,)))
        elif hasattr(value, "__dict__") and key not in _slot_names(kind):
            value.__dict__[key] = part
        else:
            object.__setattr__(value, key, part)
    return value
