"""What `fully_shard` (FSDP2) keeps between calls, and where it puts whole parameters.

In a forward its modules hold whole parameters, whose memory it makes and gives back by resizing storages; between calls
they hold this rank's part. Its hooks do so in each call in the same way, so that a capture of a whole step holds all of
it. For graphs of single layers, whole parameters have to be at the same addresses each time (`FixedPlaces`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn

from graphmod.torch_private import COMPOSABLE, CONTRACT, FSDP_STATE, REPLICATE, lacking
from graphmod.trace.dispatch import is_recording
from graphmod.trace.untraced import identity

_FLAT = "torch.distributed.fsdp.fully_sharded_data_parallel"
_OF_GROUP = ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event")
_OF_CONTEXT = ("all_gather_state", "reduce_scatter_state")
_ALLOCATES, _FREES = "wait_for_unshard", "free_unsharded_param"
_LISTS = ("reduce_scatter_states", "_last_post_reduce_events")


def _states() -> Iterator[Any]:
    if FSDP_STATE not in sys.modules:
        return
    for reference in list(sys.modules[COMPOSABLE]._module_state_mapping.values()):
        state = reference()
        if isinstance(state, sys.modules[FSDP_STATE].FSDPState):
            yield state


def param_groups() -> Iterator[Any]:
    """What is collected together: the `FSDPParamGroup`s of this process."""
    for state in _states():
        groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
        yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


def _parameters() -> Iterator[Any]:
    return (parameter for group in param_groups() for parameter in group.fsdp_params)


def shared_otherwise(module: Any) -> str | None:
    """Why a step with a module cannot be captured, which `replicate` or FullyShardedDataParallel share, or a
    `fully_shard` that is not known here; or None."""
    if FSDP_STATE in sys.modules and isinstance(module, distributed.fsdp.FSDPModule):
        kinds = {"FSDPState": _states(), "FSDPParamGroup": param_groups(), "FSDPParam": _parameters()}
        found = ((kind, one) for kind, each in kinds.items() for one in itertools.islice(each, 1))
        missing = (lacking(kind, one) for kind, one in itertools.chain([(COMPOSABLE, sys.modules[COMPOSABLE])], found))
        if why := next(filter(None, missing), None):
            return f"has parameters of fully_shard, which works in another way: {why}"
    if _FLAT in sys.modules and isinstance(module, sys.modules[_FLAT].FullyShardedDataParallel):
        return "has parameters of FullyShardedDataParallel; use fully_shard"
    if REPLICATE in sys.modules:
        states = module.__dict__.get(sys.modules[CONTRACT].STATE_KEY, {}).values()
        if any(isinstance(one, sys.modules[REPLICATE]._ReplicateState) for one in states):
            return "has parameters of replicate; use DistributedDataParallel"
    return None


def held_between_calls() -> dict[int, dict[str, Tensor]]:
    """The parameters of all modules with sharded ones, as they are now, by identity of the dict that holds them."""
    found: dict[int, dict[str, Tensor]] = {}
    for parameter in _parameters():
        where = parameter._module_info
        for module in (where.module, *where.shared_modules):
            found.setdefault(identity(module._parameters), dict(module._parameters))
    return found


def whole_in_calls() -> set[int]:
    """The whole parameters (by identity) that are given back now: in a call they come to lie somewhere for a while."""
    groups = (group for group in param_groups() if group.is_sharded)
    whole = (getattr(parameter, "_unsharded_param", None) for group in groups for parameter in group.fsdp_params)
    return {identity(tensor) for tensor in whole if tensor is not None}


@contextlib.contextmanager
def as_in_forwards() -> Iterator[None]:
    """Inside, modules hold the parameters that they hold while their forward runs, of which only what kind they are
    counts: there is no memory to them."""
    before = []
    try:
        for parameter in (one for one in _parameters() if hasattr(one, "_unsharded_param")):
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
        yield from ((state, "_training_state"), (state, "_modules_to_run_forward"))
        yield state._comm_ctx, "post_forward_order"
        yield from ((state._state_ctx, name) for name in ("iter_forward_root", "post_backward_final_callback_queued"))
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


class FixedPlaces:
    """Keeps the whole parameters of some groups of `fully_shard`, all on one device, in places of their own.

    It gives their memory back after each use, and asks for as much before the next. Here that comes from a pool in
    which nothing else lies. An allocator without other users answers the same requests, in the same order, with the
    same addresses; so layers that are whole one after the other take turns in one place, and those that are whole at
    the same time have one each, as in an eager step. Nothing relies on that to be right: whoever replays a graph
    compares addresses, and where ranks, layers or callers go another way, there is no graph to replay.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._held: list[Any] = []

    def take(self, tensors: Collection[Tensor]) -> bool:
        """Takes in the groups to which any of these whole parameters belong.

        Returns:
            Whether one is new: its parameters will be at another address the next time that they are whole.
        """
        wanted, before = set(map(id, tensors)), len(self._held)
        for group in param_groups():
            whole = {id(getattr(one, "_unsharded_param", None)) for one in group.fsdp_params}
            if whole & wanted and _can_be_held(group):
                self._held.append(group)
                if group.device.type == "cuda":
                    self._pool, wait = self._pool or torch.cuda.MemPool(), getattr(group, _ALLOCATES)
                    setattr(group, _ALLOCATES, functools.partial(_allocate, self._pool, group, wait))
                    continue
                for parameter in group.fsdp_params:
                    setattr(parameter, _FREES, functools.partial(_destroy, parameter, getattr(parameter, _FREES)))
        return len(self._held) > before

    def release(self) -> None:
        """Leaves all groups as they were."""
        for group in self._held:
            for owner, name in _replaced(group):
                original = vars(owner).pop(name).args[-1]
                if getattr(original, "__func__", None) is not getattr(type(owner), name):
                    setattr(owner, name, original)  # somebody else had replaced it before
            if group.is_sharded:
                for storage, _ in _storages(group.fsdp_params):
                    storage.resize_(0)
        self._held.clear()
        self._pool = None


