"""How deep a thread is in calls of some kind."""

import threading


class Depth(threading.local):
    """Counts calls of one kind that are under way in the present thread.

    Attributes:
        count: of them.
    """

    count = 0

    def deeper(self) -> "_Deeper":
        """A context around such a call."""
        return _Deeper(self)


class _Deeper:
    def __init__(self, depth: Depth) -> None:
        self._depth, self._before = depth, depth.count

    def __enter__(self) -> None:
        self._depth.count = self._before + 1

    def __exit__(self, *_: object) -> None:
        self._depth.count = self._before
