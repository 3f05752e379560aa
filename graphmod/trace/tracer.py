"""Sees every aten operation of a call: which, with which scalars, on which line of the user's code."""

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from graphmod.trace import compiled, dispatch
from graphmod.trace.operations import Facts, Step, draws, facts, same_generator, scalars_of, user_frame
from graphmod.trace.patches import Patch
from graphmod.trace.untraced import traced, untraced

_beside_the_key = Patch(dispatch.replacements)


class Tracer:
    """Watches a call, in the context of itself.

    Attributes:
        watching: whether the call is an eager one, which nothing may change, and its frames are watched.
        trace: the operations, in order.
        generators: those passed to random operations.
        random, backward, ran_compiled: whether it drew random numbers, ran a backward pass, ran compiled code.

    Args:
        given: the tensors the call was given.
    """

    watching = False

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        self._given = list(given)
        self.trace: list[Step] = []
        self.generators: list[torch.Generator] = []
        self.random = False
        self.backward = False
        self.ran_compiled = False
        self._context = contextlib.ExitStack()

    def __enter__(self) -> "Tracer":
        self._depth = compiled.depth()
        with contextlib.ExitStack() as context:
            if dispatch.has_key():
                context.enter_context(_beside_the_key)
            self._enter(context)
            context.enter_context(dispatch.shown_to(self, self._given))
            self._context = context.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        compiled.leave(self._depth)
        self._context.__exit__(*error)

    def _enter(self, context: contextlib.ExitStack) -> None:
        """Takes into the context what else is needed while it watches."""

    def note_mode(self, mode: TorchDispatchMode) -> None:
        """Takes in that from here to the end of the call nothing can be seen, because of a mode."""

    def note_compilation(self) -> None:
        """Takes in that from here to the end of the call nothing can be seen, because torch.compile compiles."""

    def see(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Runs an operation and takes it in."""
        seen = self.watching or sys.gettrace() is not None
        return untraced(self._see, op, args, kwargs) if seen else self._see(op, args, kwargs)

    def _see(self, op: Any, args: tuple, kwargs: dict) -> Any:
        about = facts(op)
        # What surrounds compiled code takes views as it sees fit: of arguments that are views themselves, for one.
        if about.profiler or (about.views and compiled.depth()):
            return self._do(op, args, kwargs)
        if torch._C._current_autograd_node() is None:
            code, line = user_frame()
        else:
            code, line, self.backward = None, 0, True
        random = draws(about, args, kwargs)
        generator = kwargs.get("generator")
        if generator is not None and not any(same_generator(generator, known) for known in self.generators):
            self.generators.append(generator)
        self.random = self.random or random
        step = Step(op, scalars_of(about, args, kwargs), code, line)
        result = self._run(step, about, args, kwargs, random)
        self.trace.append(step)
        return result

    def _run(self, step: Step, about: Facts, args: tuple, kwargs: dict, random: bool) -> Any:
        return self._do(step.op, args, kwargs)

    def _do(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Runs an operation, and whatever Python that runs."""
        if type(op) is OpOverload:
            op = op._op  # what calling it calls
        seen = self.watching or sys.gettrace() is not None
        return traced(op, args, kwargs) if seen else op(*args, **kwargs)


def is_recording() -> bool:
    """Whether the present call is recorded: it is being captured, or is the warm-up call before that."""
    return dispatch.current() is not None
