"""Whether what is inside containers is still as it was."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from itertools import chain
from typing import Any

from torch import Tensor

from graphmod.guards.changes import differs, line_of
from graphmod.guards.contents import content, is_shown, same, same_content

_is = operator.is_
_flat = chain.from_iterable
_BUILT_IN = (list, deque, set, dict, OrderedDict, defaultdict)  # other classes may answer otherwise
_UNCHANGING = (tuple, frozenset)  # where they lie is compared


def put_back(value: Any, items: tuple) -> None:
    """Gives a container the items that it had; see `content`."""
    now = content(value)
    if now is None or (len(now) == len(items) and all(map(_is, now, items))):
        return
    if isinstance(value, dict):
        half = len(items) // 2
        value.clear()
        value.update(zip(items[:half], items[half:], strict=True))
    elif isinstance(value, (list, deque, set)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(items)


class Contents:
    """Compares what is inside containers.

    Args:
        found: `(container, line that read it)`.
    """

    def __init__(self, found: list[tuple[Any, tuple]]) -> None:
        self.found = found
        self.optimizers: dict[int, Any] = {}  # by identity of the containers that hold their settings
        self.refresh()

    def replace(self, was: Any, there: Any) -> None:
        """Goes on with a container that has taken the place of another; it has to hold what that held then."""
        self.found = [(there if one is was else one, where) for one, where in self.found]
        self._replaced = True
        if id(was) in self.optimizers:
            self.optimizers[id(there)] = self.optimizers[id(was)]

    def refresh(self) -> None:
        """Takes what is there now for right."""
        values = [value for value, _ in self.found]
        self._replaced = False
        self._items = list(map(content, values))
        self._empty = [value for value in values if type(value) in _BUILT_IN and not value]
        self._dicts = [value for value in values if type(value) is dict and value]
        self._sequences = [value for value in values if type(value) in (list, deque) and value]
        known = {id(value) for value in (*self._empty, *self._dicts, *self._sequences)}
        self._others = [value for value in values if id(value) not in known and not isinstance(value, _UNCHANGING)]
        self._holds_something = bool(self._dicts or self._sequences or self._others)
        self._lengths, self._flat, self._inside = self._now()

    def _now(self) -> tuple[list[int], list[Any], list[tuple]]:
        dicts, sequences = self._dicts, self._sequences
        flat = [*_flat(dicts), *_flat(map(dict.values, dicts)), *_flat(sequences)]
        return [*map(len, dicts), *map(len, sequences)], flat, list(map(content, self._others))

    def changed(self) -> str | None:
        """The container in which something is no longer as it was, in words."""
        if self._replaced or any(self._empty):
            return self._compare()
        if not self._holds_something:
            return None
        lengths, flat, inside = self._now()
        if lengths == self._lengths and all(map(_is, flat, self._flat)):
            for now, before in zip(inside, self._inside, strict=True):
                if len(now) != len(before) or not all(map(_is, now, before)):
                    return self._compare()
            return None
        return self._compare()

    def _compare(self) -> str | None:
        for (value, where), items in zip(self.found, self._items, strict=True):
            if not same_content(items, content(value)):
                return self._difference(value, items, where)
        self.refresh()  # equal values in the place of others
        return None

    def _difference(self, value: Any, items: tuple, where: tuple) -> str:
        """What is different in a container, in words."""
        half = len(items) // 2
        if isinstance(value, dict) and list(value) == list(items[:half]):
            for key, was in zip(value, items[half:], strict=True):
                if isinstance(key, str) and not same(was, value[key]):
                    optimizer = self.optimizers.get(id(value))
                    name = repr(key) if optimizer is not None else f"{key!r} of a {type(value).__name__}"
                    if is_shown(was) or is_shown(value[key]):
                        return differs(name, key, was, value[key], where, optimizer)
                    return (
                        f"{name} is another {type(was).__name__} than when it was recorded (read at {line_of(where)})"
                    )
        return f"the items of a {type(value).__name__} are others than when it was recorded (read at {line_of(where)})"

    def restore(self) -> None:
        """Gives the containers the items that they had."""
        for (value, _), items in zip(self.found, self._items, strict=True):
            put_back(value, items)

    def tensors(self) -> list[tuple[Any, Tensor]]:
        """The tensors inside, each with its container."""
        pairs = zip(self.found, self._items, strict=True)
        return [(value, item) for (value, _), items in pairs for item in items if issubclass(type(item), Tensor)]
