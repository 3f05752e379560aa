"""Where attributes live, found by the rules of ordinary lookup but without running any code of the object."""

import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from graphmod.trace.undo import let_through
from graphmod.trace.untraced import identity


class _Pair(NamedTuple):
    one: int


MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing", "__slots__": ()})()
"""What is at a place where nothing is."""
UNKNOWN: Any = type("Unknown", (), {"__slots__": ()})()
"""There is no value, or none of which anything is read."""
CODE: Any = type("Code", (), {"__slots__": ()})()
"""Only code that runs could tell."""
HELD_BY_MODULE = ("_parameters", "_buffers", "_modules")
"""What a module keeps apart from its other attributes."""
_KEPT_IN_C = (types.GetSetDescriptorType, types.MemberDescriptorType, type(vars(_Pair)["one"]))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of a class that was made by running code


def is_made_by_code(kind: type) -> bool:
    """Whether a class was made by running code, so that an object's class may be exchanged."""
    return bool(kind.__flags__ & _HEAP_TYPE)


class Place(NamedTuple):
    """Where a value was found.

    Attributes:
        container: `container[key]` is the value, if there is one.
        key: an attribute name, key or index.
        value: what was there, or MISSING.
        shared: the class it is an attribute of, where it is: one of the object's own would hide it.
    """

    container: Any
    key: Any
    value: Any
    shared: type | None = None


class Slots:
    """What an object keeps in `__slots__`, read as from a dict."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        for kind in type(self._owner).__mro__:
            member = vars(kind).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    return member.__get__(self._owner)
                except AttributeError:
                    break
        raise KeyError(name)


class Cell:
    """The variable of a closure, read as from a dict under the key None."""

    __slots__ = ("cell",)

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, _: None) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            raise KeyError from None


class Kind:
    """The class of an object, read as from a dict under the key `__class__`."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, _: str) -> type:
        return type(self._owner)


class Fields:
    """What a function is made of, read as from a dict."""

    __slots__ = ("function",)
    NAMES = ("__code__", "__defaults__", "__kwdefaults__")

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function

    def __getitem__(self, name: str) -> Any:
        return getattr(self.function, name)


def get(container: Any, key: Any) -> Any:
    """`container[key]`, or MISSING. Runs no `__missing__`, which would put something there."""
    try:
        return dict.get(container, key, MISSING) if isinstance(container, dict) else container[key]
    except Exception as error:  # KeyError and IndexError, or whatever a container of the user's raises
        let_through(error)
        return MISSING


def dict_of(owner: Any) -> dict | None:
    """The attributes of an object; None where it keeps none in a dict."""
    try:
        found = owner.__dict__ if isinstance(owner, threading.local) else object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def runs_code(lookup: Callable | None) -> bool:
    """Whether a special method of a class is written in Python."""
    return isinstance(lookup, types.FunctionType)


def find(owner: Any, name: Any, known: dict[tuple[int, str], Place | None] | None = None) -> Place | None:
    """The place of an attribute.

    Args:
        known: what was found in classes by now, by their identity, where that may be taken for what is there.

    Returns:
        None where only code could tell: a property.
    """
    if not isinstance(name, str):
        return None
    if isinstance(owner, types.ModuleType):
        held = owner.__dict__
        return Place(held, name, held.get(name, MISSING))
    kind = type(owner)
    if kind is super:
        mro = owner.__self_class__.__mro__
        return find_in_classes(mro[mro.index(owner.__thisclass__) + 1 :], name)
    if isinstance(owner, type):
        return find_in_classes(owner.__mro__, name) or find_in_classes(kind.__mro__, name)
    if known is None:
        shared = find_in_classes(kind.__mro__, name)
    elif (identity(kind), name) in known:
        shared = known[identity(kind), name]
    else:
        shared = known[identity(kind), name] = find_in_classes(kind.__mro__, name)
    own = dict_of(owner)
    if shared is not None:
        described = type(shared.value)
        if isinstance(shared.value, types.MemberDescriptorType):
            return Place(Slots(owner), name, get(Slots(owner), name)) if kind.__flags__ & _HEAP_TYPE else None
        if hasattr(described, "__set__") or hasattr(described, "__delete__"):
            return None
    if own is not None and name in own:
        return Place(own, name, own[name])
    if shared is not None:
        return shared
    if isinstance(owner, nn.Module) and own is not None:
        for held in map(own.get, HELD_BY_MODULE):
            if held is not None and name in held:
                return Place(held, name, held[name])
    return Place(own, name, MISSING) if own is not None else None


def find_in_classes(mro: tuple[type, ...], name: str) -> Place | None:
    """The place of an attribute in the first of some classes that has it."""
    for base in mro:
        held = vars(base)
        if name in held:
            return Place(held, name, held[name], shared=base)
    return None


def find_item(owner: Any, key: Any) -> Place | None:
    """The place of an item of a list, tuple or dict; None for other objects, and keys that say nothing."""
    kind = type(owner)
    if isinstance(owner, dict) and kind.__getitem__ is dict.__getitem__:
        try:
            return Place(owner, key, dict.get(owner, key, MISSING))
        except TypeError:
            return None
    if kind is types.MappingProxyType:
        return Place(owner, key, owner.get(key, MISSING))
    if isinstance(owner, (list, tuple)) and type(key) is int and not runs_code(kind.__getitem__):
        count = (list if isinstance(owner, list) else tuple).__len__(owner)  # whatever the class makes of it
        return Place(owner, key, owner[key]) if -count <= key < count else None
    return None


def bound_to(value: Any) -> Any:
    """What an attribute of a class is to whoever reads it of an object; CODE where only code could tell."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property) or isinstance(getattr(type(value), "__get__", None), types.FunctionType):
        return CODE
    return value


def of_c(owner: Any, name: str) -> Any:
    """The value of an attribute that is kept in C; CODE for any other."""
    for kind in type(owner).__mro__:
        found = vars(kind).get(name)
        if found is not None:
            return found.__get__(owner, type(owner)) if isinstance(found, _KEPT_IN_C) else CODE
    return CODE
