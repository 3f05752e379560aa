"""A captured call whose results have a backward: what that differentiates, and the captured backward (R6).

Where each pass begins without gradients, they stay in the pool, where the backward made them of the memory of
activations: as in an eager step they take no memory of their own. They count as results of their tape, which are moved
before a replay writes there, if anybody still has them.

Else they lie in buffers outside the pool, and are written there without a copy. The operation whose result becomes a
gradient is found from a first capture, which is thrown away; in the second that operation computes straight into the
buffer. Layers of one kind share what the first of them found. So the gradients need no extra kernel, no replay of
another graph can touch them, and all graphs of a parameter (other shapes, other microbatches) share one buffer.

A checkpoint (`torch.utils.checkpoint`) around a layer keeps nothing of it and runs it again. A graph has memory of its
own, of which that checkpoint knows nothing. So a capture inside of one does what it does: the graph of the forward
keeps its arguments, and that of the backward computes the rest again.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphmod.errors import CaptureRefused, Diverged
from graphmod.guards.guards import Guards
from graphmod.guards.hooks import has_gradient_hooks, has_hooks_of_others, without_gradient_hooks
from graphmod.layers.group import LayerGroup, Loans
from graphmod.layers.uses import nodes_behind, separate_uses, times, used_inside, uses_of
from graphmod.signature.call import Call
from graphmod.signature.modes import entered_again
from graphmod.step.arena import Tape
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.gradients import GradientBuffer, Whole, is_split, part
from graphmod.step.graph import StepGraph
from graphmod.step.recording import Recording
from graphmod.step.static_inputs import StaticInput, without_history
from graphmod.step.static_outputs import StaticOutput
from graphmod.torch_private import (
    RUNS_CHECKPOINT,
    checkpoint_of,
    current_backward,
    is_traceable_wrapper_subclass,
    saves_tensors,
    top_saved_tensors_hooks,
    tree_leaves,
    tree_map_only,
)
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
        inside: the places among the results with a backward of those from which others of them are computed.
        saves: whether autograd saves anything for its backward, and frees it with that.
        runs_again: whether its backward runs the forward again, as the checkpoint around it does.
        ticket: weak, that of the last forward with a backward to come.
        backward: the captured backward, once there is one.
        backward_modes: the modes of PyTorch in which it was captured.
        captured_in: the pass of its arena in which it was captured.
        mismatches: backwards in a row that the captured backward did not fit.
    """

    def __init__(self, context: Context, entry: Entry, tape: Tape, recording: Recording) -> None:
        super().__init__(context, entry, tape, recording)
        assert isinstance(context.group, LayerGroup)
        self.group = context.group
        self.captured_in = tape.arena.passes
        self.hooked: list[Tensor] = []
        self.hooked_uses: list[int] = []
        self.direct: list[Tensor] = []
        self.summed: list[int] = []
        self.inside: list[int] = []
        self.backward: BackwardGraph | None = None
        self.backward_modes: tuple = ()
        self.saves = self.runs_again = False
        self.in_turn: list[int] = []
        self.edges: dict[int, GradientEdge] = {}
        self.mismatches = 0
        self.ticket: Any = None

    # -- capture -------------------------------------------------------------------------------------------------

    def _saving(self, inside: Call) -> contextlib.AbstractContextManager:
        context = self.context
        self.runs_again = in_checkpoint() and not self.recording.random
        if self.runs_again:
            return RunAgain(inside, self.entry.signature.modes, context.group.backend.device_type)
        if in_checkpoint():
            context.log_once(f"{context.name!r} {KEPT}", key="checkpoint")
        return super()._saving(inside)

    def _find_parameters(self, inside: Call, identities: set[int], recorder: Follower) -> None:
        """The leaves that the outputs depend on, found by walking the autograd graph that the capture built."""
        arguments = {id(tensor) for tensor in inside.leaves}
        nodes = list(nodes_behind(self.results.retained))
        self.inside = used_inside(self.results.retained, nodes)
        for node in nodes:
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
            if node._sequence_nr() < inside.oldest:
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
        group = self.group
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
        inputs = {i: get_gradient_edge(tensor) for i, tensor in enumerate(inside.leaves) if tensor.requires_grad}
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
        group, tape = self.group, self.tape
        known.index = tape.append(self)
        results = [result for result in known.results if result is not None]
        tape.hand_out([*results, *([known.loans] if known.in_pool else [])])
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
        again: bool = True,
    ) -> tuple[list[Tensor | None], Gradients]:
        """Gradients of `outputs`: of the differentiable inputs and hooked parameters, one for each use that is to be
        kept apart, and of the `direct` parameters.

        Args:
            several: those of the direct parameters (by identity) of which there is one for each use, too.
            edges: parameter (by identity) -> where the autograd graph of `outputs` ends for it, if not at the
                AccumulateGrad node that the parameter has now.
            again: whether they may be wanted once more.
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
                    retain_graph=again and not self.graph.seen.ran_compiled,
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
    witness, where autograd is to accumulate that itself; `inside` are the results from which others are computed, each
    with its gradient hooks."""

    __slots__ = (
        "__weakref__", "arena", "before", "done", "finished", "graph", "inside", "node", "of_witness", "passed",
        "random_state", "versions",
    )  # fmt: skip

    def __init__(self, graph: LayerGraph, random_state: Any) -> None:
        self.graph, self.random_state, self.arena = graph, random_state, graph.tape.arena
        self.passed = self.arena.passes
        self.done = self.finished = False
        self.before = graph.before
        self.versions = list(map(_version, graph.parameters))
        self.of_witness: Any = None
        self.inside: list[tuple[weakref.ref, weakref.ref]] = []
        self.node: Any = None  # weak: the autograd node that holds this ticket
        graph.ticket = weakref.ref(self)
        self.arena.in_flight += 1

    def finish(self) -> None:
        if not self.finished:
            self.done = self.finished = True
            self.arena.in_flight -= 1
            if self.arena.holds_dropped or self.graph.tape.dropped:
                self.arena.let_go_of_dropped()

    __del__ = finish

    def changed(self) -> list[Any]:
        """The parameters that were changed in place since the forward."""
        weights = self.graph.parameters
        if list(map(_version, weights)) == self.versions:
            return []
        return [p for p, version in zip(weights, self.versions, strict=True) if p._version != version]

    def watch(self, result: Any) -> None:
        """Takes in the result that was made of this forward."""
        leaves = self.graph.results.of_node(result)
        for place in self.graph.inside:
            leaf = leaves[place]
            hook = leaf.register_hook(lambda grad: None)  # makes the dict that any later one is put into
            hook.remove()
            self.inside.append((weakref.ref(leaf), hook.hooks_dict_ref))

    @property
    def current(self) -> bool:
        """Whether the pass this forward belongs to is still the last one, so that its inputs are still in place."""
        return self.arena.passes == self.passed


