"""Attention over the paged cache: which implementations there are, the SDPA reference, and prefill.

They are registered with transformers' `AttentionInterface`, so that a model's own code and weights are used; none has
"flash" in its name, which transformers would take for its own. As there is no mask function of these names,
transformers builds no mask. Imports torch, transformers, `cache`, `flex` and `varlen`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.decode import flex, varlen
from graphmod.decode.cache import CacheView, PagedCache
from graphmod.decode.config import AttentionName
from graphmod.decode.errors import DecodeError
from graphmod.errors import ConfigError

log = logging.getLogger("graphmod")

PREFILL = "graphmod_prefill"


class Implementation(NamedTuple):
    """An attention for decode steps.

    Attributes:
        name: under which transformers finds it.
        function: as transformers calls it, with `cache_view` among the keywords.
        stops_at_context: whether it does no work beyond the real context. If not, a graph is captured for each of a
            few numbers of visited tokens.
        unavailable: why it cannot be used with a cache, or None.
    """

    name: str
    function: Callable[..., tuple[Tensor, None]]
    stops_at_context: bool
    unavailable: Callable[[PagedCache], str | None]


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


def _always(_: PagedCache) -> None:
    return None


IMPLEMENTATIONS = {
    AttentionName.flex: Implementation("graphmod_flex", flex.paged_flex, True, flex.unavailable),
    AttentionName.varlen: Implementation("graphmod_varlen", varlen.paged_varlen, True, varlen.unavailable),
    AttentionName.sdpa: Implementation("graphmod_sdpa", paged_sdpa, False, _always),
}


def choose(name: AttentionName, memory: PagedCache, compiled: bool) -> Implementation:
    """The implementation a setting stands for; registered with transformers.

    Args:
        compiled: whether decode steps are compiled. Only then does `auto` take flex attention, which takes seconds to
            compile for each batch size.

    Raises:
        ConfigError: it cannot be used here; the message says why.
    """
    ALL_ATTENTION_FUNCTIONS.register(PREFILL, prefill)
    fastest = (AttentionName.flex, AttentionName.sdpa) if compiled else (AttentionName.sdpa,)
    for candidate in fastest if name is AttentionName.auto else (name,):
        found = IMPLEMENTATIONS[candidate]
        reason = found.unavailable(memory)
        if reason is None:
            ALL_ATTENTION_FUNCTIONS.register(found.name, found.function)
            return found
        if name is not AttentionName.auto:
            usable = [other.value for other, one in IMPLEMENTATIONS.items() if one.unavailable(memory) is None]
            raise ConfigError(f"attention={name.value} cannot be used: {reason}; use auto, or: {', '.join(usable)}")
        log.debug("decode attention: not %s, because %s", candidate.value, reason)
    raise AssertionError("the SDPA reference is always available")


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
