"""Looks at what code is about to read, and finds what its calls give where that takes no running of code.

Where only running code could tell, its result is taken once it is there.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import operator
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from graphmod.guards.contents import CONTAINERS, INERT, content, is_plain, sort_of
from graphmod.guards.expressions import BY_KEY, Expression, Read
from graphmod.guards.finding import MOST_ITEMS, Finding, goes_by_key
from graphmod.guards.lookup import MISSING, is_made_by_code
from graphmod.guards.notes import DEEP, Notes
from graphmod.trace.untraced import identity

_BY_NAME = (getattr, hasattr, setattr, delattr, object.__getattribute__, object.__setattr__, object.__delattr__)
_BY_KEY = ("const", BY_KEY)
# Methods some values of which are found without running them.
_METHODS = {("const", name) for name in ("__getattribute__", BY_KEY, "__getitem__", "pop", "setdefault")}
_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType)
_READ_STATE = {"__reduce_ex__", "__reduce__", "__getstate__"}  # all that is in an object
_RUNS_PYTHON = (types.FunctionType, types.MethodType, nn.Module)
# Functions that read attributes which only they know, of whatever is passed on with them.
_READERS = (operator.attrgetter, operator.methodcaller)
_READ_ANY = (operator.attrgetter, getattr, vars)
# By identity: to compare a value may run code of its class.
_by_name, _readers, _read_any = (frozenset(map(identity, some)) for some in (_BY_NAME, _READERS, _READ_ANY))
_told = _by_name.union(
    map(identity, (operator.attrgetter, operator.itemgetter, super, globals, builtins.__import__, vars, type))
)


def _tells_nothing(function: Any, kind: type) -> bool:
    """Whether a call of a function shows no more than what it is given and gives: a module or a class, of which all
    else is told as it runs, or a function in C that belongs to no object."""
    if issubclass(kind, types.BuiltinFunctionType):
        return issubclass(type(function.__self__), (types.ModuleType, type))
    return kind is type(None) or (issubclass(kind, (nn.Module, type)) and sort_of(kind) == INERT)


class Looking(Finding):
    """One look at a frame; see `Finding`."""

    __slots__ = ("_calls",)

    def __init__(self, notes: Notes, frame: types.FrameType, results: Iterable[Any] = ()) -> None:
        super().__init__(notes, frame, results)
        self._calls: dict[int, tuple[list, bool]] = {}

    def look(self, reads: Iterable[Read]) -> list[Read]:
        """Notes what is read. Returns those reads of which only code that runs can tell the value."""
        open_ones, whole, every = [], False, []
        for read in reads:
            if read.of[0] == "local":
                value = self._local(read.of[1])
                if value is not MISSING and sort_of(type(value)) == INERT:
                    every.append(value)
                    continue
            self.blocked = False
            values = self.find(read.of, inner=read.content)
            if self.blocked:
                open_ones.append(read)
            for value in values:
                if sort_of(type(value)) == INERT:
                    continue
                self._notes.chance.meet(value, self._notes.where)
                if read.content:
                    whole = whole or identity(type(value)) in _readers or identity(value) in _read_any
                    self._notes.look_inside(value)
                    if isinstance(value, dict) and "_parameters" in value and read.of[0] in ("attr", "call"):
                        self._notes.held_by_module(value)  # whose attributes these are, whole
            every += values
        if whole:
            self._look_into_all(every)
        return open_ones

    def _look_into_all(self, values: list) -> None:
        for value in values:
            for one in (value, *(content(value) or ())) if isinstance(value, CONTAINERS) else (value,):
                if isinstance(one, nn.Module):
                    self._notes.all_attributes(one)
                    for part in (*vars(one).values(), *one._modules.values()):
                        self._notes.all_attributes(part, DEEP)
                elif not isinstance(one, (type, types.ModuleType, types.FunctionType)):
                    self._notes.all_attributes(one, DEEP)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _find_call(self, of: Expression, inner: bool) -> list[Any]:
        found: list[Any] = []
        for function, told in self._called(of):
            if told is not None:
                found += told
            elif inner:
                found += self._block()
                if not isinstance(function, _RUNS_PYTHON):
                    found += self._passed_through(of)
                if isinstance(function, functools._lru_cache_wrapper):
                    found += self._notes.cached(function)
        return found

    def _called(self, of: Expression) -> list[tuple[Any, list[Any] | None]]:
        """The functions that may be called, and what each returns where that can be found without running it."""
        known = self._calls.get(identity(of))
        if known is not None:
            self.blocked = self.blocked or known[1]
            return known[0]
        before, self.blocked = self.blocked, False
        function = of[1]
        if function[0] == "attr" and function[2] == _BY_KEY:
            for base in self.find(function[1]):
                if not of[2] or not goes_by_key(base, BY_KEY):
                    self._look_into(base)
        found = []
        for one in self.find(function) or (None,):
            kind = type(one)
            if kind is types.FunctionType:
                self._notes.function(one)
            elif not _tells_nothing(one, kind):
                self._notes.chance.meet(one, self._notes.where)
                self._take_function(one, of)
                self._notes.look_inside(one)
            found.append((one, self._without_running(one, of)))
        self._calls[identity(of)] = found, self.blocked
        self.blocked = before or self.blocked
        return found

    def _take_function(self, function: Any, of: Expression) -> None:
        """What is read of a function by being called, and by code in C of what it is given."""
        if isinstance(function, _IN_C):
            if function.__name__ in _READ_STATE:
                given = [value for one in of[2][:1] for value in self.find(one)]
                for value in (*given, getattr(function, "__self__", None)):
                    self._notes.all_attributes(value, DEEP)
        elif not isinstance(function, (*_RUNS_PYTHON, type)) and is_made_by_code(type(function)):
            self._notes.attribute(type(function), "__call__")

    def _passed_through(self, of: Expression) -> list[Any]:
        """What a function may return that nobody can watch: its arguments, what is in them, or in its own object."""
        found = []
        for one in (*of[2], *([of[1][1]] if of[1][0] == "attr" else ())):
            for value in self.find(one):
                if isinstance(value, CONTAINERS):
                    found += self._items(value)
                elif not is_plain(value) and not isinstance(value, (Tensor, type, types.ModuleType)):
                    found.append(value)
        return found[: 2 * MOST_ITEMS]

    def _without_running(self, function: Any, of: Expression) -> list[Any] | None:
        """What a function returns, where that can be found without it; None for other functions."""
        given, kind = of[2], type(function)
        if issubclass(kind, weakref.ref):
            self._notes.look_inside(function)
            return [function()]
        if issubclass(kind, (operator.attrgetter, operator.itemgetter)) and len(given) == 1:
            return self._picked(function, given[0])
        if of[1][0] == "attr" and of[1][2] in _METHODS:
            told = self._method(of[1][1], of[1][2][1], given)
            if told is not None:
                return told
        if identity(function) not in _told:
            return None
        if function is operator.attrgetter or function is operator.itemgetter:
            values = [self.find(one) for one in given]
            return [function(*(one[0] for one in values))] if values and all(values) else None
        if function is super:
            return self._super(given)
        if function is globals:
            return [self._frame.f_globals]
        if function is builtins.__import__ and given:
            return [sys.modules[name] for name in self.find(given[0]) if name in sys.modules]
        if function is vars and len(given) == 1:
            return self._attributes(given[0], ("const", "__dict__"))
        if function is type and len(given) == 1:
            return [type(value) for value in self.find(given[0])]
        if identity(function) in _by_name and len(given) > 1:
            found = self._attributes(given[0], given[1])
            return found or (self.find(given[2]) if function is getattr and len(given) > 2 else [])
        return None

    def _attributes(self, base: Expression, name: Expression) -> list[Any]:
        if not self._names(name)[1]:  # one that is made as the code runs
            for value in self.find(base):
                self._notes.all_attributes(value)
            return []
        return self._find_attr(("attr", base, name), True)

    def _method(self, base: Expression, name: str, given: tuple) -> list[Any] | None:
        if name == "__getattribute__" and len(given) == 1:
            return self._attributes(base, given[0])
        for value in self.find(base):
            if isinstance(value, contextvars.ContextVar):
                self._notes.look_inside(value)
                return [one for one in content(value) or () if one is not MISSING]
            if isinstance(value, (dict, types.MappingProxyType)) and given:
                return self._find_item(("item", base, given[0]), True)
        return None

    def _picked(self, function: Any, base: Expression) -> list[Any]:
        names = function.__reduce__()[1]
        found = []
        for name in names:
            of = base
            for part in name.split(".") if isinstance(function, operator.attrgetter) else (name,):
                of = ("attr" if isinstance(function, operator.attrgetter) else "item", of, ("const", part))
            found += self._finders[of[0]](self, of, True)
        return found

    def _super(self, given: tuple) -> list[Any] | None:
        if given:
            kinds, owners = (self.find(one) for one in (given * 2)[:2])
        else:
            names = self._frame.f_code.co_varnames[:1] or self._frame.f_code.co_cellvars[:1]
            kinds, owners = (self.find(("local", name)) for name in ("__class__", *names))
        return [super(kinds[0], owners[0])] if kinds and owners and isinstance(kinds[0], type) else None


Looking._finders = {**Finding._finders, "call": Looking._find_call}
