"""Values: when two are the same to code that reads them, and what is inside those that can change."""

import array
import contextvars
import datetime
import decimal
import functools
import gc
import io
import pathlib
import queue
import random
import sys
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphmod.guards.lookup import MISSING
from graphmod.trace.undo import let_through
from graphmod.trace.untraced import identity

PLAIN = (
    *(int, float, complex, str, bytes, bool, type(None), range, slice, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(datetime.date, datetime.timedelta, decimal.Decimal, pathlib.PurePath),
)
"""Kinds of values that never change and count by what they are."""
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_MAPPINGS = (dict, types.MappingProxyType)
CONTAINERS = (*_SEQUENCES, *_SETS, *_MAPPINGS)
_MOST_BYTES, _MOST_DIGESTED = 2**20, 2**26  # of an array: kept for comparing, and looked through, at each call
_DEPTH = 6


class Whole:
    """A module with all that is in it, for code that nobody can watch: scripted, or compiled.

    Args:
        module: read as its parameters, buffers, modes and plain settings, and those of the modules inside.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def content(self) -> tuple:
        parts = list(self.module.modules())
        tensors = [*self.module.parameters(), *self.module.buffers()]
        settings = [
            value for part in parts for name, value in vars(part).items() if is_plain(value) and name[:2] != "__"
        ]
        settings += [part._c.getattr(name) for part in parts for name in _kept_by_script(part)]
        return (*tensors, *settings, *(bool(getattr(part, "training", False)) for part in parts))


def _kept_by_script(module: torch.nn.Module) -> list[str]:
    """The names of what a module of TorchScript keeps in C++ besides tensors and modules."""
    kind = vars(module).get("_concrete_type")
    return [] if kind is None else [name for name in kind.get_attributes() if module._c.hasattr(name)]


class Cached:
    """What an `lru_cache` may return without calling its function, and what else it refers to.

    Args:
        function: read as those of these that it still has; it may come to have more.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._first = self._held()

    def content(self) -> tuple:
        now = set(map(identity, self._held()))
        return tuple(one for one in self._first if identity(one) in now)

    def came_to_hold(self) -> list[Any]:
        """What is in it since then, and may change."""
        first = set(map(identity, self._first))
        return [one for one in self._held() if identity(one) not in first and not is_plain(one)]

    def _held(self) -> list[Any]:
        """Without the dict that it keeps results in, and their order in it, which decide nothing by themselves."""
        held = gc.get_referents(self.function)
        held = [value for one in held for value in (one.values() if type(one) is dict else (one,))]
        return [one for one in held if type(one).__name__ != "_lru_list_elem"]


_MOST_KINDS = 10_000
T = TypeVar("T")


def _for_each_class(find: Callable[[type], T]) -> Callable[[type], T]:
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


def is_plain(value: Any) -> bool:
    """Whether a value counts by what it is."""
    return _counts_by_value(type(value))


@_for_each_class
def _counts_by_value(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return issubclass(kind, PLAIN) or (numpy is not None and issubclass(kind, numpy.generic))


def _is_numpy(value: Any, kind: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, kind))


def is_small_array(value: Any) -> bool:
    """Whether a value is an array of numpy that costs little to compare."""
    return _is_numpy(value, "ndarray") and value.nbytes <= _MOST_BYTES


def is_iterator(value: Any) -> bool:
    """Whether reading from a value uses it up."""
    if isinstance(value, (Tensor, torch.nn.Module, io.IOBase)) or not hasattr(type(value), "__next__"):
        return False
    return not isinstance(value, type)


def is_random(value: Any) -> bool:
    """Whether a value draws random numbers on the host."""
    return _draws(type(value))


_OF_NUMPY = {"RandomState", "Generator", "BitGenerator"}


@_for_each_class
def _draws(kind: type) -> bool:
    of_numpy = [base.__name__ for base in kind.__mro__ if str(base.__module__).startswith("numpy.random")]
    return issubclass(kind, random.Random) or not _OF_NUMPY.isdisjoint(of_numpy)


_HELD_IN = (
    *(Whole, Cached, *CONTAINERS, types.SimpleNamespace, contextvars.ContextVar, weakref.ref, functools.partial),
    *(array.array, bytearray, queue.SimpleQueue),
)
"""Kinds of values that `content` finds something in, besides arrays of numpy."""


def content(value: Any) -> tuple | None:
    """What is inside a value that may change: a tuple of values, or of bytes. None where it holds nothing of that kind.

    What only counts while the call runs, the state of a random generator, `chance` compares.
    """
    if isinstance(value, (Whole, Cached)):
        return value.content()
    if isinstance(value, _MAPPINGS):
        # An OrderedDict has an order of its own, which the dict that it is does not know.
        kind = next((one for one in (OrderedDict, dict) if isinstance(value, one)), type(value))
        return (*kind.keys(value), *kind.values(value))
    if isinstance(value, _SEQUENCES):  # whatever a class of the user's makes of going through it
        return tuple(next(kind for kind in _SEQUENCES if isinstance(value, kind)).__iter__(value))
    if isinstance(value, _SETS):
        return tuple(sorted((set if isinstance(value, set) else frozenset).__iter__(value), key=hash))
    if isinstance(value, types.SimpleNamespace):
        return (*vars(value), *vars(value).values())
    if isinstance(value, contextvars.ContextVar):
        return (value.get(MISSING),)
    if isinstance(value, weakref.ref):
        return (value() is not None,)  # what it names stays the same until it is gone, and is not to be kept alive
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords, *value.keywords.values())
    if isinstance(value, (array.array, bytearray)):
        return (bytes(value),)
    if isinstance(value, queue.SimpleQueue):
        return (value.qsize(),)
    if _is_numpy(value, "ndarray"):
        if value.dtype.hasobject:
            return tuple(value.ravel().tolist())
        return (value.shape, value.dtype.str, value.tobytes() if value.nbytes <= _MOST_BYTES else _digest(value))
    return None


