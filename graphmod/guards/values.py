"""Values: where attributes live, found by the rules of ordinary lookup but without running any code of the object; what
is inside values that can change; when two are the same to code that reads them.
"""

import abc
import array
import contextlib
import contextvars
import ctypes
import datetime
import decimal
import functools
import gc
import importlib
import io
import logging
import mmap
import pathlib
import queue
import random
import sys
import threading
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor, nn

from graphmod.torch_private import DYNAMO, INDUCTOR, PYTREE
from graphmod.trace.lines import CORE, is_library
from graphmod.trace.undo import let_through
from graphmod.trace.untraced import identity

T = TypeVar("T")
# What changes in many calls and decides nothing: loggers, what torch.compile keeps about code, who watches a call.
_OF_NO_MEANING = (
    *("logging", DYNAMO, INDUCTOR, "torch.fx", PYTREE, "warnings"),
    *("graphmod.guards", "graphmod.trace"),
)
_MODULE_OF_FX = "torch.fx.graph_module"  # whose modules are a program's own
_MOST_KINDS = 10_000


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


MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing", "__slots__": ()})()
"""What is at a place where nothing is."""
UNKNOWN: Any = type("Unknown", (), {"__slots__": ()})()
"""There is no value, or none of which anything is read."""
CODE: Any = type("Code", (), {"__slots__": ()})()
"""Only code that runs could tell."""
HELD_BY_MODULE = ("_parameters", "_buffers", "_modules")
"""What a module keeps apart from its other attributes."""
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


_KEPT_IN_C = (types.GetSetDescriptorType, types.MemberDescriptorType, type(vars(Place)["key"]))


