"""Brings the keys and values that a decode step will see from the memory of the host to the device."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, library

from graphmod.wrap.extension import is_capturing

Pair = tuple[Tensor, Tensor]
"""Keys and values, (blocks, block_size, kv_heads, head_dim or value_dim), contiguous."""

HEADER = 2
"""Numbers in a list of blocks before its blocks: how many of these the copy engine brings, and how many there are."""


def unavailable(device: torch.device) -> str | None:
    """Why it cannot be done for a device, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "its copies are a Triton kernel, and Triton is not installed"
    return None


@library.custom_op("graphmod::fetch", mutates_args=("near_keys", "near_values"))
def _fetch(keys: Tensor, values: Tensor, near_keys: Tensor, near_values: Tensor, listed: Tensor) -> None:
    if near_keys.is_cuda:
        from graphmod.decode.cache.fetch_kernel import copy

        with torch.cuda.device_of(near_keys):
            copy(keys, values, near_keys, near_values, listed, beside_copy_nodes=is_capturing())
    else:
        blocks = listed[HEADER : HEADER + int(listed[1])]
        near_keys.index_copy_(0, blocks, keys.index_select(0, blocks))
        near_values.index_copy_(0, blocks, values.index_select(0, blocks))


@_fetch.register_fake
def _(*given: Tensor) -> None:
    return None


def fetch(kept: Pair, near: Pair, listed: Tensor) -> None:
    """Copies blocks to the same places near by.

    On a GPU by a kernel, which in a captured graph leaves those to the copy engine that it brings.

    Args:
        kept, near: of a layer.
        listed: (2 + blocks there are,) int64: how many of the listed blocks the copy engine brings, how many are
            listed, and the blocks, first those that the copy engine brings. Each graph reads it at every launch.
    """
    _fetch(*kept, *near, listed)