def _digest(array: Any) -> int:
    """The CRC-32 of an array's content.

    Raises:
        ValueError: it is too large to be looked through at each call.
    """
    if array.nbytes > _MOST_DIGESTED:
        megabytes = f"{array.nbytes / 2**20:,.0f} MiB"
        raise ValueError(f"an array of {megabytes} is too large to compare at each call; use a tensor")
    return zlib.crc32(array if array.flags.c_contiguous else array.tobytes())


_NAMED = (Tensor, str, torch.nn.Module, type, types.ModuleType)
_LEADING = (
    *(types.FunctionType, types.MethodType, types.BuiltinMethodType, types.MethodDescriptorType),
    *(staticmethod, classmethod, property, torch.Generator),
)
INERT, OBJECT, OTHER = range(3)
"""Sorts of values. To use one, or to look into it, tells nothing; no more than its class; more than that. What its
attributes are is told where these are read."""


@_for_each_class
def sort_of(kind: type) -> int:
    """The sort of the values of a class."""
    if _draws(kind):
        return OTHER
    if issubclass(kind, (*PLAIN, *_NAMED)):
        return INERT
    numpy = sys.modules.get("numpy")
    several = issubclass(kind, (*_HELD_IN, *_LEADING, *((numpy.ndarray, numpy.generic) if numpy is not None else ())))
    # What stands for another object says that it is of the class of that.
    stands = kind.__getattribute__ is not object.__getattribute__ or any(
        "__class__" in vars(one) for one in kind.__mro__[:-1]
    )
    return OTHER if several or stands or hasattr(kind, "mapping") or hasattr(kind, "__next__") else OBJECT


def same(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Whether code that reads the one would do the same with the other: it is the same object, or an equal value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if is_plain(one):
        return _same_plain(one, other)
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    if isinstance(one, types.BuiltinMethodType):
        return one.__self__ is other.__self__ and one.__name__ == other.__name__
    if isinstance(one, functools.partial):
        parts = ((part.func, part.args, part.keywords) for part in (one, other))
        return depth > 0 and all(same(a, b, depth - 1) for a, b in zip(*parts, strict=True))
    if depth and isinstance(one, CONTAINERS):
        return same_content(content(one), content(other), depth - 1)
    return False


def _same_plain(one: Any, other: Any) -> bool:
    try:
        if one != other:
            return bool(one != one and other != other)  # NaN is NaN
    except Exception as error:  # comparing is code of the value's
        let_through(error)
        return False
    return not isinstance(one, (float, complex)) or repr(one) == repr(other)  # 0.0 is not -0.0


def same_content(one: tuple, other: tuple, depth: int = _DEPTH) -> bool:
    """Whether two results of `content` are the same, item by item."""
    try:
        return len(one) == len(other) and all(same(a, b, depth) for a, b in zip(one, other, strict=True))
    except Exception as error:  # a container of the user's that raises
        let_through(error)
        return False


def is_shown(value: Any) -> bool:
    """Whether a message shows a value as it is: numbers, texts, and tuples of them, such as Adam's betas."""
    return isinstance(value, PLAIN) or (type(value) is tuple and all(isinstance(one, PLAIN) for one in value))


def describe(value: Any) -> str:
    """A value in a message: itself where that is short, else its kind."""
    if value is MISSING:
        return "nothing"
    if is_shown(value):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"one {type(value).__name__}"
