"""One wrapped callable whose results may have a backward, outside of its graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphmod.guards.guards import Guards
from graphmod.guards.hooks import several_hooks
from graphmod.layers.autocast import Block, as_it_is, block_of_now, casts_of_its_own, learn_casts, shares_casts
from graphmod.layers.graph import DRAWN_BEFORE, DRAWS, LayerGraph, Ticket, inputs_drawn_anew
from graphmod.layers.group import LayerGroup
from graphmod.layers.node import InTurn, apply_replayed
from graphmod.layers.recorded import RecordedBackward, for_plain_backwards, record_backward
from graphmod.layers.uses import learn_uses
from graphmod.ranks.fully_shard import reads_parts
from graphmod.signature.call import Call
from graphmod.step.arena import Tape
from graphmod.step.context import Context
from graphmod.step.dispatch import eager
from graphmod.step.entry import Entry
from graphmod.step.recording import Recording
from graphmod.torch_private import checkpoint_of
from graphmod.trace.undo import under_way, within

_KEPT = "graphmod"  # as an attribute: what is kept weakly runs code where it dies, in a backward that is recorded
COMMUNICATES = (
    "communicates with other processes to collect its parameters (fully_shard), and so does its backward, which is no "
    "part of the call; wrap the whole step"
)


def refused_with_backward(call: Call, guards: Guards, random: bool, communicates: bool) -> str | None:
    """Why a call that was made is not to be captured with a backward outside of it; None where it may be.

    Args:
        guards: what its code read.
        random, communicates: whether it drew random numbers; whether other processes took part in it.
    """
    if random and inputs_drawn_anew() is not None:
        return DRAWS
    if communicates and call.result.differentiable and reads_parts(guards.tensors):
        return COMMUNICATES
    return for_plain_backwards(call)


class EagerCall:
    """A warm-up call whose backward is still to come. No tape starts while one is in flight, because the tape would
    then begin in the middle of an iteration."""

    __slots__ = ("__weakref__", "done", "entry", "group")

    def __init__(self, group: LayerGroup, entry: Entry) -> None:
        self.group, self.entry, self.done = group, entry, False
        group.eager_in_flight += 1

    def backward_began(self, _: Any) -> None:
        if not self.done:
            self.entry.backward_began(self.group.begun)
        self.group.first_backward()
        self.finish()

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self.group.eager_in_flight -= 1

    __del__ = finish


@dataclass
class Checkpointed:
    """The calls that a checkpoint runs, or those of them that came again.

    Attributes:
        graphs: of each call at first, in order: the wrapper, in how many others it was, the graph that served it. What
            is recorded or captured has no calls inside.
        come: how many came again.
        depth: how many are under way, one in the other.
    """

    graphs: list[tuple[LayerContext, int, Any]] = field(default_factory=list)
    come: int = 0
    depth: int = 0

    def next(self, context: LayerContext, depth: int) -> Any:
        """The graph that served a call at first; None where none did."""
        known = self.graphs[self.come] if self.come < len(self.graphs) else None
        if known is None or known[0] is not context or known[1] != depth:
            return None
        self.come += 1
        return known[2]


def _again(call: Call, graph: LayerGraph | None) -> Any:
    """A call that comes again: as it ran at first. A graph saves nothing that the checkpoint sees, and in its backward
    it writes what the call writes."""
    if graph is None:
        return call()
    written = [(tensor, tensor.clone()) for tensor in graph.graph.seen.written.values()]
    depth = under_way.again
    try:
        under_way.again = depth + 1
        # What is saved as it is, of a result, would hold that result for good.
        return within(torch.autograd.graph.saved_tensors_hooks(Tensor.detach, as_it_is), call=call)
    finally:
        under_way.again = depth
        with torch.no_grad():
            for tensor, before in written:
                tensor.copy_(before)


class LayerContext(Context):
    """One wrapped callable, and what is known of backwards of its results."""

    # pyrefly: ignore[bad-override-mutable-attribute] -- whoever makes one gives it a group of this kind
    group: LayerGroup

    def start(self) -> None:
        super().start()
        self._eager_calls: weakref.WeakSet[EagerCall] = weakref.WeakSet()
        self._block: weakref.ref[Block] | None = None  # of autocast, in which the last call was that keeps casts

    def among_hooks(self, pack: Callable, call: Call, run: Callable[[], Any]) -> Any:
        """A call in a checkpoint, which counts what autograd saves, and runs the call again for the backward."""
        known = checkpoint_of(pack)
        if known is None or not torch.is_grad_enabled():
            return run()
        frame, again = known
        calls = vars(frame).setdefault(_KEPT, Checkpointed())
        if again:
            calls = vars(pack).setdefault(_KEPT, Checkpointed(calls.graphs))
        depth = calls.depth
        try:
            calls.depth = depth + 1
            if again:
                return _again(call, calls.next(self, depth))
            calls.graphs.append((self, depth, None))
            place, given = len(calls.graphs) - 1, inputs_drawn_anew()
            if given is None or given.issuperset(map(id, call.leaves)):
                result = run()
            else:
                self.log_once(f"{self.name!r} runs eagerly: it {DRAWN_BEFORE}")
                result = eager(self, call)
            calls.graphs[place] = self, depth, self.served
            return result
        finally:
            calls.depth = depth

    def waiting(self) -> int:
        return sum(not call.done for call in self._eager_calls)

    def shares_casts(self, entry: Entry) -> bool:
        if not any(p.requires_grad and p.dtype is torch.float32 for p in self.around.parameters):
            return False
        block = block_of_now(self.group.backend.device)
        before, self._block = self._block, weakref.ref(block)
        return shares_casts(self, entry, before is not None and before() is block)

    def own_casts(self, entry: Entry) -> AbstractContextManager:
        return casts_of_its_own(self, entry)

    def refuses(self, call: Call, recording: Recording) -> str | None:
        recording.its_backward = RecordedBackward()
        return refused_with_backward(call, recording.guards, recording.random, recording.communicates)

    def learn_uses(self, entry: Entry, call: Call, recording: Recording) -> None:
        learn_uses(self, entry, call)
        if recording.refused is None and call.result.differentiable:
            record_backward(self, entry, recording, call)
        if entry.keeps_casts:
            learn_casts(self, entry, call)
            entry.cast_apart(once=entry.casts_once and not recording.guards.compiled)

    def awaits_backward(self, entry: Entry, recording: Recording) -> bool:
        if recording.its_backward.wanted:
            recording.its_backward.wanted -= 1
            return True
        unknown = entry.needs_grad and not recording.its_backward.guards
        if unknown and several_hooks(recording.guards.parameters()):
            self.log_once(f"{self.name!r} runs eagerly until a backward has shown the order of its gradient hooks")
            return True
        return False

    def eager_result(self, entry: Entry, call: Call, recording: Recording | None = None) -> Any:
        if recording is not None and recording.its_backward.awaited:
            record_backward(self, entry, recording, call)
        for tensor in call.result.differentiable[:1]:
            if entry.expect_backward() and not self.group.busy:
                self.group.begin_pass()
            waiting = EagerCall(self.group, entry)
            self._eager_calls.add(waiting)
            tensor.register_hook(waiting.backward_began)
        return call.result.value

    def new_graph(self, entry: Entry, tape: Tape, recording: Recording) -> LayerGraph:
        return LayerGraph(self, entry, tape, recording)

    def results(self, graph: Any, leaves: list[Tensor], random_state: Any) -> Any:
        given = graph.given(leaves)
        if not graph.results.with_grad:
            return graph.results.make(given, ())
        ticket = Ticket(graph, random_state)
        inputs = [leaves[i] for i in graph.differentiable]
        through = graph.through_autograd
        if graph.in_turn:
            through = list(through)
            for place in graph.in_turn:
                through[place] = InTurn.apply(through[place])
        result = graph.results.make(given, apply_replayed(ticket, self.group.anchor, *inputs, *through))
        if graph.inside:
            ticket.watch(result)
        return result
