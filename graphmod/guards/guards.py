"""Guards: whether what a recorded call read is still as it was.

Imports `notes`, `contents` and `lookup`.
"""

from __future__ import annotations

import operator
from itertools import compress, count
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.guards.contents import CONTAINERS, content, describe, is_plain, same, same_content
from graphmod.guards.lookup import MISSING, Cell, dict_of, get
from graphmod.guards.notes import Note, Notes, geometry

NOT_REPLAYED = "which a replay would not do; keep it in a tensor that is changed in place, or pass it as an argument"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_data_ptr, _size, _stride = Tensor.data_ptr, Tensor.size, Tensor.stride
_requires_grad = operator.attrgetter("requires_grad")


def _has_none(leaf: Tensor) -> bool:
    return leaf.grad is None


def _line(where: tuple) -> str:
    code, line = where
    return f"{code.co_filename}:{line} in {code.co_name}"


def _name(note: Note) -> str:
    if isinstance(note.container, Cell):
        return "a variable it closes over"
    if isinstance(note.owner, list):
        return f"item {note.key}"
    if isinstance(note.key, Tensor):
        return f"the item of one {type(note.key).__name__}"
    return repr(note.key)


def what_changed(notes: Notes) -> str | None:
    """What the call itself changed of what it read, so that a replay, in which no Python runs, would go wrong: the
    first of it in words, None if that is nothing."""
    for _, kind, where in notes.iterators:
        return f"{_line(where)} takes items from a {kind}, {NOT_REPLAYED}"
    drawn = notes.chance.drawn()
    if drawn is not None:
        library, where = drawn
        return (
            f"{_line(where) if where else 'code inside'} draws random numbers on the host ({library}), which a replay "
            "would not; draw them outside and pass them as an argument, or draw on the device with torch"
        )
    replaced = replacements(notes)
    for note in notes.notes.values():
        if id(note.owner) not in replaced and note.changed():
            was, now = note.before(), note.now()
            if isinstance(now, Tensor) and was is now:
                return f"moves or reshapes {_name(note)} as it runs ({_line(note.where)}), {NOT_REPLAYED}"
            return (
                f"changes {_name(note)} from {describe(was)} to {describe(now)} as it runs ({_line(note.where)}), "
                f"{NOT_REPLAYED}"
            )
    for value, items, where in notes.contents.values():
        if id(value) not in replaced and not same_content(items, content(value)):
            return f"changes the items of a {type(value).__name__} as it runs ({_line(where)}), {NOT_REPLAYED}"
    return None


def replacements(notes: Notes) -> dict[int, Any]:
    """Containers (by identity) in whose place the call put another with the same content -> that other."""
    found = {}
    for note in notes.notes.values():
        if note.items is not None:
            before, now = note.before(), note.now()
            if before is not now and type(before) is type(now) and not note.changed():
                found[id(before)] = now
    return found


