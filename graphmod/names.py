"""What code mentions: the attributes and globals that functions and the methods of a class name. Imports nothing of
graphmod.
"""

import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

LIBRARIES = frozenset({"torch", "transformers", "graphmod"})
"""Their functions hold nothing of the user's."""
COMPILERS = ("torch._dynamo", "torch._inductor")
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
_BY_OTHER_NAMES = frozenset({"vars", "__dict__", "attrgetter", "asdict", "astuple"})


def package(item: Any) -> str:
    """The package that a class or function is of; "" where it does not tell."""
    name = getattr(item, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def of_library(item: Any) -> bool:
    """Whether a class or function belongs to a library whose code is not looked into."""
    return package(item) in _NOT_LOOKED_INTO


def of_compiler(function: types.FunctionType) -> bool:
    """Whether a function is a wrapper that torch.compile made, which takes over the name of what it compiles."""
    return str(function.__globals__.get("__name__")).startswith(COMPILERS)


def codes(whole: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside."""
    queue = [whole]
    while queue:
        code = queue.pop()
        yield code
        queue += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def names(function: types.FunctionType) -> set[str]:
    """The attributes, globals and constant keys that a function's code mentions."""
    found: set[str] = set()
    for code in codes(function.__code__):
        found |= _mentioned(code)
    return found


def _mentioned(code: types.CodeType) -> set[str]:
    return {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}


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


def looks_up(function: types.FunctionType) -> bool:
    """Whether a function's code may read attributes by names that it does not mention."""
    return _looks_up(function.__code__)


@functools.lru_cache(maxsize=4096)  # the layers of a model share theirs
def _looks_up(whole: types.CodeType) -> bool:
    for code in codes(whole):
        mentioned = _mentioned(code)
        if not _BY_OTHER_NAMES.isdisjoint(mentioned) or ("getattr" in mentioned and _computes_a_name(code)):
            return True
    return False


def _computes_a_name(code: types.CodeType) -> bool:
    """Whether `getattr` gets another name than a constant. Where that cannot be told, it does."""
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG")]
    return any(
        one.argval == "getattr" and not (one.opname == "LOAD_GLOBAL" and _gets_constant(steps[at + 1 :]))
        for at, one in enumerate(steps)
    )


def _gets_constant(steps: list[dis.Instruction]) -> bool:
    """Whether a call, the function of which lies on the stack, has a constant string as its second argument."""
    depth, constant = 0, False
    for one in steps:
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            return False
        if constant and one.opname in ("PRECALL", "CALL") and one.argval == depth:
            return True
        depth += dis.stack_effect(one.opcode, one.arg)
        if one.opname == "PUSH_NULL" and depth == 1:  # Python 3.13 puts it behind the function
            depth = 0
        elif not constant and depth >= 2:
            constant = one.opname == "LOAD_CONST" and isinstance(one.argval, str)
            if not constant:
                return False
        elif depth < (3 if constant else 0):  # something was made of the constant, or this is no call
            return False
    return False


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