# -- inside a checkpoint -----------------------------------------------------------------------------------------------


DRAWS = (
    "draws random numbers inside a checkpoint that draws others when it runs again (preserve_rng_state=False), which "
    "no replay would do; leave preserve_rng_state as it is, set dropout to 0, or do without the checkpoint"
)
DRAWN_BEFORE = (
    "is given what a checkpoint has computed, and may compute otherwise when it runs again (preserve_rng_state=False); "
    "put the checkpoint around this part alone, or leave preserve_rng_state as it is"
)
KEPT = (
    "keeps in its graph what the checkpoint around it would not: it draws random numbers, which a graph cannot draw "
    "twice. Set dropout to 0, or do without the checkpoint (gradient_checkpointing=False)"
)


def in_checkpoint() -> bool:
    """Whether a checkpoint runs this call, to run it again in the backward."""
    hooks = top_saved_tensors_hooks(True)
    known = None if hooks is None else checkpoint_of(hooks[0])
    return known is not None and not known[1] and torch.is_grad_enabled()


def inputs_drawn_anew() -> set[int] | None:
    """The identities of what the checkpoints around this call were given, each of them, that run it again without
    putting back the random state; None where there is no such."""
    frame = sys._getframe(1) if in_checkpoint() else None
    given = None
    while frame is not None:
        if frame.f_code is RUNS_CHECKPOINT and not (known := frame.f_locals)["preserve"]:
            function = known["function"]
            bound = (function.args, function.keywords) if isinstance(function, functools.partial) else ()
            leaves = set(map(id, tree_leaves((known["args"], known["kwargs"], bound))))
            given = leaves if given is None else given & leaves
        frame = frame.f_back
    return given


class _Enough(BaseException):
    """All that the backward needs has been computed again."""


