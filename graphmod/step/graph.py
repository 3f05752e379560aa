"""A captured call: how it is captured, what one replay does, and whether it may still stand for its call (rule R8)."""

from __future__ import annotations

import operator
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor

from graphmod.backend.cuda import renew_gradient_accumulators
from graphmod.errors import CaptureRefused, Diverged, SuccessorFailed
from graphmod.errors import reason as failure
from graphmod.guards.changes import NOT_REPLAYED, name_of
from graphmod.guards.guards import Guards, put
from graphmod.guards.hooks import HookWatch, has_gradient_hooks
from graphmod.signature.call import Call, Flat, Given
from graphmod.signature.flattening import rebuild
from graphmod.signature.modes import AUTOCAST
from graphmod.step.arena import Tape
from graphmod.step.context import Context
from graphmod.step.eager_parts import EagerParts, Versions, present
from graphmod.step.entry import Entry
from graphmod.step.gradients import GradientBuffer, as_memory, is_split, leave_behind, left_behind, memory_of, part
from graphmod.step.recording import Recording
from graphmod.step.results import Results, resolved
from graphmod.step.static_inputs import StaticInput, named_arguments, static_inputs, unlike_eager
from graphmod.torch_private import next_sequence_number, top_saved_tensors_hooks
from graphmod.trace.generators import put_back
from graphmod.trace.operations import address
from graphmod.trace.recorder import Follower
from graphmod.trace.undo import Undo, let_through, undoing

_grad, _data_ptr, _requires_grad = operator.attrgetter("grad"), Tensor.data_ptr, operator.attrgetter("requires_grad")
ELSEWHERE = "another rank could not capture it"
READS_OTHERWISE = "a truth value that it reads on the host is another than when it was captured"
ALIGNED_OTHERWISE = "an argument begins at another place within 16 bytes than when it was captured"


