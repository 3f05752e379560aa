"""A captured forward: how it is captured and differentiated, and what one replay does."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphmod.errors import CaptureRefused, Diverged
from graphmod.graph.accumulators import own_ends
from graphmod.graph.backward import BackwardGraph, Gradients
from graphmod.graph.buffers import StaticInput, static_inputs, unlike_eager
from graphmod.graph.checkpointed import KEPT, RunAgain, in_checkpoint, own_saved_tensors
from graphmod.graph.context import Context
from graphmod.graph.gradients import GradientBuffer, as_memory, lend, memory_of
from graphmod.graph.results import Results, resolved
from graphmod.graph.split import is_split, part
from graphmod.graph.tape import Tape
from graphmod.graph.uses import apart, times, uses_of
from graphmod.graph.watch import Watch, refuse_unseen
from graphmod.guards.changes import NOT_REPLAYED
from graphmod.guards.hooks import has_gradient_hooks, has_hooks_of_others, without_gradient_hooks
from graphmod.signature.arguments import Given
from graphmod.signature.call import Call, Flat
from graphmod.signature.flattening import rebuild
from graphmod.state.entry import Entry
from graphmod.torch_private import is_traceable_wrapper_subclass, next_sequence_number, saves_tensors
from graphmod.trace.generators import put_back
from graphmod.trace.operations import address
from graphmod.trace.recorder import Follower
from graphmod.trace.undo import Undo, is_interrupt, undoing

ELSEWHERE = "another rank could not capture it"
ALIGNED_OTHERWISE = "an argument begins at another place within 16 bytes than when it was captured"


def _python_random_state() -> tuple[Any, Any]:
    """The random states of Python and, if it is in use, numpy, which captured code may draw from."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _restore_python_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


