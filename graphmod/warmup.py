"""Warm-up calls (rule R1), and what is to be learnt from calls that run without a graph.

May import what `forward` may, `forward`, `garbage` and `failures`; knows `module` by its attributes only.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.failures import capture_failed
from graphmod.garbage import no_garbage_collection
from graphmod.group import EagerCall
from graphmod.hook_watch import modules_called
from graphmod.lifecycle import Entry
from graphmod.reach import NOT_REPLAYED
from graphmod.recorder import Recorder
from graphmod.results import resolved
from graphmod.signature import flatten, opaque_parts

if TYPE_CHECKING:
    from graphmod.module import CUDAGraphModule


def warm_up(module: CUDAGraphModule, entry: Entry, args: tuple, kwargs: dict) -> Any:
    """An ordinary call; the last one before the capture is recorded."""
    module._counters.eager_calls += 1
    module._served, module._eager_in = None, module._group.begun
    record = entry.calls + 1 == module._config.warmup_steps
    found = module._around.now(*opaque_parts(entry.signature.structure)) if record else None
    before = found.state() if record else None
    torch.clear_autocast_cache()  # what a graph casts, it casts itself; the recorded call must do so too
    with contextlib.ExitStack() as watching:
        if record:
            watching.enter_context(no_garbage_collection())
            recorder = watching.enter_context(_recorder(module, args, kwargs))
            entry.called = watching.enter_context(modules_called())
        result = module._call(*args, **kwargs)
        result = resolved(result) if record else result
    entry.calls += 1
    entry.called_forward = entry.called_forward or torch._C._current_autograd_node() is None
    if record:
        entry.script = recorder.script()
        entry.generators = recorder.generators
        changed = found.changed_since(before)
        if recorder.hazards:
            entry.calls -= 1
            capture_failed(module, entry, CaptureRefused(str(recorder.hazards[0])), "its forward")
            changed = None
        if changed is not None:
            # Known before any attempt, so that the user's Python never runs twice for one call. Once more of the same
            # kind is watched, because a first call may create what later ones only use.
            entry.calls -= 1
            refusal = CaptureRefused(f"changes {changed} as it runs, {NOT_REPLAYED}")
            capture_failed(module, entry, refusal, "its forward")
    return track(module, entry, result)


def _recorder(module: CUDAGraphModule, args: tuple, kwargs: dict) -> Recorder:
    leaves: list[Tensor] = []
    flatten((args, kwargs), leaves, {})
    backend = module._group.backend
    return Recorder(leaves, gpu=backend.device.index if backend.on_gpu else None, watching=True)


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