class Guards:
    """Compares the present with what a recorded call left behind.

    Args:
        notes: of the call, which changed nothing of it.
        backward: whether a backward ran inside, which writes gradients that are absent and adds to others.

    Attributes:
        exchanged: whether the last change found was of an object or a tensor, which the guards keep alive.
        slots: `(container, key, tensor)` of each place of a tensor.
        attributes: those of `slots` that are parameters of modules.
        modules: those that were called.
    """

    def __init__(self, notes: Notes, backward: bool = False) -> None:
        self.exchanged = False
        self.modules = list(notes.modules.values())
        self._notes: list[Note] = []
        self._containers: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._absent: dict[int, tuple[Any, list[Note]]] = {}
        replaced = replacements(notes)
        self.owners: dict[int, Any] = {}
        for note in notes.notes.values():
            if id(note.owner) in replaced:
                continue
            self.owners[id(note.owner)] = note.owner
            value = note.now()
            if value is MISSING:
                self._absent.setdefault(id(note.container), (note.container, []))[1].append(note)
                continue
            self._notes.append(note)
            self._containers.append(note.container)
            self._keys.append(note.key)
            self._values.append(value)
        self._sizes = [len(container) for container, _ in self._absent.values()]
        self._absent_in = [container for container, _ in self._absent.values()]
        self._contents: list[tuple[Any, tuple, tuple]] = []
        self._empty: list[Any] = []
        for value, _, where in notes.contents.values():
            self._watch_content(replaced.get(id(value), value), where)
        for module in self.modules:
            self._empty += [hooks for kind in HOOKS if not (hooks := getattr(module, kind))]
        self._kinds = list(map(type, self.modules))
        tensors: dict[int, Tensor] = {}
        self.slots = [
            (container, key, value)
            for container, key, value in zip(self._containers, self._keys, self._values, strict=True)
            if isinstance(value, Tensor)
        ]
        self.attributes = [
            (container, note.key, value)
            for note, container, value in zip(self._notes, self._containers, self._values, strict=True)
            if isinstance(value, Tensor) and isinstance(note.owner, nn.Module) and container is note.owner._parameters
        ]
        inside = [(value, item) for value, items, _ in self._contents for item in items if isinstance(item, Tensor)]
        held = {id(container) for container, _, _ in self.attributes}
        self.slots += [(value, None, item) for value, item in inside if id(value) not in held]
        for tensor in (*(tensor for _, _, tensor in self.slots), *(item for _, item in inside)):
            tensors[id(tensor)] = tensor
        self.tensors = [tensor for tensor in tensors.values() if tensor.layout is torch.strided]
        known = {id(tensor) for tensor in self.tensors}
        self.tensors += [leaf for key, (leaf, _) in notes.gradients.items() if key not in known]
        self._addresses = list(map(_data_ptr, self.tensors))
        self._tensor_sizes = list(map(_size, self.tensors))
        self._strides = list(map(_stride, self.tensors))
        self._flags = list(map(_requires_grad, self.tensors))
        leaves = [one for one in notes.gradients.values() if one[0].requires_grad] if backward else []
        self._leaves = [leaf for leaf, _ in leaves]
        self._without = [absent for _, absent in leaves]

    def _watch_content(self, value: Any, where: tuple) -> None:
        items = content(value)
        if items is None:
            return
        if not items and isinstance(value, CONTAINERS):
            self._empty.append(value)
        else:
            self._contents.append((value, items, where))

    # -- the check -----------------------------------------------------------------------------------------------

    def moved(self) -> str | None:
        """A tensor that is no longer where or what it was, in words."""
        tensors = self.tensors
        self.exchanged = True
        if list(map(_data_ptr, tensors)) != self._addresses:
            return "a tensor it reads has moved to another address"
        if list(map(_stride, tensors)) != self._strides or list(map(_size, tensors)) != self._tensor_sizes:
            return "a tensor it reads has another shape or other strides than when it was captured"
        return None

    def changed(self, gradients: bool = True) -> str | None:
        """What is no longer as it was, in words; None when nothing changed. `moved` looks at tensors' memory.

        Args:
            gradients: whether it matters which gradients are absent.
        """
        self.exchanged = False
        try:
            same_objects = all(map(operator.is_, map(operator.getitem, self._containers, self._keys), self._values))
        except Exception:  # KeyError and IndexError, or whatever a container of the user's raises
            return self._gone()
        if not same_objects:
            reason = self._other()
            if reason is not None:
                return reason
        if list(map(len, self._absent_in)) != self._sizes:
            reason = self._come()
            if reason is not None:
                return reason
        if any(self._empty):
            return self._filled()
        for index, (value, items, where) in enumerate(self._contents):
            now = content(value)
            if len(now) != len(items) or not all(map(operator.is_, now, items)):
                if not same_content(items, now):
                    return f"the items of a {type(value).__name__} that {_line(where)} reads are others"
                self._contents[index] = (value, now, where)
        if list(map(type, self.modules)) != self._kinds:
            return "a module has another class than when it was captured"
        if list(map(_requires_grad, self.tensors)) != self._flags:
            return "requires_grad of a tensor changed"
        if gradients and self._leaves and list(map(_has_none, self._leaves)) != self._without:
            return "other gradients are there, or absent, than when it was captured"
        return None

    def hold(self) -> bool:
        """Whether all is as it was."""
        return self.moved() is None and self.changed() is None

    def _gone(self) -> str | None:
        for note, container, key, value in zip(self._notes, self._containers, self._keys, self._values, strict=True):
            if get(container, key) is MISSING:
                return f"{_name(note)} was {describe(value)} when it was captured and is gone"
        return "an object it reads cannot be looked into any more"

    def _other(self) -> str | None:
        now = list(map(get, self._containers, self._keys))
        for index in compress(count(), map(operator.is_not, now, self._values)):
            was, there = self._values[index], now[index]
            note = self._notes[index]
            if not same(was, there):
                if is_plain(was) or is_plain(there):
                    return f"{_name(note)} was {describe(was)} when it was captured and is {describe(there)}"
                self.exchanged = True
                return f"{_name(note)} is another {type(was).__name__} than when it was captured"
            if isinstance(was, CONTAINERS):
                self._put_in_place(was, there)
            self._values[index] = there
        return None

    def _put_in_place(self, was: Any, there: Any) -> None:
        """Goes on with an equal container that has taken the place of another."""
        self._containers = [there if one is was else one for one in self._containers]
        self._absent_in = [there if one is was else one for one in self._absent_in]
        self._empty = [there if one is was else one for one in self._empty]
        self._contents = [
            (there, content(there), where) if value is was else (value, items, where)
            for value, items, where in self._contents
        ]

    def _come(self) -> str | None:
        for index, (container, (_, notes)) in enumerate(zip(self._absent_in, self._absent.values(), strict=True)):
            for note in notes:
                if get(container, note.key) is not MISSING:
                    return f"{_name(note)} was nothing when it was captured and is {describe(get(container, note.key))}"
            self._sizes[index] = len(container)
        return None

    def _filled(self) -> str | None:
        for module in self.modules:
            for kind in HOOKS:
                hooks = getattr(module, kind)
                if hooks and any(hooks is one for one in self._empty):
                    return f"hooks were added to a {type(module).__name__}"
        value = next(one for one in self._empty if one)
        return f"a {type(value).__name__} it reads was empty when it was captured"

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

    # -- what was met --------------------------------------------------------------------------------------------

    def parameters(self) -> list[Tensor]:
        """The distinct leaf tensors that may collect a gradient."""
        return [t for t in self.tensors if t.is_leaf and (t.requires_grad or isinstance(t, nn.Parameter))]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [one for one in self.owners.values() if isinstance(one, torch.optim.Optimizer)]


__all__ = ["HOOKS", "NOT_REPLAYED", "Guards", "dict_of", "geometry", "what_changed"]
