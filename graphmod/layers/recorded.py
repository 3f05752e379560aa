"""The backward of a recorded call: watched as it happens in the user's own, and judged before any is captured.

Nothing is run for it. It refuses what a graph cannot repeat, and makes guards of what only the backward reads.

The nodes of the recorded call in autograd's graph are marked in their metadata. A hook on each result, first in line,
begins the watch of the thread, which ends by a callback of the engine or, after an error, with the first frame outside
of a backward; then the next calls are eager, so that a backward of one may be recorded. Of each frame that the engine
calls it is asked which node runs. A marked one belongs to the call; hooks on a parameter, code between two layers and
the checkpoint around a layer belong to none. Hooks on a result that the call did not put there itself are between two
hooks of ours. What one call runs in one go has notes of its own, so layers in one backward, or in a backward inside of
one, each get what is theirs.

Which results had a gradient is part of what was recorded, unless no Python ran. And the order in which autograd
accumulated the gradients is kept: where several parameters have hooks, each goes through a node of its own (`InTurn`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from graphmod.errors import CaptureRefused
from graphmod.guards.changes import Change, all_changes, line_of
from graphmod.guards.guards import Guards
from graphmod.guards.hooks import has_hooks_of_others, is_ours
from graphmod.guards.notes import Notes
from graphmod.layers.uses import nodes_behind, used_inside
from graphmod.reads.backwards import begin, mark
from graphmod.signature.call import Call
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.recording import Recording
from graphmod.torch_private import top_saved_tensors_hooks
from graphmod.trace.hazards import Hazard
from graphmod.trace.lines import location

DIFFERENTIATED_AGAIN = (
    "its backward is differentiated in turn (create_graph=True), and a graph has no gradient of its gradient; run this "
    "part eagerly: graph=none, ungraph(model), or call the module as .module"
)
_NESTED = (
    "runs another backward inside its backward ({}), whose gradients a replay would not add; checkpoint with "
    "use_reentrant=False, or wrap the whole step"
)
_GRADIENT = (
    "its backward looks at the gradient of a tensor, or sets it ({}), where a replay has none of its own; do that "
    "after the backward"
)
_BETWEEN = (
    "runs Python in its backward after gradient hooks of its parameters, which a replay would run when all is done; "
    "capture the whole step"
)
GRADIENT_WITHIN = (
    "the gradient of a result from which another result is computed is asked for (register_hook, retain_grad, "
    "torch.autograd.grad), and a replay gives only what comes from code outside; run this part eagerly: graph=none, "
    "ungraph(model), or call the module as .module"
)
NO_GRAD_OF_PARTS = (
    "its backward can only run as part of a plain .backward() ({}), and a capture asks for gradients; checkpoint with "
    "use_reentrant=False, or wrap the whole step"
)


_WANTED = 16  # calls
Given = tuple[bool, ...]
"""Which of a call's results a backward has gradients for."""


class RecordedBackward:
    """What is known of the backwards of a recorded call's result.

    Attributes:
        guards: what their code read, of each that has come and was judged.
        order: parameter (by identity) -> its place in the order in which autograd accumulated their gradients.
        hooked: the parameters (by identity) that had gradient hooks then.
        runs_python: whether any ran Python.
        wanted: how many more calls are to be eager so that one may come.
    """

    def __init__(self) -> None:
        self.guards: dict[Given, list[Guards]] = {}
        self.order: dict[int, int] = {}
        self.hooked: set[int] = set()
        self.runs_python = False
        self.wanted = 0
        self._silent: Given = ()

    def add(self, given: Given, seen: BackwardOfCall) -> None:
        """Takes in what a backward has shown."""
        self.guards[given] = seen.guards
        self.order |= seen.order
        self.hooked |= seen.hooked
        self.runs_python = self.runs_python or not seen.silent
        self.wanted = 0
        if seen.silent:
            self._silent = tuple(map(max, given, self._silent or given))

    def want(self) -> None:
        """Keeps the next calls eager, so that a backward of one may be recorded."""
        self.wanted = _WANTED

    def forget(self) -> None:
        """Forgets those that have come: the next is judged anew."""
        self.guards.clear()
        self._silent = ()
        self.want()

    def knows(self, given: Given) -> bool:
        """Whether a backward like this was recorded, or is made of parts of some that run no Python."""
        return given in self.guards or (bool(self._silent) and tuple(map(max, given, self._silent)) == self._silent)

    @property
    def awaited(self) -> bool:
        """Whether one that comes is to be judged."""
        return not self.guards or self.wanted > 0

    def changed(self, given: Given) -> str | None:
        """What is no longer as it was when a backward of this kind was recorded, in words."""
        for guards in self.guards.get(given, ()):
            reason = guards.moved() or guards.changed()
            if reason is not None:
                return reason
        return None


