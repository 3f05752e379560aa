"""Keeps Python's garbage collector away for a while. Imports nothing of graphmod."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, no object dies that only the collector would find.

    It may free a graph or an event in the middle of a capture, which would invalidate it. And a recording makes so many
    objects at once that it looks through the whole heap, for as long as the recording itself takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