class StepGraph:
    """One captured call of one callable for one signature, whose results have no backward; see `layers.graph` for
    those that have.

    Attributes:
        tape, index: its place in the order of its pool.
        function: what is called.
        results: what it returns.
        parameters: leaf tensors from outside that its results have a backward for: none.
        stand_ins: parameter (by identity) -> the view of it that the capture works with, see `own_ends`.
        advanced, before: tensors from outside that it changes and that may have a part in its results, and what they
            were before the last replay; None where nobody knows. Only a backward asks for them.
        launches: how often it was replayed.
        looks: whether a replay has to look at what the code reads (`reads_otherwise`).
        backward: None here; of those that have one, the captured backward.
        recording: the `Recording` of the eager call it stands on.
        parts: the calls that are made between its graphs; None where there are none.
        successor, succeeded: code whose graph is to take the place of this one's, and whether it has run once; see
            `wrap.extension`.
    """

    def __init__(self, context: Context, entry: Entry, tape: Tape, recording: Recording) -> None:
        self.context, self.entry, self.tape, self.recording = context, entry, tape, recording
        self.index = -1
        self.graph: Any = None
        self.advanced: list[Tensor] = []
        self.before: list[Tensor] | None = None
        self.inputs: list[StaticInput] = []
        self.parameters: list[Tensor] = []
        self.backward: Any = None
        self.stand_ins: dict[int, Tensor] = {}
        self.successor: Callable[[], None] | None = None
        self.succeeded = False
        self.launches = 0
        self._missed = False
        self.looks = False
        self.parts: EagerParts | None = None
        self._carried: list[Tensor] = []
        self._flags: list[tuple[Tensor, bool]] = []

    # -- capture -------------------------------------------------------------------------------------------------

    def capture(self, call: Call) -> tuple[Any, list]:
        """Captures a call; the first `replay` of the captured graph is still to come.

        Returns:
            Where the generators were before it; for `set_random_state`.

        Raises:
            CaptureRefused: with a reason for the user.
            Exception: whatever the captured code raised.
        """
        context, entry, group, recording = self.context, self.entry, self.context.group, self.recording
        self.function = call.function
        guards, generators = recording.guards, recording.generators
        otherwise = guards.carries_otherwise(call.leaves)
        if otherwise is not None:
            raise CaptureRefused(otherwise)
        guarded = {*map(address, guards.tensors)} if recording.parts else ()
        shared = next((name for name, leaf in named_arguments(entry, call) if address(leaf) in guarded), None)
        if shared is not None:
            raise CaptureRefused(
                f"has an eager part, and {shared} shares memory with what the callable reads; pass a copy of it"
            )
        self.keep_carried()
        carried = zip([name_of(place.note) for place in guards.carried], self._carried, strict=True)
        self.inputs, identities = static_inputs(self, call, list(carried)), set(map(id, call.leaves))
        given = [static.tensor for static in self.inputs]
        inside = Call(call.function, *rebuild(entry.signature.structure, given))
        passed = Given(inside)
        owned = guards.parameters()
        # Puts back what the capture finds, where it fails (rule R7).
        bring_back = present(recording, owned, (*generators, random._inst, numpy.random.mtrand._rand))
        random_state = group.backend.random_state(), recording.host_draws.states()
        before = list(map(_grad, owned))
        versions = Versions([tensor for tensor in guards.tensors if not tensor.is_inference()])
        grads = list(map(memory_of, before))
        saving, inside.oldest = self._saving(inside), next_sequence_number()

        def run() -> Flat:
            with saving:
                value = inside()
                result = resolved(value, [there for _, _, there in guards.bound_now()], recording.kept)
            return result

        def check(recorder: Follower, result: Flat) -> None:
            reason = passed.changed() or passed.returned(result)
            writes_back = not (recording.parts or recording.differentiable)
            reason = reason or unlike_eager(self.inputs, self.given(call.leaves), recorder, writes_back)
            if any(id(place.note.owner) in self.stand_ins for place in guards.carried):
                reason = reason or "gives other memory to a parameter in whose place the capture has a view"
            if reason is not None:
                raise CaptureRefused(reason)
            there = Counter(address(part(grad)) for grad in grads if grad is not None)
            for parameter, grad in zip(owned, grads, strict=True):
                left = parameter.grad
                if left is not None and there[where := address(part(left))] > (left is grad):
                    recorder.outside.setdefault(where, part(left).detach())  # of another parameter: is to be watched
            held = {*map(id, owned), *(id(tensor) for _, _, tensor in guards.slots)}
            self.results = Results(self, result, given, recorder, held, owned)
            self._find_parameters(inside, identities, recorder)

        def capture(undo: Undo) -> Any:
            memory, ends = as_memory(owned), own_ends(self, identities)
            found = context.found.in_place() if recording.parts else nullcontext()
            if recording.parts:
                self.parts = EagerParts(self, call, given, owned, memory, ends, found)
            undo.enter(memory)
            undo.enter(ends)
            undo.enter(found)
            for place, static in zip(guards.carried, given[len(call.leaves) :], strict=True):
                put(place.container, place.note, static)
            undo.keep_modes()
            pool, script = self.tape.arena.pool, recording.script
            split = not generators and (not entry.account.failures or bool(script.late))
            return group.backend.capture(
                run, pool, given, generators, check, split=split, script=script, parts=self.parts
            )

        captured = None
        try:
            captured, _ = undoing(capture)
            changed = guards.moved() or guards.changed(gradients=False)
            if changed is not None:
                raise CaptureRefused(f"changes its own state as it runs, {NOT_REPLAYED}: {changed}")
            seen = captured.seen
            self.guards = GraphGuards(guards, seen, owned, grads, owned if recording.backward else self.parameters)
            refuse_unseen(seen, self.guards.unseen)
            if context.agreement is not None and not context.agreement.captured(True):
                raise CaptureRefused(ELSEWHERE)
            self._flags = seen.flags
            if self._flags:
                self._look_first(captured, owned, before)
        except BaseException as error:
            if captured is not None:
                captured.discard()
            if self.parts is None or not self.parts.began:
                group.backend.set_random_state(random_state[0])
                bring_back()
            else:
                self.parts.cut_short(error)
            raise
        self.graph = captured
        since = before if self.parts is None else self.parts.finish(captured)
        self._grads_after = left_behind(owned, since, given, seen.made, entry)
        self._advances = (versions if self.parts is None else self.parts.versions).raised()
        self._changed = seen.written.keys() | seen.inputs_written  # no argument that is copied may lie there
        written = [(i, one) for i, one in enumerate(self.inputs) if address(one.tensor) in seen.inputs_written]
        self._arguments_written = [i for i, one in written if one.buffer is None and not one.tensor.is_inference()]
        self._back = [(i, one.tensor) for i, one in written if one.buffer is not None]
        self._read_at = frozenset(seen.outside) if self._back else frozenset()
        self.random = seen.random
        self.advanced = list(seen.advanced.values()) if self.results.with_grad else []
        # Gradients that it leaves behind lie in the pool and may be accumulated into by whoever runs instead; its own
        # generators would have to be put back.
        self.starts_early = self.graph.start is not None and not generators and not self._grads_after
        self.looks = bool(self._flags)
        copied = [(i, one.buffer, one.tensor) for i, one in enumerate(self.inputs) if one.buffer is not None]
        self._copied = [(i, buffer) for i, buffer, one in copied if address(one) in seen.read]  # others stay unused
        self._adopted = [(i, one.pointer) for i, one in enumerate(self.inputs) if one.buffer is None]
        for _, buffer in self._copied:
            buffer.users += 1
            group.buffers.add(buffer)
        self.stands_alone = not (
            self.results.handed_out or guards.bound or self._copied or recording.host_draws or self.parts or self._flags
        )
        seen_by_parts = [] if self.parts is None else self.parts.lent
        lent = [left for _, left in (*seen_by_parts, *self._grads_after) if isinstance(left, GradientBuffer)]
        self.tape.hand_out(self.results.handed_out + lent)
        if self._grads_after or seen_by_parts:
            self.tape.arena.kept_to = self.tape
        for output in self.results.handed_out:
            group.static[output.tensor.data_ptr()] = output.tensor
        if not self.results.with_grad:
            self.forget_autograd()
        return random_state

    def _look_first(self, captured: Any, owned: list[Tensor], grads: list[Tensor | None]) -> None:
        """Launches a capture up to what it first changes, for the call that was captured, and looks at what it reads.

        Raises:
            CaptureRefused: it reads something else than was captured, or does not come so far without a change.
        """
        left = any(p.grad is not grad for p, grad in zip(owned, grads, strict=True))
        late = self.recording.script.late.values()
        if captured.start is None or left or self.recording.generators or self.context.agreement:
            raise CaptureRefused(str(next(iter(late))))
        captured.start()
        if self.reads_otherwise():
            raise Diverged(READS_OTHERWISE)

    def reads_otherwise(self) -> bool:
        """Whether the part that was launched has computed another truth value than one by which the captured code went;
        waits for the GPU."""
        if not self._flags:
            return False
        began = time.perf_counter()
        flags, known = zip(*self._flags, strict=True)
        now = torch.stack([flag.reshape(()) for flag in flags]).tolist()
        self.context.counters.host_read_seconds += time.perf_counter() - began
        return now != list(known)

    def missed_again(self) -> bool:
        """Takes in that a replay was stopped because its code reads something else; whether so was the one before."""
        before, self._missed = self._missed, True
        return before

    def _saving(self, inside: Call) -> AbstractContextManager:
        """In what the capture runs. It keeps hooks for saved tensors from around the call (an outer checkpoint) out of
        that: what a graph saves stays in its pool."""
        if top_saved_tensors_hooks(True) is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

    def _find_parameters(self, inside: Call, identities: set[int], recorder: Follower) -> None:
        """Looks, within the capture, at what the results of the call that is captured were computed from; `identities`
        are those of the tensors that its arguments stand for."""

    def forget_autograd(self) -> None:
        """Lets go of what the capture left behind for autograd."""
        self.stand_ins = {}

    # -- replay --------------------------------------------------------------------------------------------------

    def given(self, leaves: list[Tensor]) -> list[Tensor]:
        """The tensors that a replay is given: a call's tensor arguments, and what it finds at the places that it binds
        anew from what is there."""
        return [*leaves, *self._carried] if self._carried else leaves

    def keep_carried(self) -> None:
        """Takes what is at these places now for what the next replay finds there."""
        self._carried = [place.now() for place in self.recording.guards.carried]

    def unfit(self, leaves: list[Tensor], careful: bool) -> str | None:
        """Why this graph cannot take these arguments at these addresses, or None. Unless `careful`, a graph that starts
        early leaves the rest of the check to `guards`, after its start."""
        guards = self.recording.guards
        otherwise = guards.carries_otherwise(leaves) or guards.finds_elsewhere(leaves)
        if otherwise is not None:
            return otherwise
        self.keep_carried()
        leaves = self.given(leaves)
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
        given_at = list(map(address, leaves)) if self._back else []
        for index, _ in self._back:
            if given_at[index] in self._read_at or given_at.count(given_at[index]) > 1:
                return f"it changes memory that {self.inputs[index].name} shares"
        for arena in self.context.group.arenas:  # a buffer may serve graphs of several
            if arena.in_flight:
                for index, buffer in self._copied:
                    if buffer.users > 1 and not buffer.free_for(leaves[index], arena.passes):
                        return f"the copy of another {self.inputs[index].name} is still needed"
        if not self.starts_early or careful:
            unfit = self.guards.changed()
        else:
            unfit = "a tensor it reads has moved to another address" if self.guards.gone() else None
        if unfit is None:
            draws = self.recording.host_draws
            unfit = draws.choose_otherwise(leaves)
            if draws.given:
                self.context.counters.host_read_seconds += draws.given.seconds
        return unfit

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
        if self.parts is not None:
            self.parts.begin()
        passes, given = self.tape.arena.passes, self.given(leaves)
        for index, buffer in self._copied:
            self.context.counters.copied_bytes += buffer.load(given[index], passes, self.context)
        if self.advanced:
            self.before = [tensor.clone() for tensor in self.advanced]

    def forget_arguments(self) -> None:
        """Lets go of what its arguments were copied from, after a pass."""
        for _, buffer in self._copied:
            buffer.forget()

    def launch_first(self, leaves: list[Tensor]) -> None:
        """Replays for the first time, which gives the results of the call that was captured, with these tensor
        arguments, and takes its place on the tape."""
        self.before = self.graph.before(self.advanced) if self.advanced else None
        if self.parts is not None:
            self.parts.launch_last()
        elif self._flags:
            self.graph.finish()
        else:
            self.graph.replay()
        self._after(leaves, again=False)
        self.index = self.tape.append(self)

    def replay(self, leaves: list[Tensor]) -> None:
        """Launches it in the place of a call with these tensor arguments."""
        if self.parts is None:
            self.graph.replay()
        else:
            self.parts.replay(leaves)

    @property
    def began_parts(self) -> bool:
        """Whether the call under way has called an eager part, so that it cannot be begun again."""
        return self.parts is not None and self.parts.began

    def launch(self) -> None:
        """Replays all of it once more, with the arguments of the call that was captured."""
        self.graph.replay()
        self._after([one.tensor for one in self.inputs])

    def launched(self, leaves: list[Tensor]) -> None:
        """Its graph was replayed in the place of a call with these tensor arguments."""
        self.launches += 1
        self._missed = False
        if self.parts is None:  # else before the first of them
            self.recording.host_draws.advance()
        self._after(leaves)

    def replace_by(self, run: Callable[[], None]) -> None:
        """Has other code take the place of this graph, from the next call on; see `wrap.extension`."""
        self.successor = run

    def run_successor(self) -> bool:
        """Lets the successor do this call: itself, when it is asked for the first time, since it may load and compile
        what no capture may; the second time by a graph that is captured now, whose replay must come at once.

        Returns:
            Whether the call is done. Where not, the graph, or what was captured in its place, is to do it.

        Raises:
            SuccessorFailed: it failed, and may have changed something.
        """
        context, run, first = self.context, self.successor, not self.succeeded
        assert run is not None, "asked where there is one"
        began = time.perf_counter()
        self.succeeded = True
        try:
            if first:
                run()
                return True
            self._capture_successor(run)
            context.counters.capture_seconds += time.perf_counter() - began  # no capture of the call: there is one
        except Exception as error:
            let_through(error)
            if first:
                self.successor = None
                raise SuccessorFailed(
                    f"{context.name!r}: code that was to take the place of its graph failed: {failure(error)}. It may "
                    "have changed something, so begin again; the graph does all further calls"
                ) from error
            context.log_once(f"{context.name!r} keeps the kernels it has: {failure(error)}")
        return False

    def _capture_successor(self, run: Callable[[], None]) -> None:
        self.successor = None
        backend = self.context.group.backend
        backend.prepare_capture()
        captured, result = backend.capture(run, self.tape.arena.pool, [], [], split=False)
        if result is not None or captured.seen is None or not captured.seen.outside:
            captured.discard()
            raise CaptureRefused(
                "code that takes the place of a graph returns nothing, and works on tensors from outside"
            )
        self.graph, self.starts_early = captured, False

    def _after(self, leaves: list[Tensor], again: bool = True) -> None:
        """Does what the captured code did to gradients, version counters, and those of the call's tensor arguments that
        were copied; `again`: the capture itself has raised the versions of what is no argument."""
        given = self.given(leaves)
        leave_behind(self._grads_after, given, self.entry.copies_out)
        if again and self._advances:
            torch.autograd.graph.increment_version(self._advances)
        for index in self._arguments_written:
            torch.autograd.graph.increment_version(leaves[index])
        for index, memory in self._back:
            given[index].detach().copy_(memory)


