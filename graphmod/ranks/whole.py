"""Where `fully_shard` (FSDP2) puts whole parameters: at the same addresses each time, so that graphs of single layers
read them there.

It gives their memory back after each use, and asks for as much before the next. Here that comes from a pool in which
nothing else lies. An allocator without other users answers the same requests, in the same order, with the same
addresses; so layers that are whole one after the other take turns in one place, and those that are whole at the same
time have one each, as in an eager step. Nothing relies on that to be right: whoever replays a graph compares addresses,
and where ranks, layers or callers go another way, there is no graph to replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.ranks.sharded import param_groups
from graphmod.trace.dispatch import is_recording

_ALLOCATES, _FREES = "wait_for_unshard", "free_unsharded_param"


class FixedPlaces:
    """Keeps the whole parameters of some groups of `fully_shard`, all on one device, in places of their own."""

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
                self._hold(group)
        return len(self._held) > before

    def _hold(self, group: Any) -> None:
        self._held.append(group)
        if group.device.type == "cuda":
            self._pool = self._pool or torch.cuda.MemPool()
            setattr(group, _ALLOCATES, functools.partial(_allocate, self._pool, group, getattr(group, _ALLOCATES)))
            return
        for parameter in group.fsdp_params:
            setattr(parameter, _FREES, functools.partial(_destroy, parameter, getattr(parameter, _FREES)))

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
        whole = [getattr(one, "_unsharded_param", None) for one in group.fsdp_params]
        if not wanted.isdisjoint(map(id, whole)):
            together = tuple(map(id, whole))
            for sharded, one in zip(group.fsdp_params, whole, strict=True):
                if id(one) in wanted and (group.reduce_grads or sharded.reduce_dtype not in (None, one.dtype)):
                    found[id(one)] = together
    return found
