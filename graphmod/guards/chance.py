"""Random numbers that Python draws on the host, which a replay would not draw."""

import random
import sys
import types
from typing import Any

import torch

from graphmod.guards.contents import OTHER, is_random, sort_of, state
from graphmod.trace import dispatch
from graphmod.trace.seeds import MOVES, READS_SEED, SETS_STATE
from graphmod.trace.untraced import identity


class Chance:
    """Compares the states of the host's random generators before and after a call.

    Those of `random` and `numpy.random`, and each generator that the call's code was seen to use.
    """

    def __init__(self) -> None:
        self._states: list[tuple[Any, tuple, tuple | None]] = []
        self._of_torch: list[tuple[torch.Generator, torch.Tensor, tuple | None]] = []
        self._known: set[int] = set()
        self.meet(random._inst, None)
        mtrand = sys.modules.get("numpy.random.mtrand")
        if hasattr(mtrand, "_rand"):  # another thread may be importing it
            self.meet(mtrand._rand, None)

    def meet(self, value: Any, where: tuple | None) -> None:
        """Takes in a value that code at `where` uses: a generator, or a function that draws from one."""
        if sort_of(type(value)) != OTHER:
            return
        recorder = dispatch.current()
        method = _method_of_generator(value) if recorder is not None else None
        if method in MOVES or method == "initial_seed":
            recorder.refuse(method, SETS_STATE if method in MOVES else READS_SEED)
        if isinstance(value, (types.BuiltinMethodType, types.MethodType)):
            value = value.__self__
        if recorder is not None and _is_generator(value):
            recorder.note_generator(value)
        elif _is_generator(value) and identity(value) not in self._known:
            self._known.add(identity(value))
            self._of_torch.append((value, value.get_state(), where))
        if not is_random(value):
            return
        if identity(value) not in self._known:
            self._known.add(identity(value))
            self._states.append((value, state(value), where))
        elif where is not None:
            for index, (known, before, line) in enumerate(self._states):
                if known is value and line is None:
                    self._states[index] = (known, before, where)

    def drawn(self) -> tuple[str, tuple | None] | None:
        """The library whose generator was drawn from, and the code and line that used it first; None where none was."""
        for value, before, where in self._states:
            if state(value) != before:
                return type(value).__module__.partition(".")[0], where
        return None

    def moved(self) -> tuple | None:
        """The code and line that used one of torch's generators first which has moved, where no recorder follows it;
        None where none has. The default ones are every capture's own."""
        default = (torch.default_generator, *torch.cuda.default_generators)
        for value, before, where in self._of_torch:
            if not any(value is one for one in default) and not torch.equal(value.get_state(), before):
                return where
        return None

    def restore(self) -> None:
        """Puts the generators of `random` and `numpy.random` back to where they were."""
        for value, before, _ in self._states:
            if isinstance(value, random.Random) and state(value) != before:
                value.setstate(before[0])


def _is_generator(value: Any) -> bool:
    return issubclass(type(value), torch.Generator)  # `isinstance` runs Python code of torch's, at each value met


def _method_of_generator(value: Any) -> str | None:
    """The name of a method of one of torch's generators; None of anything else."""
    of_object = isinstance(value, types.BuiltinMethodType) and _is_generator(value.__self__)
    of_class = type(value) is types.MethodDescriptorType and value.__objclass__ is torch.Generator
    return value.__name__ if of_object or of_class else None
