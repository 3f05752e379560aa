"""Random numbers that Python draws on the host, which a replay would not draw."""

import random
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from graphmod.guards.values import OTHER, is_random, sort_of
from graphmod.trace import dispatch
from graphmod.trace.generators import METHODS, comparable, kinds_followed, state_of
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.undo import let_through
from graphmod.trace.untraced import identity

_BOUND = frozenset(map(identity, (types.BuiltinMethodType, types.MethodType)))


class Chance:
    """Compares the states of the host's random generators before and after a call.

    Those of `random` and `numpy.random`, and each generator that the call's code was seen to use.

    Attributes:
        draws: is told what code draws from them, and what that does with the numbers; see `host_draws`.
    """

    def __init__(self, draws: HostDraws | None = None) -> None:
        self.draws = draws
        self._kinds = frozenset(map(identity, kinds_followed()))
        self._states: dict[int, tuple[Any, Any, tuple | None]] = {}  # by identity of the generator, which it holds
        self._of_torch: dict[int, tuple[torch.Generator, torch.Tensor, tuple | None]] = {}
        self._of_system: tuple | None = None
        self.meet(random._inst, None)
        mtrand = sys.modules.get("numpy.random.mtrand")
        if hasattr(mtrand, "_rand"):  # another thread may be importing it
            self.meet(mtrand._rand, None)

    def meet(self, value: Any, where: tuple | None) -> None:
        """Takes in a value that code at `where` uses: a generator, or a function that draws from one."""
        if sort_of(type(value)) != OTHER:
            return
        recorder = dispatch.current()
        if recorder is not None and (method := _method_of_generator(value)) in METHODS:
            recorder.refuse(method, METHODS[method])
        if isinstance(value, (types.BuiltinMethodType, types.MethodType)):
            value = value.__self__
        if recorder is not None and _is_generator(value):
            recorder.note_generator(value)
        elif _is_generator(value) and identity(value) not in self._of_torch:
            self._of_torch[identity(value)] = (value, value.get_state(), where)
        if not is_random(value):
            return
        known = self._states.get(identity(value))
        if known is None:
            self._states[identity(value)] = (value, _state(value), where)
            if self.draws is not None and identity(type(value)) in self._kinds:
                self.draws.begin(value)
        elif known[2] is None:
            self._states[identity(value)] = (*known[:2], where)

    def ask_system(self, where: tuple) -> None:
        """Takes in that code at `where` is about to ask the system for random bytes, which has no state to compare."""
        self._of_system = self._of_system or where

    def drawn(self) -> tuple[str, tuple | None] | None:
        """The library whose generator was drawn from, and the code and line that used it first; None where none was."""
        drawn_at, followed = ({}, False) if self.draws is None else (self.draws.drawn_at, self.draws.followed)
        for value, before, where in self._states.values():
            known = id(value) in drawn_at
            if not followed if known else _state(value) != before:
                return type(value).__module__.partition(".")[0], drawn_at.get(id(value), where)
        return None if self._of_system is None else ("os", self._of_system)

    def moved(self) -> tuple | None:
        """The code and line that used one of torch's generators first which has moved, where no recorder follows it;
        None where none has. The default ones are every capture's own."""
        default = (torch.default_generator, *torch.cuda.default_generators)
        for value, before, where in self._of_torch.values():
            if not any(value is one for one in default) and not torch.equal(value.get_state(), before):
                return where
        return None

    def draw(self, function: Any, given: list, where: tuple, is_old: Callable[[Any], bool]) -> None:
        """Takes in that code at `where` is about to call a function, which may be a method of a generator."""
        bound = identity(type(function)) in _BOUND
        owner = function.__self__ if bound else given[0] if given else None
        if self.draws is None or identity(type(owner)) not in self._kinds:
            return
        if not bound:
            name = getattr(function, "__name__", "")
            if getattr(type(owner), name, None) is not function:
                return
            function, given = getattr(owner, name), given[1:]
        self.meet(owner, where)
        if not is_old(owner):  # another one is made in each call
            self.draws.escaped()
        self.draws.draw(function, given, where)


def _state(generator: Any) -> Any:
    """Where a generator is; None of one whose class keeps no state, or none yet."""
    try:
        return comparable(state_of(generator))
    except Exception as error:
        let_through(error)
        return None


def _is_generator(value: Any) -> bool:
    return issubclass(type(value), torch.Generator)  # `isinstance` runs Python code of torch's, at each value met


def _method_of_generator(value: Any) -> str:
    """The name of a method of one of torch's generators; "" of anything else."""
    of_object = isinstance(value, types.BuiltinMethodType) and _is_generator(value.__self__)
    of_class = type(value) is types.MethodDescriptorType and value.__objclass__ is torch.Generator
    return value.__name__ if of_object or of_class else ""
