"""Where an object holds others: attributes, slots, closures, items. Looking there runs no code of the user's.

Imports `names`.
"""

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphmod.names import COMPILERS, LIBRARIES, codes, of_compiler, of_library, package

STOP = (type, types.ModuleType, torch.dtype, torch.device, torch.Generator, bytes, complex)
"""What is not looked into."""
PLAIN = (int, float, bool, str, type(None))
SIZED = (list, dict, deque)
HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: of a class that was made by running code."""
_MOST_QUEUED = 4096  # items of a deque, which take time to get at
_MACHINERY = frozenset({"importlib", "logging", "typing"})
_MODULE_INTERNALS = {*nn.Module().__dict__, "forward", "_graphmod"}  # `forward` is where graph_layers wraps

Place = tuple[Any, Any, Any]
"""(container, key, what container[key] is)"""


class _Slots:
    """What an object keeps in `__slots__`, read as from a dict, without running its code; None where nothing is set."""

    __slots__ = ("_members", "_owner")

    def __init__(self, owner: Any, members: dict[str, Any]) -> None:
        self._owner, self._members = owner, members

    def __getitem__(self, name: str) -> Any:
        try:
            return self._members[name].__get__(self._owner)
        except AttributeError:
            return None


def _slots_of(kind: type) -> dict[str, Any]:
    """The slots that Python code gave a class and its bases, by name."""
    if not kind.__flags__ & HEAP_TYPE:
        return {}
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }


def get(container: Any, key: Any) -> Any:
    """`container[key]`, the content of a closure cell, or None where there is nothing any more."""
    try:
        return container.cell_contents if isinstance(container, types.CellType) else container[key]
    except (KeyError, IndexError, ValueError):
        return None


def places(value: Any) -> Iterator[tuple[Any, Any, bool]]:
    """The `(container, key)` pairs through which an object holds others, and whether code gets there by an attribute of
    that name alone. A class that holds machinery of its own besides what it wraps says with `_reach_through` which
    attributes lead on."""
    through = getattr(type(value), "_reach_through", None)
    if through is not None:
        yield from ((value.__dict__, name, False) for name in through)
        return
    if isinstance(value, nn.Module):
        for held in (value._parameters, value._buffers, value._modules):
            yield from ((held, key, False) for key in list(held.keys()))  # a scripted module's can do no more
        yield from ((value.__dict__, key, True) for key in list(value.__dict__) if key not in _MODULE_INTERNALS)
    elif isinstance(value, types.FunctionType) and of_compiler(value) and hasattr(value, "__wrapped__"):
        yield value.__dict__, "__wrapped__", False
    elif isinstance(value, types.FunctionType):
        yield from ((cell, None, False) for cell in value.__closure__ or ())
        yield from ((value.__globals__, name, True) for name in _globals_of(value))
        for defaults in (value.__defaults__, value.__kwdefaults__):
            yield from _items(defaults)
        if hasattr(value, "__wrapped__"):
            yield value.__dict__, "__wrapped__", False
    elif isinstance(value, types.MethodType):
        yield from _items((value.__self__, value.__func__))
    elif isinstance(value, functools.partial):
        for part in ((value.func,), value.args, value.keywords):
            yield from _items(part)
    else:
        if isinstance(value, (dict, list, tuple)) or (isinstance(value, deque) and len(value) <= _MOST_QUEUED):
            yield from _items(value)
        attributes, ours = dict_of(value), not of_library(type(value))  # a library's code names what it reads itself
        yield from ((attributes, key, ours and key != "__wrapped__") for key in list(attributes))
    slots = _slots_of(type(value))
    if slots:
        view = _Slots(value, slots)
        yield from ((view, name, True) for name in slots)


def _globals_of(function: types.FunctionType) -> Iterator[str]:
    return (name for code in codes(function.__code__) for name in code.co_names if name in function.__globals__)


def _items(container: Any) -> Iterator[tuple[Any, Any, bool]]:
    keys = list(container) if isinstance(container, dict) else range(len(container or ()))
    return ((container, key, False) for key in keys)


def dict_of(value: Any) -> dict:
    """The attributes of an object."""
    try:
        found = value.__dict__
    except Exception:  # code of the user's
        return {}
    return found if isinstance(found, dict) else {}


def holds_nothing(value: Any) -> bool:
    """Library functions; the configuration objects of transformers, which every layer points to; and what leads from
    any function to all of a program, as loggers do, with nothing in it that a graph would read."""
    if isinstance(value, types.FunctionType):
        return package(value) in LIBRARIES
    kind = type(value)
    if isinstance(value, nn.Module):
        return False
    if package(kind) in _MACHINERY or str(kind.__module__).startswith(COMPILERS):
        return True  # the class itself: what a user derives from it may hold anything
    return any(base.__name__ in ("PreTrainedConfig", "PretrainedConfig") for base in kind.__mro__)
