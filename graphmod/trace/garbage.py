"""Keeps Python's garbage collector away for a while, and asks it what is new."""

import contextlib
import gc
import threading
import time
import weakref
from typing import Any

from torch import Tensor

from graphmod.torch_private import weak_reference
from graphmod.trace.untraced import identity

_lock = threading.Lock()  # the collector belongs to the process
_inside: set[Any] = set()  # who keeps it away
_enabled = False
_holders: set[Any] = set()  # who keeps the heap frozen
_BY_PYTHON = 10_000  # objects that Python may have frozen itself, as 3.12 does with its first few hundred
_PAUSE, _again_at = 5.0, 0.0  # seconds
_by_program = False  # whether the program itself has frozen something


class no_garbage_collection:
    """Inside, in whichever threads, no object dies that only the collector would find.

    It may free a graph or an event in the middle of a capture, which would invalidate it. And a recording makes so many
    objects at once that it looks through the whole heap, for as long as the recording itself takes.
    """

    def __enter__(self) -> None:
        global _enabled
        with _lock:
            if not _inside:
                _enabled = gc.isenabled()
            _inside.add(self)
            gc.disable()

    def __exit__(self, *_: object) -> None:
        with _lock:
            if _enabled and _inside == {self}:
                gc.enable()
            _inside.discard(self)


class frozen_heap:
    """Inside, the collector does not look at what is there when it is entered, and frees nothing of that, nor of what
    is there when a call is recorded meanwhile.

    PyTorch, a model, and what compiled code leaves are a million objects. A look at all of them takes up to a second,
    in which no thread of Python runs.
    """

    def __enter__(self) -> None:
        gc.collect()
        _freeze(self)

    def __exit__(self, *_: object) -> None:
        _unfreeze(self)


class Ages:
    """Tells what was there when it was entered from what was made since, in whichever thread.

    The collector lists what it tracks and what is not frozen. What is there at first is frozen, and so is what was
    listed whenever somebody asks, so that to ask takes as long as what has been made since then is long. A dict of
    numbers, or an array, the collector does not know: it was there if what was there leads to it. What a program has
    frozen itself stays so.

    Attributes:
        made: the identities of what was made since, as far as somebody asked, or it is left.
    """

    def __init__(self) -> None:
        self.made: set[int] = set()
        self._there: dict[int, Any] = {}

    def __enter__(self) -> "Ages":
        _freeze(self)
        return self

    def __exit__(self, *_: object) -> None:
        _unfreeze(self)
        self._there.clear()

    def there(self, value: Any) -> None:
        """Takes in that a value was there, whatever the collector says; it is held."""
        self._there[identity(value)] = value

    def is_old(self, value: Any) -> bool:
        """Whether a value was there. Of one that the collector does not track (a dict of numbers, an array) that is
        only known if somebody said so."""
        name = identity(value)
        known = self._there.get(name)
        if known is value or (type(known) is weakref.ref and known() is value):
            return True
        if name in self.made or not gc.is_tracked(value):
            return False
        with _lock:
            _list_new()
        old = name not in self.made
        if old and known is None and not issubclass(type(value), Tensor):  # `swap_tensors` minds weak references
            with contextlib.suppress(TypeError):
                self._there[name] = weak_reference(value)
        return old


_ages: list[Ages] = []  # of those that are entered


def _list_new() -> None:
    if _ages:
        listed = gc.get_objects()
        for one in _ages:
            one.made.update(map(identity, listed))
    if _holders:  # else nobody would thaw it
        gc.freeze()


def _freeze(holder: Ages | frozen_heap) -> None:
    global _by_program
    with _lock:
        if not _holders:
            _by_program = gc.get_freeze_count() > _BY_PYTHON
        _holders.add(holder)
        _list_new()
        if isinstance(holder, Ages):
            _ages.append(holder)


def _unfreeze(holder: Ages | frozen_heap) -> None:
    """Undoes one `_freeze`, with the last of all. What the program itself had frozen stays so, and so does, as nobody
    can tell the two apart, what else is no garbage by then; between two recordings of a model's layers nobody looks for
    garbage, which takes as long as all that is frozen is much."""
    global _again_at
    with _lock:
        if holder in _ages:
            _list_new()
            _ages.remove(holder)
        if _holders == {holder} and not (_by_program and time.monotonic() < _again_at):
            gc.unfreeze()
            if _by_program:
                gc.collect()
                gc.freeze()
                _again_at = time.monotonic() + _PAUSE
        _holders.discard(holder)
