"""Graphs with collectives are freed before their process groups: `destroy_process_group` of NCCL waits for them."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

_frees: list[weakref.WeakMethod] = []


def free_before_destruction(free: Callable[[], None]) -> None:
    """Calls a method, as long as its object lives, before process groups are destroyed."""
    _frees[:] = [known for known in _frees if known() is not None]
    if not any(known() == free for known in _frees):
        _frees.append(weakref.WeakMethod(free))
    original = distributed.destroy_process_group
    if not hasattr(original, "_frees_graphs"):
        distributed.destroy_process_group = distributed_c10d.destroy_process_group = _freeing(original)


def _freeing(original: Callable) -> Callable:
    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        for known in _frees:
            free = known()
            if free is not None:
                free()
        _frees.clear()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # CUDA tells NCCL of a graph's end in a thread of its own
        return original(*args, **kwargs)

    destroy_process_group._frees_graphs = True
    return destroy_process_group