class own_ends:
    """Lets the autograd graph of a capture end at AccumulateGrad nodes of its own; whoever comes after it makes others
    again.

    Such a node keeps the stream on which it was made, and lives as long as anything that leads to it. A capture that
    ended at one of the caller's stream would fork to that stream; gradients that eager code accumulated at one of the
    capture stream would run there, where nothing is to run. So captures get nodes, or views in front of them, of their
    own.

    Where a parameter's node must stay as it is, modules have a view of it instead, at which the capture ends, and which
    is noted in `graph.stand_ins`. Those are parameters that are used outside of this graph too, those with gradient
    hooks, which the node runs, and all of them while an eager call of the module waits for its backward. Code that runs
    its backward inside gets views of shared ones only: its gradients must reach the parameters themselves.

    Args:
        graph: about to be captured.
        given: the identities of its arguments. It has aliases of those, and calls before this one led to their nodes.
    """

    def __init__(self, graph: StepGraph, given: set[int]) -> None:
        context, group, found = graph.context, graph.context.group, graph.recording.guards
        self._graph, self._backend = graph, group.backend
        owned, with_grad = found.parameters(), torch.is_grad_enabled()
        runs_backward = graph.recording.backward and not context.is_module
        kept = owned if context.waiting() else [parameter for parameter in owned if has_gradient_hooks(parameter)]
        held = {id(names) for names, _, _ in found.attributes}
        elsewhere = {id(tensor) for container, _, tensor in found.slots if id(container) not in held}
        wanted = {*group.shared, *map(id, () if runs_backward else kept)} - elsewhere
        # Autocast keeps its casts of parameters, not of views. What a first attempt trips over, a second goes without.
        casts = graph.entry.signature.modes[AUTOCAST]
        if not with_grad or (casts is not None and casts[-1]) or graph.entry.account.failures:
            wanted = set()
        self._places = [place for place in found.attributes if id(place[2]) in wanted and place[2].requires_grad]
        self._parameters: dict[int, Tensor] = {id(parameter): parameter for _, _, parameter in self._places}
        # Then the backward goes on behind the views, to nodes of the capture too.
        self._within = runs_backward and not group.busy
        known = {id(parameter): parameter for parameter in (*owned, *context.around.parameters)}
        keep = self._parameters.keys() | group.shared.keys()
        keep |= given - {id(one) for *_, one in (*found.attributes, *found.slots)}
        if not self._within:  # whoever leads to the node of now runs the hooks, too
            keep |= {key for key, parameter in known.items() if has_gradient_hooks(parameter)}
        self._renewed = [parameter for key, parameter in known.items() if key not in keep] if with_grad else []
        self._renewed += self._parameters.values() if self._within else ()

    def __enter__(self) -> None:
        renew_gradient_accumulators(self._renewed)
        views = self._backend.views(list(self._parameters.values()), self._within)
        self._graph.stand_ins = dict(zip(self._parameters, views, strict=True))
        self.stand_in()

    def __exit__(self, *_: object) -> None:
        self.stand_back()
        renew_gradient_accumulators(self._renewed)

    def stand_in(self) -> None:
        """Puts the views in place."""
        for names, key, parameter in self._places:
            names[key] = self._graph.stand_ins[id(parameter)]

    def stand_back(self) -> None:
        """Puts the parameters themselves in place."""
        for names, key, parameter in self._places:
            names[key] = parameter