class View:
    """Something that an object keeps in no dict, read as from one."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner


class Slots(View):
    """What is in `__slots__`."""

    def __getitem__(self, name: str) -> Any:
        for kind in type(self.owner).__mro__:
            member = vars(kind).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    return member.__get__(self.owner)
                except AttributeError:
                    break
        raise KeyError(name)


class Cell(View):
    """The variable of a closure that a cell is, under the key None."""

    def __getitem__(self, _: None) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:
            raise KeyError from None


class InC(View):
    """The attributes of an object that C keeps."""

    def __getitem__(self, name: str) -> Any:
        return of_c(self.owner, name)


class Kind(View):
    """The class of an object, under the key `__class__`."""

    def __getitem__(self, _: str) -> type:
        return type(self.owner)


class Data(View):
    """The memory of a tensor, as another tensor, under the key `data`."""

    def __getitem__(self, _: str) -> Any:
        return self.owner.data


class Fields(View):
    """What a function is made of."""

    NAMES = ("__code__", "__defaults__", "__kwdefaults__")

    def __getitem__(self, name: str) -> Any:
        return getattr(self.owner, name)


def get(container: Any, key: Any) -> Any:
    """`container[key]`, or MISSING. Runs no `__missing__`, which would put something there."""
    try:
        if issubclass(type(container), dict):
            return dict.get(container, key, MISSING)
        return container.get(key, MISSING) if type(container) is types.MappingProxyType else container[key]
    except Exception as error:  # KeyError and IndexError, or whatever a container of the user's raises
        let_through(error)
        return MISSING


def dict_of(owner: Any) -> dict | None:
    """The attributes of an object; None where it keeps none in a dict."""
    try:
        local = issubclass(type(owner), threading.local)
        found = owner.__dict__ if local else object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if issubclass(type(found), dict) else None


def find(owner: Any, name: str, known: dict[tuple[int, str], Place | None]) -> Place | None:
    """The place of an attribute.

    Args:
        known: what was found in classes by now, by their identity, which is taken for what is there.

    Returns:
        None where only code could tell: a property.
    """
    kind: Any = type(owner)
    if issubclass(kind, types.ModuleType):
        held = owner.__dict__
        return Place(held, name, held.get(name, MISSING))
    if kind is super:
        mro = owner.__self_class__.__mro__
        return find_in_classes(mro[mro.index(owner.__thisclass__) + 1 :], name)
    if issubclass(kind, type):
        return find_in_classes(owner.__mro__, name) or find_in_classes(type(owner).__mro__, name)
    if (identity(kind), name) in known:
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
    if issubclass(kind, nn.Module) and own is not None:
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
    """The place of an item of a list, tuple or dict, or of memory that Python shows as bytes, where that is a plain
    value; None for other objects, and keys that say nothing."""
    kind = type(owner)
    if issubclass(kind, dict) and kind.__getitem__ is dict.__getitem__:
        try:
            return Place(owner, key, dict.get(owner, key, MISSING))
        except TypeError:
            return None
    if kind is types.MappingProxyType:
        return Place(owner, key, owner.get(key, MISSING))
    if issubclass(kind, (list, tuple)) and type(key) is int and not isinstance(kind.__getitem__, types.FunctionType):
        count = _built_in(owner, (list, tuple)).__len__(owner)
        return Place(owner, key, owner[key]) if -count <= key < count else None
    if issubclass(kind, BUFFERS) and type(key) is int and not isinstance(kind.__getitem__, types.FunctionType):
        value = get(owner, key)
        return Place(owner, key, value) if value is MISSING or is_plain(value) else None
    return None


def bound_to(value: Any) -> Any:
    """What an attribute of a class is to whoever reads it of an object; CODE where only code could tell."""
    kind = type(value)
    if issubclass(kind, (staticmethod, classmethod)):
        return value.__func__
    if issubclass(kind, property) or isinstance(getattr(kind, "__get__", None), types.FunctionType):
        return CODE
    return value


def of_c(owner: Any, name: str) -> Any:
    """The value of an attribute that is kept in C; CODE for any other."""
    for kind in type(owner).__mro__:
        found = vars(kind).get(name)
        if found is not None:
            return found.__get__(owner, type(owner)) if isinstance(found, _KEPT_IN_C) else CODE
    return CODE


# -- what belongs to libraries, and what means nothing -----------------------------------------------------------------
def is_library_module(module: types.ModuleType | None) -> bool:
    """Whether a module belongs to an installed library, or to Python."""
    if module is None:
        return False
    held = vars(module)  # without a `__getattr__` of its own
    file = held.get("__file__")
    return is_library(file) if isinstance(file, str) else held.get("__name__") in sys.builtin_module_names


def is_of_core(value: Any) -> bool:
    """Whether a function of this package stands in for another for as long as a call is recorded."""
    return type(value) is types.FunctionType and value.__code__.co_filename.startswith(CORE)


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


# -- what is inside, and what is the same ------------------------------------------------------------------------------
CONSTANTS = (
    *(int, float, complex, str, bytes, bool, range, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Kinds of values that Python and PyTorch write out as constants."""
PLAIN = (*CONSTANTS, type(None), slice, datetime.date, datetime.timedelta, decimal.Decimal, pathlib.PurePath)
"""Kinds of values that never change and count by what they are."""
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_MAPPINGS = (dict, types.MappingProxyType)
CONTAINERS = (*_SEQUENCES, *_SETS, *_MAPPINGS)
HOLDERS = (*CONTAINERS, functools.partial)
"""Kinds of values that count by what is in them."""
_OF_CTYPES = ctypes.Structure.__bases__
POINTER: type = ctypes.POINTER(ctypes.c_int).__bases__[0]
"""The class of all pointers of ctypes."""
BUFFERS = (array.array, bytearray, memoryview, mmap.mmap, *_OF_CTYPES)
"""Kinds of values that show memory as bytes, whoever else writes there."""
_MOST_BYTES, _MOST_DIGESTED = 2**20, 2**26  # of an array: kept for comparing, and looked through, at each call
_DEPTH = 6


