"""Finds, while code runs, what variables, attributes and items stand for, without running any code of the objects."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor

from graphmod.guards.contents import CONTAINERS, content, is_plain
from graphmod.guards.events import variable
from graphmod.guards.expressions import Expression
from graphmod.guards.lookup import CODE, MISSING, UNKNOWN, runs_code
from graphmod.guards.notes import Notes

MOST_ITEMS = 64
"""Of a container, one of which something returns."""


def goes_by_key(value: Any, method: str) -> bool:
    """Whether a method of a value looks at one key of a dict, and runs no code of the value's class."""
    kind = type(value)
    of = dict if issubclass(kind, dict) else types.MappingProxyType
    return issubclass(kind, of) and getattr(kind, method, None) is getattr(of, method)


class Finding:
    """What one frame has at one time. `looking` finds what its calls give.

    Attributes:
        blocked: whether only code that runs could tell a value that was asked for.

    Args:
        results: what code gave that the frame called on the present line, where that is known.
    """

    __slots__ = ("_frame", "_notes", "_results", "_variables", "blocked")
    _finders: ClassVar[dict[str, Callable]] = {}

    def __init__(self, notes: Notes, frame: types.FrameType, results: Iterable[Any] = ()) -> None:
        self._notes, self._frame, self._results = notes, frame, list(results)
        self._variables: dict[str, Any] = {}
        self.blocked = False

    def find(self, of: Expression, inner: bool = True) -> list[Any]:
        """What an expression may stand for: one value, or several.

        Args:
            inner: whether something of the value is read.
        """
        kind = of[0]
        if kind == "const":
            return [of[1]]
        if kind == "local":
            value = self._local(of[1])
            return [] if value is MISSING else [value]
        return self._finders[kind](self, of, inner or kind == "made")

    def _local(self, name: str) -> Any:
        if name not in self._variables:
            self._variables[name] = variable(self._frame, name)
        return self._variables[name]

    def _block(self, inner: bool = True) -> list[Any]:
        self.blocked = self.blocked or inner
        return self._results

    def _find_untold(self, _: Expression, inner: bool) -> list[Any]:
        return self._block(inner)

    def _find_module(self, of: Expression, _: bool) -> list[Any]:
        return [sys.modules[of[1]]] if of[1] in sys.modules else []

    def _find_either(self, of: Expression, inner: bool) -> list[Any]:
        return [value for one in of[1] for value in self.find(one, inner)]

    def _find_name(self, of: Expression, inner: bool) -> list[Any]:
        held = self._frame.f_locals
        if held is not self._frame.f_globals and of[1] in held:
            return [self._notes.item(held, of[1])] if type(held) is dict else [held[of[1]]]
        return self._find_global(of, inner)

    def _find_global(self, of: Expression, _: bool) -> list[Any]:
        held, name = self._frame.f_globals, of[1]
        if name in held:
            return [self._notes.global_variable(held, name, self._frame.f_code.co_filename)]
        self._notes.no_global_variable(held, name, self._frame.f_code.co_filename)
        return [builtins.__dict__[name]] if name in builtins.__dict__ else []

    def _find_attr(self, of: Expression, inner: bool) -> list[Any]:
        found, kind, names = [], of[2][0], of[2][1:]
        for base in self.find(of[1]):
            for name in names if kind == "const" else self.find(of[2]):
                value = self._notes.attribute(base, name)
                if value is CODE:
                    found += self._block(inner)
                elif value is not UNKNOWN and value is not MISSING:
                    found.append(value)
        return found

    def _find_item(self, of: Expression, inner: bool) -> list[Any]:
        found: list[Any] = []
        keys, told = self._names(of[2])
        for base in self.find(of[1]):
            if is_plain(base) or isinstance(base, Tensor):
                continue
            if not told:
                self._notes.look_inside(base)
                found += self._items(base) if isinstance(base, CONTAINERS) else self._block(inner)
            for key in keys if told else ():
                value = self._notes.item(base, key)
                in_c = not runs_code(getattr(type(base), "__getitem__", None))
                goes_in = value is CODE and in_c and isinstance(base, CONTAINERS)
                found += self._items(base) if goes_in else self._told(value, inner)
        return found

    def _find_key(self, of: Expression, _: bool) -> list[Any]:
        keys, told = self._names(of[2])
        for base in self.find(of[1]):
            for key in keys if told and goes_by_key(base, "__contains__") else ():
                self._notes.item(base, key)
            if not told or not goes_by_key(base, "__contains__"):
                self._look_into(base)
        return []

    def _look_into(self, value: Any) -> None:
        self._notes.chance.meet(value, self._notes.where)
        self._notes.look_inside(value)

    def _names(self, of: Expression) -> tuple[list[Any], bool]:
        """The keys, or names, that an expression may stand for, and whether that is all; not if code makes them."""
        blocked, self.blocked = self.blocked, False
        keys = self.find(of)
        told = bool(keys) and not self.blocked
        self.blocked = blocked
        return keys, told

    def _told(self, value: Any, inner: bool) -> list[Any]:
        if value is CODE:
            return self._block(inner)
        return [] if value is UNKNOWN or value is MISSING else [value]

    def _items(self, container: Any) -> list[Any]:
        return list((content(container) or ())[:MOST_ITEMS])


Finding._finders = {
    kind: getattr(Finding, f"_find_{kind}")
    for kind in ("global", "name", "module", "attr", "item", "key", "either", "untold")
}
Finding._finders["made"] = Finding._find_either
