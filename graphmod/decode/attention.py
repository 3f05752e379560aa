"""Attention over the paged cache: which implementations there are, the SDPA reference, and prefill.

They are registered with transformers' `AttentionInterface`, so that a model's own code and weights are used; none has
"flash" in its name, which transformers would take for its own. As there is no mask function of these names,
transformers builds no mask.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.decode import flex, varlen, xqa
from graphmod.decode.cache import CacheView, PagedCache
from graphmod.decode.config import AttentionName
from graphmod.decode.errors import DecodeError
from graphmod.decode.fastest import measure
from graphmod.decode.implementation import Implementation
from graphmod.errors import ConfigError

log = logging.getLogger("graphmod")

PREFILL = "graphmod_prefill"


def paged_sdpa(
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
    """The reference, on any device: gathers the visited blocks and masks what lies beyond the context.

    Args:
        query: (B, heads, 1, head_dim).
        key, value: of the new token; already in the cache, and not used here.

    Returns:
        (B, 1, heads, head_dim).
    """
    view = cache_view
    rows, heads, _, width = query.shape
    keys, values = view.memory.read(module.layer_idx, view.block_table, view.visited)
    if view.shared is None:
        seen = torch.arange(view.visited, device=query.device) < view.context.unsqueeze(1)
        view.shared = seen[:, None, None, :]
    # The query heads that share a KV head stand where SDPA has queries of different positions: nothing is repeated.
    grouped = query.reshape(rows, view.memory.kv_heads, -1, width)
    out = scaled_dot_product_attention(
        grouped, keys.to(query.dtype), values.to(query.dtype), attn_mask=view.shared, scale=scaling
    )
    return out.reshape(rows, 1, heads, width), None


def prefill(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache_view: CacheView,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a chunk of prompts, (B, heads, S, head_dim), with transformers' own SDPA.

    A first chunk needs nothing from the cache; padding on the right is in nobody's past. Later chunks read what came
    before from the cache.
    """
    view = cache_view
    if view.start is None:
        return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})
    keys, values = view.memory.read(module.layer_idx, view.block_table, view.visited)
    if view.shared is None:
        position = view.start[:, None] + torch.arange(query.shape[2], device=query.device)
        seen = torch.arange(view.visited, device=query.device) <= position.unsqueeze(-1)
        view.shared = seen.unsqueeze(1)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    return sdpa_attention_forward(module, query, keys, values, view.shared, **kwargs)


IMPLEMENTATIONS = {
    AttentionName.flashinfer: Implementation("graphmod_xqa", xqa.paged_xqa, True, xqa.unavailable, xqa.prepare),
    AttentionName.flex: Implementation("graphmod_flex", flex.paged_flex, True, flex.unavailable, flex.prepare),
    AttentionName.varlen: Implementation("graphmod_varlen", varlen.paged_varlen, True, varlen.unavailable),
    AttentionName.sdpa: Implementation("graphmod_sdpa", paged_sdpa, False, lambda _: None),
}
# What `auto` tries, in this order: a rule and no measurement, so that one model decodes with the same last bits in
# every run. Without compilation it leaves out flex attention, which takes seconds to compile for each batch size.
# `benchmarks/attention.py` measured them: SDPA takes three to five times as long as FlashInfer, flex about 0.9 times.
AUTO = (AttentionName.flashinfer, AttentionName.sdpa)
AUTO_COMPILED = (AttentionName.flex, AttentionName.sdpa)


class Choice(NamedTuple):
    """The attention of an engine.

    Attributes:
        implementation: registered with transformers.
        measured_us: microseconds a layer of each that `fastest` compared, by the name of the setting; else empty.
    """

    implementation: Implementation
    measured_us: dict[str, float]


def choose(name: AttentionName, memory: PagedCache, compiled: bool, max_seq_len: int) -> Choice:
    """The implementation a setting stands for; prepared, and registered with transformers.

    Args:
        compiled: whether decode steps are compiled.
        max_seq_len: the most tokens of a sequence.

    Raises:
        ConfigError: it cannot be used here; the message says why.
    """
    ALL_ATTENTION_FUNCTIONS.register(PREFILL, prefill)
    measured: dict[str, float] = {}
    if name is AttentionName.auto:
        found = _first(AUTO_COMPILED if compiled else AUTO, memory)
    elif name is AttentionName.fastest:
        usable = {one.value: IMPLEMENTATIONS[one] for one in IMPLEMENTATIONS if _reason(one, memory) is None}
        measured = measure(usable, memory, compiled, max_seq_len) if len(usable) > 1 else {}
        found = usable[min(measured, key=measured.__getitem__) if measured else AttentionName.sdpa.value]
    else:
        found, reason = IMPLEMENTATIONS[name], _reason(name, memory)
        if reason is not None:
            others = [other.value for other, one in IMPLEMENTATIONS.items() if one.unavailable(memory) is None]
            others = [other for other in others if other != name.value]
            raise ConfigError(f"attention={name.value} cannot be used: {reason}; use auto, or: {', '.join(others)}")
    ALL_ATTENTION_FUNCTIONS.register(found.name, found.function)
    return Choice(found, measured)


def _first(names: Iterable[AttentionName], memory: PagedCache) -> Implementation:
    return next(IMPLEMENTATIONS[name] for name in names if _reason(name, memory) is None)


def _reason(name: AttentionName, memory: PagedCache) -> str | None:
    """Why an implementation cannot be used, or None: it is prepared."""
    found = IMPLEMENTATIONS[name]
    reason = found.unavailable(memory) or found.prepare(memory)
    if reason is not None:
        log.debug("decode attention: not %s, because %s", name.value, reason)
    return reason


@contextlib.contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Lets `model` use the attention function `name` while it is active.

    Raises:
        DecodeError: the model does not let its attention be chosen.
    """
    if not getattr(model, "_supports_attention_backend", False) and not getattr(model, "_supports_sdpa", False):
        raise DecodeError(
            f"{type(model).__name__} does not let its attention be chosen; decode needs a model that goes through "
            "transformers' attention interface (llama, qwen3, gpt2, ...). Use model.generate"
        )
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
