"""Guards: whether what a recorded call read is still as it was.

Checked before each replay, so everything lies in flat lists that `map` goes through.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, compress, count
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.guards.changes import line_of, name_of, replacements
from graphmod.guards.contents import CONTAINERS, content, describe, is_plain, same, same_content
from graphmod.guards.hooks import HookWatch
from graphmod.guards.lookup import MISSING, Cell, Kind, get
from graphmod.guards.note import Note
from graphmod.guards.notes import Notes

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_data_ptr, _size, _stride = Tensor.data_ptr, Tensor.size, Tensor.stride
_requires_grad = operator.attrgetter("requires_grad")
_is, _is_not, _getitem = operator.is_, operator.is_not, operator.getitem
_flat = chain.from_iterable
_UNCHANGING = (tuple, frozenset)  # where they lie is compared
_MOST_LEVELS = 16  # of containers in containers, each in the place of an equal one


def _has_none(leaf: Tensor) -> bool:
    return leaf.grad is None


class Contents:
    """Compares what is inside containers.

    Args:
        found: `(container, line that read it)`.
    """

    def __init__(self, found: list[tuple[Any, tuple]]) -> None:
        self.found = found
        self.names: dict[int, str] = {}  # of containers, in words
        self.refresh()

    def replace(self, was: Any, there: Any) -> None:
        """Goes on with a container that has taken the place of another; it has to hold what that held then."""
        self.found = [(there if one is was else one, where) for one, where in self.found]
        self._replaced = True
        if id(was) in self.names:
            self.names[id(there)] = self.names[id(was)]

    def refresh(self) -> None:
        """Takes what is there now for right."""
        values = [value for value, _ in self.found]
        self._replaced = False
        self._items = list(map(content, values))
        self._empty = [value for value in values if isinstance(value, CONTAINERS) and not value]
        self._dicts = [value for value in values if type(value) is dict and value]
        self._sequences = [value for value in values if type(value) in (list, deque) and value]
        known = {id(value) for value in (*self._empty, *self._dicts, *self._sequences)}
        self._others = [value for value in values if id(value) not in known and not isinstance(value, _UNCHANGING)]
        self._holds_something = bool(self._dicts or self._sequences or self._others)
        self._lengths, self._flat, self._inside = self._now()

    def _now(self) -> tuple[list[int], list[Any], list[tuple]]:
        dicts, sequences = self._dicts, self._sequences
        flat = [*_flat(dicts), *_flat(map(dict.values, dicts)), *_flat(sequences)]
        return [*map(len, dicts), *map(len, sequences)], flat, list(map(content, self._others))

    def changed(self) -> str | None:
        """The container in which something is no longer as it was, in words."""
        if self._replaced or any(self._empty):
            return self._compare()
        if not self._holds_something:
            return None
        lengths, flat, inside = self._now()
        if lengths == self._lengths and all(map(_is, flat, self._flat)):
            for now, before in zip(inside, self._inside, strict=True):
                if len(now) != len(before) or not all(map(_is, now, before)):
                    return self._compare()
            return None
        return self._compare()

    def _compare(self) -> str | None:
        for (value, where), items in zip(self.found, self._items, strict=True):
            if not same_content(items, content(value)):
                return f"{self._difference(value, items)} (read at {line_of(where)})"
        self.refresh()  # equal values in the place of others
        return None

    def _difference(self, value: Any, items: tuple) -> str:
        """What is different in a container, in words."""
        half = len(items) // 2
        if isinstance(value, dict) and list(value) == list(items[:half]):
            for key, was in zip(value, items[half:], strict=True):
                if isinstance(key, str) and not same(was, value[key]):
                    of = self.names.get(id(value), f"a {type(value).__name__}")
                    if not (is_plain(was) or is_plain(value[key])):
                        return f"{key!r} of {of} is another {type(was).__name__} than when it was captured"
                    text = f"{key!r} of {of} was {describe(was)} when it was captured and is {describe(value[key])}"
                    number = key == "lr" and isinstance(value[key], float)
                    return text + (", and a rate that is a tensor would be read anew" if number else "")
        return f"the items of a {type(value).__name__} are others than when it was captured"

    def restore(self) -> None:
        """Gives the containers the items that they had."""
        for (value, _), items in zip(self.found, self._items, strict=True):
            now = content(value)
            if len(now) == len(items) and all(map(_is, now, items)):
                continue
            if isinstance(value, dict):
                half = len(items) // 2
                value.clear()
                value.update(zip(items[:half], items[half:], strict=True))
            elif isinstance(value, (list, deque, set)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(items)

    def tensors(self) -> list[tuple[Any, Tensor]]:
        """The tensors inside, each with its container."""
        pairs = zip(self.found, self._items, strict=True)
        return [(value, item) for (value, _), items in pairs for item in items if isinstance(item, Tensor)]


class Guards:
    """Compares the present with what a recorded call left behind.

    Args:
        notes: of the call, which changed nothing of it.
        backward: whether a backward ran inside, which writes gradients that are absent and adds to others.

    Attributes:
        exchanged: whether the last change found was of an object or a tensor, which the guards keep alive.
        slots: `(container, key, tensor)` of each place of a tensor.
        attributes: those of `slots` that are parameters of modules.
        tensors: those at these places and in the containers.
        modules: those that were called.
        optimizers: those it worked with.
    """

    def __init__(self, notes: Notes, backward: bool = False) -> None:
        self.exchanged = False
        self.modules = list(notes.modules.values())
        self._hooks_of = [hooks for module in self.modules for kind in HOOKS if not (hooks := getattr(module, kind))]
        replaced = replacements(notes)
        self.contents = Contents(
            [(replaced.get(id(value), value), where) for value, _, where in notes.contents.values()]
        )
        kept = [note for note in notes.notes.values() if id(note.owner) not in replaced]
        called = notes.modules.keys()
        others = [note.owner for note in kept if isinstance(note.container, Kind) and id(note.owner) not in called]
        self._objects = [*self.modules, *others]
        self._kinds = list(map(type, self._objects))
        kept = [note for note in kept if not isinstance(note.container, Kind)]
        owners = {id(note.owner): note.owner for note in kept}
        self.optimizers = [one for one in owners.values() if isinstance(one, torch.optim.Optimizer)]
        self.contents.names = {id(group): type(one).__name__ for one in self.optimizers for group in one.param_groups}
        self._take_places(kept)
        self._take_tensors(notes, backward)

    def _take_places(self, notes: list[Note]) -> None:
        whole = {id(value) for value, _ in self.contents.found if type(value) in (dict, list)}
        there = [(note, note.container, note.now()) for note in notes]
        places = [
            (note, container, value)
            for note, container, value in there
            if value is not MISSING and not (id(container) in whole and note.owner is container)
        ]
        self._notes = [note for note, _, _ in places]
        self._containers = [container for _, container, _ in places]
        self._keys = [note.key for note in self._notes]
        self._values = [value for _, _, value in places]
        self._absent: dict[int, tuple[Any, list[Note]]] = {}
        self._unset = [note for note, container, value in there if value is MISSING and not isinstance(container, dict)]
        for note, container, value in there:
            if value is MISSING and isinstance(container, dict):
                self._absent.setdefault(id(container), (container, []))[1].append(note)
        self._without = [container for container, _ in self._absent.values()]
        self._lengths = list(map(len, self._without))
        self.slots = [(c, note.key, value) for note, c, value in there if isinstance(value, Tensor)]
        self.attributes = [
            (container, note.key, value)
            for note, container, value in there
            if isinstance(value, Tensor) and isinstance(note.owner, nn.Module) and container is note.owner._parameters
        ]

    def _take_tensors(self, notes: Notes, backward: bool) -> None:
        held = {id(container) for container, _, _ in self.attributes}
        inside = self.contents.tensors()
        self.slots += [(value, None, tensor) for value, tensor in inside if id(value) not in held]
        met = (*(one for _, _, one in self.slots), *(one for _, one in inside))
        leaves = list(notes.gradients.values())
        found = {id(tensor): tensor for tensor in (*met, *(leaf for leaf, _ in leaves))}
        self.tensors = [tensor for tensor in found.values() if tensor.layout is torch.strided]
        self._addresses = list(map(_data_ptr, self.tensors))
        self._sizes = list(map(_size, self.tensors))
        self._strides = list(map(_stride, self.tensors))
        self._flags = list(map(_requires_grad, self.tensors))
        leaves = [one for one in leaves if one[0].requires_grad] if backward else []
        self._leaves, self._absent_gradients = [leaf for leaf, _ in leaves], [absent for _, absent in leaves]
        self._gradient_hooks = HookWatch(self._leaves)

    # -- the check -----------------------------------------------------------------------------------------------

    def moved(self) -> str | None:
        """A tensor that is no longer where or what it was, in words."""
        tensors = self.tensors
        self.exchanged = True
        if list(map(_data_ptr, tensors)) != self._addresses:
            return f"{self._named(self._addresses, _data_ptr)} has moved to another address"
        if list(map(_stride, tensors)) != self._strides or list(map(_size, tensors)) != self._sizes:
            return "a tensor it reads has another shape or other strides than when it was captured"
        return None

    def _named(self, before: list, read: Callable) -> str:
        """The first tensor that is other than before, by the name under which it is read."""
        now = next(one for one, known in zip(self.tensors, before, strict=True) if read(one) != known)
        name = next((key for _, key, value in self.slots if value is now and isinstance(key, str)), None)
        return "a tensor it reads" if name is None else f"{name!r}, a tensor it reads,"

    def changed(self, gradients: bool = True) -> str | None:
        """What is no longer as it was, in words; None when nothing changed. `moved` looks at tensors' memory.

        Args:
            gradients: whether it matters which gradients are absent.
        """
        self.exchanged = False
        try:
            same_objects = all(map(_is, map(_getitem, self._containers, self._keys), self._values))
        except Exception:  # KeyError and IndexError, or whatever a container of the user's raises
            return self._gone()
        if not same_objects:
            reason = self._other()
            if reason is not None:
                return reason
        if list(map(len, self._without)) != self._lengths:
            reason = self._come()
            if reason is not None:
                return reason
        for note in self._unset:
            if note.now() is not MISSING:
                return f"{name_of(note)} was nothing when it was captured and is {describe(note.now())}"
        if any(self._hooks_of):
            return "hooks were added to a module in it"
        reason = self.contents.changed()
        if reason is not None:
            return reason
        if list(map(type, self._objects)) != self._kinds:
            return f"{self._of_other_class()} has another class than when it was captured"
        if list(map(_requires_grad, self.tensors)) != self._flags:
            return "requires_grad of a tensor changed"
        if gradients and self._leaves and list(map(_has_none, self._leaves)) != self._absent_gradients:
            return "other gradients are there, or absent, than when it was captured"
        return self._gradient_hooks.changed() if self._leaves else None

    def _of_other_class(self) -> str:
        found = next(kind for one, kind in zip(self._objects, self._kinds, strict=True) if type(one) is not kind)
        return f"one {found.__name__}"

    def _gone(self) -> str:
        for note, container, value in zip(self._notes, self._containers, self._values, strict=True):
            if get(container, note.key) is MISSING:
                return f"{name_of(note)} was {describe(value)} when it was captured and is gone"
        return "an object it reads cannot be looked into any more"

    def _other(self) -> str | None:
        for _ in range(_MOST_LEVELS):
            now = list(map(get, self._containers, self._keys))
            others = list(compress(count(), map(_is_not, now, self._values)))
            if not others:
                return None
            for index in others:
                reason = self._compared(index, now[index])
                if reason is not None:
                    return reason
        return "objects it reads are others each time one looks"

    def _compared(self, index: int, there: Any) -> str | None:
        was, note = self._values[index], self._notes[index]
        if not same(was, there):
            if is_plain(was) or is_plain(there):
                return f"{name_of(note)} was {describe(was)} when it was captured and is {describe(there)}"
            self.exchanged = True
            return f"{name_of(note)} is another {type(was).__name__} than when it was captured"
        if isinstance(was, CONTAINERS):
            self._put_in_place(was, there)
        self._values[index] = there
        return None

    def _put_in_place(self, was: Any, there: Any) -> None:
        """Goes on with an equal container that has taken the place of another."""
        self._containers = [there if one is was else one for one in self._containers]
        self._without = [there if one is was else one for one in self._without]
        self.contents.replace(was, there)

    def _come(self) -> str | None:
        for index, (container, (_, notes)) in enumerate(zip(self._without, self._absent.values(), strict=True)):
            for note in notes:
                now = get(container, note.key)
                if now is not MISSING:
                    return f"{name_of(note)} was nothing when it was captured and is {describe(now)}"
            self._lengths[index] = len(container)
        return None

    # -- after a call that failed --------------------------------------------------------------------------------

    def restore(self) -> None:
        """Puts back every value that is another than it was."""
        for container, key, value in zip(self._containers, self._keys, self._values, strict=True):
            if isinstance(container, Cell):
                container.cell.cell_contents = value
            elif isinstance(container, (dict, list)) and get(container, key) is not value:
                container[key] = value
        for container, notes in self._absent.values():
            for note in notes:
                if isinstance(container, dict):
                    container.pop(note.key, None)
        self.contents.restore()

    # -- what was met --------------------------------------------------------------------------------------------

    def told(self) -> Iterator[tuple[Any, Any, Any, tuple]]:
        """`(owner, key, value, who read it)` of each place that is compared, for people; key and value are None of a
        container that is compared as a whole."""
        for note, value in zip(self._notes, self._values, strict=True):
            yield note.owner, note.key, value, note.where
        for value, where in self.contents.found:
            yield value, None, None, where

    def parameters(self) -> list[Tensor]:
        """The distinct leaf tensors that may collect a gradient."""
        return [t for t in self.tensors if t.is_leaf and (t.requires_grad or isinstance(t, nn.Parameter))]
