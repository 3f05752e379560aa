"""Which files, modules and functions belong to installed libraries or to this package, and which mean nothing."""

import functools
import os
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from graphmod.torch_private import DYNAMO, INDUCTOR, PYTREE
from graphmod.trace.lines import CORE, STDLIB, TORCH
from graphmod.trace.untraced import identity

# What changes in many calls and decides nothing: loggers, what torch.compile keeps about code, who watches a call.
_OF_NO_MEANING = (
    *("logging", DYNAMO, INDUCTOR, "torch.fx", PYTREE, "warnings"),
    *("graphmod.guards", "graphmod.trace"),
)
_MODULE_OF_FX = "torch.fx.graph_module"  # whose modules are a program's own
_MOST_KINDS = 10_000
T = TypeVar("T")


def for_each_class(find: Callable[[type], T]) -> Callable[[type], T]:
    """Remembers what is found for classes, by identity: a class may have a hash of its own."""
    found: dict[int, tuple[type, T]] = {}

    @functools.wraps(find)
    def remembered(kind: type) -> T:
        known = found.get(identity(kind))
        if known is None:
            if len(found) > _MOST_KINDS:  # classes that a program makes as it runs
                found.clear()
            known = found[identity(kind)] = kind, find(kind)
        return known[1]

    return remembered


@cache
def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed library."""
    filename = os.path.normpath(filename)
    return filename.startswith((TORCH, STDLIB, "<frozen")) or f"{os.sep}site-packages{os.sep}" in filename


@cache
def is_users(filename: str) -> bool:
    """Whether a file is neither a library's nor part of this package."""
    return not is_library(filename) and not os.path.normpath(filename).startswith(CORE)


def is_library_module(module: types.ModuleType | None) -> bool:
    """Whether a module belongs to an installed library, or to Python."""
    if module is None:
        return False
    held = vars(module)  # without a `__getattr__` of its own
    file = held.get("__file__")
    return is_library(file) if isinstance(file, str) else held.get("__name__") in sys.builtin_module_names


def is_of_core(value: Any) -> bool:
    """Whether a function of this package stands in for another for as long as a call is recorded."""
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(CORE)


def package_of(kind: type) -> str:
    """The module that a class says it is of; "" where that is no name."""
    name = getattr(kind, "__module__", "")
    return name if isinstance(name, str) else ""


def is_of_library(kind: type | None) -> bool:
    """Whether a class belongs to an installed library, or to Python."""
    return kind is not None and is_library_module(sys.modules.get(package_of(kind)))


@for_each_class
def means_nothing(kind: type) -> bool:
    """Whether what is kept in a class, or in what is made of it, decides nothing."""
    name = package_of(kind)
    inside = any(name == one or name.startswith(f"{one}.") for one in _OF_NO_MEANING)
    return inside and name != _MODULE_OF_FX
