"""What each attention takes on this GPU, for `attention=fastest`."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphmod.config import CUDAGraphConfig
from graphmod.decode.attention.implementation import Implementation
from graphmod.decode.cache.cache import CacheView, PagedCache
from graphmod.decode.step.graphs import context_sizes
from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")

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