class ForwardGraph:
    """One captured forward of one module for one signature.

    Attributes:
        tape, index: its place in the order of its pool.
        function: what is called.
        results: what it returns.
        differentiable: indices of the tensor arguments that require grad; once for each use of one that code outside
            uses too.
        parameters: leaf tensors from outside that the outputs depend on.
        hooked, direct: those of them whose gradients go through autograd (they have gradient hooks, or several uses in
            one backward), and the others.
        edges: parameter (by identity) -> where the capture's autograd graph ends for it; until the backward is captured
            from it.
        stand_ins: parameter (by identity) -> the view of it that the capture worked with, see `accumulators`.
        witness: one of `direct` that autograd sees, or None.
        through_autograd: what autograd sees of the parameters: `hooked` and the witness.
        advanced, before: tensors from outside that it changes and that may have a part in its results, and what they
            were before the last replay; None where nobody knows.
        in_turn: those of `through_autograd` whose hooks are to run in eager's order, the last of them first.
        saves: whether autograd saves anything for its backward, and frees it with that.
        launches: how often it was replayed.
        ticket: weak, that of the last forward with a backward to come.
        backward: the captured backward, once there is one.
        backward_modes: the modes of PyTorch in which it was captured.
        captured_in: the pass of its arena in which it was captured.
        recording: the `Recording` of the eager call it stands on.
        mismatches: backwards in a row that the captured backward did not fit.
        successor, succeeded: code whose graph is to take the place of this one's, and whether it has run once; see
            `wrap.exchange`.
    """

    def __init__(self, context: Context, entry: Entry, tape: Tape, recording: Any) -> None:
        self.context, self.entry, self.tape, self.recording = context, entry, tape, recording
        self.index = -1
        self.graph: Any = None
        self.advanced: list[Tensor] = []
        self.before: list[Tensor] | None = None
        self.captured_in = tape.arena.passes
        self.inputs: list[StaticInput] = []
        self.parameters: list[Tensor] = []
        self.hooked: list[Tensor] = []
        self.hooked_uses: list[int] = []
        self.direct: list[Tensor] = []
        self.summed: list[int] = []
        self.backward: BackwardGraph | None = None
        self.backward_modes: tuple = ()
        self.saves = False
        self.in_turn: list[int] = []
        self.edges: dict[int, GradientEdge] = {}
        self.stand_ins: dict[int, Tensor] = {}
        self.mismatches = 0
        self.successor: Callable[[], None] | None = None
        self.succeeded = False
        self.launches = 0
        self.ticket: Any = None

    # -- capture -------------------------------------------------------------------------------------------------

    def capture(self, call: Call) -> None:
        """Captures a call; the first `replay` of the captured graph is still to come.

        Raises:
            CaptureRefused: with a reason for the user.
            Exception: whatever the captured code raised.
        """
        context, entry, group, recording = self.context, self.entry, self.context.group, self.recording
        self.function = call.function
        self.inputs, identities = static_inputs(self, call), set(map(id, call.leaves))
        given = [static.tensor for static in self.inputs]
        inside = Call(call.function, *rebuild(entry.signature.structure, given))
        passed = Given(inside)
        guards = recording.guards
        owned = guards.parameters()
        grads_then = [parameter.grad for parameter in owned]
        grads = list(map(memory_of, grads_then))
        oldest = next_sequence_number()
        again = None
        if in_checkpoint() and recording.random:
            context.log_once(f"{context.name!r} {KEPT}", key="checkpoint")
        elif in_checkpoint():
            again = RunAgain(inside, entry.signature.modes, group.backend.device_type)

        def run() -> Flat:
            with again or own_saved_tensors():
                return resolved(inside())

        def check(recorder: Follower, result: Flat) -> None:
            reason = passed.changed() or passed.returned(result) or unlike_eager(self.inputs, call.leaves, recorder)
            if reason is not None:
                raise CaptureRefused(reason)
            originals = {id(view): view._base for view in self.stand_ins.values()}
            held = {*map(id, owned), *(id(tensor) for _, _, tensor in guards.slots)}
            clone, returned = context.config.clone_outputs, recording.returned
            self.results = Results(result, given, recorder, entry, returned, originals, held, clone)
            self._find_parameters(given, identities, recorder, oldest)

        grad = torch.is_grad_enabled()

        def capture(undo: Undo) -> Any:
            undo.then(lambda error: is_interrupt(error) and torch.set_grad_enabled(grad))
            undo.enter(as_memory(owned))
            undo.enter(own_ends(self, guards, identities))
            pool, script = self.tape.arena.pool, recording.script
            split = not generators and not entry.account.failures
            return group.backend.capture(run, pool, given, generators, check, split=split, script=script)

        python_random, generators = _python_random_state(), recording.generators
        states = [(generator, generator.get_state()) for generator in generators]
        states += recording.host_draws.states()
        random_state, captured = group.backend.random_state(), None
        try:
            captured, _ = undoing(capture)
            changed = guards.moved() or guards.changed(gradients=False)
            if changed is not None:
                raise CaptureRefused(f"changes its own state as it runs, {NOT_REPLAYED}: {changed}")
            differentiated = owned if recording.backward else self.parameters
            seen = captured.seen
            last = len(seen.trace) if seen.first_write is None else seen.first_write
            early = [tensor for where, tensor in seen.outside.items() if seen.first_seen.get(where, last) <= last]
            # Kernels that the recorder cannot see may read any of the others.
            early += [tensor for tensor in guards.tensors if address(tensor) not in seen.outside]
            self.watch = Watch(guards, seen.outside, owned, grads, seen.backward, differentiated, early)
            refuse_unseen(seen, self.watch.unseen)
            if context.agreement is not None and not context.agreement.captured(True):
                raise CaptureRefused(ELSEWHERE)
        except BaseException:
            if captured is not None:
                captured.discard()
            group.backend.set_random_state(random_state)
            put_back(states)
            guards.restore()
            _restore_python_random_state(python_random)
            for parameter, grad in zip(owned, grads_then, strict=True):
                if parameter.grad is not grad:
                    parameter.grad = grad
            raise
        self.graph = captured
        left = [(p, p.grad) for p, before in zip(owned, grads_then, strict=True) if p.grad is not before]
        self._grads_after = [(p, lend(p, grad, seen.made, entry) if grad is not None else None) for p, grad in left]
        self._written = [t for t in seen.written.values() if not t.is_inference()]
        self._changed = seen.written.keys() | seen.inputs_written  # no argument that is copied may lie there
        given_at = [0 if tensor.is_inference() else address(tensor) for tensor in given]
        self._arguments_written = [i for i, where in enumerate(given_at) if where in seen.inputs_written]
        self.random = seen.random
        self.advanced = list(seen.advanced.values()) if self.results.with_grad else []
        # Gradients that it leaves behind lie in the pool and may be accumulated into by whoever runs instead; its own
        # generators would have to be put back.
        self.starts_early = self.graph.start is not None and not generators and not self._grads_after
        copied = [(i, one) for i, one in enumerate(self.inputs) if one.buffer is not None]
        self._copied = [(i, one.buffer) for i, one in copied if address(one.tensor) in seen.read]  # others stay unused
        self._adopted = [(i, one.pointer) for i, one in enumerate(self.inputs) if one.buffer is None]
        for _, buffer in self._copied:
            buffer.users += 1
            group.buffers.add(buffer)
        self.stands_alone = not (self.results.handed_out or self._copied or recording.host_draws)
        lent = [left for _, left in self._grads_after if isinstance(left, GradientBuffer)]
        self.tape.hand_out(self.results.handed_out + lent)
        if self._grads_after:
            self.tape.arena.keep_to(self.tape)
        for output in self.results.handed_out:
            group.static[output.tensor.data_ptr()] = output.tensor
        if not self.results.with_grad:
            self.forget_autograd()

    def _find_parameters(self, given: list[Tensor], identities: set[int], recorder: Follower, oldest: int) -> None:
        """The leaves that the outputs depend on, found by walking the autograd graph that the capture built."""
        arguments = {id(tensor) for tensor in given}
        queue = [tensor.grad_fn for tensor in self.results.retained]
        seen = set(queue)
        while queue:
            node = queue.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                if is_traceable_wrapper_subclass(leaf) and not is_split(leaf):
                    raise CaptureRefused(
                        f"has a parameter that is a {type(leaf).__name__}, whose gradient only a whole step can make; "
                        "wrap the whole step"
                    )
                if id(leaf) not in arguments and address(part(leaf)) in recorder.outside:
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
                view = self.stand_ins.get(id(getattr(following, "variable", None)))
                if view is not None:
                    self.edges[id(following.variable)] = get_gradient_edge(view)
                if view is not None and view.grad_fn is not node:
                    raise CaptureRefused(
                        "uses a parameter that code outside uses too both as an attribute of its module and in another "
                        "way (a variable, a list); use it in one way"
                    )
                if following is not None and following not in seen:
                    seen.add(following)
                    queue.append(following)
        group = self.context.group
        returned = {*map(id, self.results.passed_on), *identities}
        group.share([p for p in self.parameters if id(p) in returned])  # the caller may use it, too
        self.hooked = [p for p in self.parameters if has_gradient_hooks(p) or id(p) in group.shared or is_split(p)]
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
        self.results.retained, self.edges, self.stand_ins = [], {}, {}

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
        wanted = [*ends, *(edges.get(id(p), p) for p in direct)]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        parts: dict[int, list[Tensor]] = {}
        if pairs and wanted:
            repeated = {place: ends[place] for place, count in enumerate(counts) if count > 1}
            with torch.enable_grad():
                for place, parameter in enumerate(direct, len(ends)):
                    if id(parameter) in several:
                        repeated[place] = edges.get(id(parameter)) or get_gradient_edge(parameter)
            separately = apart(repeated, outputs) if repeated else contextlib.nullcontext(parts)
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

    # -- replay --------------------------------------------------------------------------------------------------

    def unfit(self, leaves: list[Tensor], careful: bool) -> str | None:
        """Why this graph cannot take these arguments at these addresses, or None. Unless `careful`, a graph that starts
        early leaves the rest of the check to `changed`, after its start."""
        for index, pointer in self._adopted:
            if leaves[index].data_ptr() != pointer:
                return f"{self.inputs[index].name} is at another address than when it was captured"
        for index, buffer in self._copied:
            if not buffer.aligned_as(leaves[index]):
                return ALIGNED_OTHERWISE
        if self._changed:
            for index, _ in self._copied:
                if address(leaves[index]) in self._changed:
                    return f"it changes memory that {self.inputs[index].name} shares"
        for arena in self.context.group.arenas:  # a buffer may serve graphs of several
            if arena.in_flight:
                for index, buffer in self._copied:
                    if buffer.users > 1 and not buffer.free_for(leaves[index], arena.passes):
                        return f"the copy of another {self.inputs[index].name} is still needed"
        if not self.starts_early or careful:
            unfit = self.changed()
        else:
            unfit = "a tensor it reads has moved to another address" if self.watch.gone() else None
        return unfit or self.recording.host_draws.choose_otherwise()

    def changed(self) -> str | None:
        """What is no longer as it was at the capture, or None."""
        return self.watch.changed()

    def random_state(self) -> tuple[Any, list]:
        """Where the generators are that it and its code draw from; for `set_random_state`."""
        device = self.context.group.backend.random_state() if self.random else None
        return device, self.recording.host_draws.states()

    def set_random_state(self, state: tuple[Any, list]) -> None:
        """Puts these generators to where they were."""
        device, host = state
        put_back(host)
        if self.random:
            self.context.group.backend.set_random_state(device)

    def load(self, leaves: list[Tensor]) -> None:
        """Brings the arguments to where the graph reads them, and keeps what it is about to change."""
        passes = self.tape.arena.passes
        for index, buffer in self._copied:
            self.context.counters.copied_bytes += buffer.load(leaves[index], passes, self.context)
        if self.advanced:
            self.before = [tensor.clone() for tensor in self.advanced]

    def forget_arguments(self) -> None:
        """Lets go of what its arguments were copied from, after a pass."""
        for _, buffer in self._copied:
            buffer.forget()

    def launch_first(self) -> None:
        """Replays for the first time, which gives the results of the call that was captured, and takes its place on the
        tape."""
        self.before = self.graph.before(self.advanced) if self.advanced else None
        self.launch()
        self.index = self.tape.append(self)

    def launch(self) -> None:
        """Replays all of it, once more or for the call that was captured."""
        self.graph.replay()
        self._after()

    def launched(self, leaves: list[Tensor]) -> None:
        """Its graph was replayed in the place of a call with these tensor arguments."""
        self.launches += 1
        self.recording.host_draws.advance()
        self._after(leaves)

    def _after(self, leaves: list[Tensor] | None = None) -> None:
        """Does what the captured Python code did to gradients and version counters; `leaves` are the call's tensor
        arguments, if it had others than the call before."""
        for parameter, left in self._grads_after:
            grad = left
            if isinstance(left, GradientBuffer):
                grad = left.copy() if self.entry.copies_out else left.tensor
            if parameter.grad is not grad:
                parameter.grad = grad
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        for index in self._arguments_written:
            torch.autograd.graph.increment_version(self.inputs[index].tensor if leaves is None else leaves[index])
