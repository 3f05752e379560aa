"""Keeps Python's garbage collector away for a while."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()  # the collector belongs to the process
_inside = 0
_enabled = False
_frozen = 0


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, in whichever threads, no object dies that only the collector would find.

    It may free a graph or an event in the middle of a capture, which would invalidate it. And a recording makes so many
    objects at once that it looks through the whole heap, for as long as the recording itself takes.
    """
    global _inside, _enabled
    with _lock:
        if not _inside:
            _enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _enabled:
                gc.enable()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Inside, the collector does not look at what is there when it is entered, and frees nothing of that, nor of what
    is there when a call is recorded meanwhile.

    PyTorch, a model, and what compiled code leaves are a million objects. A look at all of them takes up to a second,
    in which no thread of Python runs.
    """
    gc.collect()
    freeze()
    try:
        yield
    finally:
        unfreeze()


def freeze() -> None:
    """Lets the collector list only what is made from now on, in whichever thread."""
    global _frozen
    with _lock:
        _frozen += 1
        gc.freeze()


def unfreeze() -> None:
    """Undoes one `freeze`, with the last of all; also what the program itself may have frozen, which it would take long
    to count."""
    global _frozen
    with _lock:
        _frozen -= 1
        if not _frozen:
            gc.unfreeze()
