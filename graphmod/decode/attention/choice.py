"""Attention over the paged cache in decode steps: which implementations there are, and the SDPA reference.

They are registered with transformers' `AttentionInterface`, so that a model's own code and weights are used; none has
"flash" in its name, which transformers would take for its own. As there is no mask function of these names,
transformers builds no mask.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.decode.attention import flex, triton, xqa
from graphmod.decode.attention.fastest import measure
from graphmod.decode.attention.implementation import Implementation
from graphmod.decode.cache.cache import CacheView, PagedCache
from graphmod.decode.config import AttentionName
from graphmod.errors import ConfigError

log = logging.getLogger("graphmod")


def paged_sdpa(
    module: nn.Module,
    query: Tensor,
    *_: Any,
    cache_view: CacheView,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The reference, on any device: gathers the visited blocks and masks what lies beyond the context.

    Args:
        query: (B, heads, 1, head_dim).
        _: keys and values of the new token, which are in the cache already, and a mask, which there is none of.
        s_aux: (heads,), what transformers calls the logits of attention sinks.

    Returns:
        (B, 1, heads, value_dim).
    """
    view, layer = cache_view, cache_view.memory.layers[module.layer_idx]
    rows, heads, _, width = query.shape
    keys, values = view.memory.read(module.layer_idx, view.block_table, view.visited)
    seen = view.shared.get(layer.rule)
    if seen is None:
        token = torch.arange(view.visited, device=query.device)
        seen = token < view.context.unsqueeze(1)
        first = layer.rule.first_seen(view.context)
        if first is not None:
            seen = seen & (token >= first.unsqueeze(1))
        seen = view.shared[layer.rule] = seen[:, None, None, :]
    # The query heads that share a KV head stand where SDPA has queries of different positions: nothing is repeated.
    grouped = query.reshape(rows, layer.kv_heads, -1, width)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if s_aux is not None:
        keys, values, seen = _with_sinks(s_aux, grouped, keys, values, seen)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scaling)
    return out.reshape(rows, 1, heads, layer.value_dim), None


def _with_sinks(sinks: Tensor, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
    """Keys, values and an additive mask with one more token: its score is the sink of the head, its value nothing."""
    rows, kv_heads, group, _ = query.shape
    mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, float("-inf"))
    mask = mask.expand(rows, kv_heads, group, -1)
    more = sinks.to(query.dtype).reshape(1, kv_heads, group, 1).expand(rows, -1, -1, -1)
    return pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1)), torch.cat((mask, more), dim=-1)


def _sdpa_unavailable(memory: PagedCache) -> str | None:
    return "SDPA caps no scores" if any(layer.softcap for layer in memory.layers) else None


IMPLEMENTATIONS = {
    AttentionName.flashinfer: Implementation("graphmod_xqa", xqa.paged_xqa, True, xqa.unavailable, xqa.prepare),
    AttentionName.flex: Implementation("graphmod_flex", flex.paged_flex, True, flex.unavailable, flex.prepare, True),
    AttentionName.triton: Implementation(
        "graphmod_triton", triton.paged_triton, True, triton.unavailable, triton.prepare
    ),
    AttentionName.sdpa: Implementation("graphmod_sdpa", paged_sdpa, False, _sdpa_unavailable),
}
OWN = Implementation(None, None, False, lambda _: None)
"""The model's own attention, over keys and values that are gathered for it: what any model can use."""
# What `auto` tries, in this order: a rule and no measurement, so that one model decodes with the same last bits in
# every run. Not flex attention, which takes seconds to compile for each batch size, and longer in a step: compiled
# steps of 1, 32 and 128 rows took 0.94, 1.69 and 4.09 ms with it, and 0.87, 1.66 and 3.89 with `triton`, on an H200.
AUTO = (AttentionName.triton, AttentionName.flashinfer, AttentionName.sdpa)


class Choice(NamedTuple):
    """The attention of an engine.

    Attributes:
        implementation: registered with transformers.
        measured_us: microseconds a layer of each that `fastest` compared, by the name of the setting; else empty.
    """

    implementation: Implementation
    measured_us: dict[str, float]


def choose(name: AttentionName, memory: PagedCache, max_seq_len: int, own_reason: str = "") -> Choice:
    """The implementation a setting stands for; prepared, and registered with transformers.

    Args:
        own_reason: why the model can only use its own attention; "" if it need not.
        max_seq_len: the most tokens of a sequence.

    Raises:
        ConfigError: it cannot be used here; the message says why.
    """
    measured: dict[str, float] = {}
    if own_reason and name not in (AttentionName.auto, AttentionName.fastest, AttentionName.own):
        raise ConfigError(f"attention={name.value} cannot be used with this model: {own_reason}; use auto, or own")
    if own_reason or name is AttentionName.own:
        if own_reason:
            log.info("decode attention: the model's own, because %s", own_reason)
        return Choice(OWN, measured)
    if name is AttentionName.auto:
        found = _first(AUTO, memory)
    elif name is AttentionName.fastest:
        usable = {one.value: IMPLEMENTATIONS[one] for one in IMPLEMENTATIONS if _reason(one, memory) is None}
        measured = measure(usable, memory, max_seq_len) if len(usable) > 1 else {}
        fastest = min(measured, key=measured.__getitem__) if measured else AttentionName.sdpa.value
        found = usable.get(fastest, OWN)
    else:
        found, reason = IMPLEMENTATIONS[name], _reason(name, memory)
        if reason is not None:
            others = [other.value for other, one in IMPLEMENTATIONS.items() if one.unavailable(memory) is None]
            others = [*(other for other in others if other != name.value), AttentionName.own.value]
            raise ConfigError(f"attention={name.value} cannot be used: {reason}; use auto, or: {', '.join(others)}")
    if found.name is not None:
        ALL_ATTENTION_FUNCTIONS.register(found.name, found.function)
    return Choice(found, measured)


def reference(chosen: Implementation, memory: PagedCache) -> Implementation:
    """What computes the same as a chosen attention, on any device and without a compiler."""
    plain = IMPLEMENTATIONS[AttentionName.sdpa]
    if chosen.name is None or plain.unavailable(memory):
        return OWN
    ALL_ATTENTION_FUNCTIONS.register(plain.name, plain.function)
    return plain


def _first(names: Iterable[AttentionName], memory: PagedCache) -> Implementation:
    return next((IMPLEMENTATIONS[name] for name in names if _reason(name, memory) is None), OWN)


def _reason(name: AttentionName, memory: PagedCache) -> str | None:
    """Why an implementation cannot be used, or None: it is prepared."""
    found = IMPLEMENTATIONS[name]
    reason = found.unavailable(memory) or found.prepare(memory)
    if reason is not None:
        log.debug("decode attention: not %s, because %s", name.value, reason)
    return reason