class RunAgain(torch.autograd.graph.saved_tensors_hooks):
    """Within it autograd saves nothing: what a backward asks for is computed again, once for each backward.

    Args:
        call: what is computed within.
        modes: PyTorch's, as they are now; see `signature`.
        device_type: `cpu` or `cuda`.
    """

    def __init__(self, call: Call, modes: tuple, device_type: str) -> None:
        self._call = call
        self._modes, self._device_type = modes, device_type
        self._count = 0
        self._computed: list[Any] = []
        self._computed_in = -1
        super().__init__(self._leave_out, self._compute)

    def _leave_out(self, tensor: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def _compute(self, index: int) -> Tensor:
        if self._computed_in != current_backward():
            self._computed, self._computed_in = [], current_backward()
            args, kwargs = tree_map_only(Tensor, without_history, (self._call.args, self._call.kwargs))
            hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, _never)
            modes = entered_again(self._modes, self._device_type)
            with torch.enable_grad(), modes, hooks, contextlib.suppress(_Enough):
                self._call.function(*args, **kwargs)
            if len(self._computed) != self._count:
                raise CaptureRefused("saves other tensors for its backward when it runs again inside a checkpoint")
        found = self._computed[index]
        self._computed[index] = None  # its memory is for others, once autograd is done with it
        return found

    def _keep(self, tensor: Tensor) -> None:
        self._computed.append(tensor.detach())
        if len(self._computed) == self._count:
            raise _Enough


def _never(_: Any) -> Tensor:
    raise RuntimeError("nothing of a forward that runs again has a backward")


# -- its captured backward ---------------------------------------------------------------------------------------------


Gradients = list[tuple[Tensor, Tensor | None]]  # (parameter, its gradient)
_is_not, _NOTHING = operator.is_not, repeat(None)
_grad, _tensor = operator.attrgetter("grad"), operator.attrgetter("tensor")
_data_ptr = Tensor.data_ptr


class GradientsExchanged(Exception):
    """The user has put other tensors in the place of the gradients that a graph adds to."""


class Outvoted(Exception):
    """Another rank runs this backward without a graph."""


