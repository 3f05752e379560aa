"""Guards: whether what a recorded call read is still as it was.

Checked before each replay, so everything lies in flat lists that `map` goes through.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator
from itertools import chain, compress, count, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphmod.guards.changes import differs, name_of, replacements
from graphmod.guards.compiled import modes
from graphmod.guards.containers import Contents
from graphmod.guards.contents import CONTAINERS, describe, is_plain, same
from graphmod.guards.hooks import HookWatch
from graphmod.guards.lookup import MISSING, Cell, Fields, Kind, get
from graphmod.guards.note import Note
from graphmod.guards.notes import Notes
from graphmod.torch_private import alike

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_data_ptr, _size, _stride = Tensor.data_ptr, Tensor.size, Tensor.stride
_requires_grad = operator.attrgetter("requires_grad")
_is, _is_not, _getitem = operator.is_, operator.is_not, operator.getitem
_get = dict.get  # runs no `__missing__`
_cell_contents = operator.attrgetter("cell_contents")
_fields = operator.attrgetter(*Fields.NAMES)
_flat = chain.from_iterable
_NAMED = (dict, types.MappingProxyType)  # where something comes only if there is more of it
_PLAIN = (Tensor, nn.Parameter)
_MOST_LEVELS = 16  # of containers in containers, each in the place of an equal one


def _form(tensor: Tensor) -> tuple:
    return type(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _parts(tensor: Tensor) -> list[tuple[Tensor, str, Tensor]]:
    """The tensors with memory that one without (a DTensor) stands for, each with whose and which attribute it is."""
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        return []
    found = []
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        found += [(tensor, name, part), *_parts(part)] if isinstance(part, Tensor) else []
    return found


def _has_none(leaf: Tensor) -> bool:
    return leaf.grad is None


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
        self._of_optimizer = {id(group): one for one in self.optimizers for group in one.param_groups}
        self.contents.optimizers = self._of_optimizer
        self._of_dynamo = notes.of_dynamo
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
        self._values = [value for _, _, value in places]
        self._sort_places()
        self._absent: dict[int, tuple[Any, list[Note]]] = {}
        self._unset = [n for n, container, value in there if value is MISSING and not isinstance(container, _NAMED)]
        for note, container, value in there:
            if value is MISSING and isinstance(container, _NAMED):
                self._absent.setdefault(id(container), (container, []))[1].append(note)
        self._without = [container for container, _ in self._absent.values()]
        self._lengths = list(map(len, self._without))
        self.slots = [(c, note.key, value) for note, c, value in there if isinstance(value, Tensor)]
        self.attributes = [
            (container, note.key, value)
            for note, container, value in there
            if isinstance(value, Tensor) and isinstance(note.owner, nn.Module) and container is note.owner._parameters
        ]

    def _sort_places(self) -> None:
        """Lays the places out so that no code in Python is needed to look at most of them."""
        places = list(zip(self._containers, self._notes, self._values, strict=True))
        cells = [(one.cell, value) for one, _, value in places if isinstance(one, Cell)]
        self._cells, self._in_cells = [cell for cell, _ in cells], [value for _, value in cells]
        fields = [(one, note, value) for one, note, value in places if isinstance(one, Fields)]
        known = {(id(one.function), note.key): value for one, note, value in fields}
        self._functions = list({id(one.function): one.function for one, _, _ in fields}.values())
        self._in_functions = [known[id(one), name] for one in self._functions for name in Fields.NAMES]
        dicts = [place for place in places if isinstance(place[0], dict)]
        self._dicts, self._names = [one for one, _, _ in dicts], [note.key for _, note, _ in dicts]
        self._in_dicts = [value for _, _, value in dicts]
        others = [place for place in places if not isinstance(place[0], (Cell, Fields, dict))]
        self._held, self._keys = [one for one, _, _ in others], [note.key for _, note, _ in others]
        self._in_others = [value for _, _, value in others]

    def _take_tensors(self, notes: Notes, backward: bool) -> None:
        held = {id(container) for container, _, _ in self.attributes}
        inside = self.contents.tensors()
        self.slots += [(value, None, tensor) for value, tensor in inside if id(value) not in held]
        met = (*(one for _, _, one in self.slots), *(one for _, one in inside))
        leaves = list(notes.gradients.values())
        found = {id(tensor): tensor for tensor in (*met, *(leaf for leaf, _ in leaves))}
        self._wrapped = [one for tensor in found.values() for one in _parts(tensor)]
        found |= {id(part): part for _, _, part in self._wrapped}
        self.tensors = [tensor for tensor in found.values() if tensor.layout is torch.strided]
        self._take_geometry()
        leaves = [one for one in leaves if one[0].requires_grad] if backward else []
        self._leaves, self._absent_gradients = [leaf for leaf, _ in leaves], [absent for _, absent in leaves]
        self._gradient_hooks = HookWatch(self._leaves)

    def _take_geometry(self) -> None:
        self._addresses = list(map(_data_ptr, self.tensors))
        self._sizes = list(map(_size, self.tensors))
        self._strides = list(map(_stride, self.tensors))
        self._flags = list(map(_requires_grad, self.tensors))
        self._forms = list(map(_form, self.tensors))
        self._alike: Callable[..., bool] | None = None

    # -- the check -----------------------------------------------------------------------------------------------

    def moved(self) -> str | None:
        """A tensor that is no longer where or what it was, in words."""
        tensors = self.tensors
        self.exchanged = True
        for tensor, name, part in self._wrapped:
            if getattr(tensor, name) is not part:
                return f"{name} of a {type(tensor).__name__} it reads is another"
        if list(map(_data_ptr, tensors)) != self._addresses:
            return f"{self._named(self._addresses, _data_ptr)} has moved to another address"
        return None if self._alike is not None and self._alike(*tensors) else self._of_other_kind()

    def _of_other_kind(self) -> str | None:
        """A tensor of another shape, or that requires grad where it did not, in words."""
        tensors = self.tensors
        if list(map(_stride, tensors)) != self._strides or list(map(_size, tensors)) != self._sizes:
            return "a tensor it reads has another shape or other strides than when it was recorded"
        if list(map(_requires_grad, tensors)) != self._flags:
            self.exchanged = False
            return f"requires_grad of {self._named(self._flags, _requires_grad)} changed"
        if list(map(_form, tensors)) != self._forms:
            return "a tensor it reads has another dtype or class than when it was recorded"
        self._alike = alike(tensors)  # which depends on modes, such as autocast, as they are now
        return None

    def _named(self, before: list, read: Callable) -> str:
        """The first tensor that is other than before, by the name under which it is read."""
        now = next(one for one, known in zip(self.tensors, before, strict=True) if read(one) != known)
        name = next((key for _, key, value in self.slots if value is now and isinstance(key, str)), None)
        return "a tensor it reads" if name is None else f"{name!r}, a tensor it reads,"

    def changed(self, gradients: bool = True) -> str | None:
        """What is no longer as it was, in words; None when nothing changed. `moved` looks at the tensors themselves.

        Args:
            gradients: whether it matters which gradients are absent.
        """
        self.exchanged = False
        try:
            same_objects = (
                all(map(_is, map(_get, self._dicts, self._names, repeat(MISSING)), self._in_dicts))
                and all(map(_is, map(_getitem, self._held, self._keys), self._in_others))
                and all(map(_is, map(_cell_contents, self._cells), self._in_cells))
                and all(map(_is, _flat(map(_fields, self._functions)), self._in_functions))
            )
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
                return differs(name_of(note), note.key, MISSING, note.now(), note.where)
        if any(self._hooks_of):
            return "hooks were added to a module in it"
        reason = self.contents.changed() or (self._recompiles() if self._of_dynamo else None)
        if reason is not None:
            return reason
        if list(map(type, self._objects)) != self._kinds:
            return f"{self._of_other_class()} has another class than when it was recorded"
        if gradients and self._leaves and list(map(_has_none, self._leaves)) != self._absent_gradients:
            return "other gradients are there, or absent, than when it was recorded"
        return self._gradient_hooks.changed() if self._leaves else None

    def _recompiles(self) -> str | None:
        """What torch.compile would compile anew for, in words."""
        now = modes()
        return next((reason for one in self._of_dynamo if (reason := one.changed(now)) is not None), None)

    def _of_other_class(self) -> str:
        found = next(kind for one, kind in zip(self._objects, self._kinds, strict=True) if type(one) is not kind)
        return f"one {found.__name__}"

    def _gone(self) -> str:
        for note, container, value in zip(self._notes, self._containers, self._values, strict=True):
            if get(container, note.key) is MISSING:
                return f"{name_of(note)} was {describe(value)} when it was recorded and is gone"
        return "an object it reads cannot be looked into any more"

    def _other(self) -> str | None:
        try:
            return self._compare()
        finally:
            self._sort_places()  # also where something differs: what was equal has been exchanged

    def _compare(self) -> str | None:
        for _ in range(_MOST_LEVELS):
            now = [get(container, note.key) for container, note in zip(self._containers, self._notes, strict=True)]
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
                optimizer = self._of_optimizer.get(id(note.owner))
                return differs(name_of(note), note.key, was, there, note.where, optimizer)
            self.exchanged = True
            return f"{name_of(note)} is another {type(was).__name__} than when it was recorded"
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
                    return differs(name_of(note), note.key, MISSING, now, note.where)
            self._lengths[index] = len(container)
        return None

    # -- after a call that failed --------------------------------------------------------------------------------

    def restore(self) -> None:
        """Puts back every value that is another than it was."""
        for container, note, value in zip(self._containers, self._notes, self._values, strict=True):
            if isinstance(container, Cell):
                container.cell.cell_contents = value
            elif isinstance(container, (dict, list)) and get(container, note.key) is not value:
                container[note.key] = value
        for container, notes in self._absent.values():
            for note in notes:
                if isinstance(container, dict):
                    container.pop(note.key, None)
        self.contents.restore()

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        looked_at = (self._notes, self._without, self._unset, self._hooks_of, self._objects, self.tensors, self._leaves)
        return any(looked_at) or bool(self._of_dynamo) or bool(self.contents.found)

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
