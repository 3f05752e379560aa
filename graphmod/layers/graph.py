"""A captured call whose results have a backward: what that differentiates, and how."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphmod.errors import CaptureRefused, Diverged
from graphmod.guards.hooks import has_gradient_hooks, has_hooks_of_others, without_gradient_hooks
from graphmod.layers.backward import BackwardGraph, Gradients
from graphmod.layers.checkpointed import KEPT, RunAgain, in_checkpoint
from graphmod.layers.uses import nodes_behind, separate_uses, times, uses_of
from graphmod.signature.call import Call
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.gradients import is_split, part
from graphmod.step.graph import StepGraph
from graphmod.step.recording import Recording
from graphmod.step.tape import Arena, Tape
from graphmod.torch_private import is_traceable_wrapper_subclass, saves_tensors
from graphmod.trace.operations import address
from graphmod.trace.recorder import Follower

_version = operator.attrgetter("_version")


class LayerGraph(StepGraph):
    """One captured forward of one module for one signature.

    Attributes:
        differentiable: indices of the tensor arguments that require grad; once for each use of one that code outside
            uses too.
        parameters: leaf tensors from outside that the outputs depend on.
        hooked, direct: those of them whose gradients go through autograd (they have gradient hooks, or several uses in
            one backward), and the others.
        edges: parameter (by identity) -> where the capture's autograd graph ends for it; until the backward is captured
            from it.
        witness: one of `direct` that autograd sees, or None.
        through_autograd: what autograd sees of the parameters: `hooked` and the witness.
        in_turn: those of `through_autograd` whose hooks are to run in eager's order, the last of them first.
        summed: the places among `differentiable` of arguments with several uses, whose gradients are added up.
        saves: whether autograd saves anything for its backward, and frees it with that.
        ticket: weak, that of the last forward with a backward to come.
        backward: the captured backward, once there is one.
        backward_modes: the modes of PyTorch in which it was captured.
        captured_in: the pass of its arena in which it was captured.
        mismatches: backwards in a row that the captured backward did not fit.
    """

    def __init__(self, context: Context, entry: Entry, tape: Tape, recording: Recording) -> None:
        super().__init__(context, entry, tape, recording)
        self.captured_in = tape.arena.passes
        self.hooked: list[Tensor] = []
        self.hooked_uses: list[int] = []
        self.direct: list[Tensor] = []
        self.summed: list[int] = []
        self.backward: BackwardGraph | None = None
        self.backward_modes: tuple = ()
        self.saves = False
        self.in_turn: list[int] = []
        self.edges: dict[int, GradientEdge] = {}
        self.mismatches = 0
        self.ticket: Any = None

    # -- capture -------------------------------------------------------------------------------------------------

    def _saving(self, inside: Call) -> contextlib.AbstractContextManager:
        context = self.context
        if in_checkpoint() and not self.recording.random:
            return RunAgain(inside, self.entry.signature.modes, context.group.backend.device_type)
        if in_checkpoint():
            context.log_once(f"{context.name!r} {KEPT}", key="checkpoint")
        return super()._saving(inside)

    def _find_parameters(self, given: list[Tensor], identities: set[int], recorder: Follower, oldest: int) -> None:
        """The leaves that the outputs depend on, found by walking the autograd graph that the capture built."""
        arguments = {id(tensor) for tensor in given}
        for node in nodes_behind(self.results.retained):
            leaf: Any = getattr(node, "variable", None)
            if leaf is not None:
                if is_traceable_wrapper_subclass(leaf) and not is_split(leaf):
                    raise CaptureRefused(
                        f"has a parameter that is a {type(leaf).__name__}, whose gradient only a whole step can make; "
                        "wrap the whole step"
                    )
                held = part(leaf)
                if id(leaf) not in arguments and (address(held) in recorder.outside or not held.numel()):
                    self.parameters.append(leaf)
                    self.edges.setdefault(id(leaf), GradientEdge(node, 0))
                continue
            self.saves = self.saves or saves_tensors(node)
            if node._sequence_nr() < oldest:
                raise CaptureRefused(
                    "uses a tensor from outside that was itself computed with gradients, whose history a graph cannot "
                    "follow; pass it as an argument"
                )
            for following, _ in node.next_functions:
                original = getattr(following, "variable", None)
                view = self.stand_ins.get(id(original))
                if view is not None:
                    self.edges[id(original)] = get_gradient_edge(view)
                if view is not None and view.grad_fn is not node:
                    raise CaptureRefused(
                        "uses a parameter that code outside uses too both as an attribute of its module and in another "
                        "way (a variable, a list); use it in one way"
                    )
        group = self.context.group
        returned = {*map(id, self.results.passed_on), *identities}
        group.share([p for p in self.parameters if id(p) in returned])  # the caller may use it, too
        self.hooked = [
            p
            for p in self.parameters
            if has_gradient_hooks(p) or id(p) in group.shared or is_split(p) or not _is_plain(p)
        ]
        hooked = set(map(id, self.hooked))
        self.direct = [p for p in self.parameters if id(p) not in hooked]
        direct = set(map(id, self.direct))
        first = next((p for p in self.context.around.parameters if id(p) in direct), None)
        self.witness = first if len(self.direct) > 1 else None
        inputs = {i: get_gradient_edge(tensor) for i, tensor in enumerate(given) if tensor.requires_grad}
        counts = {i: max(1, times(uses)) for i, uses in uses_of(inputs, self.results.retained).items()}
        apart = self.entry.used_outside
        self.differentiable = [i for i, count in counts.items() for _ in range(count if i in apart else 1)]
        self.summed = [place for place, i in enumerate(self.differentiable) if counts[i] > 1 and i not in apart]
        edges = {i: self.edges[id(parameter)] for i, parameter in enumerate(self.hooked)}
        self.hooked_uses = [max(1, times(uses)) for uses in uses_of(edges, self.results.retained).values()]
        of_hooked = [p for p, count in zip(self.hooked, self.hooked_uses, strict=True) for _ in range(count)]
        self.through_autograd = (*of_hooked, *(() if self.witness is None else (self.witness,)))
        # Autograd runs the hooks of gradients that come out of one node in an order of its own.
        several = [place for place, p in enumerate(of_hooked) if has_hooks_of_others(p) and not is_split(p)]
        known = self.recording.its_backward
        if known.runs_python and not {id(of_hooked[place]) for place in several} <= known.hooked:
            raise Diverged("has gradient hooks on parameters that were not there when its backward was recorded")
        if len({id(of_hooked[place]) for place in several}) > 1:
            self.in_turn = sorted(several, key=lambda place: known.order.get(id(of_hooked[place]), -1), reverse=True)

    def forget_autograd(self) -> None:
        """Lets go of the autograd graph of the capture, which serves to capture the backward of its own pass only."""
        super().forget_autograd()
        self.results.retained, self.edges = [], {}

    def add_backward(self, known: BackwardGraph, modes: tuple) -> None:
        """Takes in its backward, captured and run in these modes of PyTorch, and puts it onto the tape."""
        group, tape = self.context.group, self.tape
        known.index = tape.append(self)
        results = [result for result in known.results if result is not None]
        tape.hand_out(results)
        for result in results:
            group.static[result.tensor.data_ptr()] = result.tensor
        self.backward, self.backward_modes = known, modes
        if tape.fresh_grads is None and self.parameters:
            tape.fresh_grads = group.found_fresh

    def count_mismatch(self, matched: bool) -> None:
        """Takes in whether a backward found things as the captured one, or the recorded one, did."""
        self.mismatches = 0 if matched else self.mismatches + 1

    # -- gradients -----------------------------------------------------------------------------------------------

    def differentiate(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        direct: Sequence[Tensor],
        edges: Mapping[int, GradientEdge],
        several: Collection[int] = (),
    ) -> tuple[list[Tensor | None], Gradients]:
        """Gradients of `outputs`: of the differentiable inputs and hooked parameters, one for each use that is to be
        kept apart, and of the `direct` parameters.

        Args:
            several: those of the direct parameters (by identity) of which there is one for each use, too.
            edges: parameter (by identity) -> where the autograd graph of `outputs` ends for it, if not at the
                AccumulateGrad node that the parameter has now.
        """
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        given = Counter(self.differentiable)
        with torch.enable_grad():
            ends = [get_gradient_edge(inputs[i]) for i in given]
            ends += [edges.get(id(p)) or get_gradient_edge(p) for p in self.hooked]
        counts = [*given.values(), *self.hooked_uses]
        wanted: Any = [*ends, *(edges.get(id(p), p) for p in direct)]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        parts: dict[int, list[Tensor]] = {}
        if pairs and wanted:
            repeated = {place: ends[place] for place, count in enumerate(counts) if count > 1}
            with torch.enable_grad():
                for place, parameter in enumerate(direct, len(ends)):
                    if id(parameter) in several:
                        repeated[place] = edges.get(id(parameter)) or get_gradient_edge(parameter)
            separately = separate_uses(repeated, outputs) if repeated else contextlib.nullcontext(parts)
            # Autograd runs the hooks when the gradients come out of this node.
            with separately as parts, without_gradient_hooks(self.hooked):
                found = torch.autograd.grad(
                    [out for out, _ in pairs],
                    wanted,
                    [grad for _, grad in pairs],
                    retain_graph=not self.graph.seen.ran_compiled,  # a capture may be made twice
                    allow_unused=True,
                )
        through: list[Tensor | None] = []
        for place, count in enumerate(counts):
            whole = found[place]
            of_uses = parts.get(place, [] if whole is None else [whole])
            through += [*of_uses, *[None] * (count - len(of_uses))]
        places = enumerate(direct, len(ends))
        return through, [(p, one) for place, p in places for one in parts.get(place) or [found[place]]]


def _is_plain(parameter: Tensor) -> bool:
    """Whether a gradient buffer can be like the parameter: it has memory, and autograd gives its gradient no other
    dtype."""
    return parameter.numel() > 0 and getattr(parameter, "grad_dtype", parameter.dtype) is parameter.dtype


class Ticket:
    """One forward with a backward still to come; dies with the autograd node that holds it. `done` says whether it has
    had one, after which another may follow if the graph was retained; `of_witness` is the gradient of the forward's
    witness, where autograd is to accumulate that itself."""

    __slots__ = (
        "__weakref__", "arena", "before", "done", "finished", "graph", "node", "of_witness", "passed", "random_state",
        "versions", "weights",
    )  # fmt: skip

    def __init__(self, arena: Arena, graph: LayerGraph, random_state: Any) -> None:
        self.arena, self.graph, self.random_state = arena, graph, random_state
        self.passed = arena.passes
        self.done = self.finished = False
        self.before = graph.before
        self.weights = graph.parameters
        self.versions = list(map(_version, graph.parameters))
        self.of_witness: Any = None
        self.node: Any = None  # weak: the autograd node that holds this ticket
        graph.ticket = weakref.ref(self)
        arena.in_flight += 1

    def finish(self) -> None:
        if not self.finished:
            self.done = self.finished = True
            self.arena.in_flight -= 1
            if self.arena.holds_dropped or self.graph.tape.dropped:
                self.arena.let_go_of_dropped()

    __del__ = finish

    def changed(self) -> list[Any]:
        """The parameters that were changed in place since the forward."""
        if list(map(_version, self.weights)) == self.versions:
            return []
        return [p for p, version in zip(self.weights, self.versions, strict=True) if p._version != version]

    @property
    def current(self) -> bool:
        """Whether the pass this forward belongs to is still the last one, so that its inputs are still in place."""
        return self.arena.passes == self.passed
