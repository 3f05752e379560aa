"""Finds the methods that a graph cannot repeat, an optimizer's `step` for one, and makes eager parts of their calls."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from graphmod.guards.changes import SCHEDULERS, all_changes
from graphmod.guards.notes import STANDS_FOR, Notes
from graphmod.guards.values import dict_of
from graphmod.reads.frames import noting
from graphmod.step.eager_parts import RecordedParts
from graphmod.torch_private import beside_dynamo
from graphmod.trace import dispatch
from graphmod.trace.dispatch import hidden
from graphmod.trace.recorder import Recorder
from graphmod.trace.untraced import untraced

_JOINED = ("zero_grad",)  # an eager part where others of its object are, and it comes after one


class Methods:
    """The methods that one callable calls and that become eager parts although nobody has marked them: an optimizer's
    `step`, an average's `update`.

    A recorded call that is refused shows which such methods ran. In the next, what a graph cannot repeat is counted
    before and after each. If nothing is left but what some of them do, those are eager parts from then on. Each of
    these calls is one of the user's, like any other.

    Attributes:
        refused: why the first call was refused.
        found: those that are eager parts, by name.

    Args:
        wanted: whether there are to be any.
    """

    def __init__(self, wanted: bool = False) -> None:
        self._gave_up = not wanted
        self.refused = ""
        self.found: list[str] = []
        self._methods: list[tuple[Any, str]] = []
        # What a graph cannot repeat and each did, outside of other such methods that it calls; see `_causes`.
        self._tried: dict[tuple[int, str], Counter] | None = None
        self._inside: Counter = Counter()  # what those have done that the one under way has called so far
        self._most: set[tuple[int, str]] = set()  # in which a backward ran, so that they are most of the call

    def learn(self, recorder: Recorder, refused: str) -> bool:
        """Takes in a recorded call that was refused. Returns whether the next may do better."""
        parts = recorder.parts
        assert isinstance(parts, RecordedParts), "it was recorded"
        noted = parts.noted
        if self._gave_up:
            return False
        if self.found:  # what comes after them is no better
            self.give_up()
        elif self._tried is None:
            self._methods, self._tried = noted.methods, {}
            self._gave_up = not self._methods
            self.refused = refused if self._methods else ""
        else:
            tried, self._tried = {key: causes for key, causes in self._tried.items() if causes}, None
            if _causes(recorder, noted.notes) - sum(tried.values(), Counter()) or self._most & tried.keys():
                tried = {}
            # What one method keeps, the others of its object use; and a rate that changes would be another graph.
            owners = {id(owner) for owner, _ in self._of(tried)}
            owners |= {id(one.optimizer) for one, _ in self._of(tried) if isinstance(one, SCHEDULERS)}
            for owner, name in self._methods:
                if id(owner) in owners:
                    tried.setdefault((id(owner), name), Counter())
            self._methods = self._of(tried)
            self.found = [f"{type(owner).__name__}.{name}" for owner, name in self._methods if name not in _JOINED]
            self._gave_up = not self.found
        return not self._gave_up

    def give_up(self) -> None:
        """Takes in that something was compiled, once more where methods were in place: that is what it stands on."""
        if self._methods:
            self._gave_up, self._methods, self.found = True, [], []

    def _of(self, tried: dict[tuple[int, str], Counter]) -> list[tuple[Any, str]]:
        return [(owner, name) for owner, name in self._methods if (id(owner), name) in tried]

    def in_place(self, noted: noting | None = None) -> AbstractContextManager:
        """Inside, calls of these methods come here, as far as somebody records them.

        Args:
            noted: what notes what the call reads, if it does.
        """
        owners: dict[tuple[int, str], tuple[Any, set[int]]] = {}
        for owner, name in self._methods:
            holders = (owner, *type(owner).__mro__)
            holder = next(one for one in holders if name in (dict_of(one) or getattr(one, "__dict__", ())))
            owners.setdefault((id(holder), name), (holder, set()))[1].add(id(owner))
        return _InPlace(
            [(one, name, self._stand_in(one, name, those, noted)) for (_, name), (one, those) in owners.items()]
        )

    def _stand_in(self, holder: Any, name: str, owners: set[int], noted: noting | None) -> Callable:
        found = vars(holder)[name]
        function = getattr(found, STANDS_FOR, found)  # another thread may record, too

        @functools.wraps(function)
        @beside_dynamo
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder: Any = dispatch.current()
            owner = args[0] if isinstance(holder, type) else holder
            if not isinstance(recorder, Recorder) or id(owner) not in owners:
                return function(*args, **kwargs)
            if name in _JOINED and not recorder.had_part:
                return function(*args, **kwargs)
            method, given = (types.MethodType(function, owner), args[1:]) if owner is not holder else (function, args)
            if self._tried is not None and noted is not None:
                return self._try((id(owner), name), recorder, noted, method, given, kwargs)
            return recorder.eager_part(method, given, kwargs, sys._getframe(), f"{type(owner).__name__}.{name}")

        setattr(call, STANDS_FOR, function)
        return call

    def _try(
        self, key: tuple[int, str], recorder: Recorder, noted: noting, method: Callable, args: tuple, kwargs: dict
    ) -> Any:
        before, begin = untraced(_causes, recorder, noted.notes), len(recorder.trace)
        outside, self._inside = self._inside, Counter()
        try:
            return method(*args, **kwargs)
        finally:
            new = untraced(_causes, recorder, noted.notes) - before
            assert self._tried is not None, "so it is tried"
            self._tried[key] = self._tried.get(key, Counter()) + (new - self._inside)
            self._most |= {key} if any(step.code is None for step in recorder.trace[begin:]) else set()
            self._inside = outside + new


def _causes(recorder: Recorder, notes: Notes) -> Counter:
    """All that a graph cannot repeat of a recorded call, so far, without values, which come and go."""
    with hidden():
        return Counter([*map(str, recorder.hazards), *(change[1:] for change in all_changes(notes))])


class _InPlace:
    """Inside, classes have other methods, and objects, where these have one of their own: what is in an object, its
    own code may copy, pickle or count.

    Args:
        methods: `(class or object, name, method)` of each.
    """

    def __init__(self, methods: list[tuple[Any, str, Callable]]) -> None:
        self._methods = methods

    def __enter__(self) -> None:
        for holder, name, stand_in in self._methods:
            _put(holder, name, stand_in)

    def __exit__(self, *_: object) -> None:
        for holder, name, stand_in in self._methods:
            if vars(holder).get(name) is stand_in:
                _put(holder, name, getattr(stand_in, STANDS_FOR))


def _put(holder: Any, name: str, method: Callable) -> None:
    if isinstance(holder, type):
        type.__setattr__(holder, name, method)
    else:
        vars(holder)[name] = method
