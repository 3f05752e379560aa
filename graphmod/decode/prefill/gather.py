"""Brings together what pieces of prompts attend to, and no more than that, however much a graph has room for."""

from importlib.util import find_spec

import torch
from torch import Tensor, library

BY_LENGTH = find_spec("triton") is not None
"""Whether no more is copied on a GPU than there is."""


@library.custom_op("graphmod::gather_columns", mutates_args=())
def gather_columns(keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values one after the other, (C, kv_heads, head_dim or value_dim) each. What comes after those that there
    are is undefined.

    Args:
        keys, values: (blocks, block_size, kv_heads, head_dim or value_dim), contiguous.
        slots: (C,) int64: where each lies.
        starts: (pieces + 2,) int32, of `Packed`: the last but one is how many there are.
    """
    if keys.is_cuda and BY_LENGTH:
        from graphmod.decode.prefill.gather_kernel import gather

        with torch.cuda.device_of(keys):
            return gather(keys, values, slots, starts[-2:])
    return keys.flatten(0, 1).index_select(0, slots), values.flatten(0, 1).index_select(0, slots)


@gather_columns.register_fake
def _(keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    return keys.new_empty((len(slots), *keys.shape[2:])), values.new_empty((len(slots), *values.shape[2:]))
