"""Warm-up calls (rule R1), and what is to be learnt from calls that run without a graph.

May import what `forward` may, `recording` and `failures`; knows `module` by its attributes only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphmod.capture.recording import record
from graphmod.errors import CaptureRefused
from graphmod.graph.group import EagerCall
from graphmod.signature.flattening import flatten
from graphmod.signature.modes import difference
from graphmod.signature.signature import parameter_names
from graphmod.state.entry import Entry
from graphmod.state.failures import capture_failed

if TYPE_CHECKING:
    from graphmod.wrap.module import CUDAGraphModule


def warm_up(module: CUDAGraphModule, entry: Entry, args: tuple, kwargs: dict) -> Any:
    """An ordinary call; the last of some in a state that is new is recorded, because the first may create what later
    ones only use."""
    module._counters.eager_calls += 1
    module._served, module._eager_in = None, module._group.begun
    entry.calls += 1
    if entry.calls < module._config.warmup_steps:
        if entry.graphs:
            module._log_once(
                f"{module._name!r} runs eagerly: {entry.difference}. It is recorded and captured again, as after each "
                "such change"
            )
        torch.clear_autocast_cache()
        result = module._call(*args, **kwargs)
    else:
        result, recording = record(
            module._call, args, kwargs, parameter_names(module._call), module._group.gpu, module._root
        )
        modes = difference(entry.signature.modes, module._group.modes())
        if modes and recording.refused is None:
            recording.refused = f"changes a mode of PyTorch ({modes[0]}), which no replay does; do it around the call"
        entry.add(recording)
        module._learn(recording)
        entry.calls = 0
        if recording.refused is not None:
            # Before any attempt, so that the user's Python never runs twice for one call. The next one is recorded.
            entry.calls = module._config.warmup_steps
            capture_failed(module, entry, CaptureRefused(recording.refused), "its forward")
        elif entry.fruitless > MOST_FRUITLESS:
            entry.disabled, entry.reason = True, f"it is in another state in each call: {entry.difference}"
            module._log_once(
                f"{module._name!r} stays eager: {entry.reason}. Keep that as it is, or change a tensor in place; "
                "force_enable() tries again"
            )
    entry.called_forward = entry.called_forward or torch._C._current_autograd_node() is None
    return track(module, entry, result)


MOST_FRUITLESS = 8  # recordings in a row that led to no replay


def track(module: CUDAGraphModule, entry: Entry, result: Any) -> Any:
    """Watches for the backward of an eager call, and learns whether there will be one; returns the result."""
    for tensor in differentiable(result)[:1]:
        if not entry.needs_grad:
            entry.needs_grad = True
            if not module._group.busy:
                module._group.begin_pass()
        call = EagerCall(module._group, entry)
        module._eager_calls.add(call)
        tensor.register_hook(call.backward_began)
    return result


def differentiable(result: Any) -> list[Tensor]:
    """The tensors in a result that have a backward, each once, in order."""
    leaves: list[Tensor] = []
    flatten(result, leaves, {})
    return [tensor for tensor in leaves if tensor.requires_grad and not tensor.is_leaf]