class OpaqueModule:
    """A module with all that is in it, for code that nobody can watch: scripted, or compiled.

    Args:
        module: read as its parameters, buffers, modes and plain settings, and those of the modules inside.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def content(self) -> tuple:
        parts = list(self.module.modules())
        tensors = [*self.module.parameters(), *self.module.buffers()]
        settings = [
            value for part in parts for name, value in vars(part).items() if is_plain(value) and name[:2] != "__"
        ]
        settings += [value for part in parts for value in _kept_by_script(part)]
        return (*tensors, *settings, *(bool(getattr(part, "training", False)) for part in parts))


def _kept_by_script(module: Any) -> list[Any]:
    """What a module of TorchScript keeps in C++ besides tensors and modules."""
    kind = vars(module).get("_concrete_type")
    names = () if kind is None else kind.get_attributes()
    return [module._c.getattr(name) for name in names if module._c.hasattr(name)]


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


class Subclasses:
    """Which classes were found to be subclasses of others that anybody may register classes with, at any time.

    Its content is what is no longer so. That is asked again only where a class was registered, of whatever kind.
    """

    def __init__(self) -> None:
        self._answers: dict[tuple[int, int], tuple[type, Any, Any]] = {}
        self._others: tuple = ()
        self._token = abc.get_cache_token()

    def ask(self, kind: type, of: Any) -> None:
        """Takes in that code is about to ask whether one class is a subclass of `of`, as that of `isinstance` may be.
        Code of these classes that then runs does so now: they remember what it said."""
        if (identity(kind), identity(of)) not in self._answers:
            self._answers[identity(kind), identity(of)] = kind, of, self._is_one(kind, of)

    def content(self) -> tuple:
        token = abc.get_cache_token()
        if token != self._token:
            now = [(kind, self._is_one(kind, of), was) for kind, of, was in self._answers.values()]
            self._others, self._token = tuple(kind for kind, is_one, was in now if is_one is not was), token
        return self._others

    @staticmethod
    def _is_one(kind: type, of: Any) -> Any:
        try:
            return issubclass(kind, of)
        except Exception as error:  # as protocols with data do
            let_through(error)
            return type(error)


class Answer:
    """What a function in C tells of what it alone can see, such as whether a lock is taken: asked again to compare.

    Args:
        of: what it tells, in words.
    """

    def __init__(self, of: str, ask: Callable[[], Any]) -> None:
        self.of, self._ask = of, ask

    def content(self) -> tuple:
        return (self._ask(),)


_SEMAPHORE: Any = importlib.import_module("_multiprocessing").SemLock  # of `multiprocessing`
LOCKS = _LOCK, _RLOCK, _ = type(threading.Lock()), type(threading.RLock()), _SEMAPHORE
"""Kinds of locks."""
STATE_OF_LOCK = "the state of a lock"


def state_of_lock(lock: Any) -> str:
    """Whether a lock is free, or who has it, in words."""
    if isinstance(lock, _SEMAPHORE):
        return f"{lock._get_value()} left{', its own' if lock._is_mine() else ''}"
    return _RLOCK.__repr__(lock) if isinstance(lock, _RLOCK) else "taken" if lock.locked() else "free"


def enabled_from(logger: logging.Logger) -> float:
    """The level from which on a logger is enabled."""
    return float("inf") if logger.disabled else max(logger.manager.disable + 1, logger.getEffectiveLevel())


def kind_of(value: Any) -> str:
    """The kind of a container, in words."""
    return "registry of abstract classes" if isinstance(value, Subclasses) else type(value).__name__


def is_plain(value: Any) -> bool:
    """Whether a value counts by what it is."""
    return _counts_by_value(type(value))


@for_each_class
def _counts_by_value(kind: type) -> bool:
    return issubclass(kind, (*PLAIN, numpy.generic))


def is_small_memory(value: Any) -> bool:
    """Whether a value is an array of numpy, or shows memory as bytes, and costs little to compare."""
    try:
        return issubclass(type(value), (numpy.ndarray, *BUFFERS)) and _size_of(value) <= _MOST_BYTES
    except ValueError:  # it is mapped, or was released
        return False


@for_each_class
def is_iterator(kind: type) -> bool:
    """Whether reading from a value of a class uses it up."""
    return hasattr(kind, "__next__") and not issubclass(kind, (Tensor, nn.Module, io.IOBase, type))


def is_random(value: Any) -> bool:
    """Whether a value draws random numbers on the host."""
    return _draws(type(value))


_OF_NUMPY = {"RandomState", "Generator", "BitGenerator"}


@for_each_class
def _draws(kind: type) -> bool:
    of_numpy = [base.__name__ for base in kind.__mro__ if str(base.__module__).startswith("numpy.random")]
    return issubclass(kind, random.Random) or not _OF_NUMPY.isdisjoint(of_numpy)


def _built_in(value: Any, kinds: tuple[type, ...]) -> Any:
    """Which of these a value is one of, whose methods tell what is there whatever a class of the user's makes of it."""
    return next(kind for kind in kinds if issubclass(type(value), kind))


