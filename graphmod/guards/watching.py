"""Watches a call, and keeps of what was noted what had been there before it.

Objects that the call makes itself need no notes. Those that were there before it are told apart by the garbage
collector: what exists when the call begins is frozen (`gc.freeze`), so that all it lists afterwards is new.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import _lru_cache_wrapper, partial
from types import BuiltinMethodType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from graphmod.guards.contents import CONTAINERS, Cached, content
from graphmod.guards.frames import NOT_TOLD, Frames
from graphmod.guards.library import is_library
from graphmod.guards.notes import Notes
from graphmod.guards.reading import Reading
from graphmod.guards.running import functions_of, those_there
from graphmod.trace.garbage import freeze, unfreeze
from graphmod.trace.untraced import identity

_OF_C = (BuiltinMethodType, partial)
_NAMED = (type, ModuleType, FunctionType, nn.Module, Tensor)
_PATIENCE = 1.0  # seconds that a recording waits for another
_turn = threading.RLock()


@contextlib.contextmanager
def noting(*roots: Any) -> Iterator[Notes]:
    """Notes what the body reads. Afterwards the notes hold what was there before it, and nothing that it made.

    Args:
        roots: objects that were there before.
    """
    notes = Notes()
    watcher = _Watcher(notes)
    for root in roots:
        watcher.take(notes.root, root)
    with _telling_new_objects():
        with Frames(watcher) as frames:
            yield notes
        notes.unseen = frames.missed or ("" if frames.heard else NOT_TOLD)
        _forget_new(notes, roots)


class _Watcher:
    """What `frames` tells of the code that runs goes to the notes."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._functions = those_there()
        self.step = Reading(notes).step

    def take(self, note: Callable, *seen: Any) -> Any:
        """Notes something that was seen. It may be of any kind, so that this may fail; the user's call goes on."""
        try:
            return note(*seen)
        except Exception as error:
            notes = self._notes
            notes.unreadable = notes.unreadable or (f"{type(error).__name__}: {error}", notes.here())
            return None

    def entered(self, frame: FrameType) -> None:
        """Takes in that a function is about to run, whoever called it."""
        code = frame.f_code
        if not code.co_freevars and is_library(code.co_filename):  # of such a function nothing is noted
            return
        self._notes.where, self._notes.frame = (code, frame.f_lineno), frame
        try:
            for function in functions_of(frame, self._functions):
                self.take(self._notes.function, function)
        finally:
            self._notes.frame = None

    def called(self, module: nn.Module) -> None:
        """Takes in that a module is called."""
        self.take(self._notes.called, module)

    def walked(self, module: nn.Module) -> None:
        """Takes in that code goes through a module and all that is in it."""
        self.take(self._notes.walked, module)

    def exchanges(self, *tensors: Tensor) -> None:
        """Takes in that tensors are about to be exchanged with each other."""
        self.take(self._notes.exchanged, *tensors)

    def leaves(self, frame: FrameType) -> None:
        """Takes in that code is sent to another thread."""
        self._notes.elsewhere = self._notes.elsewhere or (frame.f_code, frame.f_lineno)

    def compiled(self, frame: FrameType) -> None:
        """Takes in that code which dynamo has written is about to run."""
        self._notes.where = (frame.f_code, frame.f_lineno)
        self.take(self._notes.compiled, frame)


@contextlib.contextmanager
def _telling_new_objects() -> Iterator[None]:
    # Threads record one after the other, for as long as that cannot mean that one waits for a call of the other. Then
    # what the other has made is taken for old, which is compared; what is taken for new is not.
    alone = _turn.acquire(timeout=_PATIENCE)
    freeze()
    try:
        yield
    finally:
        unfreeze()
        if alone:
            _turn.release()


def _forget_new(notes: Notes, roots: tuple) -> None:
    # A dict that comes to hold more than plain values is tracked from then on, however old it is.
    new = set(map(identity, gc.get_objects())) - notes.roots - notes.untracked
    old: set[int] = set()  # the collector does not track all containers: others are old if what is old leads to them

    def was_there(value: Any) -> bool:
        value = notes.holders.get(identity(value), value)
        if value is None or identity(value) in new:
            return False
        return identity(value) in old or (gc.is_tracked(value) and identity(value) not in notes.untracked)

    def leads_to(value: Any) -> None:
        if identity(value) not in old:
            old.add(identity(value))
            if identity(value) not in new:
                for item in _inside(value):
                    leads_to(item)

    for root in roots:
        leads_to(root)
    old |= notes.roots
    waiting, found = list(notes.notes.items()), {}
    contents, inside = list(notes.contents.items()), {}
    known = -1
    while known != len(found) + len(inside):
        known = len(found) + len(inside)
        later = []
        for key, note in waiting:
            if was_there(note.owner):
                found[key] = note
                leads_to(note.before())
            else:
                later.append((key, note))
        waiting, later = later, []
        for key, one in contents:
            if was_there(one[0]):
                inside[key] = one
                for item in one[1]:
                    leads_to(item)
            else:
                later.append((key, one))
        contents = later
    notes.notes, notes.contents = found, inside
    notes.iterators = [one for one in notes.iterators if was_there(one[0])]
    notes.tensors = {key: met for key, met in notes.tensors.items() if was_there(met.tensor)}
    notes.modules = {key: module for key, module in notes.modules.items() if was_there(module)}


def _inside(value: Any) -> Iterable[Any]:
    """What a container holds; of another object its dicts that the collector does not track, and what leads to such."""
    if isinstance(value, (*CONTAINERS, partial)):
        return content(value) or ()
    if isinstance(value, _lru_cache_wrapper):
        return Cached(value).content()
    if isinstance(value, _NAMED):  # what is in these has notes of its own
        return ()
    held = gc.get_referents(value)
    return [one for one in held if isinstance(one, _OF_C) or (isinstance(one, dict) and not gc.is_tracked(one))]