def _replaced(group: Any) -> list[tuple[Any, str]]:
    """What `FixedPlaces` has put in the place of a group's methods: whose, and which."""
    places = [(group, _ALLOCATES), *((one, _FREES) for one in group.fsdp_params)]
    return [
        (owner, name) for owner, name in places if getattr(vars(owner).get(name), "func", None) in (_allocate, _destroy)
    ]


def _can_be_held(group: Any) -> bool:
    """Whether its memory can come from a pool, and does not do so for another set of graphs already. Pools of CUDA's
    own allocator are for captures alone."""
    if group.device.type == "cuda" and torch.cuda.get_allocator_backend() != "native":
        return False
    known = hasattr(group, _ALLOCATES) and all(hasattr(one, _FREES) for one in group.fsdp_params)
    return known and not _replaced(group)


def _storages(parameters: list[Any]) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """Where whole parameters lie, once they have been whole, with the bytes that each needs."""
    for parameter in parameters:
        for tensor in (*parameter.all_gather_outputs, *getattr(parameter, "_unsharded_inner_tensors", ())):
            yield tensor.untyped_storage(), tensor.numel() * tensor.itemsize


def _allocate(pool: Any, group: Any, wait: Callable[[], None]) -> None:
    """Makes the memory that `wait` is about to ask for, for all parameters of a group at once."""
    if group._all_gather_result is not None and not is_recording():
        with torch.cuda.use_mem_pool(pool, group.device):
            for storage, size in _storages(group.fsdp_params):
                if storage.size() != size:
                    storage.resize_(size)
    wait()


def _destroy(parameter: Any, free: Callable[[], None]) -> None:
    """In the place of `free`, for emulated graphs, which have no pools: the memory stays, and whoever reads a whole
    parameter that was given back gets NaN."""
    if is_recording():  # a step that is captured as a whole frees memory itself
        free()
        return
    for storage, size in _storages([parameter]):
        if storage.size() == size:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)


def is_collected(model: nn.Module) -> bool:
    """Whether `fully_shard` collects all parameters of a model, and each whole: none is split in another way (tensor
    parallelism), in which it would stay split."""
    known = {id(one.sharded_param): one for group in param_groups() for one in group.fsdp_params}
    found = [known.get(id(parameter)) for parameter in model.parameters()]
    return all(one is not None and not one.is_dtensor for one in found)


def reads_parts(tensors: Collection[Tensor]) -> bool:
    """Whether any of these is a parameter that `fully_shard` collects, whole or in part."""
    known = set(map(id, tensors))
    return any(
        id(one.sharded_param) in known or id(getattr(one, "_unsharded_param", None)) in known
        for group in param_groups()
        for one in group.fsdp_params
    )


def taken_together(parameters: Collection[Tensor]) -> dict[int, tuple[int, ...]]:
    """Those whole parameters (by identity) whose gradients `fully_shard` takes from `.grad` as soon as the backward of
    their group is over, each with the parameters of that group: it copies the gradients to where they are summed up
    over ranks, or added up in another dtype."""
    wanted, found = set(map(id, parameters)), {}
    for group in param_groups():
        whole: list[Any] = [getattr(one, "_unsharded_param", None) for one in group.fsdp_params]
        if not wanted.isdisjoint(map(id, whole)):
            together = tuple(map(id, whole))
            for sharded, one in zip(group.fsdp_params, whole, strict=True):
                if id(one) in wanted and (group.reduce_grads or sharded.reduce_dtype not in (None, one.dtype)):
                    found[id(one)] = together
    return found
