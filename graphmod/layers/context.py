"""One wrapped callable whose results may have a backward, outside of its graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

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


class LayerContext(Context):
    """One wrapped callable, and what is known of backwards of its results."""

    # pyrefly: ignore[bad-override-mutable-attribute] -- whoever makes one gives it a group of this kind
    group: LayerGroup

    def start(self) -> None:
        super().start()
        self._eager_calls: weakref.WeakSet[EagerCall] = weakref.WeakSet()
        self._block: weakref.ref[Block] | None = None  # of autocast, in which the last call was that keeps casts

    def among_hooks(self, pack: Callable, call: Call, run: Callable[[], Any]) -> Any:
        """A call in a checkpoint, which counts what autograd saves, and runs the call again for the backward: as it ran
        at first. A graph saves nothing that others see; so where one served it, this is an eager call of which the
        checkpoint does not know what it saves."""
        known = checkpoint_of(pack)
        if known is None or not torch.is_grad_enabled():
            return run()
        frame, again = known
        # With the checkpoint: of each call, in order, whether a graph served it. With the hook: how many came again.
        served = vars(frame).setdefault(_KEPT, {}).setdefault(self, [])
        if not again:
            given = inputs_drawn_anew()
            if given is None or not any(tensor.requires_grad and id(tensor) not in given for tensor in call.leaves):
                result = run()
            else:
                self.log_once(f"{self.name!r} runs eagerly: it {DRAWN_BEFORE}")
                result = eager(self, call)
            served.append(self.served is not None)
            return result
        counts = vars(pack).setdefault(_KEPT, {})
        place = counts[self] = counts.get(self, -1) + 1
        if not any(served[place : place + 1]):
            return call()
        depth = under_way.again
        try:
            under_way.again = depth + 1
            return within(torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is), call=call)
        finally:
            under_way.again = depth

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
        recording.its_backward = RecordedBackward(recording.functions)
        if recording.random and inputs_drawn_anew() is not None:
            return DRAWS
        if recording.communicates and call.result.differentiable and reads_parts(recording.guards.tensors):
            return COMMUNICATES
        return for_plain_backwards(call)

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
        outputs: tuple[Tensor, ...] = ()
        if graph.results.with_grad:
            ticket = Ticket(graph, random_state)
            inputs = [leaves[i] for i in graph.differentiable]
            through = graph.through_autograd
            if graph.in_turn:
                through = list(through)
                for place in graph.in_turn:
                    through[place] = InTurn.apply(through[place])
            outputs = apply_replayed(ticket, self.group.anchor, *inputs, *through)
        return graph.results.make(graph.given(leaves), outputs)
