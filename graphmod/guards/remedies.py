"""What helps where something that code reads changes: inside of the call, or from one call to the next."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.guards.contents import is_plain
from graphmod.guards.notes import Notes

KEEP = "keep it in a tensor that is changed in place, or pass it as an argument"
KEEP_ITEMS = "do that after the call, with what the call returns"
KEEP_COUNT = (
    f"{KEEP}. If it counts microbatches, capture forward and backward only, and call optimizer.step() outside, after "
    "the last of them"
)
KEEP_ITERATOR = "take them outside and pass them as an argument"
OUTSIDE = "keep the code that does outside of the captured call"
IN_THREAD = "run it in this thread"
DRAW = "draw them outside and pass them as an argument, or draw on the device with torch"
FILLED = "call it once before, or let the next call be captured, which finds it"
TWO_STEPS = (
    "make two steps of it, each captured on its own, and switch requires_grad between their calls; a network that "
    "only lends its gradient needs no switch at all (examples/gan.py)"
)
_CYCLED = ("betas", "momentum")  # which OneCycleLR and CyclicLR change along with the rate
_NO_CYCLE = "build the scheduler (OneCycleLR, CyclicLR) with cycle_momentum=False"
_SCHEDULER = "keep the scheduler's step() outside of the captured call"
_TENSOR = "pass it as a tensor argument, or keep it fixed"
_FIXED = "keep it fixed, or pass it as an argument"

SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
_LAZY = ("_scale", "_growth_tracker")  # which a GradScaler makes when it is first used


def keepers(notes: Notes) -> dict[int, Any]:
    """What an optimizer or a GradScaler keeps in dicts (by identity) -> the optimizer or GradScaler."""
    found: dict[int, Any] = {}
    for note in notes.notes.values():
        owner = note.owner
        if isinstance(owner, torch.optim.Optimizer):
            found.update((id(group), owner) for group in owner.param_groups)
            found.update((id(state), owner) for state in owner.state.values())
            found[id(owner.state)] = owner
        elif isinstance(owner, torch.amp.GradScaler):
            found[id(owner)] = owner
            if note.key == "_per_optimizer_states":
                found[id(note.before())] = owner
    return found


def against_change(owner: Any, key: Any, was: Any, keeper: Any) -> str:
    """What helps where the call itself changes something.

    Args:
        owner, key: where it is.
        was: what was there before.
        keeper: see `keepers`.
    """
    if isinstance(owner, SCHEDULERS):
        return _SCHEDULER
    if isinstance(keeper, torch.amp.GradScaler):
        if key in _LAZY and was is None:
            return "make it before the first call: scaler.scale(torch.ones((), device=...))"
        return "keep the GradScaler's unscale_(), step() and update() outside of the captured call"
    optimizer = owner if isinstance(owner, torch.optim.Optimizer) else keeper
    if optimizer is not None:
        if key in ("lr", "initial_lr", "_opt_called", *_CYCLED):
            return _SCHEDULER
        return f"keep the step() of this {type(optimizer).__name__} outside of the captured call"
    if key == "require_forward_param_sync" and isinstance(owner, nn.parallel.DistributedDataParallel):
        return "call what it holds where nothing is trained: ddp.module(...)"
    if isinstance(owner, nn.Module) and key == "training":
        return "call train() and eval() outside of the captured call"
    if isinstance(owner, (list, deque)) and key is None:
        return KEEP_ITEMS
    return KEEP_COUNT if type(was) is int else KEEP


def between_calls(key: Any, was: Any, now: Any, optimizer: torch.optim.Optimizer | None) -> str:
    """What helps where a value is another than in the call before.

    Args:
        optimizer: whose setting it is; None where it is none.
    """
    number = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (was, now))
    if optimizer is not None:
        if key == "lr" and number:
            return tensor_rate(optimizer)
        if key in _CYCLED:
            return f"{_NO_CYCLE}, or keep the step() of this {type(optimizer).__name__} outside of the captured call"
        return f"keep it fixed, or keep the step() of this {type(optimizer).__name__} outside of the captured call"
    if number:
        return _TENSOR
    return _FIXED if is_plain(was) and is_plain(now) else ""


def tensor_rate(optimizer: torch.optim.Optimizer) -> str:
    """How an optimizer gets a rate that may change under a graph."""
    name, known = type(optimizer).__name__, inspect.signature(type(optimizer).__init__).parameters
    flag = next((flag for flag in ("fused", "capturable") if flag in known), None)
    if flag is None:
        return f"keep the step() of {name} outside of the captured callable"
    ready = isinstance(optimizer.param_groups[0].get("lr"), Tensor) or all(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    flags = "" if ready else f"{flag}=True, "
    return (
        f"build {name} with {flags}lr=torch.tensor(...) on the device, and change that in place: lr.fill_(...), as "
        "schedulers do with a tensor"
    )
