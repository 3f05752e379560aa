"""Warm-up calls (rule R1), and what is to be learnt from calls that run without a graph."""

from __future__ import annotations

from typing import Any

import torch

from graphmod.call.together import alone
from graphmod.capture.recorded_backward import for_plain_backwards, nodes_of, watch_backward
from graphmod.capture.recording import record
from graphmod.errors import CaptureRefused
from graphmod.graph.casts import learn_casts
from graphmod.graph.checkpointed import DRAWS, draws_anew
from graphmod.graph.context import Context
from graphmod.graph.group import EagerCall
from graphmod.graph.uses import learn_uses
from graphmod.guards.hooks import on_accumulator
from graphmod.ranks.fully_shard import reads_parts
from graphmod.signature.call import Call, Flat
from graphmod.signature.modes import difference
from graphmod.state.entry import Entry
from graphmod.torch_private import current_node, next_sequence_number
from graphmod.trace import dispatch
from graphmod.trace.hazards import COMPILES


def warm_up(context: Context, entry: Entry, call: Call) -> Any:
    """An ordinary call; the last of some in a state that is new is recorded, because the first may create what later
    ones only use."""
    context.counters.eager_calls += 1
    context.served, context.eager_in = None, context.group.begun
    entry.called_forward = entry.called_forward or current_node() is None
    if entry.difference:
        context.last_failure = entry.eager_for = entry.difference
        if entry.graphs or entry.keeps_changing:
            _say_difference(context, entry)
    if entry.ordinary:
        entry.ordinary -= 1
        call.result = Flat(alone(context, entry, call))
    else:
        oldest = next_sequence_number()
        recording = alone(context, entry, lambda: record(call, context.group.gpu, context.root))
        outputs = call.result.differentiable
        if recording.settles:
            # Under the recorder functions of PyTorch are others, which compiled code may stand on. It may be compiled
            # once more, in a call like any other, and the one after that is recorded.
            context.spend(entry, 2)
            entry.lost = f"it {COMPILES.effect}, in each call"
            entry.ordinary = 1
            return track(context, entry, call)
        if recording.random and draws_anew():
            recording.refused = recording.refused or DRAWS
        if recording.refused is not None and torch.is_grad_enabled():  # which may be a consequence
            recording.refused = context.around.take_over() or recording.refused
        if recording.communicates and outputs and reads_parts(recording.guards.tensors):
            recording.refused = recording.refused or COMMUNICATES
        if not (recording.refused or recording.communicates) and context.group.whole.take(recording.guards.tensors):
            # The next call is recorded, at the addresses that stay.
            return track(context, entry, call)
        modes = difference(entry.signature.modes, context.group.modes())
        if modes and recording.refused is None:
            recording.refused = f"changes a mode of PyTorch ({modes[0]}), which no replay does; do it around the call"
        recording.refused = recording.refused or for_plain_backwards(nodes_of(outputs, call.leaves, oldest)[0])
        if outputs or recording.backward:
            trained = [one for one in (*recording.guards.parameters(), *context.around.parameters) if one.requires_grad]
            with torch.enable_grad():
                recording.refused = recording.refused or (ON_ACCUMULATOR if any(map(on_accumulator, trained)) else None)
        entry.add(recording)
        if dispatch.current() is None:  # else it is part of a larger recording
            returned = call.result.seen  # these the caller may use as he likes, which `ForwardGraph` sees to
            others = [one for one in context.around.parameters if id(one) not in returned]
            learn_uses(entry, call.leaves, outputs, others, context.group.share)
            if recording.refused is None and outputs:
                watch_backward(context, entry, recording, call, oldest)
            if entry.keeps_casts:
                learn_casts(context, entry, call.leaves, outputs, oldest)
                entry.casts_once = entry.casts_once and not recording.guards.compiled
        context.learn(recording.guards)
        if recording.refused is not None:
            # Before any attempt, so that the user's Python never runs twice for one call. The next one is recorded.
            if context.group.settle(context.config.backend, context.around.device([]), misguessed=True):
                entry.recordings.clear()
            else:
                context.failed(entry, CaptureRefused(recording.refused), "its forward")
        else:
            entry.ordinary = context.config.warmup_steps - 1
            context.spend(entry)
    return track(context, entry, call)


def _say_difference(context: Context, entry: Entry) -> None:
    if entry.other_branch:
        is_layer = type(context.root) in context.group.said.like
        parts = "after ungraph(model), graph_layers(model, layers=[...]) keeps the parts that it names"
        keep = parts if is_layer else "graph_layers(model) keeps the layers"
        others = "" if context.instead else f"; {keep} in graphs, whichever of them run"
        context.log_once(
            f"{context.name!r} runs eagerly where {entry.difference}. Branches that come often get a graph "
            f"each{others}",
            key="other branch",
        )
        return
    then = (
        "recorded and captured again, as after each such change"
        if entry.graphs
        else "recorded anew after each such change, so that there is no graph yet"
    )
    context.log_once(f"{context.name!r} runs eagerly: {entry.difference}. It is {then}", key=entry.difference)


COMMUNICATES = (
    "communicates with other processes to collect its parameters (fully_shard), and so does its backward, which is no "
    "part of the call; wrap the whole step"
)
ON_ACCUMULATOR = (
    "hooks are on the node of autograd that accumulates a parameter's gradient (grad_fn.next_functions, as in "
    "Megatron-core's DistributedDataParallel), which a graph does not run; use register_post_accumulate_grad_hook"
)


def track(context: Context, entry: Entry, call: Call) -> Any:
    """Watches for the backward of an eager call, and learns whether there will be one; returns the result."""
    for tensor in call.result.differentiable[:1]:
        if not entry.needs_grad:
            entry.needs_grad = True
            if not context.group.busy:
                context.group.begin_pass()
        waiting = EagerCall(context.group, entry)
        context.eager_calls.add(waiting)
        tensor.register_hook(waiting.backward_began)
    return call.result.value