def _of_array(value: Any) -> tuple:
    if value.dtype.hasobject:
        return tuple(value.ravel().tolist())
    return (*value.shape, value.dtype.str, _bytes_of(value))


_LOOKS: dict[Any, Callable[[Any], tuple]] = {
    **{kind: kind.content for kind in (OpaqueModule, Cached, Subclasses, Answer)},
    # An OrderedDict has an order of its own, which the dict that it is does not know.
    **{
        kind: lambda value, keys=kind.keys, values=kind.values: (*keys(value), *values(value))
        for kind in (OrderedDict, *_MAPPINGS)
    },
    **{kind: lambda value, of=kind.__iter__: tuple(of(value)) for kind in _SEQUENCES},
    **{kind: lambda value, of=kind.__iter__: tuple(sorted(of(value), key=hash)) for kind in _SETS},
    types.SimpleNamespace: lambda value: (*vars(value), *vars(value).values()),
    contextvars.ContextVar: lambda value: (value.get(MISSING),),
    # What it names stays the same until it is gone, and is not to be kept alive.
    weakref.ref: lambda value: (value() is not None,),
    functools.partial: lambda value: (value.func, *value.args, *value.keywords, *value.keywords.values()),
    queue.SimpleQueue: lambda value: (value.qsize(),),
    numpy.ndarray: _of_array,
    **{kind: lambda value: (_bytes_of(value),) for kind in BUFFERS},
}
HELD_IN = tuple(_LOOKS)
"""Kinds of values that `content` finds something in."""


def _behind_another(value: Any) -> None:
    if isinstance(value, HELD_IN):
        raise ValueError(f"what a {type(value).__name__} stands for only code in C could tell; use that itself")


@for_each_class
def _look_into(kind: type) -> Callable[[Any], Any] | None:
    found = next((look for base, look in _LOOKS.items() if issubclass(kind, base)), None)
    if found is not None:
        return found
    # `isinstance` asks the object, too. Python code of its class is told of as it runs, and not to be run for a look.
    asked = [kind.__getattribute__, *(vars(one)["__class__"] for one in kind.__mro__[:-1] if "__class__" in vars(one))]
    in_python = any(isinstance(one, (types.FunctionType, property)) for one in asked)
    return None if in_python or asked == [object.__getattribute__] else _behind_another


def content(value: Any) -> tuple | None:
    """What is inside a value that may change: a tuple of values, or of bytes. None where it holds nothing of that kind.

    What only counts while the call runs, the state of a random generator, `Chance` compares.
    """
    look = _look_into(type(value))
    return None if look is None else look(value)


def content_now(value: Any) -> tuple:
    """What is inside a value whose content was taken before; MISSING where it cannot be looked into any more."""
    try:
        return content(value) or ()
    except Exception as error:  # memory was released, or a file closed; or whatever a container of the user's raises
        let_through(error)
        return (MISSING,)


def within(value: Any) -> tuple:
    """What is inside one of `HOLDERS`."""
    return (value.func, value.args, value.keywords) if isinstance(value, functools.partial) else content_now(value)


def behind(pointer: Any, index: int = 0) -> Any:
    """What a pointer of ctypes leads to, as bytes: `pointer[index]`."""
    return _bytes_of(pointer[index] if index else pointer.contents)


_whole: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()  # the sizes of mapped files at first


