"""Decode attention with kernels of this package: any GPU that Triton knows, nothing to install and little to compile.

How long each row is and where its blocks lie is read on the device, so that one graph serves every context.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, library

from graphmod.decode.cache.cache import Attends, CacheView, PagedCache

_WIDEST = 256


def unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None."""
    if memory.device.type != "cuda":
        return f"it needs a GPU, and the cache is on {memory.device}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(memory.device) < (8, 0) and torch.version.hip is None:
        return "it needs a GPU of compute capability 8.0 or newer"
    if memory.block_size < 16 or memory.block_size & (memory.block_size - 1):
        return f"block_size={memory.block_size} is no power of two of at least 16"
    for width in sorted({width for layer in memory.layers for width in (layer.head_dim, layer.value_dim)}):
        if width & (width - 1) or not 16 <= width <= _WIDEST:
            return f"heads of {width} are no power of two from 16 to {_WIDEST}"
    return None


def prepare(memory: PagedCache) -> None:
    """Takes the memory in which the parts of a row are counted."""
    most = memory.rows * max(layer.kv_heads for layer in memory.layers)
    memory.scratch["triton"] = (torch.zeros(most, dtype=torch.int32, device=memory.device),)


# For an operation that does not take any strides, inductor makes copies of the table and the query for each layer.
@library.custom_op("graphmod::triton_decode", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def triton_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    context: Tensor,
    first: Tensor | None,
    sinks: Tensor | None,
    counters: Tensor,
    scale: float,
    cap: float | None,
) -> Tensor:
    """One token of each row against its part of the cache; (B, 1, heads, value_dim) in the dtype of `query`.

    It is said to change nothing: the kernel leaves `counters` zero, as it found them.

    Args:
        query: (B, heads, 1, head_dim), its last dimension contiguous.
        keys, values: (blocks, block_size, kv_heads, head_dim or value_dim), contiguous, of the dtype of `query`.
        table: (B, blocks of a sequence) integers, its last dimension contiguous.
        context: (B,) int64: tokens of each row; a row without any gets zeros.
        first: (B,) int64: the first token that is seen; None sees all.
        sinks: (heads,) logits of attention sinks, or None.
        counters: (B * kv_heads or more) int32, zero.
        scale: of the products of queries and keys.
        cap: what scores are capped at by a tanh; None caps nothing.
    """
    from graphmod.decode.kernels import attend

    with torch.cuda.device_of(query):  # the device whose stream it is launched on
        return attend(query, keys, values, table, context, first, sinks, counters, scale, cap)


@triton_decode.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Tensor:
    return query.new_empty((len(query), 1, query.shape[1], values.shape[3]))


def paged_triton(
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
    rule = memory.layers[module.layer_idx].rule
    if rule not in view.shared:
        view.shared[rule] = rule.first_seen(view.context)
    out = triton_decode(
        query.to(memory.dtype),
        *memory.near(module.layer_idx),
        view.block_table,
        view.context,
        view.shared[rule],
        s_aux,
        *memory.scratch["triton"],
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap,
    )
    return out.to(query.dtype), None
