"""Keeps Python's garbage collector away for a while."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()  # the collector belongs to the process
_inside = 0
_enabled = False


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
