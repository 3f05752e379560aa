"""How deep a thread is in calls of some kind."""

import contextlib
import threading
from collections.abc import Iterator


class Depth(threading.local):
    """Counts calls of one kind that are under way in the present thread.

    Attributes:
        count: of them.
    """

    count = 0

    @contextlib.contextmanager
    def deeper(self) -> Iterator[None]:
        """Around such a call."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
