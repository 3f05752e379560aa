"""A module around wrapped layers: which of the two serves a call, its own graph or those of its layers."""

from __future__ import annotations

import itertools
import operator
from typing import Any

from torch import distributed, nn

from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.trace.dispatch import is_recording
from graphmod.trace.undo import under_way
from graphmod.wrap.target import MARK, Target

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
