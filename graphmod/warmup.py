"""Warm-up calls (rule R1), and what is to be learnt from calls that run without a graph.

May import what `forward` may, `forward`, `garbage` and `failures`; knows `module` by its attributes only.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphmod.arguments import Given
from graphmod.errors import CaptureRefused
from graphmod.failures import capture_failed
from graphmod.flattening import flatten
from graphmod.garbage import no_garbage_collection
from graphmod.group import EagerCall
from graphmod.hook_watch import modules_called
from graphmod.lifecycle import Entry
from graphmod.modes import difference
from graphmod.reach import NOT_REPLAYED
from graphmod.results import not_to_be_made_again, outline, resolved
from graphmod.signature import parameter_names
from graphmod.structure import opaque_parts
from graphmod.surroundings import SWITCHES_MODE
from graphmod.tracer import Tracer

if TYPE_CHECKING:
    from graphmod.module import CUDAGraphModule


def warm_up(module: CUDAGraphModule, entry: Entry, args: tuple, kwargs: dict) -> Any:
    """An ordinary call; the last one before the capture is recorded."""
    module._counters.eager_calls += 1
    module._served, module._eager_in = None, module._group.begun
    tracer = Tracer()
    record = entry.calls + 1 == module._config.warmup_steps
    found = module._around.now(*opaque_parts(entry.signature.structure)) if record else None
    before = found.state() if record else None
    training = module._around.training() if record else None
    given = Given(args, kwargs, parameter_names(module._call)) if record else None
    torch.clear_autocast_cache()  # what a graph casts, it casts itself; the recorded call must do so too
    with contextlib.ExitStack() as watching:
        if record:
            watching.enter_context(no_garbage_collection())
            watching.enter_context(given)  # before the tracer, which must not see what that does
            watching.enter_context(tracer)
            entry.called = watching.enter_context(modules_called())
        result = module._call(*args, **kwargs)
        result = resolved(result) if record else result
    entry.calls += 1
    entry.called_forward = entry.called_forward or torch._C._current_autograd_node() is None
    if record:
        entry.trace = tracer.trace
        entry.generators = tracer.generators
        returned = outline(result)
        refused = not_to_be_made_again(returned[0])
        entry.returned = returned if refused is None else None  # which may hold objects
        changed = found.changed_since(before)
        reason = given.changed() or given.returned(result) or refused
        modes = difference(entry.signature.modes, module._group.modes())
        if modes:
            reason = reason or f"changes a mode of PyTorch ({modes[0]}), which no replay does; do it around the call"
        if training != module._around.training():
            reason = reason or SWITCHES_MODE
        reason = reason or (changed and f"changes {changed} as it runs, {NOT_REPLAYED}")
        if reason is not None:
            # Known before any attempt, so that the user's Python never runs twice for one call. Once more of the same
            # kind is watched, because a first call may create what later ones only use.
            entry.calls -= 1
            capture_failed(module, entry, CaptureRefused(reason), "its forward")
    return track(module, entry, result)


def track(module: CUDAGraphModule, entry: Entry, result: Any) -> Any:
    """Watches for the backward of an eager call, and learns whether there will be one; returns the result."""
    for tensor in differentiable(result)[:1]:
        if not entry.needs_grad:
            entry.needs_grad = True
            if not module._group.busy:
                module._group.begin_pass()
        call = EagerCall(module._group)
        module._eager_calls.add(call)
        tensor.register_hook(call.backward_began)
    return result


def differentiable(result: Any) -> list[Tensor]:
    """The tensors in a result that have a backward, each once, in order."""
    leaves: list[Tensor] = []
    flatten(result, leaves, {})
    return [tensor for tensor in leaves if tensor.requires_grad and not tensor.is_leaf]
