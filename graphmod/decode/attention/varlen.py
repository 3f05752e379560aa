"""Decode attention with torch's `varlen_attn` where it takes a block table (bf16 or fp16, on a GPU)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.decode.cache.cache import CacheView, PagedCache
from graphmod.decode.cache.layers import not_plain

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

_NEEDED = {"block_table", "seqused_k", "num_splits"}
_PAGE = 256  # what the kernel's page size must be a multiple of on GPUs without its newest variant


def unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None."""
    if varlen_attn is None or not set(inspect.signature(varlen_attn).parameters) >= _NEEDED:
        return f"varlen_attn of torch {torch.__version__} takes no block table"
    if not_plain(memory.layers):
        return not_plain(memory.layers)
    if memory.device.type != "cuda":
        return f"it needs a GPU, and the cache is on {memory.device}"
    if memory.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, and the model has {memory.dtype}"
    if memory.block_size % _PAGE:
        return f"block_size={memory.block_size} is no multiple of {_PAGE}"
    return None


def paged_varlen(
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
    """As `attention.paged_sdpa`. One split only: with several, results are wrong (pytorch #194167)."""
    view, memory = cache_view, cache_view.memory
    rows = query.shape[0]
    if not view.shared:
        starts = torch.arange(rows + 1, device=query.device, dtype=torch.int32)
        view.shared[None] = starts, view.context.to(torch.int32), view.block_table.to(torch.int32)
    starts, used, table = view.shared[None]
    out = varlen_attn(
        query.squeeze(2).to(memory.dtype),
        memory.keys[module.layer_idx],
        memory.values[module.layer_idx],
        starts,
        None,
        1,
        table.shape[1] * memory.block_size,
        scale=scaling,
        enable_gqa=query.shape[1] != memory.layers[0].kv_heads,
        seqused_k=used,
        block_table=table,
        num_splits=1,
    )
    return out.unsqueeze(1).to(query.dtype), None
