"""What a wrapper around a module calls: its `forward` of now, past the wrapper that may stand in its place.

Owns also how a module whose `forward` is redirected is told from its copies, and which serves a call where a wrapped
module is around wrapped layers.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed, nn

from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.trace.dispatch import is_recording
from graphmod.trace.undo import under_way


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


# -- a module around wrapped layers: which of the two serves a call ----------------------------------------------------


_post_accumulate_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
INSTEAD = "; its layers then run from graphs of their own"
_PAYS = 8  # to `Context.without_layers`: a replay that many times less than to the account of captures
_UNUSED = 64  # calls of a body in a row that do without the graphs of its layers, which are then given up


class Body(Target):
    """Calls the `forward` of a module around wrapped layers, and decides which serves: its own graph, or the layers'.

    One graph of the module that runs the layers (the body) costs the host a fraction of what the graphs of its layers
    do. Where it cannot be captured, or not now, its Python runs, and its layers from graphs of their own. To make
    graphs of both kinds would take the memory of both. So while a graph of the body is to be expected, its layers run
    as plain modules; and what graphs they have is given up once they are not used any more.

    The module is passed over where all gradients at the end of one backward come too late: with several ranks, which
    exchange them meanwhile, and with hooks of an optimizer, which frees them. And where all its calls were refused.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.passed_over = False
        self._unused = 0

    def passes_on(self) -> bool:
        """Whether the layers are to serve a call that is no part of another; asked once in each."""
        self._unused += 1
        if self._unused == _UNUSED:
            self._give_up_layers()
        if self.passed_over:
            context = self._context()
            entry = _last_used(context) if _is_refused(context) else None
            refused = entry is not None and entry.stays_eager()
            self.passed_over = self._comes_late() or refused
        return self.passed_over or _has_ranks()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = None if is_recording() or under_way.again else self._context()
        depth = under_way.plain
        try:
            under_way.plain = depth + (context is not None and self._expects_graph(context))
            return super().__call__(*args, **kwargs)
        finally:
            under_way.plain = depth

    def _context(self) -> Context | None:
        """Of the wrapper; None where there is none any more."""
        mark = self.module.__dict__.get(MARK)
        return None if mark is None else mark.graphed._context

    def _comes_late(self) -> bool:
        return _has_ranks() or any(map(_post_accumulate_hooks, self.module.parameters()))

    def _expects_graph(self, context: Context) -> bool:
        """Whether calls like this one, which runs without a graph, are going to have one."""
        entry = _last_used(context)
        late = self._comes_late()
        if late:
            _drop_graphs(context)
        self.passed_over = late or _is_refused(context)
        account = context.without_layers
        if late or entry is None or entry.disabled or not account.allows(context.counters.replays // _PAYS):
            self._unused = 0
            return False
        account.spend(1)
        return True

    def _give_up_layers(self) -> None:
        marks = [module.__dict__.get(MARK) for module in self.module.modules() if module is not self.module]
        for context in (mark.graphed._context for mark in marks if mark is not None):
            context.nested = True
            _drop_graphs(context)


def _drop_graphs(context: Context) -> None:
    """Frees the graphs of a wrapper, and the pools in which no others are left."""
    tapes = {graph.tape for entry in context.entries for graph in entry.graphs}
    context.drop(*tapes)
    for arena in {tape.arena for tape in tapes}:
        if not arena.in_flight and all(tape.dropped for tape in arena.tapes):
            arena.pool.release()


def _is_refused(context: Context | None) -> bool:
    return context is not None and context.entries.state == "disabled"


def _last_used(context: Context | None) -> Entry | None:
    return None if context is None else max(context.entries, key=lambda one: one.last_used, default=None)


def _has_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def body_of(model: nn.Module, layers: list[str]) -> str | None:
    """The name of the innermost module that runs all of `layers`; None where that is the model itself, and where there
    are several ranks."""
    if len(layers) < 2 or _has_ranks():
        return None
    parts = [name.split(".") for name in layers]
    common = [same[0] for same in itertools.takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))]
    around = [".".join(common[:count]) for count in range(len(common), 0, -1)]
    called = [name for name in around if type(model.get_submodule(name)).forward is not nn.Module.forward]
    # A sequence may also be there to be looped over; the module around it then runs the layers.
    looping = [name for name in called if type(model.get_submodule(name)).forward is not nn.Sequential.forward]
    return next(iter(looping or called), None)
