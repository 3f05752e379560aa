"""Attention over the paged cache in decode steps: the SDPA reference and a kernel of this package; and the choice
between them.

They are registered with transformers' `AttentionInterface`, so that a model's own code and weights are used; none has
"flash" in its name, which transformers would take for its own. As there is no mask function of these names,
transformers builds no mask. All but the reference read on the device how long each row is and where its blocks lie, so
that one graph serves every context and the work ends where the context does.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.decode.cache import Attends, CacheView, PagedCache
from graphmod.decode.types import AttentionName
from graphmod.errors import ConfigError

log = logging.getLogger("graphmod")


class Implementation(NamedTuple):
    """An attention for decode steps.

    Attributes:
        name: under which transformers finds it; None leaves a model its own.
        function: as transformers calls it, with `cache_view` among the keywords; None with the model's own.
        stops_at_context: whether it does no work beyond the real context. If not, a graph is captured for each of a
            few numbers of visited tokens.
        unavailable: why it cannot be used with a cache, or None; asked of every implementation, so it must be quick.
        prepare: what takes long, for the one that is to be used: loads it, takes memory.
    """

    name: str | None
    function: Callable[..., tuple[Tensor, None]] | None
    stops_at_context: bool
    unavailable: Callable[[PagedCache], str | None]
    prepare: Callable[[PagedCache], None] = lambda _: None

    def register(self) -> None:
        """Lets transformers find it."""
        if self.name is not None and self.function is not None:
            ALL_ATTENTION_FUNCTIONS.register(self.name, self.function)


def paged_sdpa(
    module: Attends,
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
    assert view.visited is not None
    rows, heads, width = query.shape[0], query.shape[1], query.shape[-1]
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


# -- kernels of this package: any GPU that Triton knows, nothing to install and little to compile ----------------------

_WIDEST = 256


def triton_unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None."""
    widths = sorted({width for layer in memory.layers for width in (layer.head_dim, layer.value_dim)})
    return misfit(memory.device, memory.block_size, widths)


def misfit(device: torch.device, block_size: int, widths: Iterable[int]) -> str | None:
    """Why its kernel does not take a cache of such blocks and heads, or None."""
    if device.type != "cuda":
        return f"it needs a GPU, and the cache is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    if block_size < 16 or block_size & (block_size - 1):
        return f"block_size={block_size} is no power of two of at least 16"
    for width in widths:
        if width & (width - 1) or not 16 <= width <= _WIDEST:
            return f"heads of {width} are no power of two from 16 to {_WIDEST}"
    return None


def prepare_triton(memory: PagedCache) -> None:
    """Registers the operation, and takes the memory in which the parts of a row are counted."""
    importlib.import_module("graphmod.decode.kernels")
    most = memory.rows * max(layer.kv_heads for layer in memory.layers)
    memory.scratch["triton"] = (torch.zeros(most, dtype=torch.int32, device=memory.device),)


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
    """Queries (B, heads, 1, head_dim) against the cache: (B, 1, heads, value_dim). On the rest see `paged_sdpa`.

    Args:
        softcap: what scores are capped at; s_aux: (heads,) logits of attention sinks.
    """
    view, memory = cache_view, cache_view.memory
    rule = memory.layers[module.layer_idx].rule
    if rule not in view.shared:
        view.shared[rule] = rule.first_seen(view.context)
    out = torch.ops.graphmod.triton_decode(
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


# -- the choice --------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = {
    AttentionName.triton: Implementation("graphmod_triton", paged_triton, True, triton_unavailable, prepare_triton),
    AttentionName.sdpa: Implementation("graphmod_sdpa", paged_sdpa, False, _sdpa_unavailable),
}
OWN = Implementation(None, None, False, lambda _: None)
"""The model's own attention, over keys and values that are gathered for it: what any model can use."""


def choose(name: AttentionName, memory: PagedCache, own_reason: str = "") -> Implementation:
    """The implementation a setting stands for, prepared and registered with transformers.

    `auto` takes the first that can be used: it measures nothing, so that one model decodes with the same last bits in
    every run.

    Args:
        own_reason: why the model can only use its own attention; "" if it need not.

    Raises:
        ConfigError: it cannot be used here; the message says why.
    """
    if own_reason and name not in (AttentionName.auto, AttentionName.own):
        raise ConfigError(f"attention={name} cannot be used with this model: {own_reason}; use auto, or own")
    if own_reason or name is AttentionName.own:
        if own_reason:
            log.info("decode attention: the model's own, because %s", own_reason)
        return OWN
    usable = {one: way for one, way in IMPLEMENTATIONS.items() if way.unavailable(memory) is None}
    if name is AttentionName.auto:
        found = next(iter(usable.values()), OWN)
    elif name in usable:
        found = usable[name]
    else:
        reason = IMPLEMENTATIONS[name].unavailable(memory)
        raise ConfigError(f"attention={name} cannot be used: {reason}; use auto, or: {', '.join([*usable, 'own'])}")
    found.prepare(memory)
    found.register()
    return found


def reference(chosen: Implementation, memory: PagedCache) -> Implementation:
    """What computes the same as a chosen attention, on any device and without a compiler."""
    plain = IMPLEMENTATIONS[AttentionName.sdpa]
    if chosen.name is None or plain.unavailable(memory):
        return OWN
    plain.register()
    return plain
