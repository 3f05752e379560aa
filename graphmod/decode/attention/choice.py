"""Attention over the paged cache in decode steps: which implementations there are, the SDPA reference, and the choice
between them, by a rule or by what each takes on this GPU.

They are registered with transformers' `AttentionInterface`, so that a model's own code and weights are used; none has
"flash" in its name, which transformers would take for its own. As there is no mask function of these names,
transformers builds no mask.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.config import CUDAGraphConfig
from graphmod.decode.attention import flex, triton, xqa
from graphmod.decode.cache.cache import Attends, CacheView, PagedCache
from graphmod.decode.config import AttentionName
from graphmod.decode.step.graphs import context_sizes
from graphmod.errors import ConfigError
from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")


class Implementation(NamedTuple):
    """An attention for decode steps.

    Attributes:
        name: under which transformers finds it; None leaves a model its own.
        function: as transformers calls it, with `cache_view` among the keywords; None with the model's own.
        stops_at_context: whether it does no work beyond the real context. If not, a graph is captured for each of a
            few numbers of visited tokens.
        unavailable: why it cannot be used with a cache, or None; asked of every implementation, so it must be quick.
        prepare: what takes long, for the one that is to be used: loads it, takes memory. Why that failed, or None.
        compiled: whether dynamo compiles it, in the first step of each batch size.
    """

    name: str | None
    function: Callable[..., tuple[Tensor, None]] | None
    stops_at_context: bool
    unavailable: Callable[[PagedCache], str | None]
    prepare: Callable[[PagedCache], str | None] = lambda _: None
    compiled: bool = False

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
    found.register()
    return Choice(found, measured)


def reference(chosen: Implementation, memory: PagedCache) -> Implementation:
    """What computes the same as a chosen attention, on any device and without a compiler."""
    plain = IMPLEMENTATIONS[AttentionName.sdpa]
    if chosen.name is None or plain.unavailable(memory):
        return OWN
    plain.register()
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


_LAYERS = 8  # of the model, one after the other: no layer finds its keys in the GPU's cache because it ran before
_ROUNDS = 9
_REPLAYS = 5
_WARMUP = 3
_WARM_SECONDS = 0.05  # of replays before any is timed: an idle GPU runs at low clocks


def measure(candidates: Mapping[str, Implementation], memory: PagedCache, max_seq_len: int) -> dict[str, float]:
    """Microseconds a layer of each candidate with a full batch, every row halfway to `max_seq_len`; in a CUDA graph.

    One that fails is left out, and the log says why. Must run outside of any capture.

    Args:
        candidates: by the name of the setting; prepared.
    """
    found = {}
    for name, one in candidates.items():
        try:
            with torch.cuda.device(memory.device):
                found[name] = time_graph(*layers_of(one, memory, memory.rows, max_seq_len // 2, max_seq_len))
        except torch.OutOfMemoryError:
            log.warning("decode attention: %s is skipped, because the GPU has no memory left to measure it", name)
        except Exception as error:  # of kernels, compilers and loaders: anything
            log.warning("decode attention: %s is skipped, because it failed: %.300s", name, error)
    said = ", ".join(f"{name} {us:.1f} us" for name, us in sorted(found.items(), key=lambda item: item[1]))
    log.info("decode attention: one layer with %d rows takes %s", memory.rows, said or "no measured time")
    return found


def layers_of(
    one: Implementation, memory: PagedCache, rows: int, context: int, max_seq_len: int
) -> tuple[Callable[[], Any], int]:
    """A function that calls an attention once for each of some layers, as a decode step does; and for how many.

    Args:
        rows: of the batch, each with `context` tokens, in blocks of its own where the cache has as many.
        max_seq_len: what block tables have room for.
    """
    size, context = memory.block_size, max(1, context)
    layers = [SimpleNamespace(layer_idx=number) for number in range(min(len(memory.layers), _LAYERS))]
    width = -(-max_seq_len // size)
    table = torch.arange(rows * width, device=memory.device) % (memory.blocks - memory.first_block)
    table = table.add(memory.first_block).view(rows, width)
    visited = next(n for n in context_sizes(size, width * size, one.stops_at_context) if n is None or n >= context)
    lengths = torch.full((rows,), context, device=memory.device)
    sizes = [
        (rows, memory.layers[layer.layer_idx].heads, 1, memory.layers[layer.layer_idx].head_dim) for layer in layers
    ]
    queries = [torch.ones(size, dtype=memory.dtype, device=memory.device) for size in sizes]
    slots = torch.zeros_like(lengths)

    def call(memory: PagedCache, table: Tensor, lengths: Tensor, slots: Tensor, *queries: Tensor) -> list[Tensor]:
        view = CacheView(memory, slots, table, lengths, visited)
        pairs = zip(layers, queries, strict=True)
        assert one.function is not None
        return [one.function(layer, query, cache_view=view)[0] for layer, query in pairs]

    # A partial, because the core looks for tensors there, and not in functions of this package.
    return functools.partial(call, memory, table, lengths, slots, *queries), len(layers)


def time_graph(function: Callable[[], Any], parts: int) -> float:
    """Microseconds that `function` takes in a CUDA graph, divided by its `parts`: a median.

    Raises:
        RuntimeError: it failed, or could not be captured.
    """

    def run() -> None:  # `replay` is for what returns no tensors
        function()

    graphed = CUDAGraphModule(run, CUDAGraphConfig(warmup_steps=_WARMUP), name="decode attention")
    try:
        with torch.inference_mode():
            for _ in range(_WARMUP + 1):  # compiles, and loads what a capture may not load
                graphed()
            begun = time.perf_counter()
            while time.perf_counter() - begun < _WARM_SECONDS:
                _event_ms(graphed)
            times = [_event_ms(graphed) for _ in range(_ROUNDS)]
    finally:
        graphed.reset()
    return statistics.median(times) * 1e3 / parts


def _event_ms(graphed: CUDAGraphModule) -> float:
    """Milliseconds of one replay.

    Raises:
        RuntimeError: there is no graph.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    done = graphed.replay(_REPLAYS)
    end.record()
    end.synchronize()
    if done < _REPLAYS:
        raise RuntimeError(f"it could not be captured: {graphed.last_failure}")
    return begin.elapsed_time(end) / _REPLAYS