def _mapped_by(value: Any) -> mmap.mmap | None:
    """The mapped memory that a value is a view of."""
    while not isinstance(value, mmap.mmap):
        if isinstance(value, memoryview):
            value = value.obj
        elif isinstance(value, numpy.ndarray):
            value = value.base
        elif isinstance(value, _OF_CTYPES):
            kept = value._objects  # of what was made `from_buffer`, a view of that; a cast may keep itself
            views = kept.values() if type(kept) is dict else (kept,)
            view = next((one for one in views if type(one) is memoryview), None)
            value = view if value._b_base_ is None else value._b_base_
        else:
            return None
    return value


def _size_of(value: Any) -> int:
    """The size in bytes of memory that a value shows.

    Raises:
        ValueError: it is that of a file, which may be cut off at any time; or it was released.
    """
    mapped = _mapped_by(value)
    if mapped is not None and isinstance(value, (mmap.mmap, memoryview)):
        raise ValueError("of mapped memory only single items (`mapped[0]`) can be compared; pass the rest as a tensor")
    with contextlib.suppress(OSError):  # it is of no file
        if mapped is not None and mapped.size() < max(len(mapped), _whole.setdefault(mapped, mapped.size())):
            raise ValueError("it shows memory of a file that was cut off; pass it as a tensor")
    if isinstance(value, _OF_CTYPES):
        return ctypes.sizeof(value)
    if isinstance(value, (numpy.ndarray, memoryview)):
        return value.nbytes
    return _built_in(value, BUFFERS).__len__(value) * getattr(value, "itemsize", 1)


def _bytes_of(value: Any) -> bytes | int:
    """The bytes that a value shows, or their CRC-32. No other thread runs as they are copied: a bytearray whose memory
    somebody looks at cannot grow.

    Raises:
        ValueError: there are too many to be looked through at each call; see also `_size_of`.
    """
    size = _size_of(value)
    if size > _MOST_DIGESTED:
        raise ValueError(f"an array of {size / 2**20:,.0f} MiB is too large to compare at each call; use a tensor")
    # `bytes` would run a `__bytes__` of the value's class.
    copied = value.tobytes() if isinstance(value, (numpy.ndarray, memoryview)) else b"".join((value,))
    return copied if size <= _MOST_BYTES else zlib.crc32(copied)


_NAMED = (Tensor, str, nn.Module, type, types.ModuleType)
_LEADING = (
    *(types.FunctionType, types.MethodType, types.BuiltinMethodType, types.MethodDescriptorType),
    *(staticmethod, classmethod, property, torch.Generator, *LOCKS),
)
COMMON = frozenset(
    map(identity, (Tensor, nn.Parameter, bool, int, float, str, type(None), slice, torch.Size, torch.dtype))
)
"""By identity, kinds of values of which most are, and whose use tells nothing."""
INERT, OBJECT, OTHER = range(3)
"""Sorts of values. To use one, or to look into it, tells nothing; no more than its class; more than that. What its
attributes are is told where these are read."""


@for_each_class
def sort_of(kind: type) -> int:
    """The sort of the values of a class."""
    if _draws(kind):
        return OTHER
    if issubclass(kind, (*PLAIN, *_NAMED)):
        return INERT
    several = issubclass(kind, (*HELD_IN, *_LEADING, numpy.generic))
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
    kind = type(one)
    if kind is types.MethodType:
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    if kind is types.BuiltinMethodType:
        return one.__self__ is other.__self__ and one.__name__ == other.__name__
    if not depth or not issubclass(kind, HOLDERS) or dict_of(one) or dict_of(other):
        return False
    return same_content(within(one), within(other), depth - 1)


def same_plain(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal and plain: what C keeps is made anew each time one looks."""
    return one is other or (type(one) is type(other) and is_plain(one) and _same_plain(one, other))


def _same_plain(one: Any, other: Any) -> bool:
    try:
        if is_made_by_code(type(one)):  # and may have attributes, or an idea of its own of what is equal
            return same(one.__reduce_ex__(2), other.__reduce_ex__(2))
        if one != other:
            return bool(one != one and other != other)  # NaN is NaN
    except Exception as error:  # taking a value apart is code of its class
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