class BackwardOfCall:
    """The backward of one eager call, which is watched as it comes; see `backwards.Watched`.

    Args:
        call: has its result.
        outputs: those of its results that may have a backward.
        finish: called with this when it is over.

    Attributes:
        given: which results it had gradients for.
        refused: why it cannot be captured, changes apart.
        changes: what it changed in Python.
        guards: what it read.
        order, hooked: see `RecordedBackward`.
        silent: whether it ran no Python.
        failed: whether an error ended it.
    """

    def __init__(self, call: Call, outputs: Sequence[Tensor], finish: Callable[[BackwardOfCall], None]) -> None:
        self.beside = self.over = False
        kept = top_saved_tensors_hooks(True)
        self.around: CodeType | None = None if kept is None else getattr(kept[1], "__code__", None)
        self.refused: list[str] = []
        self.changes: list[Change] = []
        self.guards: list[Guards] = []
        self.order: dict[int, int] = {}
        self.silent, self.failed = True, False
        self.hooked: set[int] = set()
        self._finish = finish
        self._handles: list[Any] = []
        self.gpu = next((tensor.get_device() for tensor in outputs if tensor.is_cuda), None)
        nodes, accumulators = _nodes_of(call, outputs)
        made = [tensor for tensor in outputs if tensor.grad_fn in nodes]
        self.given, self._went_on = [False] * len(made), [False] * len(made)
        self._inside = used_inside(made, nodes)
        for node in nodes:
            mark(node, self)
        for node in accumulators:
            self._watch_parameter(node)
        for index, tensor in enumerate(made):
            self._watch_result(index, tensor)

    def _watch_result(self, index: int, tensor: Any) -> None:
        """Watches for the backward at a result. Hooks that the call itself put there are a part of it, and those of
        whoever it is returned to are none."""

        def come(_: Tensor) -> None:
            self.given[index] = True
            if index in self._inside and asks_for_gradient(result, first.hooks_dict_ref, before):
                self.refused.append(GRADIENT_WITHIN)
            begin(self)
            if torch.is_grad_enabled():
                self.refused.append(DIFFERENTIATED_AGAIN)

        def outside(_: Tensor) -> None:
            self.beside = not self.over

        def inside(_: Any) -> None:
            self.beside, self._went_on[index] = False, True

        first = tensor.register_hook(come)
        hooks: Any = tensor._backward_hooks
        known = list(hooks.items())
        hooks.clear()  # autograd goes by the order of insertion, whatever `move_to_end` does
        hooks.update([known[-1], *known[:-1]])
        self._handles += [first, tensor.register_hook(outside), tensor.grad_fn.register_prehook(inside)]
        result, before = ref(tensor), _of_others(hooks)

    def _watch_parameter(self, node: Any) -> None:
        """Watches for the gradient of a parameter, which a node accumulates."""
        parameter = node.variable

        def note(_: Any) -> None:
            self.order.setdefault(id(parameter), len(self.order))
            if has_hooks_of_others(parameter):
                self.hooked.add(id(parameter))

        self._handles.append(node.register_prehook(note))

    def enter(self) -> None:
        self.silent = False
        if self.hooked and _BETWEEN not in self.refused:
            self.refused.append(_BETWEEN)

    def take(self, notes: Notes) -> None:
        if notes.gradient_at is not None:
            self.refused.append(_GRADIENT.format(line_of(notes.gradient_at)))
        self.changes += all_changes(notes)
        guards = Guards(notes)
        if guards:
            self.guards.append(guards)

    def cannot_repeat(self, hazards: list[Hazard]) -> None:
        self.refused += map(str, hazards)

    def nested(self, frame: FrameType) -> None:
        caller = frame.f_back or frame
        self.refused.append(_NESTED.format(location(caller.f_code, caller.f_lineno)))

    def fail(self) -> None:
        self.failed = True
        self.finish()

    def finish(self) -> None:
        self.over = True
        for handle in self._handles:
            handle.remove()
        if any(self.given[index] and not self._went_on[index] for index in self._inside):
            self.refused.append(GRADIENT_WITHIN)  # by torch.autograd.grad
        self._finish(self)


def asks_for_gradient(result: ref, hooks: ref, before: int = 0) -> bool:
    """Whether somebody asks for the gradient of a result that may be gone by now.

    Args:
        hooks: its gradient hooks.
        before: how many of others it had when it was returned.
    """
    there = result()
    return _of_others(hooks() or {}) > before or (there is not None and there.retains_grad)


def _of_others(hooks: dict[int, Any]) -> int:
    return sum(not is_ours(hook) for hook in hooks.values())


def record_backward(context: Context, entry: Entry, recording: Recording, call: Call) -> None:
    """Has the backward of an eager call judged, when it comes.

    Args:
        recording: of the state that the call was made in.
        call: has its result.
    """

    def judge(seen: BackwardOfCall) -> None:
        known, kind = recording.its_backward, tuple(seen.given)
        if kind in known.guards:
            return
        if seen.failed:
            known.want()
            return
        refused = next(iter((*seen.refused, *map(str, seen.changes))), None)
        known.add(kind, seen)
        if refused is None:
            return
        recording.refused = recording.refused or refused
        entry.warm_up_again(0)  # the next call is recorded anew
        tapes = {graph.tape for graph in entry.graphs if graph.recording is recording}
        context.drop(*tapes, why=refused)
        context.failed(entry, CaptureRefused(refused), "its backward")

    BackwardOfCall(call, call.result.differentiable, judge)


def _nodes_of(call: Call, outputs: Iterable[Tensor]) -> tuple[set[Node], list[Node]]:
    """The nodes of autograd's graph that a call has made for some results, and those behind them that accumulate
    gradients."""
    with torch.inference_mode(False), torch.enable_grad():
        ends = {get_gradient_edge(tensor).node for tensor in call.leaves if tensor.requires_grad}
    found, accumulators = set(), []
    for node in nodes_behind(outputs, ends, lambda node: node._sequence_nr() >= call.oldest):
        if hasattr(node, "variable"):
            accumulators.append(node)
        elif node._sequence_nr() >= call.oldest:
            found.add(node)
    return found, accumulators


def for_plain_backwards(call: Call) -> str | None:
    """Why nobody may ask for single gradients by way of a call that was made, or None: code in one of its backwards
    asks autograd whether it is part of a plain `.backward()`, and raises if not."""
    for node in _nodes_of(call, call.result.differentiable)[0]:
        function = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
        code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
        if code is not None and "_is_checkpoint_valid" in code.co_names:
            return NO_GRAD_OF_PARTS.format(f"{code.co_filename}:{code.co_firstlineno}")
    return None
