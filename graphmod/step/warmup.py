"""Warm-up calls (rule R1), and what is to be learnt from calls that run without a graph."""

from __future__ import annotations

from typing import Any

import torch

from graphmod.errors import CaptureRefused
from graphmod.guards.hooks import on_accumulator
from graphmod.signature.call import Call, Flat
from graphmod.signature.modes import difference
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.recording import record
from graphmod.step.together import alone
from graphmod.torch_private import current_node, next_sequence_number
from graphmod.trace import dispatch
from graphmod.trace.hazards import COMPILES


def warm_up(context: Context, entry: Entry, call: Call) -> Any:
    """An ordinary call; the last of some in a state that is new is recorded, because the first may create what later
    ones only use."""
    context.ran_eagerly()
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
            return context.eager_result(entry, call)
        recording.refused = recording.refused or context.refuses(call, recording, oldest)
        if recording.refused is not None and torch.is_grad_enabled():  # which may be a consequence
            recording.refused = context.around.take_over() or recording.refused
        if not (recording.refused or recording.communicates) and context.group.whole.take(recording.guards.tensors):
            # The next call is recorded, at the addresses that stay.
            return context.eager_result(entry, call)
        modes = difference(entry.signature.modes, context.group.modes())
        if modes and recording.refused is None:
            recording.refused = f"changes a mode of PyTorch ({modes[0]}), which no replay does; do it around the call"
        if outputs or recording.backward:
            trained = [one for one in (*recording.guards.parameters(), *context.around.parameters) if one.requires_grad]
            with torch.enable_grad():
                recording.refused = recording.refused or (ON_ACCUMULATOR if any(map(on_accumulator, trained)) else None)
        entry.add(recording)
        if dispatch.current() is None:  # else it is part of a larger recording
            context.learn_uses(entry, call, recording, oldest)
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
    return context.eager_result(entry, call)


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


ON_ACCUMULATOR = (
    "hooks are on the node of autograd that accumulates a parameter's gradient (grad_fn.next_functions, as in "
    "Megatron-core's DistributedDataParallel), which a graph does not run; use register_post_accumulate_grad_hook"
)
