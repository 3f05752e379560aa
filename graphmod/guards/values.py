"""What is met in the values that code reads: tensors, functions, containers and what is inside them."""

from __future__ import annotations

import gc
import types
from collections.abc import ItemsView, KeysView, ValuesView
from functools import partial
from typing import Any

from torch import Tensor, nn

from graphmod.guards.contents import CONTAINERS, INERT, OBJECT, content, is_iterator, is_plain, sort_of
from graphmod.guards.library import is_library, is_users
from graphmod.guards.lookup import Cell, Fields, Kind, Place, get, is_made_by_code
from graphmod.guards.note import Note
from graphmod.ranks.sharded import held_between_calls
from graphmod.trace.untraced import identity

_FOLLOWED = (*CONTAINERS, partial, types.SimpleNamespace, types.BuiltinMethodType)
_DEPTH, _MOST_INSIDE = 32, 4096  # how far, and into how many items, containers in containers are followed


class Values:
    """Collects notes on values.

    Attributes:
        notes: by identity of the object and key.
        contents: containers whose items were read, by identity: the container, its items, and where that was.
        iterators: what code used that is used up by it.
        gradients: the leaf tensors met -> whether they had no gradient then.
        between_calls: identity of a dict of parameters -> what is in it before and after the call, though not in it.
        untracked: the identities of dicts that the collector did not track when they were met.
        where: the code and line that reads now.
        frame: that runs now; held for no longer than it is looked at.
    """

    def __init__(self) -> None:
        self.notes: dict[tuple[int, Any], Note] = {}
        self.contents: dict[int, tuple[Any, tuple, tuple]] = {}
        self.iterators: list[tuple[Any, str, tuple]] = []
        self.gradients: dict[int, tuple[Tensor, bool]] = {}
        self.between_calls = held_between_calls()
        self.untracked: set[int] = set()
        self.where: tuple = ("", 0)
        self.frame: types.FrameType | None = None
        self._place: tuple[tuple, tuple] = (), ()  # the last `where`, and what `here` gave for it
        self._functions: dict[int, types.FunctionType] = {}
        self._first: dict[tuple[int, Any], Note] = {}  # notes by identity of the container, and key

    def here(self) -> tuple:
        """The code and line that reads now; if they are a library's, also those of the user's that had called it."""
        frame = self.frame
        if frame is None:
            return self.where
        if self._place[0] is not self.where:
            library = is_library(frame.f_code.co_filename)
            while library and frame is not None and not is_users(frame.f_code.co_filename):
                frame = frame.f_back
            of_user = library and frame is not None
            self._place = self.where, (*self.where, (frame.f_code, frame.f_lineno)) if of_user else self.where
        return self._place[1]

    def _note(self, owner: Any, place: Place) -> None:
        try:
            name = (identity(owner), place.key)
            known = self.notes.get(name)
        except TypeError:  # a key that cannot be hashed
            return
        if known is None or known.owner is not owner:
            self._untracked_yet(owner)
            self._untracked_yet(place.value)
            found = (identity(place.container), place.key)
            lasting = self.between_calls.get(found[0], {}).get(place.key)
            earlier = self._first.get(found)  # by another way, before the call put something else there
            if lasting is None and earlier is not None and earlier.container is place.container:
                lasting = earlier.before()
            place = place if lasting is None else place._replace(value=lasting)
            self.notes[name] = self._first[found] = Note(owner, place, self.here())
            self._meet(place.value)

    def _untracked_yet(self, value: Any) -> None:
        if isinstance(value, dict) and not gc.is_tracked(value):
            self.untracked.add(identity(value))

    def _kind_if_it_matters(self, owner: Any) -> None:
        """Notes the class of an object, if it is one of a program's own."""
        kind = type(owner)
        if kind is not super and is_made_by_code(kind) and not issubclass(kind, (type, types.ModuleType)):
            self._kind(owner)

    def _kind_of_made(self, owner: Any) -> None:
        if is_made_by_code(type(owner)):
            self._kind(owner)

    def _kind(self, owner: Any) -> None:
        name = (identity(owner), Kind)
        known = self.notes.get(name)
        if known is None or known.owner is not owner:
            self.notes[name] = Note(owner, Place(Kind(owner), "__class__", type(owner)), self.here())

    def _meet(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._leaf(value)
        elif isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self._meet(value.__func__)
        elif isinstance(value, property):
            for function in (value.fget, value.fset, value.fdel):
                self._meet(function)
        elif isinstance(value, types.MethodType):
            self._meet(value.__func__)
            self._kind_if_it_matters(value.__self__)

    def _leaf(self, tensor: Tensor) -> None:
        if (
            tensor.is_leaf
            and identity(tensor) not in self.gradients
            and (tensor.requires_grad or isinstance(tensor, nn.Parameter))
        ):
            self.gradients[identity(tensor)] = tensor, tensor.grad is None

    def function(self, function: types.FunctionType) -> None:
        """Notes what belongs to a function: the variables it closes over, and, of one of the user's, its defaults."""
        if self._functions.get(identity(function)) is function:
            return
        self._functions[identity(function)] = function
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and (identity(cell), None) not in self.notes:  # that is for `super()`, and stays
                place = Place(Cell(cell), None, get(Cell(cell), None))
                self.notes[identity(cell), None] = Note(cell, place, self.here())
                self._meet(place.value)
        if not is_library(function.__code__.co_filename):
            places = [Place(Fields(function), name, getattr(function, name)) for name in Fields.NAMES]
            for place in places:
                self.notes[identity(function), place.key] = Note(function, place, self.here())
            for place in places:
                if isinstance(place.value, CONTAINERS):
                    self.look_inside(place.value)

    def look_inside(self, value: Any, depth: int = _DEPTH) -> None:
        """Notes the items of a container that code goes through, or passes to code that may."""
        sort = sort_of(type(value))
        if sort == INERT:
            return
        if sort == OBJECT:
            self._kind_of_made(value)
            return
        known = self.contents.get(identity(value))
        if known is not None and known[0] is value:
            return
        self._meet(value)
        if isinstance(value, (nn.Module, type, types.FunctionType, types.ModuleType)):
            return
        if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, CONTAINERS):
            value = value.__self__
        elif hasattr(type(value), "mapping") and isinstance(value, (KeysView, ValuesView, ItemsView)):
            value = gc.get_referents(value)[0]  # the dict itself, which `mapping` would wrap anew each time
        if is_iterator(value):
            self.iterators.append((value, type(value).__name__, self.here()))
            return
        known = self.contents.get(identity(value))
        if known is not None and known[0] is value:
            return
        self._untracked_yet(value)
        items = content(self.between_calls.get(identity(value), value))
        if items is None:
            self._kind_of_made(value)
        elif not (isinstance(value, tuple) and all(is_plain(item) for item in items)):
            self.contents[identity(value)] = (value, items, self.here())
            for item in items:
                if isinstance(item, Tensor):
                    self._leaf(item)
                elif depth and len(items) <= _MOST_INSIDE and isinstance(item, _FOLLOWED):
                    self.look_inside(item, depth - 1)