def _where(grad: Tensor | None) -> int:
    return 0 if grad is None else part(grad).data_ptr()


class GraphGuards:
    """Compares the present with the moment of a capture: the guards of the recorded call, the gradients it met, and the
    tensors that it reads by address, which are held.

    Args:
        guards: of the recorded call.
        seen: the record of the capture; what that read without being given it is held from now on.
        parameters: leaf tensors whose `.grad` the capture may have read or set.
        grads: their gradients before the capture.
        differentiated: the leaf tensors whose gradients the graph computes, or leaves behind.

    Attributes:
        unseen: the addresses of tensors from outside to which no guard leads, so that what takes their place goes
            unnoticed.
    """

    def __init__(
        self,
        guards: Guards,
        seen: Follower,
        parameters: list[Tensor],
        grads: list[Tensor | None],
        differentiated: list[Tensor],
    ) -> None:
        self._guards, outside = guards, seen.outside
        self.held = list(outside.values())
        # What may be read before anything that lasts is changed. Kernels that the recorder cannot see may read whatever
        # it does not know.
        last = len(seen.trace) if seen.first_write is None else seen.first_write
        self._early = [tensor for where, tensor in outside.items() if seen.first_seen.get(where, last) <= last]
        self._early += [tensor for tensor in guards.staying if address(tensor) not in outside]
        self._early_at = list(map(_data_ptr, self._early))
        found_at = {address(tensor) for tensor in guards.tensors}
        found_at.update(address(part(grad)) for grad in grads if grad is not None)
        self.unseen = [where for where in outside if where not in found_at]
        self._hooks = HookWatch(differentiated)
        self._differentiated = differentiated
        # A gradient that was read must be the same. One that was absent must be absent again if a backward ran, and one
        # that was there but never read had been cleared inside, and may be anything.
        watched = [
            (p, g)
            for p, g in zip(parameters, grads, strict=True)
            if (seen.backward if g is None else address(part(g)) in outside)
        ]
        self._with_grads = [p for p, _ in watched]
        self._grads = [g for _, g in watched]
        self._split = any(is_split(g) for g in self._grads if g is not None)  # whose part may be exchanged
        self._grad_addresses = list(map(_where, self._grads))

    def gone(self) -> bool:
        """Whether memory is gone that is read before anything lasting is changed: all that has to be known before that
        part is launched. What was read is held, but a storage can be emptied (`resize_(0)`) or moved, and its memory
        given back, all the same."""
        return list(map(_data_ptr, self._early)) != self._early_at

    def changed(self) -> str | None:
        """What is no longer as it was, in words; None when nothing changed."""
        reason = self._guards.moved() or self._guards.changed()
        if reason is not None:
            return reason
        return self._hooks.changed() or (self._moved_grads() if self._with_grads else None)

    def differentiated_otherwise(self) -> str | None:
        """What has been done since to the parameters, so that autograd would treat their gradients otherwise, in
        words."""
        if not all(map(_requires_grad, self._differentiated)):
            return "a parameter does not require grad any more"
        return self._hooks.added()

    def _moved_grads(self) -> str | None:
        now: list[Any] = list(map(_grad, self._with_grads))
        if not self._split and all(map(operator.is_, now, self._grads)):
            return None
        if list(map(_where, now)) != self._grad_addresses:
            return "the gradients it accumulates into or reads differ from those at capture"
        return None


def refuse_unseen(seen: Follower, unseen: Iterable[int]) -> None:
    """Refuses tensors that a graph would read by address although no guard leads to them: nobody would notice if the
    code found another in their place.

    Args:
        seen: the record of the capture.
        unseen: their addresses.

    Raises:
        CaptureRefused: naming the first of them.
    """
    for where in unseen:
        tensor, index = seen.outside[where], seen.first_seen.get(where)
        if index is None:
            continue  # returned as it is, and never read
        step = seen.trace[index]
        if where in seen.static:
            continue
        kind = f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
        raise CaptureRefused(
            f"reads a {kind} at {step.location} that was found neither among its arguments nor in an attribute, "
            "variable or item that its code reads, so that another in its place would go unnoticed. Pass it as an "
            "argument, or mark_static(tensor) if it stays for good"
        )
