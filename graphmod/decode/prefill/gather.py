"""Brings together what pieces of prompts attend to, and no more than that, however much a graph has room for."""

import functools
import logging

import torch
from torch import Tensor, library

log = logging.getLogger("graphmod")


@functools.cache
def copies_by_length(device: torch.device) -> bool:
    """Whether no more is copied than there is: by a kernel, which Triton may be unable to make (no C compiler)."""
    if device.type != "cuda":
        return False
    try:
        from graphmod.decode.kernels import gather

        with torch.cuda.device(device):
            kept = torch.zeros(1, 16, 1, 16, device=device, dtype=torch.bfloat16)
            gather(kept, kept, torch.zeros(1, dtype=torch.int64, device=device), kept.new_ones(1, dtype=torch.int32))
    except Exception as error:  # of compilers and drivers: anything
        log.debug("prefill gathers without a kernel", exc_info=error)
        return False
    return True


@library.custom_op("graphmod::gather_columns", mutates_args=())
def gather_columns(keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values one after the other, (C, kv_heads, head_dim or value_dim) each. What comes after those that there
    are is undefined.

    Args:
        keys, values: (blocks, block_size, kv_heads, head_dim or value_dim), contiguous.
        slots: (C,) int64: where each lies.
        starts: (pieces + 2,) int32, of `Packed`: the last but one is how many there are.
    """
    if copies_by_length(keys.device):
        from graphmod.decode.kernels import gather

        with torch.cuda.device_of(keys):
            return gather(keys, values, slots, starts[-2:])
    return keys.flatten(0, 1).index_select(0, slots), values.flatten(0, 1).index_select(0, slots)
