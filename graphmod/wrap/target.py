"""What a wrapper around a module calls: its `forward` of now, past the wrapper that may stand in its place.

Owns also how a module whose `forward` is redirected is told from its copies.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Target:
    """Calls a module's `forward`, or its `__call__` if that is all it has, without the module's hooks.

    Args:
        module: the module.

    Attributes:
        own: the `forward` that was assigned to the module itself; None where its class's is meant.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        if isinstance(module, torch.jit.ScriptModule):
            module.__dict__.setdefault("forward", module.forward)  # its class has none
        self.own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args if self.own is not None else (self.module, *args)
        return self.function(*given, **kwargs)

    @property
    def function(self) -> Any:
        """What is called now; if it is the class's, with the module as its first argument."""
        if self.own is not None:
            return self.own
        kind = type(self.module)
        return kind.__call__ if kind.forward is nn.Module.forward else kind.forward

    @property
    def __signature__(self) -> inspect.Signature:
        found = inspect.signature(self.function)
        if self.own is not None:
            return found
        return found.replace(parameters=list(found.parameters.values())[1:])

    def of_copy(self, module: nn.Module, memo: dict | None) -> Target:
        """The same for a copy of the module; deep, where there is a `memo` of `copy.deepcopy`."""
        made = type(self)(module)
        if not isinstance(module, torch.jit.ScriptModule):
            made.own = self.own if memo is None else copy.deepcopy(self.own, memo)
        return made


@contextlib.contextmanager
def in_place_of_forward(module: nn.Module, run: Callable) -> Iterator[None]:
    """Has a module's `__call__` run something else than its `forward`."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = run
    try:
        yield
    finally:
        set_forward(module, before)


def set_forward(module: nn.Module, forward: Any) -> None:
    """Gives a module its own `forward`, or its class's where that is None."""
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


class Mark:
    """What `graph_layers` leaves at a layer: its wrapper, and the `forward` that was assigned to the layer before.

    A shallow copy of the layer shares it, and so does the redirected `forward`, which cannot know through which of the
    two it was called: `shared` tells that there may be such a copy, `caller` which it is.
    """

    __slots__ = ("forward", "graphed")

    def __init__(self, graphed: Any, forward: Any) -> None:
        self.graphed, self.forward = graphed, forward
        graphed._mark = self

    def __deepcopy__(self, memo: dict) -> Mark:
        return Mark(copy.deepcopy(self.graphed, memo), copy.deepcopy(self.forward, memo))


MARK = "_graphmod"
"""The attribute of a layer that is a `Mark`."""
HOLDERS = 3
"""`sys.getrefcount(wrapper._mark)` where only the layer and its wrapper hold the mark."""
_DEPTH = 6  # frames between a module's `__call__` and the redirected forward, at most


def caller_with(mark: Mark) -> nn.Module | None:
    """The module with this mark, the original or a copy, whose call led here; None where no frame tells."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module.__dict__.get(MARK) is mark:
            return module
        frame = frame.f_back
    return None
