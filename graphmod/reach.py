"""Finds what a callable can reach: modules, parameters, optimizers, and the places that hold tensors and settings.

The address watch asks it where the tensors that a graph reads by address live, which objects lead there, and which
numbers the captured Python code may have looked at. Imports `names` and `places`.
"""

import types
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.names import looks_up, methods, names, names_of_method, of_compiler, of_library, used_by_syntax
from graphmod.places import HEAP_TYPE, PLAIN, SIZED, STOP, Place, dict_of, get, holds_nothing, places

_MOST = 200_000  # objects looked at; beyond it a callable holds a data set, not a model
_MOST_NUMBERS = 64  # in one list or dict; more is data, not settings

NOT_REPLAYED = "which a replay would not do; keep it in a tensor that is changed in place, or pass it as an argument"


@dataclass
class Reach:
    """What was found.

    Attributes:
        modules, optimizers: each once, in the order of the walk.
        slots: places of tensors.
        links: places of the objects that lead to tensors and settings.
        numbers: places of plain values (numbers, strings, None) that the reached code names.
        objects: those that code gets to, whose attributes it may look for.
        containers, sizes: the lists, dicts and queues among the links and the attributes of objects, and their lengths.
        all_numbers, all_containers, all_sizes: the same, and those that the reached code does not name.
    """

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    slots: list[Place] = field(default_factory=list)
    links: list[Place] = field(default_factory=list)
    numbers: list[Place] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
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


class _Walk:
    """One walk. Everything that is held is looked at for tensors; what code can get to, because it names the attributes
    on the way, counts as used: its numbers, and the names in its methods.

    Attributes:
        named: what used code names.
        used: the identities of what is used.
        numbers, links: places, each with the identity of the object that holds it.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.found = Reach()
        self.named: set[str] = set()
        self.used: set[int] = set()
        self.numbers: list[tuple[Place, int]] = []
        self.links: list[tuple[Place, int]] = []
        self._seen: dict[int, Any] = {}  # identities, and the values, so that none dies during the walk
        self._held: dict[int, list[tuple[str | None, Any]]] = {}  # (attribute, what it leads to)
        self._waiting: defaultdict[str, list[Any]] = defaultdict(list)  # for their attribute to be named
        self._methods: defaultdict[str, list[types.FunctionType]] = defaultdict(list)
        self._kinds: dict[int, type] = {}
        self._to_use: list[Any] = []
        self._any_attribute = False  # code was met that may read attributes by names made at run time
        self._use(roots)

    def counts(self, place: Place, owner: int) -> bool:
        """Whether code may read a place: of something used, an item, or an attribute that is named."""
        container, key, _ = place
        if owner not in self.used:
            return False
        return not isinstance(key, str) or key in self.named or self._any_attribute or id(container) == owner

    def objects(self) -> list[Any]:
        """What is used and has attributes that code of the user's looks for. Not modules: what wraps and hooks them
        gives them attributes of its own."""
        others = (nn.Module, *SIZED, types.FunctionType, types.MethodType)
        held = (self._seen[one] for one in self.used if one in self._seen)
        return [one for one in held if not isinstance(one, others) and not of_library(type(one))]

    def _look_through(self, root: Any) -> None:
        queue = [root]
        while queue and len(self._seen) < _MOST:
            value = queue.pop()
            if isinstance(value, (*STOP, *PLAIN, Tensor)) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, nn.Module) and not hasattr(type(value), "_reach_through"):
                self.found.modules.append(value)
            elif isinstance(value, torch.optim.Optimizer):
                self.found.optimizers.append(value)
            held = self._held[id(value)] = self._look_into(value)
            queue += [item for _, item in held]

    def _look_into(self, value: Any) -> list[tuple[str | None, Any]]:
        held, plain = [], []
        for container, key, by_name in places(value):
            item = get(container, key)
            place = container, key, item
            if isinstance(item, Tensor):
                self.found.slots.append(place)
            elif isinstance(item, PLAIN):
                if not isinstance(container, tuple):
                    plain.append((place, id(value)))
            elif not isinstance(item, STOP) and not holds_nothing(item):
                held.append((key if by_name and not _is_part(item) else None, item))
                if not isinstance(container, tuple):
                    self.links.append((place, id(value)))
        if len(plain) <= _MOST_NUMBERS or not isinstance(value, SIZED):
            self.numbers += plain
        return held

    def _use(self, values: Iterable[Any]) -> None:
        self._to_use += values
        while self._to_use:
            value = self._to_use.pop()
            if id(value) in self.used:
                continue
            self._look_through(value)
            self.used.add(id(value))
            self._note_code(value)
            for name, item in self._held.get(id(value), ()):
                if name is None or name in self.named or self._any_attribute:
                    self._to_use.append(item)
                else:
                    self._waiting[name].append(item)

    def _mention(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self.named:
                self.named.add(name)
                self._to_use += self._waiting.pop(name, ())
                self._to_use += self._methods.get(name, ())

    def _note_code(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, nn.Module):
            if not hasattr(kind, "_reach_through"):
                self._mention(names_of_method(kind, "forward"))
        elif isinstance(value, types.FunctionType):
            if of_compiler(value):
                return
            self._mention(names(value))
            if not self._any_attribute and looks_up(value):
                self._any_attribute = True
                self._to_use += [item for held in self._waiting.values() for item in held]
        elif isinstance(value, types.MethodType):
            self._mention(names_of_method(type(value.__self__), value.__func__.__name__))
        elif callable(value) and not isinstance(value, torch.optim.Optimizer):
            self._mention(names_of_method(kind, "__call__"))
        if id(kind) not in self._kinds and kind.__flags__ & HEAP_TYPE and not of_library(kind):
            self._kinds[id(kind)] = kind
            for name, function in methods(kind):
                self._methods[name].append(function)
                if name in self.named or used_by_syntax(name) or (name == "forward" and isinstance(value, nn.Module)):
                    self._to_use.append(function)


def _is_part(item: Any) -> bool:
    """Whether an object is surely used by what holds it, also if no code says so that is looked into: a module with
    parameters, or of PyTorch. Others are metrics and the like, which may count beside a step."""
    return isinstance(item, nn.Module) and (of_library(type(item)) or any(True for _ in nn.Module.parameters(item)))


def plain_sequence(value: Any) -> bool:
    """Whether it is a list or tuple of nothing but numbers, strings and None."""
    return isinstance(value, (tuple, list)) and all(isinstance(item, PLAIN) for item in value)


def _containers(links: list[Place], modules: list[nn.Module]) -> list[Any]:
    sized = [item for _, _, item in links if isinstance(item, SIZED)]
    objects = [dict_of(item) for _, _, item in links if not of_library(type(item))]
    return [*sized, *(module.__dict__ for module in modules), *objects]


def _distinct(found: list[Place]) -> list[Place]:
    """Each place once: every function that names a global leads to it."""
    return list({(id(container), key): (container, key, item) for container, key, item in found}.values())


def reach(*roots: Any) -> Reach:
    """Walks everything that `roots` hold: closures, the globals a function names, attributes, slots, containers; and
    what the methods of the objects used read."""
    walk = _Walk(roots)
    found = walk.found
    links, found.all_numbers = [place for place, _ in walk.links], [place for place, _ in walk.numbers]
    found.all_containers = _containers(links, found.modules)
    found.all_sizes = list(map(len, found.all_containers))
    for optimizer in found.optimizers:
        keep_all = {id(group) for group in optimizer.param_groups}
        settings = [place for place in links if plain_sequence(place[2])]  # `betas`
        found.numbers += [place for place in (*found.all_numbers, *settings) if id(place[0]) in keep_all]
    groups = {id(place[0]) for place in found.numbers}
    found.numbers += [
        place for place, owner in walk.numbers if id(place[0]) not in groups and walk.counts(place, owner)
    ]
    found.links = [place for place, owner in walk.links if isinstance(place[2], nn.Module) or walk.counts(place, owner)]
    found.numbers, found.links = _distinct(found.numbers), _distinct(found.links)
    found.objects = walk.objects()
    found.containers = _containers(found.links, found.modules)
    found.sizes = list(map(len, found.containers))
    return found
