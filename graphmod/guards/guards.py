"""Guards: whether what a recorded call read is still as it was: places, what is inside containers, and tensors.

Checked before each replay, so everything lies in flat lists that `map` goes through.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.errors import BackwardUnavailable
from graphmod.guards.changes import differs, line_of, name_of
from graphmod.guards.compiled import modes
from graphmod.guards.hooks import HookWatch
from graphmod.guards.notes import Note, Notes, form
from graphmod.guards.values import (
    HOLDERS,
    MISSING,
    Answer,
    Cell,
    Data,
    Fields,
    Kind,
    Slots,
    content_now,
    get,
    is_plain,
    kind_of,
    same,
    same_content,
    same_plain,
    within,
)
from graphmod.ranks.fully_shard import as_in_forwards
from graphmod.torch_private import alike, is_traceable_wrapper_subclass
from graphmod.trace.operations import address, is_leaf
from graphmod.trace.undo import let_through

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_is, _getitem, _call = operator.is_, operator.getitem, operator.call
_get = dict.get  # runs no `__missing__`
_flat = chain.from_iterable
_NAMED = (dict, types.MappingProxyType)  # where something comes only if there is more of it
_OTHERS = "objects it reads are others each time one looks"
_MOST_LEVELS = 16  # of containers in containers, each in the place of an equal one
_FLAT = (list, deque, dict)  # whose items are compared one by one
_BUILT_IN = (*_FLAT, set, OrderedDict, defaultdict)  # other classes may answer otherwise
_UNCHANGING = (tuple, frozenset)  # where they lie is compared
_data_ptr = Tensor.data_ptr
_requires_grad = operator.attrgetter("requires_grad")
_ORDINARY = (Tensor, nn.Parameter)


def _has_none(leaf: Tensor) -> bool:
    return leaf.grad is None


def put_back(value: Any, items: tuple) -> None:
    """Gives a container the items that it had; see `content`."""
    now = content_now(value)
    if len(now) == len(items) and all(map(_is, now, items)):
        return
    if isinstance(value, dict):
        half = len(items) // 2
        value.clear()
        value.update(zip(items[:half], items[half:], strict=True))
    elif isinstance(value, (list, deque, set)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(items)


class Contents:
    """Compares what is inside containers.

    Args:
        found: `(container, line that read it)`.

    Attributes:
        exchanged: containers inside of these, and the equal ones that were found in their place.
        replaced: whether any of these have been replaced since `refresh`.
    """

    def __init__(self, found: list[tuple[Any, tuple]]) -> None:
        self.found = found
        self.exchanged: list[tuple[Any, Any]] = []
        self.optimizers: dict[int, Any] = {}  # by identity of the containers that hold their settings
        self.refresh()

    def replace(self, exchanged: dict[int, tuple[Any, Any]]) -> None:
        """Goes on with containers that have taken the place of others, by the identity of those; each has to hold what
        the other held then."""
        self.found = [(exchanged.get(id(one), (one, one))[1], where) for one, where in self.found]
        self.replaced = True
        for was, there in exchanged.values():
            if id(was) in self.optimizers:
                self.optimizers[id(there)] = self.optimizers[id(was)]

    def refresh(self) -> None:
        """Takes what is there now for right."""
        values = [value for value, _ in self.found]
        self.replaced = False
        self._items = list(map(content_now, values))
        self._counted = [one for one in values if type(one) in _FLAT or (type(one) in _BUILT_IN and not one)]
        known = set(map(id, self._counted))
        self._others = [value for value in values if id(value) not in known and not isinstance(value, _UNCHANGING)]
        self._lengths, self._inside = list(map(len, self._counted)), list(map(content_now, self._others))
        self._parts = [one.__iter__ for one in self._counted if one]
        self._parts += [one.values for one in self._counted if type(one) is dict and one]
        self._flat = list(_flat(map(_call, self._parts)))

    def changed(self) -> str | None:
        """The container in which something is no longer as it was, in words."""
        flat = _flat(map(_call, self._parts))
        if self.replaced or list(map(len, self._counted)) != self._lengths or not all(map(_is, flat, self._flat)):
            return self._compare()
        for now, before in zip(map(content_now, self._others), self._inside, strict=True):
            if len(now) != len(before) or not all(map(same_plain, now, before)):
                return self._compare()
        return None

    def _compare(self) -> str | None:
        exchanged: list[tuple[Any, Any]] = []
        for (value, where), items in zip(self.found, self._items, strict=True):
            now = content_now(value)
            if not same_content(items, now):
                return self._difference(value, items, where)
            exchanged += [pair for pair in zip(items, now, strict=True) if pair[0] is not pair[1]]
        self.exchanged = [pair for pair in exchanged if issubclass(type(pair[0]), HOLDERS)]
        if not self.exchanged:
            self.refresh()  # equal values in the place of others
        return None

    def _difference(self, value: Any, items: tuple, where: tuple) -> str:
        """What is different in a container, in words."""
        if isinstance(value, Answer):
            return differs(value.of, None, items[0], content_now(value)[0], where)
        half = len(items) // 2
        if isinstance(value, dict) and list(value) == list(items[:half]):
            for key, was in zip(value, items[half:], strict=True):
                if isinstance(key, str) and not same(was, value[key]):
                    optimizer = self.optimizers.get(id(value))
                    name = repr(key) if optimizer is not None else f"{key!r} of a {type(value).__name__}"
                    return differs(name, key, was, value[key], where, optimizer)
        return f"the items of a {kind_of(value)} are others than when it was recorded (read at {line_of(where)})"

    def restore(self) -> None:
        """Gives the containers the items that they had."""
        for (value, _), items in zip(self.found, self._items, strict=True):
            put_back(value, items)

    def not_restored(self) -> str | None:
        """The container in which something is another after `restore`, in words. An object in a variable of a context
        is left to who runs the code."""
        for (value, where), items in zip(self.found, self._items, strict=True):
            now = content_now(value)
            objects = isinstance(value, contextvars.ContextVar) and not any(map(is_plain, (*items, *now)))
            if not objects and not same_content(items, now):
                return self._difference(value, items, where)
        return None

    def set_variables(self) -> list[tuple[contextvars.ContextVar, contextvars.Token]]:
        """Gives the variables of contexts the plain values that they had: a thread has its own. Returns what takes
        them back."""
        pairs = ((value, items) for (value, _), items in zip(self.found, self._items, strict=True))
        plain = ((value, items[0]) for value, items in pairs if isinstance(value, contextvars.ContextVar))
        return [(value, value.set(was)) for value, was in plain if was is not MISSING and is_plain(was)]

    def items(self, but: Collection[int]) -> Iterator[Any]:
        """All that is inside now, but for that of some containers, by identity."""
        return _flat(content_now(value) for value, _ in self.found if id(value) not in but)

    def tensors(self) -> list[tuple[Any, Tensor]]:
        """The tensors inside, each with its container."""
        pairs = zip(self.found, self._items, strict=True)
        return [(value, item) for (value, _), items in pairs for item in items if issubclass(type(item), Tensor)]


def _form(tensor: Tensor) -> tuple:
    return tensor.size(), tensor.stride(), tensor.dtype, type(tensor), tensor.is_conj(), tensor.is_neg()


def _inner_tensors(tensor: Tensor) -> list[tuple[Tensor, str, Tensor]]:
    """The tensors with memory that one without (a DTensor) stands for, each with whose and which attribute it is."""
    if type(tensor) in _ORDINARY or not is_traceable_wrapper_subclass(tensor):
        return []
    found = []
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        found += [(tensor, name, part), *_inner_tensors(part)] if isinstance(part, Tensor) else []
    return found


def with_memory(tensors: Collection[Tensor]) -> list[Tensor]:
    """Those of some tensors that have memory, and those that one without (a DTensor) stands for."""
    inside = [inner for tensor in tensors for _, _, inner in _inner_tensors(tensor)]
    found = {id(tensor): tensor for tensor in (*tensors, *inside)}
    return [tensor for tensor in found.values() if tensor.layout is torch.strided]


class _Guard:
    """A place that holds what it held when it was recorded, or by now an equal value, in an equal container.

    The recorded call may have put an equal container there, which the first look finds.
    """

    __slots__ = ("container", "note", "value")

    def __init__(self, note: Note) -> None:
        self.note, self.container = note, note.container
        self.value = self.now() if note.items is None else note.before()
        if issubclass(type(self.value), Tensor) and note.before() is self.value:
            note.hold()  # as others do: `torch.utils.swap_tensors` refuses what is held weakly

    def now(self) -> Any:
        return get(self.container, self.note.key)


def put(container: Any, note: Note, value: Any) -> None:
    """Puts a value, or nothing, at a place, unless it is there."""
    if get(container, note.key) is value:
        return
    if isinstance(container, (dict, list)):
        if value is not MISSING:
            container[note.key] = value
        elif isinstance(container, dict):
            del container[note.key]
    elif isinstance(container, (Cell, Data, Fields, Slots, types.MappingProxyType)):
        of_class = isinstance(container, types.MappingProxyType)
        attributes, owner = (type, note.owner) if of_class else (object, container.owner)
        name = "cell_contents" if isinstance(container, Cell) else note.key
        if value is not MISSING:
            attributes.__setattr__(owner, name, value)
        else:
            attributes.__delattr__(owner, name)


def _columns(places: list[_Guard]) -> tuple[list, list, list]:
    """Their containers, keys and values."""
    return [one.container for one in places], [one.note.key for one in places], [one.value for one in places]


class Guards:
    """Compares the present with what a recorded call left behind.

    Args:
        notes: of the call, which changed nothing of it.
        backward: whether a backward ran inside, which writes gradients that are absent and adds to others.
        bound: places whose value is another after each call; of those that are read, the form is compared.
        given: the identities of containers whose content is in the call's signature.

    Attributes:
        bound: those, in containers as they are now.
        carried: those of them that hold a tensor whose values the next call reads.
        exchanged: whether the last change found was of an object or a tensor, which the guards keep alive.
        slots: `(container, key, tensor)` of each place of a tensor.
        attributes: those of `slots` that are parameters of modules.
        tensors, staying: those at these places and in the containers; those of them whose memory stays where it is.
        modules: those that were called.
        optimizers: those it worked with.
    """

    def __init__(
        self, notes: Notes, backward: bool = False, bound: Collection[Note] = (), given: Collection[int] = ()
    ) -> None:
        self.exchanged, self._identified = False, notes.identified
        self.bound = list(map(_Guard, bound))
        kept_out = {note.place for note in bound}
        for place in self.bound:  # neither what was there nor what is is kept alive
            place.value = MISSING
            place.note.let_go()
        self.carried = [place for place in self.bound if place.note.read]
        self.modules = list(notes.modules.values())
        self._hooks_of = [hooks for module in self.modules for kind in HOOKS if not (hooks := getattr(module, kind))]
        contents = [(value, where) for value, _, where in notes.contents.values()]
        self.contents = Contents([(value, where) for value, where in contents if id(value) not in given])
        kept = [note for note in notes.notes.values() if id(note.owner) not in given]
        called = set(map(id, self.modules))
        others = [note.owner for note in kept if isinstance(note.container, Kind) and id(note.owner) not in called]
        self._objects = [*self.modules, *(one for one in others if id(one) not in notes.weakly)]
        self._kinds = list(map(type, self._objects))
        self._named_weakly = [(weakref.ref(one), type(one)) for one in others if id(one) in notes.weakly]
        kept = [note for note in kept if not isinstance(note.container, Kind)]
        kept = [note for note in kept if note.place not in kept_out]
        owners = {id(note.owner): note.owner for note in kept}
        self.optimizers = [one for one in owners.values() if isinstance(one, torch.optim.Optimizer)]
        self._of_optimizer = {id(group): one for one in self.optimizers for group in one.param_groups}
        self.contents.optimizers = self._of_optimizer
        self._of_dynamo = notes.of_dynamo
        self._take_places(kept)
        self._take_tensors(notes, backward, given)

    def _take_places(self, notes: list[Note]) -> None:
        whole = {id(value) for value, _ in self.contents.found if type(value) in (dict, list)}
        self._places: list[_Guard] = []
        self._unset: list[Note] = []
        absent: dict[int, tuple[Any, list[Note]]] = {}
        self.slots, self.attributes = [], []
        for note in notes:
            place = _Guard(note)
            container, value = place.container, place.value
            if value is MISSING and isinstance(container, _NAMED):
                absent.setdefault(id(container), (container, []))[1].append(note)
            elif value is MISSING:
                self._unset.append(note)
            elif not (id(container) in whole and note.owner is container):
                self._places.append(place)
            if issubclass(type(value), Tensor):
                self.slots.append((container, note.key, value))
                if isinstance(note.owner, nn.Module) and container is note.owner._parameters:
                    self.attributes.append((container, note.key, value))
        self._without, self._absent = [one for one, _ in absent.values()], [names for _, names in absent.values()]
        self._lengths = list(map(len, self._without))
        self._sort_places()

    def _sort_places(self) -> None:
        """Lays the places out so that no code in Python is needed to look at most of them."""
        owners, dicts, others = [], [], []
        for place in self._places:
            one = place.container
            (owners if isinstance(one, (Cell, Fields)) else dicts if isinstance(one, dict) else others).append(place)
        views, names, self._in_owners = _columns(owners)
        self._owners = [view.owner for view in views]
        self._attributes = ["cell_contents" if name is None else name for name in names]
        self._dicts, self._names, self._in_dicts = _columns(dicts)
        self._held, self._keys, self._in_others = _columns(others)

    def _take_tensors(self, notes: Notes, backward: bool, given: Collection[int]) -> None:
        held = {id(container) for container, _, _ in self.attributes}
        inside = self.contents.tensors()
        self.slots += [(value, None, tensor) for value, tensor in inside if id(value) not in held]
        there = [(met, tensor) for met in notes.tensors.values() if (tensor := met.tensor) is not None]
        in_tuples = [tensor for met, tensor in there if not met.tuples.issubset(given)]
        leaves = [
            (tensor, met.without_gradient)
            for met, tensor in there
            if met.is_leaf and (met.asked_for_gradient or (backward and tensor.requires_grad))
        ]
        known = (*(one for _, _, one in self.slots), *(one for _, one in inside), *in_tuples)
        found = {id(one): one for one in (*known, *(leaf for leaf, _ in leaves))}
        self._tensor_names = {id(one): key for _, key, one in reversed(self.slots) if isinstance(key, str)}
        moving = {id(place.container.owner) for place in self.bound if isinstance(place.container, Data)}
        by_key = [note for note in notes.notes.values() if issubclass(type(note.key), Tensor)]
        keys = [id(note.key) for note in by_key if note.before() is not MISSING]
        self._elsewhere = {*found, *keys}
        self.tensors = with_memory(found.values())
        self.staying = [tensor for tensor in self.tensors if id(tensor) not in moving]
        self._inner = [inner for tensor in found.values() for inner in _inner_tensors(tensor)]
        self._addresses = list(map(_data_ptr, self.staying))
        self._forms, self._flags = list(map(_form, self.tensors)), list(map(_requires_grad, self.tensors))
        self._alike: Callable[..., bool] | None = None
        self._leaves = [leaf for leaf, _ in leaves]
        told = [(leaf, absent) for leaf, absent in leaves if absent is not None]
        self._may_have_gradients, self._absent_gradients = [leaf for leaf, _ in told], [absent for _, absent in told]
        self._gradient_hooks = HookWatch(self._leaves)

    # -- the check -----------------------------------------------------------------------------------------------

    def moved(self) -> str | None:
        """A tensor that is no longer where or what it was, or has other gradient hooks, in words."""
        self.exchanged = True
        for tensor, name, inner in self._inner:
            if getattr(tensor, name) is not inner:
                return f"{name} of a {type(tensor).__name__} it reads is another"
        if list(map(_data_ptr, self.staying)) != self._addresses:
            named = self._named(self.staying, self._addresses, _data_ptr)
            return f"{named} has moved to another address; change it in place (copy_), not its memory (.data = ...)"
        other = None if self._alike is not None and self._alike(*self.tensors) else self._of_other_form()
        if other is not None:
            return other
        self.exchanged = False
        return self._gradient_hooks.changed() if self._leaves else None

    def _of_other_form(self) -> str | None:
        """A tensor of another form, or that requires grad where it did not, in words."""
        if list(map(_form, self.tensors)) != self._forms:
            named = self._named(self.tensors, self._forms, _form)
            return f"{named} has another shape, other strides, another dtype or class than when it was recorded"
        if list(map(_requires_grad, self.tensors)) != self._flags:
            self.exchanged = False
            return f"requires_grad of {self._named(self.tensors, self._flags, _requires_grad)} changed"
        self._alike = alike(self.tensors)  # which depends on modes, such as autocast, as they are now
        return None

    def _named(self, tensors: list[Tensor], before: list, read: Callable) -> str:
        """The first of some tensors that is other than before, by the name under which it is read."""
        now = next(one for one, known in zip(tensors, before, strict=True) if read(one) != known)
        name = self._tensor_names.get(id(now))
        return "a tensor it reads" if name is None else f"{name!r}, a tensor it reads,"

    def changed(self, gradients: bool = True) -> str | None:
        """What is no longer as it was, in words; None when nothing changed. `moved` looks at the tensors themselves.

        Args:
            gradients: whether it matters which gradients are absent.
        """
        self.exchanged = False
        reason = (
            self._held_otherwise()
            or self._come()
            or self.carries_otherwise()
            or ("hooks were added to a module in it" if any(self._hooks_of) else None)
            or self._contents_changed()
            or (self._recompiles() if self._of_dynamo else None)
            or self._of_other_class()
        )
        if reason is None and gradients and list(map(_has_none, self._may_have_gradients)) != self._absent_gradients:
            return "other gradients are there, or absent, than when it was recorded"
        return reason

    def _held_otherwise(self) -> str | None:
        """A place that holds something else, in words."""
        try:
            same_objects = (
                all(map(_is, map(_get, self._dicts, self._names, repeat(MISSING)), self._in_dicts))
                and (
                    all(map(_is, map(_getitem, self._held, self._keys), self._in_others))
                    or all(map(same_plain, map(_getitem, self._held, self._keys), self._in_others))
                )
                and all(map(_is, map(getattr, self._owners, self._attributes), self._in_owners))
            )
        except Exception as error:  # KeyError and IndexError, or whatever a container of the user's raises
            let_through(error)
            return self._other() or "an object it reads cannot be looked into any more"
        return None if same_objects else self._other()

    def carries_otherwise(self, leaves: Iterable[Tensor] = ()) -> str | None:
        """Which tensor whose values the next call reads is one of another form, or lies where another of the callable
        or of its arguments `leaves` does, in words: code may ask whether they are one."""
        if not self.carried:
            return None
        alone = [
            address(now)
            for place in self.carried
            if not isinstance(place.container, Data) and isinstance(now := place.now(), Tensor)
        ]
        others = {*map(address, leaves), *map(address, self.tensors)}
        for place in self.carried:
            now = place.now()
            if form(now) != place.note.form:
                return f"{name_of(place.note)} is no tensor like the one that was there when it was recorded"
            where = address(now)
            if where and not isinstance(place.container, Data) and (where in others or alone.count(where) > 1):
                return f"{name_of(place.note)} shares memory with another tensor that the call finds"
        return None

    def learn_arguments(self, leaves: Iterable[Tensor]) -> None:
        """Takes in the tensor arguments of the recorded call. One that is found elsewhere, too, may be another later: a
        capture takes copies, and would show whether code asks for it."""
        self._arguments = list(map(id, leaves))

    def finds_elsewhere(self, leaves: Iterable[Tensor]) -> str | None:
        """Whether code finds one of these arguments elsewhere, too, and another one than when it was recorded, in
        words: it may ask whether they are the same."""
        names, elsewhere = list(map(id, leaves)), self._elsewhere
        if elsewhere.isdisjoint(names):
            return None
        same = all(name not in elsewhere or name == was for name, was in zip(names, self._arguments, strict=True))
        return None if same else "an argument is a tensor that its code finds elsewhere, too; pass a clone of it"

    def _recompiles(self) -> str | None:
        """What torch.compile would compile anew for, in words."""
        now = modes()
        with as_in_forwards():
            return next((reason for one in self._of_dynamo if (reason := one.changed(now)) is not None), None)

    def _of_other_class(self) -> str | None:
        """An object whose class was exchanged, in words."""
        for one, kind in self._named_weakly:
            if type(one()) is not kind:
                return f"one {kind.__name__} is gone, or has another class than when it was recorded"
        if list(map(type, self._objects)) == self._kinds:
            return None
        found = next(kind for one, kind in zip(self._objects, self._kinds, strict=True) if type(one) is not kind)
        return f"one {found.__name__} has another class than when it was recorded"

    def _other(self) -> str | None:
        try:
            return self._compare()
        finally:
            self._sort_places()  # also where something differs: what was equal has been exchanged

    def _compare(self) -> str | None:
        for _ in range(_MOST_LEVELS):
            others = [(place, now) for place in self._places if not same_plain(now := place.now(), place.value)]
            if not others:
                return None
            for place, now in others:
                if not same(place.value, now):
                    return self._differs(place, now)
            reason = self._go_on([(place.value, now) for place, now in others])
            if reason is not None:
                return reason
            for place, now in others:
                place.value = now
        return _OTHERS

    def _differs(self, place: _Guard, there: Any) -> str:
        was, note = place.value, place.note
        self.exchanged = self.exchanged or not (is_plain(was) or is_plain(there))
        optimizer = self._of_optimizer.get(id(note.owner))
        return differs(name_of(note), note.key, was, there, note.where, optimizer)

    def _contents_changed(self) -> str | None:
        for _ in range(_MOST_LEVELS):
            reason = self.contents.changed()
            exchanged, self.contents.exchanged = self.contents.exchanged, []
            if reason is not None or not exchanged:
                return reason
            reason = self._go_on(exchanged)
            goes_on = self.contents.replaced
            if reason is None:
                self.contents.refresh()
                reason = self._other() or self._come()
            if reason is not None or not goes_on:
                return reason
        return _OTHERS

    def _go_on(self, exchanged: list[tuple[Any, Any]]) -> str | None:
        """Goes on with equal containers that have taken the place of others, and with those in them. In words, what
        was one container and is two: which of them stands for it nobody can tell."""
        found: dict[int, tuple[Any, Any]] = {}
        pairs = list(exchanged)
        while pairs:
            was, there = pairs.pop()
            known = found.get(id(was))
            if was is not there and id(was) in self._identified:
                return f"one {type(was).__name__}, of which code asks which object it is, is another now"
            if was is there or not issubclass(type(was), HOLDERS) or (known is not None and known[1] is there):
                continue
            if known is not None and not isinstance(was, _UNCHANGING):
                return self._two(was)
            found[id(was)] = was, there
            pairs += zip(within(was), within(there), strict=False)
        containers = (
            *(place.container for place in (*self._places, *self.bound)),
            *self._without,
            *(one for one, _ in self.contents.found),
        )
        if found.keys().isdisjoint(map(id, containers)):
            return None
        held = [place for place in self._places if issubclass(type(place.value), HOLDERS)]
        left = [place.now() for place in held if id(place.container) not in found]
        left += self.contents.items(but=found)
        seen: set[int] = set()
        while left:
            one = left.pop()
            if issubclass(type(one), HOLDERS) and id(one) not in seen:
                if id(one) in found and not isinstance(one, _UNCHANGING):
                    return self._two(one)
                seen.add(id(one))
                left += within(one)
        for place in (*self._places, *self.bound):
            place.container = found.get(id(place.container), (None, place.container))[1]
        self._without = [found.get(id(one), (None, one))[1] for one in self._without]
        self.contents.replace(found)
        return None

    def _two(self, was: Any) -> str:
        self.exchanged = True
        return f"one {type(was).__name__} that it reads in two places has become two"

    def _come(self) -> str | None:
        """What is where nothing was, in words."""
        lengths = list(map(len, self._without))
        empty = [(note.container, note) for note in self._unset]
        if lengths != self._lengths:
            empty += [(one, note) for one, notes in zip(self._without, self._absent, strict=True) for note in notes]
        for container, note in empty:
            now = get(container, note.key)
            if now is not MISSING:
                return differs(name_of(note), note.key, MISSING, now, note.where)
        self._lengths = lengths
        return None

    # -- the state of the recorded call --------------------------------------------------------------------------

    def restore(self) -> None:
        """Puts back every value that is another than it was."""
        for found in self._as_then():
            put(*found)
        self.contents.restore()

    def bound_now(self) -> list[tuple[Any, Note, Any]]:
        """What is at each place that calls bind anew, for `put`."""
        return [(one.container, one.note, one.now()) for one in self.bound]

    def _as_then(self) -> list[tuple[Any, Note, Any]]:
        """Each place, and what it held: the container, the note on it, the value."""
        found = [(place.container, place.note, place.value) for place in self._places]
        found += [(note.container, note, MISSING) for note in self._unset]
        for container, notes in zip(self._without, self._absent, strict=True):
            found += [(container, note, MISSING) for note in notes]
        return found

    def keep(self) -> Callable[[], None]:
        """Returns what puts back all that is compared as it is now."""
        now = [*self.bound_now(), *((one, note, get(one, note.key)) for one, note, _ in self._as_then())]
        contents = [(value, content_now(value)) for value, _ in self.contents.found]

        def bring_back() -> None:
            for found in now:
                put(*found)
            for value, items in contents:
                put_back(value, items)

        return bring_back

    @contextlib.contextmanager
    def as_recorded(self) -> Iterator[None]:
        """Inside, code finds what the recorded call has found; what it does to that is undone.

        Raises:
            BackwardUnavailable: something cannot be put back.
        """
        bring_back, variables = self.keep(), self.contents.set_variables()
        try:
            if self.changed(gradients=False) is not None:
                self.restore()
            other = self._held_otherwise() or self._come() or self.contents.not_restored()
            if other is not None:
                raise BackwardUnavailable(f"its forward has to run again, but {other}; change it after the backward")
            yield
        finally:
            bring_back()
            for variable, token in variables:
                variable.reset(token)

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        places = self._places or self._without or self._unset or self.contents.found
        objects = self._hooks_of or self._objects or self._named_weakly or self._of_dynamo
        return bool(places or objects or self.tensors or self._leaves)

    # -- what was met --------------------------------------------------------------------------------------------

    def told(self) -> Iterator[tuple[Any, Any, Any, tuple]]:
        """`(owner, key, value, who read it)` of each place that is compared, for people; key and value are None of a
        container that is compared as a whole."""
        for place in self._places:
            yield place.note.owner, place.note.key, place.value, place.note.where
        for value, where in self.contents.found:
            yield value, None, None, where

    @property
    def compiled(self) -> bool:
        """Whether code that dynamo has written ran, which may compare other modes than those that it computes in."""
        return bool(self._of_dynamo)

    def parameters(self) -> list[Tensor]:
        """The distinct leaf tensors that may collect a gradient."""
        return [t for t in self.tensors if (t.requires_grad or isinstance(t, nn.Parameter)) and is_leaf(t)]
