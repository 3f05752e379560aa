"""Finds what a callable can reach: modules, parameters, optimizers, and the places that hold tensors and settings.

The address watch asks it where the tensors that a graph reads by address live, which objects lead there, and which
numbers the captured Python code may have looked at. Imports `names`.
"""

import functools
import types
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.names import codes, methods, names, names_of_method, of_library, used_by_syntax

_STOP = (type, types.ModuleType, torch.dtype, torch.device, torch.Generator, bytes, complex)
SIZED = (list, dict, deque)
PLAIN = (int, float, bool, str, type(None))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made by running code
_MOST = 200_000  # objects looked at; beyond it a callable holds a data set, not a model
_MOST_QUEUED = 4096  # items of a deque, which take time to get at
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
        containers, sizes: the lists, dicts and queues among the links and the attributes of objects, and their lengths.
        all_numbers, all_containers, all_sizes: the same, and those that the reached code does not name.
    """

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    slots: list[Place] = field(default_factory=list)
    links: list[Place] = field(default_factory=list)
    numbers: list[Place] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    all_numbers: list[Place] = field(default_factory=list)
    all_containers: list[Any] = field(default_factory=list)
    all_sizes: list[int] = field(default_factory=list)

    def in_place(self) -> bool:
        """Whether every tensor and object is still where it was found, and nothing was added."""
        if list(map(len, self.all_containers)) != self.all_sizes:
            return False
        if not all(get(container, key) is item for container, key, item in (*self.slots, *self.links)):
            return False
        return all(isinstance(get(container, key), PLAIN) for container, key, _ in self.all_numbers)

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
            name = "a variable" if key is None else f"item {key}" if isinstance(container, (list, deque)) else repr(key)
            return f"{name} from {_short(old)} to {_short(now)}"
        if sizes != before[1]:
            return "the length of a list or dict"
        return None


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, PLAIN) else f"one {type(value).__name__}"


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
    if not kind.__flags__ & _HEAP_TYPE:
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


def _globals_of(function: types.FunctionType) -> Iterator[tuple[Any, Any]]:
    for code in codes(function):
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
    else:
        if isinstance(value, (dict, list, tuple)) or (isinstance(value, deque) and len(value) <= _MOST_QUEUED):
            yield from _items(value)
        yield from _items(_dict_of(value))
    slots = _slots_of(type(value)) if through is None else ()
    if slots:
        view = _Slots(value, slots)
        yield from ((view, name) for name in slots)


def _dict_of(value: Any) -> dict:
    try:
        found = value.__dict__
    except Exception:  # code of the user's
        return {}
    return found if isinstance(found, dict) else {}


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


class _Walk:
    """One walk: what is still to be looked at, and what the code reached so far names."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.found = Reach()
        self.named: set[str] = set()
        self.numbers: list[Place] = []
        self._queue: list[Any] = list(roots)
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # `_seen` holds identities, so nothing may die during the walk
        self._methods: defaultdict[str, list[types.FunctionType]] = defaultdict(list)
        self._queues: list[tuple[deque, Any]] = []

    def run(self) -> None:
        while self._queue and len(self._seen) < _MOST:
            value = self._queue.pop()
            if isinstance(value, (*_STOP, *PLAIN, Tensor)) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._keep.append(value)
            self._note(value)
            self._look_into(value)

    def unnamed_queues(self) -> set[int]:
        """The identities of the queues that no code reached names: others may push to them between calls."""
        return {id(queue) for queue, key in self._queues if isinstance(key, str) and key not in self.named}

    def _mention(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self.named:
                self.named.add(name)
                self._queue += self._methods.get(name, ())

    def _note(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, nn.Module) and not hasattr(kind, "_reach_through"):
            self.found.modules.append(value)
            self._mention(names_of_method(kind, "forward"))
        elif isinstance(value, torch.optim.Optimizer):
            self.found.optimizers.append(value)
        elif isinstance(value, types.FunctionType):
            self._mention(names(value))
        elif isinstance(value, types.MethodType):
            self._mention(names_of_method(type(value.__self__), value.__func__.__name__))
        elif callable(value):
            self._mention(names_of_method(kind, "__call__"))
        if id(kind) not in self._seen and kind.__flags__ & _HEAP_TYPE and not of_library(kind):
            self._seen.add(id(kind))
            for name, function in methods(kind):
                self._methods[name].append(function)
                if name in self.named or used_by_syntax(name) or (name == "forward" and isinstance(value, nn.Module)):
                    self._queue.append(function)

    def _look_into(self, value: Any) -> None:
        found, plain = self.found, []
        for container, key in _places(value):
            item = get(container, key)
            if isinstance(item, Tensor):
                found.slots.append((container, key, item))
            elif isinstance(item, PLAIN):
                if not isinstance(container, tuple):
                    plain.append((container, key, item))
            elif not isinstance(item, _STOP) and not _holds_nothing(item):
                self._queue.append(item)
                if isinstance(item, deque):
                    self._queues.append((item, key))
                if not isinstance(container, tuple):
                    found.links.append((container, key, item))
        if len(plain) <= _MOST_NUMBERS or not isinstance(value, SIZED):
            self.numbers += plain


def _containers(found: Reach) -> list[Any]:
    sized = [item for _, _, item in found.links if isinstance(item, SIZED)]
    objects = [_dict_of(item) for _, _, item in found.links if not of_library(type(item))]
    return [*sized, *(module.__dict__ for module in found.modules), *objects]


def reach(*roots: Any) -> Reach:
    """Walks everything that `roots` hold: closures, the globals a function names, attributes, containers; and what the
    methods of such objects hold, where code that was reached names them."""
    walk = _Walk(roots)
    walk.run()
    found, named, numbers, ignored = walk.found, walk.named, walk.numbers, walk.unnamed_queues()
    found.all_numbers, found.all_containers = numbers, _containers(found)
    found.all_sizes = list(map(len, found.all_containers))
    for optimizer in found.optimizers:
        keep_all = {id(group) for group in optimizer.param_groups}
        settings = [place for place in found.links if _plain_sequence(place[2])]  # `betas`
        found.numbers += [place for place in (*numbers, *settings) if id(place[0]) in keep_all]
    groups = {id(place[0]) for place in found.numbers}
    found.numbers += [
        place
        for place in numbers
        if id(place[0]) not in groups
        and id(place[0]) not in ignored
        and (not isinstance(place[1], str) or place[1] in named)
    ]
    found.links = [
        place
        for place in found.links
        if id(place[0]) not in ignored
        and (not isinstance(place[1], str) or isinstance(place[2], nn.Module) or place[1] in named)
    ]
    found.containers = _containers(found)
    found.sizes = list(map(len, found.containers))
    return found
