"""Decode attention with `flex_attention`, the block table as its BlockMask: torch alone, on a GPU.

The number of blocks that a row visits lies in device memory, so one graph serves every context and the work ends where
the context does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from graphmod.decode.cache.cache import Attends, CacheView, Layer, PagedCache
from graphmod.fuse.inductor import compiled_code, for_decode


def unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None."""
    if memory.device.type != "cuda":
        return f"it is compiled for a GPU, and the cache is on {memory.device}"
    if torch.cuda.get_device_capability(memory.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    if memory.block_size < 16 or memory.block_size & (memory.block_size - 1):
        return f"block_size={memory.block_size} is no power of two of at least 16"
    for width in sorted({width for layer in memory.layers for width in (layer.head_dim, layer.value_dim)}):
        if width & (width - 1) or width < 16:
            return f"heads of {width} are no power of two of at least 16"
    return None


@cache
def _compiled() -> Any:
    return for_decode(flex_attention)


def prepare(memory: PagedCache) -> None:
    """Chooses how many blocks of keys and values are on their way while one is computed with: up to three, as far as
    two programs of four warps fit in a multiprocessor's shared memory. On an H200, 32 rows of 545 tokens took 23.3 us a
    layer with three, and 31.5 us with inductor's own choice.

    Where the query heads of a KV head are no power of two, inductor takes another kernel, which is left alone.
    """
    memory.kernel_options = {}
    powers = all((layer.heads // layer.kv_heads).bit_count() == 1 for layer in memory.layers)
    width = max(layer.head_dim + layer.value_dim for layer in memory.layers)
    block = min(memory.block_size, 64) * width * memory.dtype.itemsize
    properties = torch.cuda.get_device_properties(memory.device)
    stages = min(3, getattr(properties, "shared_memory_per_block_optin", 48 * 1024) // 2 // block)
    if stages > 1 and powers:
        memory.kernel_options = {"num_stages": stages, "num_warps": 4}
    _compiled()  # a recorded step that made it would be refused, for it keeps what it made


def block_mask(view: CacheView, tokens: int, layer: Layer) -> BlockMask:
    """The blocks each row visits, from the one that the first token it sees is in to the one its context ends in.

    All are given as partly masked ones: then the kernel divides what a row really visits among its splits, where with
    "full" blocks it would divide the whole cache. All that is in a visited block is seen, but for the start of the
    first and the end of the last.

    Args:
        tokens: slots of the whole cache, which flex attention sees as one long row of keys.
        layer: one of those that look back as far.
    """
    size = view.memory.block_size
    table = view.block_table.to(torch.int32)
    count = (view.context + (size - 1)) // size
    last = table.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    filled = view.context - (count - 1) * size
    seen = layer.rule.first_seen(view.context)

    def in_context(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return (slot // size != last[row]) | (slot % size < filled[row])

    rule = in_context
    if seen is not None:
        before, skipped = seen // size, seen % size
        first = table.gather(1, before.unsqueeze(1)).squeeze(1)
        column = torch.arange(table.shape[1], device=table.device) + before.unsqueeze(1)
        table = table.gather(1, column.clamp(max=table.shape[1] - 1))
        count = count - before

        def rule(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            started = (slot // size != first[row]) | (slot % size >= skipped[row])
            return started & in_context(row, head, query, slot)

    # As wide as the cache has blocks, which is what lowerings check; no row visits that many.
    indices = pad(table, (0, max(0, view.memory.blocks - table.shape[1])))

    return BlockMask.from_kv_blocks(
        count.to(torch.int32)[:, None, None],
        indices[:, None, None, :],
        BLOCK_SIZE=(128, size),
        mask_mod=rule,
        seq_lengths=(1, tokens),
        compute_q_blocks=False,
    )


def paged_flex(
    module: Attends,
    query: Tensor,
    *_: Any,
    cache_view: CacheView,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `attention.paged_sdpa`: (B, heads, 1, head_dim) to (B, 1, heads, value_dim).

    Args:
        softcap: what scores are capped at; s_aux: (heads,) logits of attention sinks.
    """
    view, memory = cache_view, cache_view.memory
    layer, tokens = memory.layers[module.layer_idx], memory.blocks * memory.block_size
    if layer.rule not in view.shared:
        view.shared[layer.rule] = block_mask(view, tokens, layer)
    keys, values = (held.flatten(0, 1).unsqueeze(0).transpose(1, 2) for held in memory.near(module.layer_idx))
    query = query.to(keys.dtype)
    settings = {
        "block_mask": view.shared[layer.rule],
        "scale": scaling,
        "enable_gqa": query.shape[1] != layer.kv_heads,
        "kernel_options": dict(memory.kernel_options),
    }
    if softcap is not None:
        settings["score_mod"] = _capped(softcap)
    if s_aux is not None:
        settings["return_aux"] = AuxRequest(lse=True)
    with compiled_code():
        out = _compiled()(query, keys, values, **settings)
    if s_aux is not None:
        # A sink adds its exponential to the denominator and nothing to the numerator.
        out, aux = out
        out = out * torch.sigmoid(aux.lse - s_aux.to(aux.lse.dtype)[None, :, None]).unsqueeze(-1)
    return out.transpose(1, 2).to(query.dtype), None


@cache  # one function for each cap: dynamo compiles for a function
def _capped(cap: float) -> Callable:
    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped
