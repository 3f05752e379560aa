"""Sees every aten operation of a call: which, with which scalars, on which line of the user's code. Imports `trace`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphmod.trace import Facts, Step, draws, facts, scalar_of, user_frame


class Tracer(TorchDispatchMode):
    """Watches a call.

    Attributes:
        trace: the operations, in order.
        generators: those passed to random operations.
        random, backward: whether it drew random numbers, or ran a backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[Step] = []
        self.generators: list[torch.Generator] = []
        self.random = False
        self.backward = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it stands for costs as much as the rest of the recording

    def note_compiled(self) -> None:
        """Takes in that compiled code runs now."""

    def note_unseen(self, changed: Iterable[Tensor]) -> None:
        """Takes in that code out of its sight changed tensors, or may have."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        about = facts(op)
        if about.profiler:
            return op(*args, **kwargs)
        if torch._C._current_autograd_node() is None:
            code, line = user_frame()
        else:
            code, line, self.backward = None, 0, True
        result = self._run(op, about, args, kwargs, code, line)
        self.random = self.random or draws(about, args, kwargs)
        generator = kwargs.get("generator")
        if generator is not None and not any(generator is known for known in self.generators):
            self.generators.append(generator)
        scalars = tuple(map(scalar_of, args))
        if kwargs:
            scalars += tuple([(key, scalar_of(value)) for key, value in kwargs.items()])
        self.trace.append(Step(op, scalars, code, line))
        return result

    def _run(self, op: Any, about: Facts, args: tuple, kwargs: dict, code: Any, line: int) -> Any:
        return op(*args, **kwargs)


def current_tracer() -> Tracer | None:
    """The tracer, or recorder, that watches the present call."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tracer)), None)


def is_recording() -> bool:
    """Whether the present call is recorded: it is being captured, or is the warm-up call before that."""
    return current_tracer() is not None
