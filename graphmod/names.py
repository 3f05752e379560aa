"""What code mentions: the attributes and globals that functions and the methods of a class name. Imports nothing of
graphmod.
"""

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

LIBRARIES = frozenset({"torch", "transformers", "graphmod"})
"""Their functions hold nothing of the user's."""
# Their code is not looked into, but for the forward of their modules: they keep no settings of the user's elsewhere.
_NOT_LOOKED_INTO = LIBRARIES | sys.stdlib_module_names
# What a step does not call on an object that it uses.
_NOT_USED = frozenset(
    f"__{name}__"
    for name in (
        *("new", "init", "post_init", "del", "init_subclass", "class_getitem", "set_name", "prepare"),
        *("copy", "deepcopy", "replace", "getnewargs", "getstate", "setstate", "reduce", "reduce_ex"),
        *("repr", "str", "format", "dir", "sizeof", "eq", "hash", "delattr"),
        *("instancecheck", "subclasscheck", "subclasshook"),
    )
)
# With these, code reads attributes whose names stand nowhere in it.
_BY_OTHER_NAMES = frozenset({"getattr", "vars", "__dict__", "attrgetter", "asdict", "astuple"})


def package(item: Any) -> str:
    """The package that a class or function is of; "" where it does not tell."""
    return (getattr(item, "__module__", None) or "").partition(".")[0]


def of_library(item: Any) -> bool:
    """Whether a class or function belongs to a library whose code is not looked into."""
    return package(item) in _NOT_LOOKED_INTO


def codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Its code, and that of the functions inside."""
    queue = [function.__code__]
    while queue:
        code = queue.pop()
        yield code
        queue += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def names(function: types.FunctionType) -> set[str]:
    """The attributes, globals and constant keys that a function's code mentions."""
    found: set[str] = set()
    for code in codes(function):
        found |= set(code.co_names)
        found |= {constant for constant in code.co_consts if isinstance(constant, str)}
    return found


@functools.lru_cache(maxsize=4096)
def _names_of_method(owner: type, name: str) -> frozenset[str]:
    found: set[str] = set()
    queue, seen = [name], set()
    while queue:
        method = queue.pop()
        function = getattr(owner, method, None)
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if method in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(method)
        mentioned = names(function)
        found |= mentioned
        queue += [other for other in mentioned if isinstance(getattr(owner, other, None), types.FunctionType)]
    return frozenset(found)


def names_of_method(owner: type, name: str) -> frozenset[str]:
    """The names that a method mentions, and the methods of the same class that it calls."""
    try:
        return _names_of_method(owner, name)
    except TypeError:  # a class that cannot be hashed
        return _names_of_method.__wrapped__(owner, name)


def methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The methods and properties that a class has from code outside of the libraries, those among them that `super()`
    leads to."""
    for base in kind.__mro__:
        if not of_library(base):
            for name, member in vars(base).items():
                for part in _functions(member):
                    yield name, part


def looks_up(mentioned: set[str]) -> bool:
    """Whether code that mentions these may read attributes by names that it does not."""
    return not _BY_OTHER_NAMES.isdisjoint(mentioned)


def used_by_syntax(name: str) -> bool:
    """Whether a method of this name may be called without its name being mentioned (`x[i]`, `x + y`, `with x`)."""
    return name.startswith("__") and name.endswith("__") and name not in _NOT_USED


def _functions(member: Any) -> Iterator[types.FunctionType]:
    if isinstance(member, property):
        parts: tuple = (member.fget, member.fset)
    elif isinstance(member, functools.cached_property):
        parts = (member.func,)
    elif isinstance(member, (staticmethod, classmethod)):
        parts = (member.__func__,)
    else:
        parts = (member,)
    return (part for part in parts if isinstance(part, types.FunctionType))
