"""What `fully_shard` (FSDP2) keeps between calls: the parameters that its modules hold then, and work not waited for.

In a forward its modules hold whole parameters, whose memory it makes and gives back by resizing storages; between calls
they hold this rank's part. Its hooks do so in each call in the same way, so that a capture holds all of it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from graphmod.trace.untraced import identity

_REPLICATE = "torch.distributed._composable.replicate"
_FLAT = "torch.distributed.fsdp.fully_sharded_data_parallel"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_COMPOSABLE = "torch.distributed._composable_state"
_OF_GROUP = ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event")
_OF_CONTEXT = ("all_gather_state", "reduce_scatter_state")
_LISTS = ("reduce_scatter_states", "_last_post_reduce_events")


def _states() -> Iterator[Any]:
    if _STATE not in sys.modules:
        return
    for reference in list(sys.modules[_COMPOSABLE]._module_state_mapping.values()):
        state = reference()
        if isinstance(state, sys.modules[_STATE].FSDPState):
            yield state


def param_groups() -> Iterator[Any]:
    """What is collected together: the `FSDPParamGroup`s of this process."""
    for state in _states():
        groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
        yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


def shared_otherwise(module: Any) -> str | None:
    """Why a step with a module cannot be captured, which `replicate` or FullyShardedDataParallel share; or None."""
    if _FLAT in sys.modules and isinstance(module, sys.modules[_FLAT].FullyShardedDataParallel):
        return "has parameters of FullyShardedDataParallel; use fully_shard"
    if _REPLICATE in sys.modules:
        states = module.__dict__.get(sys.modules["torch.distributed._composable.contract"].STATE_KEY, {}).values()
        if any(isinstance(one, sys.modules[_REPLICATE]._ReplicateState) for one in states):
            return "has parameters of replicate; use DistributedDataParallel"
    return None


def held_between_calls() -> dict[int, dict[str, Tensor]]:
    """The parameters of all modules with sharded ones, as they are now, by identity of the dict that holds them."""
    found: dict[int, dict[str, Tensor]] = {}
    for group in param_groups():
        for parameter in group.fsdp_params:
            where = parameter._module_info
            for module in (where.module, *where.shared_modules):
                found.setdefault(identity(module._parameters), dict(module._parameters))
    return found


@contextlib.contextmanager
def as_in_forwards() -> Iterator[None]:
    """Inside, modules hold the parameters that they hold while their forward runs, of which only what kind they are
    counts: there is no memory to them."""
    before = []
    try:
        parameters = [one for group in param_groups() for one in group.fsdp_params]
        for parameter in (one for one in parameters if hasattr(one, "_unsharded_param")):
            where = parameter._module_info
            places = [(where.module, where.param_name)]
            places += zip(where.shared_modules, where.shared_param_names, strict=True)
            for module, name in places:
                before.append((module._parameters, name, module._parameters[name]))
                module._parameters[name] = parameter._unsharded_param
        yield
    finally:
        for held, name, value in before:
            held[name] = value


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Around a capture: neither it nor what follows waits for work of the other, and one that fails leaves no trace."""
    _forget_pending()
    before = [(owner, name, _copied(getattr(owner, name))) for owner, name in _changing()]
    groups = [(group, group._sharded_state) for group in param_groups()]
    try:
        yield
    except BaseException:
        for group, state in groups:
            if group._sharded_state is not state:
                group._to_sharded()
        for owner, name, value in before:
            setattr(owner, name, value)
        raise
    finally:
        _forget_pending()


def _changing() -> Iterator[tuple[Any, str]]:
    """What changes while a step runs, and is as before when it is over."""
    for state in _states():
        yield from ((state, "_training_state"), (state._comm_ctx, "post_forward_order"))
        yield from ((state._state_ctx, name) for name in ("iter_forward_root", "post_backward_final_callback_queued"))
        if hasattr(state, "_modules_to_run_forward"):
            yield state, "_modules_to_run_forward"
    for group in param_groups():
        yield from ((group, name) for name in ("_training_state", "_post_forward_indices", "_partial_reduce_output"))
        for parameter in group.fsdp_params:
            yield parameter, "unsharded_accumulated_grad"
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param, "grad"


def _copied(value: Any) -> Any:
    return type(value)(value) if isinstance(value, (list, set)) else value


def _forget_pending() -> None:
    """Lets go of work of the last call that the next would wait for, once it is done: an event of an eager call cannot
    be waited for in a capture, nor the reverse."""
    holders = [(group, _OF_GROUP) for group in param_groups()] + [(state._comm_ctx, _OF_CONTEXT) for state in _states()]
    pending = [(one, name) for one, names in holders for name in names if getattr(one, name, None) is not None]
    lists = [getattr(state._comm_ctx, name, None) for state in _states() for name in _LISTS]
    if not pending and not any(lists):
        return
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    for one in filter(None, lists):
        one.clear()
    for one, name in pending:
        setattr(one, name, None)
