"""Finds functions that a graph cannot repeat, an optimizer's `step` for one, and makes eager parts of their calls."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

from graphmod.guards.changes import Change
from graphmod.guards.notes import UNGUARDED, Note
from graphmod.reads.frames import compiled_code
from graphmod.step.eager_parts import RecordedParts
from graphmod.torch_private import beside_dynamo
from graphmod.trace import dispatch
from graphmod.trace.recorder import Recorder

_Functions = tuple[FunctionType, ...] | None
_MOST_CALLS = 12  # that are recorded to find parts, until one shows that they do


class FoundParts:
    """The functions that one callable calls and that become eager parts although nobody has marked them: an optimizer's
    `step`, the `update` of an average, a callback.

    A recorded call that is refused shows in which functions it does what a graph cannot repeat: operations, and all
    that comes upon what the call changes. The outermost of each in which the model does not learn, by a forward or
    backward, is to be an eager part, and the next call is recorded with such parts. Where one cannot be, the next
    function inside takes its place. Each of these calls is one of the user's, like any other.

    Attributes:
        wanted: whether any are looked for.
        refused: why the first call was refused; or what keeps the call eager whatever is a part.

    Args:
        wanted: whether there are to be any.
    """

    def __init__(self, wanted: bool = False) -> None:
        self.wanted, self._gave_up = wanted, False
        self.refused = ""
        self._around: set[tuple[weakref.ref[FunctionType], ...]] = set()  # functions, the outermost first
        self._unfit: weakref.WeakSet[FunctionType] = weakref.WeakSet()
        self._parts: weakref.WeakSet[FunctionType] = weakref.WeakSet()
        self._calls = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def learn(self, recorder: Recorder, changes: list[Change], bound: Iterable[Note], refused: str) -> bool:
        """Takes in a recorded call that was refused: all that it changed, and what of that it binds anew. Returns
        whether the next may do better."""
        parts = recorder.parts
        assert isinstance(parts, RecordedParts), "it was recorded"
        if not self.wanted:
            return False
        touched: dict[Any, set[_Functions]] = {}
        for functions, whats in parts.noted.notes.touched.items():
            for what in whats:
                touched.setdefault(what, set()).add(functions)
        changed = {change.place: str(change) for change in changes}
        free = set() if any(one.late for one in parts.made) else {note.place for note in bound}
        self._unfit |= parts.noted.with_model
        self._unfit |= (one.function for one in parts.made if one.refused and isinstance(one.function, FunctionType))
        causes = {what for what in touched if isinstance(what, str) or what in changed.keys() - free}
        before, self._parts = self._parts, self._choose(touched[what] for what in causes)
        # What else a part binds, it binds at each replay, so that all who read it are to be parts, too.
        while more := {what for what in free & touched.keys() - causes if self._in_parts(touched[what])}:
            causes |= more
            self._parts = self._choose(touched[what] for what in more)
        fits = {what: all(map(self._outermost, touched[what])) for what in causes}
        keeps = next((changed.get(what) or str(what) for what in touched if not fits.get(what, True)), "")
        self._calls += 1
        gave_up, in_vain = self._gave_up, any(one.refused and one.given for one in parts.made)  # for what it returns
        self._gave_up = gave_up or bool(keeps) or self._parts <= before or self._calls > _MOST_CALLS
        if keeps or (self._gave_up and not gave_up and not in_vain) or not self.refused:
            self.refused = keeps or refused
        if self._gave_up:
            self._parts.clear()
        return not self._gave_up

    def succeeded(self) -> None:
        """Takes in that a recorded call was not refused."""
        self._calls = 0

    def give_up(self) -> None:
        """Takes in that something was compiled, once more where parts were in place: that is what it stands on."""
        if self._parts:
            self._gave_up = True
            self._parts.clear()

    def _choose(self, touched: Iterable[set[_Functions]]) -> weakref.WeakSet[FunctionType]:
        """The functions that are to be parts, with those in which something more was touched."""
        for arounds in touched:
            self._around |= {tuple(map(weakref.ref, functions or ())) for functions in arounds}
        there = ([function() for function in functions] for functions in self._around)
        return weakref.WeakSet(filter(None, map(self._outermost, there)))

    def _outermost(self, functions: Iterable[FunctionType | None] | None) -> FunctionType | None:
        found = next((one for one in functions or () if one is not None and one not in self._unfit), None)
        return None if found is compiled_code else found

    def _in_parts(self, arounds: set[_Functions]) -> bool:
        return any(one in self._parts for functions in arounds for one in functions or ())

    def in_place(self, functions: Iterable[Any] | None = None) -> _InPlace:
        """Inside, calls of functions (None: of all that are parts now) are eager parts, as far as somebody records
        them."""
        return _InPlace([*map(_StandIn, self._parts if functions is None else functions)])


class _StandIn:
    """Is called in the place of a function, by whatever way code comes to that: the function has other code.

    Attributes:
        code: its own.
    """

    def __init__(self, function: FunctionType) -> None:
        self._function, self.code = function, function.__code__
        while self.code.co_name == UNGUARDED:  # another thread records, too
            self.code = next(one for one in self.code.co_consts if isinstance(one, _StandIn)).code
        calls = _calls_stand_in(self.code)
        constants = tuple(self if one == _MARK else one for one in calls.co_consts)
        self._instead = calls.replace(co_name=UNGUARDED, co_consts=constants, co_freevars=self.code.co_freevars)

    @beside_dynamo
    def call(self, given: list[Any], named: dict[str, Any]) -> Any:
        """Calls the function, as an eager part or as it is, and leaves defaults to that."""
        recorder: Any = dispatch.current()
        function = self._function
        defaults = list(function.__defaults__ or ())
        while len(given) <= self.code.co_argcount and defaults and given and given[-1] is defaults[-1]:
            del given[-1], defaults[-1]
        by_name = function.__kwdefaults__ or {}
        args = tuple(given)
        kwargs = {name: value for name, value in named.items() if name not in by_name or value is not by_name[name]}
        if isinstance(recorder, Recorder):
            return recorder.eager_part(function, args, kwargs, sys._getframe(1), _name_of(function, args))
        as_it_is = FunctionType(
            self.code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        as_it_is.__kwdefaults__ = function.__kwdefaults__
        return as_it_is(*args, **kwargs)

    def put(self) -> None:
        self._function.__code__ = self._instead

    def take_away(self) -> None:
        if self._function.__code__ is self._instead:
            self._function.__code__ = self.code


_MARK = "the stand-in"


def _calls_stand_in(code: CodeType) -> CodeType:
    """Code with the parameters of other code, which others may ask for: it calls the `_StandIn` among its constants."""
    count, names = code.co_argcount, code.co_varnames
    first, by_name = names[:count], names[count : count + code.co_kwonlyargcount]
    rest = iter(names[count + len(by_name) :])
    more = [f"*{next(rest)}"] if code.co_flags & inspect.CO_VARARGS else []
    named = [f"**{next(rest)}"] if code.co_flags & inspect.CO_VARKEYWORDS else []
    alone = code.co_posonlyargcount
    parameters = [*first[:alone], *(["/"] if alone else []), *first[alone:]]
    parameters += [*(more or (["*"] if by_name else [])), *by_name, *named]
    kwargs = ", ".join([*(f"{name!r}: {name}" for name in by_name), *named])
    source = f"lambda {', '.join(parameters)}: {_MARK!r}.call([{', '.join([*first, *more])}], {{{kwargs}}})"
    return next(one for one in compile(source, __file__, "eval").co_consts if isinstance(one, CodeType))


def _name_of(function: FunctionType, args: tuple) -> str:
    """What a function is called in messages; a method by the class of its object."""
    name, qualified = function.__name__, function.__qualname__.rpartition("<locals>.")[2]
    is_method = bool(args) and inspect.getattr_static(type(args[0]), name, None) is not None
    return f"{type(args[0]).__name__}.{name}" if is_method and "." in qualified else qualified


class _InPlace:
    """Inside, functions have the code of their stand-ins."""

    def __init__(self, stand_ins: list[_StandIn]) -> None:
        self._stand_ins = stand_ins

    def __enter__(self) -> None:
        for one in self._stand_ins:
            one.put()

    def __exit__(self, *_: object) -> None:
        for one in self._stand_ins:
            one.take_away()
