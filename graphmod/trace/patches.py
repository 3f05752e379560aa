"""Replaces functions of other libraries for as long as a call needs it.

Such functions belong to the process. So each replacement is put in once, by whoever comes first, and taken out by
whoever leaves last; it passes on the calls of everyone whom it does not concern.
"""

import threading
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patch:
    """A context in which attributes are replaced. One object serves all threads and may be entered again.

    Args:
        make: gives `(owner, name, replacement)` for each, when the first enters.
    """

    def __init__(self, make: Callable[[], list[tuple[Any, str, Any]]]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._users = 0
        self._before: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            try:
                if self._users == 1:
                    for owner, name, replacement in self._make():
                        self._before.append((owner, name, vars(owner).get(name, _ABSENT), replacement))
                        setattr(owner, name, replacement)
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._users -= 1
            while not self._users and self._before:
                owner, name, before, replacement = self._before[-1]
                if vars(owner).get(name) is not replacement:
                    pass  # somebody put theirs over ours, and goes on to call ours
                elif before is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
                self._before.pop()
