"""Attention of prompts that lie one after the other: each token sees its own prompt, up to itself.

On a GPU in half precision by PyTorch's flash attention for sequences of different lengths, elsewhere by SDPA with a
mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.decode.cache.cache import Layer, PagedCache
from graphmod.decode.prefill.gather import copies_by_length, gather_columns
from graphmod.decode.prefill.view import AT, HELD, NOBODY, OF, PIECE, POSITION, PackedView

NAME = "graphmod_packed"
_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256  # heads that flash attention takes
_flash_forward = torch.ops.aten._flash_attention_forward


def unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None: then it is registered with transformers."""
    if any(layer.softcap or layer.sinks for layer in memory.layers):
        return "it has neither capped scores nor attention sinks"
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    return None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    cache_view: PackedView,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it.

    Args:
        query: (1, heads, T, head_dim).
        key, value: (1, kv_heads, T, head_dim), of the same tokens; they are in the cache already.

    Returns:
        (1, T, heads, value_dim).
    """
    view, memory = cache_view, cache_view.memory
    if _is_flash(memory, memory.layers[module.layer_idx]):
        return _flash(query, key, value, scaling, view, module.layer_idx), None
    columns = view.packed.columns
    if columns is not None:  # (1, kv_heads, C, head_dim)
        kept = memory.keys[module.layer_idx], memory.values[module.layer_idx]
        key, value = (
            held.flatten(0, 1).index_select(0, columns[HELD]).transpose(0, 1).unsqueeze(0).to(query.dtype)
            for held in kept
        )
    return _masked(query, key, value, scaling, view, memory.layers[module.layer_idx]), None


def reads_by_length(memory: PagedCache) -> bool:
    """Whether all that pieces see is read from the cache, and no more, so that room for any number costs no time. Not
    where a part of the cache is far: new keys would come back over the bus."""
    near = memory.ring is None and all(_is_flash(memory, layer) for layer in memory.layers)
    return near and copies_by_length(memory.device)


def _is_flash(memory: PagedCache, layer: Layer) -> bool:
    half = memory.device.type == "cuda" and memory.dtype in _HALF
    return half and layer.rule.chunk is None and layer.head_dim == layer.value_dim <= _WIDEST and not layer.head_dim % 8


def _flash(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, view: PackedView, number: int) -> Tensor:
    packed, memory, rule = view.packed, view.memory, view.memory.layers[number].rule
    wanted, key, value = (one[0].transpose(0, 1).to(memory.dtype) for one in (query, key, value))
    starts = packed.starts
    if packed.columns is not None:
        key, value = gather_columns(memory.keys[number], memory.values[number], packed.columns[HELD], starts[1])
    window = {} if rule.window is None else {"window_size_left": rule.window - 1, "window_size_right": 0}
    out = _flash_forward(
        wanted, key, value, starts[0], starts[1], len(wanted), len(key), 0.0, True, False, scale=scaling, **window
    )
    return out[0].unsqueeze(0).to(query.dtype)


def _masked(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, view: PackedView, layer: Layer) -> Tensor:
    seen = view.shared.get(layer.rule)
    if seen is None:
        tokens, columns = view.packed.tokens, view.packed.columns
        piece, position = tokens[PIECE].unsqueeze(1), tokens[POSITION].unsqueeze(1)
        of, at = (tokens[PIECE], tokens[POSITION]) if columns is None else (columns[OF], columns[AT])
        # Padding sees everything: who sees nothing computes NaN.
        seen = view.shared[layer.rule] = ((piece == of) & layer.rule.sees(position, at)) | (piece == NOBODY)
    # A mask multiplies by zero, so what is not finite would reach the other prompts. It is taken out, and put back
    # into the tokens that see it.
    finite = (torch.isfinite(key).all(-1) & torch.isfinite(value).all(-1)).all(1)[0]
    spoilt = (seen & ~finite).any(1)
    key, value = (one.masked_fill(~finite.unsqueeze(1), 0) for one in (key, value))
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=grouped)
    return out.masked_fill(spoilt.unsqueeze(1), float("nan")).transpose(1, 2)
