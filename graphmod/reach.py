"""Finds what a callable can reach: modules, parameters, optimizers, and the places that hold tensors and settings.

The address watch asks it where the tensors that a graph reads by address live, which objects lead there, and which
numbers the captured Python code may have looked at. Imports nothing of graphmod.
"""

import functools
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_STOP = (type, types.ModuleType, torch.dtype, torch.device, torch.Generator, bytes, complex)
PLAIN = (int, float, bool, str, type(None))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made by running code
_MOST = 200_000  # objects looked at; beyond it a callable holds a data set, not a model
_MOST_NUMBERS = 64  # in one list or dict; more is data, not settings
_MODULE_INTERNALS = {*nn.Module().__dict__, "forward", "_graphmod"}  # `forward` is where graph_layers wraps

NOT_REPLAYED = "which a replay would not do; keep it in a tensor that is changed in place, or pass it as an argument"

Place = tuple[Any, Any, Any]  # (container, key, what container[key] is)


@dataclass
class Reach:
    """What was found.

    Attributes:
        modules, optimizers: each once, in the order of the walk.
        slots: places of tensors.
        links: places of the objects that lead to tensors and settings.
        numbers: places of plain values (numbers, strings, None) that the reached code names.
        containers, sizes: the lists and dicts among the links and the attributes of modules, and their lengths.
    """

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    slots: list[Place] = field(default_factory=list)
    links: list[Place] = field(default_factory=list)
    numbers: list[Place] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def in_place(self) -> bool:
        """Whether every tensor and object is still where it was found, and nothing was added."""
        if list(map(len, self.containers)) != self.sizes:
            return False
        return all(get(container, key) is item for container, key, item in (*self.slots, *self.links))

    def parameters(self) -> list[Tensor]:
        """The distinct leaf tensors that may collect a gradient."""
        found = {id(t): t for _, _, t in self.slots if t.is_leaf and (t.requires_grad or isinstance(t, nn.Parameter))}
        return list(found.values())

    def state(self) -> tuple[list, list]:
        """What is at every place now, and how long every container is."""
        now = [get(container, key) for container, key, _ in (*self.numbers, *self.slots, *self.links)]
        return now, list(map(len, self.containers))

    def changed_since(self, before: tuple[list, list]) -> str | None:
        """What Python code changed since `before = state()`: the first place in words, None if nothing did."""
        items, sizes = self.state()
        places = (*self.numbers, *self.slots, *self.links)
        for (container, key, _), old, now in zip(places, before[0], items, strict=True):
            if old is now or (isinstance(old, PLAIN) and type(old) is type(now) and (old == now or old != old)):
                continue
            name = "a variable" if key is None else f"item {key}" if isinstance(container, list) else repr(key)
            return f"{name} from {_short(old)} to {_short(now)}"
        if sizes != before[1]:
            return "the length of a list or dict"
        return None


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, PLAIN) else f"one {type(value).__name__}"


class _Slots:
    """The attributes that an object keeps in `__slots__`, read as from a dict."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self._owner, key)
        except AttributeError:
            raise KeyError(key) from None


@functools.lru_cache(maxsize=4096)
def _slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots that Python code gave a class and its bases."""
    if not kind.__flags__ & _HEAP_TYPE:
        return ()
    return tuple(
        name
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def get(container: Any, key: Any) -> Any:
    """`container[key]`, the content of a closure cell, or None where there is nothing any more."""
    try:
        return container.cell_contents if isinstance(container, types.CellType) else container[key]
    except (KeyError, IndexError, ValueError):
        return None


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    queue = [function.__code__]
    while queue:
        code = queue.pop()
        yield code
        queue += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _names(function: types.FunctionType) -> set[str]:
    """The attributes, globals and constant keys that a function's code mentions."""
    found: set[str] = set()
    for code in _codes(function):
        found |= set(code.co_names)
        found |= {constant for constant in code.co_consts if isinstance(constant, str)}
    return found


@functools.lru_cache(maxsize=4096)
def _names_of_method(owner: type, name: str) -> frozenset[str]:
    """The names that a method mentions, and the methods of the same class that it calls."""
    found: set[str] = set()
    queue, seen = [name], set()
    while queue:
        method = queue.pop()
        function = getattr(owner, method, None)
        function = getattr(function, "__wrapped__", function)
        if method in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(method)
        mentioned = _names(function)
        found |= mentioned
        queue += [other for other in mentioned if isinstance(getattr(owner, other, None), types.FunctionType)]
    return frozenset(found)


def _globals_of(function: types.FunctionType) -> Iterator[tuple[Any, Any]]:
    for code in _codes(function):
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__, name


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """The `(container, key)` pairs through which an object holds others. A class that holds machinery of its own
    besides what it wraps says with `_reach_through` which attributes lead on."""
    through = getattr(type(value), "_reach_through", None)
    if through is not None:
        yield from ((value.__dict__, name) for name in through)
    elif isinstance(value, nn.Module):
        for held in (value._parameters, value._buffers, value._modules):
            yield from ((held, key) for key in list(held.keys()))  # a scripted module's can do no more
        yield from ((value.__dict__, key) for key in list(value.__dict__) if key not in _MODULE_INTERNALS)
    elif isinstance(value, types.FunctionType):
        yield from ((cell, None) for cell in value.__closure__ or ())
        yield from _globals_of(value)
        for defaults in (value.__defaults__, value.__kwdefaults__):
            yield from _items(defaults)
        if hasattr(value, "__wrapped__"):
            yield value.__dict__, "__wrapped__"
    elif isinstance(value, types.MethodType):
        yield from _items((value.__self__, value.__func__))
    elif isinstance(value, functools.partial):
        yield from _items((value.func,))
        yield from _items(value.args)
        yield from _items(value.keywords)
    elif isinstance(value, (dict, list, tuple, deque)):
        yield from _items(value)
    elif hasattr(value, "__dict__"):
        yield from _items(value.__dict__)
    slots = _slots_of(type(value)) if through is None else ()
    if slots:
        view = _Slots(value)
        yield from ((view, name) for name in slots)


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(container) if isinstance(container, dict) else range(len(container or ()))
    return ((container, key) for key in keys)


def _holds_nothing(value: Any) -> bool:
    """Library functions, and the configuration objects of transformers, which every layer points to."""
    if isinstance(value, types.FunctionType):
        return (value.__module__ or "").partition(".")[0] in ("torch", "transformers", "graphmod")
    return any(base.__name__ in ("PreTrainedConfig", "PretrainedConfig") for base in type(value).__mro__)


def _plain_sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(item, PLAIN) for item in value)


def reach(*roots: Any) -> Reach:
    """Walks everything that `roots` hold: closures, the globals a function names, attributes, containers."""
    found = Reach()
    seen: set[int] = set()
    keep: list[Any] = []  # `seen` holds identities, so nothing may die during the walk
    queue: list[Any] = list(roots)
    named: set[str] = set()
    numbers: list[Place] = []
    while queue and len(seen) < _MOST:
        value = queue.pop()
        if isinstance(value, (*_STOP, *PLAIN, Tensor)) or id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        if isinstance(value, nn.Module) and not hasattr(type(value), "_reach_through"):
            found.modules.append(value)
            named |= _names_of_method(type(value), "forward")
        elif isinstance(value, torch.optim.Optimizer):
            found.optimizers.append(value)
        elif isinstance(value, types.FunctionType):
            named |= _names(value)
        elif isinstance(value, types.MethodType):
            named |= _names_of_method(type(value.__self__), value.__func__.__name__)
        elif callable(value):
            named |= _names_of_method(type(value), "__call__")
        here: list[Place] = []
        for container, key in _places(value):
            item = get(container, key)
            if isinstance(item, Tensor):
                found.slots.append((container, key, item))
            elif isinstance(item, PLAIN):
                if not isinstance(container, tuple):
                    here.append((container, key, item))
            elif not isinstance(item, _STOP) and not _holds_nothing(item):
                queue.append(item)
                if not isinstance(container, tuple):
                    found.links.append((container, key, item))
        if len(here) <= _MOST_NUMBERS or not isinstance(value, (list, dict, deque)):
            numbers += here
    for optimizer in found.optimizers:
        keep_all = {id(group) for group in optimizer.param_groups}
        settings = [place for place in found.links if _plain_sequence(place[2])]  # `betas`
        found.numbers += [place for place in (*numbers, *settings) if id(place[0]) in keep_all]
    groups = {id(place[0]) for place in found.numbers}
    found.numbers += [p for p in numbers if id(p[0]) not in groups and (not isinstance(p[1], str) or p[1] in named)]
    found.links = [
        place
        for place in found.links
        if not isinstance(place[1], str) or isinstance(place[2], nn.Module) or place[1] in named
    ]
    found.containers = [item for _, _, item in found.links if isinstance(item, (list, dict))]
    found.containers += [module.__dict__ for module in found.modules]
    found.sizes = list(map(len, found.containers))
    return found
