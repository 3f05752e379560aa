"""Graphs with collectives are freed before their process groups: to shut one of NCCL's down waits for them."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

_frees: list[weakref.WeakMethod] = []


def free_before_destruction(free: Callable[[Any], None]) -> None:
    """Calls a method with each process group that is about to be destroyed, as long as the object lives."""
    _frees[:] = [known for known in _frees if known() is not None]
    if not any(known() == free for known in _frees):
        _frees.append(weakref.WeakMethod(free))
    # All ways to destroy a group lead here, under whatever name a program has imported them.
    original = distributed.ProcessGroup.shutdown
    if not hasattr(original, "_frees_graphs"):
        distributed.ProcessGroup.shutdown = _freeing(original)


def _freeing(original: Callable) -> Callable:
    @functools.wraps(original)
    def shutdown(group: Any) -> Any:
        frees = [free for known in _frees if (free := known()) is not None]
        for free in frees:
            free(group)
        if frees:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # CUDA tells NCCL of a graph's end in a thread of its own
        return original(group)

    shutdown._frees_graphs = True
    return shutdown
