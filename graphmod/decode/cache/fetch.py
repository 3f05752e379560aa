"""Brings the keys and values that a decode step will see from the memory of the host to the device."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, library


def unavailable(device: torch.device) -> str | None:
    """Why it cannot be done for a device, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "its copies are a Triton kernel, and Triton is not installed"
    return None


@library.custom_op("graphmod::fetch", mutates_args=("near_keys", "near_values"))
def _fetch(
    keys: Tensor,
    values: Tensor,
    near_keys: Tensor,
    near_values: Tensor,
    table: Tensor,
    context: Tensor,
    first: Tensor | None,
) -> None:
    from graphmod.decode.cache.fetch_kernel import copy

    with torch.cuda.device_of(near_keys):
        copy(keys, values, near_keys, near_values, table, context, first)


@_fetch.register_fake
def _(*given: Tensor | None) -> None:
    return None


def fetch(
    kept: tuple[Tensor, Tensor], near: tuple[Tensor, Tensor], table: Tensor, context: Tensor, first: Tensor | None
) -> None:
    """Copies the blocks that rows see to the same places near by. The token that a step adds is not among them.

    On a GPU by a kernel that reads lengths and block tables there: so one graph serves every length, and no more is
    copied than is seen; a block that several rows hold is copied once.

    Args:
        kept, near: keys and values, (blocks, block_size, kv_heads, head_dim or value_dim), contiguous.
        table: (B, blocks of a sequence) int64, its last dimension contiguous.
        context: (B,) int64: tokens of each row, the new one included; 0 in padding.
        first: (B,) int64: the first token that is seen; None sees all.
    """
    if near[0].is_cuda:
        _fetch(*kept, *near, table, context, first)
        return
    size = kept[0].shape[1]
    start = torch.arange(table.shape[1], device=table.device) * size
    seen = start < (context - 1).unsqueeze(1)
    if first is not None:
        seen = seen & (start + size > first.unsqueeze(1))
    blocks = torch.where(seen, table, 0).reshape(-1)  # NULL_BLOCK, which is the same in both
    for far, here in zip(kept, near, strict=True):
        here.index_copy_(0, blocks, far.index_select(0, blocks))