def changed_in_place(name: str) -> RuntimeError:
    """What autograd says where a backward reads something that was changed since."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a result "
        f"or a parameter of {name!r}, which its backward reads again; use the out-of-place operation"
    )


@dataclass(eq=False, repr=False)
class BackwardGraph:
    """One captured backward.

    Attributes:
        index: its place on the tape of its forward.
        inputs: per output of the forward, where its gradient is read, or None if there was none at capture.
        copied: of those, index and buffer of each that is copied.
        results: per differentiable input and hooked parameter of the forward, its gradient, or None.
        wholes: per result, what makes it again where it is a DTensor, or None.
        saved, weights: outputs and parameters of the forward that the backward reads again; `weights_at` their
            addresses.
        written: the buffers of the gradients that the graph overwrites.
        accumulated: those of gradients that it adds to, each with what it adds to: the buffer's memory, or a tensor
            that the user had put in place; targets_at: the addresses of these.
        entry: the signature of its forward.
        parameters, loans: those of `written`; in_pool: whether any lie where its tape has activations.
        claim: asks for the memory of those of `written` that other graphs write, too; None where there are none.
        guards: what its code read; None where it reads nothing.
        held: what it reads by address besides what it is given and what the forward reads.
        apart: whether it was captured with gradients there that the user had put in place, to which the buffers were
            added afterwards.
    """

    graph: Any
    inputs: list[StaticInput | None]
    results: list[StaticOutput | None]
    wholes: list[Whole | None]
    written: list[GradientBuffer]
    accumulated: list[tuple[GradientBuffer, Tensor]]
    saved: list[StaticOutput]
    weights: list[Tensor]
    guards: Guards | None
    held: list[Tensor]
    claim: Callable[[], bool] | None
    entry: Entry

    def __post_init__(self) -> None:
        self._any_split = any(map(is_split, self.weights))
        self.weights_at = self._addresses()
        self.targets_at = [target.data_ptr() for _, target in self.accumulated]
        self.copied = [(i, item.buffer) for i, item in enumerate(self.inputs) if item is not None and item.buffer]
        self.parameters, self.loans = [buffer.parameter for buffer in self.written], Loans(self.written, self.entry)
        self.in_pool = any(buffer.arena is not None for buffer in self.written)
        self.index = -1
        self.apart = False

    def launch_first(self) -> None:
        """Replays for the first time, among the gradients that were there at capture."""
        self.graph.replay()
        for buffer in self.written:
            if buffer.parameter.grad is None:
                buffer.parameter.grad = buffer.tensor
            else:
                self.apart = True
                buffer.parameter.grad.add_(buffer.memory)

    def _addresses(self) -> list[int]:
        return list(map(_data_ptr, map(part, self.weights) if self._any_split else self.weights))

    def fits(self, grads: Sequence[Tensor | None], passes: int) -> bool:
        if self._addresses() != self.weights_at:
            return False  # `fully_shard` may have collected them elsewhere than for the forward
        for static, grad in zip(self.inputs, grads, strict=True):
            if (static is None) is not (grad is None):
                return False
            if static is None or grad is None:
                continue
            if static.tensor.stride() != grad.stride():
                return False  # kernels for another layout may round otherwise
            if static.buffer is None:
                if static.pointer != grad.data_ptr():
                    return False
            elif not (static.buffer.free_for(grad, passes) and static.buffer.aligned_as(grad)):
                return False
        return True

    def changed(self) -> str | None:
        """What its code would read that is no longer as it was, in words."""
        return None if self.guards is None else self.guards.moved() or self.guards.changed()

    def launch(self, grads: Sequence[Tensor | None], passes: int, agrees: Callable[[], bool]) -> tuple[int, bool]:
        """Replays into the parameters' gradients, whatever state they are in; returns the bytes copied in, and whether
        the gradients were in the state they had at capture.

        Args:
            agrees: asked before anything changes, once it is known that it can.

        Raises:
            GradientsExchanged: that is not possible; nothing has changed.
            Outvoted: others do not agree; nothing has changed.
            Exception: whatever the launch raised; the gradients are in their places.
        """
        copied = 0
        if self.claim is not None and not self.claim():
            raise GradientsExchanged("views of another layer's gradient are held, which this torch cannot move")
        for index, buffer in self.copied:
            grad = grads[index]
            assert grad is not None, "of gradients that fit"
            copied += buffer.load(grad, passes, self)
        if not self.accumulated and not any(map(_is_not, map(_grad, self.parameters), _NOTHING)):
            tensors = self.loans.free() or self._free()
            if not agrees():
                raise Outvoted
            try:
                self.graph.replay()
                for parameter, tensor in zip(self.parameters, tensors, strict=True):
                    parameter.grad = tensor
            except BaseException:
                for parameter in self.parameters:
                    parameter.grad = None
                raise
            return copied, True
        return copied, self._launch_among_others(agrees)

    def _free(self) -> list[Tensor]:
        """The tensors for gradients, none of which is there now; what the user holds of those before is moved away."""
        if not all(buffer.evacuate() for buffer in self.written):
            raise GradientsExchanged("views of a gradient are held, which this version of torch cannot move")
        return list(map(_tensor, self.written))

    def _launch_among_others(self, agrees: Callable[[], bool]) -> bool:
        """Replays where gradients may not be as they were at capture; returns whether they were.

        The sum of two terms does not depend on their order, so the results are those of eager accumulation.
        """
        fill, before = [], []  # parameters without a gradient; copies of gradients that the graph is going to overwrite
        add: list[tuple[Tensor, Tensor]] = []
        clear: list[Tensor] = []
        filled = zip(self.written, _NOTHING, strict=False)
        added_to = ((buffer, at) for (buffer, _), at in zip(self.accumulated, self.targets_at, strict=True))
        for buffer, target in (*filled, *added_to):
            grad, memory = buffer.parameter.grad, buffer.memory
            if target is None or target == memory.data_ptr():
                if grad is not None and grad.data_ptr() == memory.data_ptr():
                    if target is None:
                        before.append((grad, grad.clone()))
                    continue
                if not buffer.evacuate():
                    raise GradientsExchanged("views of a gradient are held, which this version of torch cannot move")
                if target is not None:
                    clear.append(memory)
                if grad is None:
                    fill.append(buffer)
                else:
                    add.append((grad, memory))
            elif grad is None or grad.data_ptr() != target:
                raise GradientsExchanged("gradients that the graph adds to were exchanged")
        if not agrees():
            raise Outvoted
        for memory in clear:
            memory.zero_().neg_()  # -0, to which anything may be added
        try:
            self.graph.replay()
        except BaseException:
            for grad, kept in before:
                grad.copy_(kept)
            raise
        for buffer in fill:
            buffer.parameter.grad = buffer.tensor
        for grad, more in (*before, *add):
            grad.add_(more)
        return not clear and not before and (self.apart or not add)
