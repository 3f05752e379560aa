"""Decode attention with `flex_attention`, the block table as its BlockMask: torch alone, on a GPU.

The number of blocks that a row visits lies in device memory, so one graph serves every context and the work ends where
the context does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from graphmod.decode.cache import CacheView, PagedCache
from graphmod.decode.compiled import compiled_code


def unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None."""
    if memory.device.type != "cuda":
        return f"it is compiled for a GPU, and the cache is on {memory.device}"
    if torch.cuda.get_device_capability(memory.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    if memory.block_size < 16 or memory.block_size & (memory.block_size - 1):
        return f"block_size={memory.block_size} is no power of two of at least 16"
    if memory.head_dim & (memory.head_dim - 1) or memory.head_dim < 16:
        return f"heads of {memory.head_dim} are no power of two of at least 16"
    return None


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def prepare(memory: PagedCache) -> None:
    """Chooses how many blocks of keys and values are on their way while one is computed with: up to three, as far as
    two programs of four warps fit in a multiprocessor's shared memory. On an H200, 32 rows of 545 tokens took 23.3 us a
    layer with three, and 31.5 us with inductor's own choice.

    Where the query heads of a KV head are no power of two, inductor takes another kernel, which is left alone.
    """
    memory.kernel_options = {}
    group = memory.heads // memory.kv_heads
    block = 2 * min(memory.block_size, 64) * memory.head_dim * memory.dtype.itemsize
    properties = torch.cuda.get_device_properties(memory.device)
    stages = min(3, getattr(properties, "shared_memory_per_block_optin", 48 * 1024) // 2 // block)
    if stages > 1 and group & (group - 1) == 0:
        memory.kernel_options = {"num_stages": stages, "num_warps": 4}


def block_mask(view: CacheView, tokens: int) -> BlockMask:
    """The blocks each row visits, up to and with the one its context ends in.

    All are given as partly masked ones: then the kernel divides what a row really visits among its splits, where with
    "full" blocks it would divide the whole cache. A visited block is in the context but for the end of the last.

    Args:
        tokens: slots of the whole cache, which flex attention sees as one long row of keys.
    """
    size = view.memory.block_size
    table = view.block_table.to(torch.int32)
    # As wide as the cache has blocks, which is what lowerings check; no row visits that many.
    indices = pad(table, (0, max(0, view.memory.blocks - table.shape[1])))
    count = (view.context + (size - 1)) // size
    last = table.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    filled = view.context - (count - 1) * size

    def in_context(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return (slot // size != last[row]) | (slot % size < filled[row])

    return BlockMask.from_kv_blocks(
        count.to(torch.int32)[:, None, None],
        indices[:, None, None, :],
        BLOCK_SIZE=(128, size),
        mask_mod=in_context,
        seq_lengths=(1, tokens),
        compute_q_blocks=False,
    )


def paged_flex(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    cache_view: CacheView,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `attention.paged_sdpa`: (B, heads, 1, head_dim) to (B, 1, heads, head_dim)."""
    view, memory = cache_view, cache_view.memory
    tokens = memory.blocks * memory.block_size
    if view.shared is None:
        view.shared = block_mask(view, tokens)
    keys, values = (
        held[module.layer_idx].view(1, tokens, memory.kv_heads, memory.head_dim).transpose(1, 2)
        for held in (memory.keys, memory.values)
    )
    query = query.to(keys.dtype)
    settings = {
        "block_mask": view.shared,
        "scale": scaling,
        "enable_gqa": query.shape[1] != memory.kv_heads,
        "kernel_options": dict(memory.kernel_options),
    }
    if torch.compiler.is_compiling():
        out = flex_attention(query, keys, values, **settings)
    else:
        with compiled_code((keys, values)):
            out = _compiled()(query, keys, values, **settings)
    return out.transpose(1, 2).to(query.dtype), None
