"""What each attention of decode steps takes on this GPU: microseconds a layer, in a CUDA graph, in bf16.

    python benchmarks/attention.py --out benchmarks/results/attention.json
    python benchmarks/attention.py --shapes b1_544_of_2048
    python benchmarks/attention.py --shapes choices --out choices.json

Several layers run one after the other, each over keys of its own, as in a decode step. Attentions that cannot be used
are listed with the reason; `own` is what a model like Llama does by itself, over keys and values gathered for it.
`gb_s` is how many keys and values of the contexts were read in a second, each counted once.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.options import chosen, gpu_is_there

LAYERS, HEAD, BLOCK = 8, 128, 64
# Contexts that are no multiple of what a kernel takes at a time: those would flatter kernels that take much.
SHAPES = {
    "b1_544_of_2048": {"rows": 1, "heads": 16, "kv_heads": 8, "context": 544, "max_seq_len": 2048},
    "b1_544_of_32768": {"rows": 1, "heads": 16, "kv_heads": 8, "context": 544, "max_seq_len": 32768},
    "b32_544_of_2048": {"rows": 32, "heads": 16, "kv_heads": 8, "context": 544, "max_seq_len": 2048},
    "b128_544_of_2048": {"rows": 128, "heads": 16, "kv_heads": 8, "context": 544, "max_seq_len": 2048},
    "b32_2000_of_2048": {"rows": 32, "heads": 32, "kv_heads": 8, "context": 2000, "max_seq_len": 2048},
    "b128_2000_of_2048": {"rows": 128, "heads": 32, "kv_heads": 8, "context": 2000, "max_seq_len": 2048},
}
CHOICES = {
    f"b{rows}_{context}_of_{longest}": {
        "rows": rows,
        "heads": 32,
        "kv_heads": 8,
        "context": context,
        "max_seq_len": longest,
        "layers": layers,
    }
    for context, longest in ((2000, 2048), (16000, 16384))
    for rows, layers in ((1, 8), (32, 4), (128, 2))  # as many as overflow the GPU's cache, and fit in its memory
}
"""Short and long contexts of few and many rows, which `--shapes choices` measures."""
KNOWN = SHAPES | CHOICES


def measure(shape: dict[str, int]) -> dict[str, Any]:
    """For each attention `us` and `gb_s`, or `unavailable` or `failed`: why there is no time."""
    import torch

    from graphmod.decode.attention import IMPLEMENTATIONS, OWN
    from graphmod.decode.cache import Layer, PagedCache
    from graphmod.decode.types import AttentionName

    rows, context, longest = shape["rows"], shape["context"], shape["max_seq_len"]
    sizes = (Layer(shape["heads"], shape["kv_heads"], HEAD, HEAD),) * shape.get("layers", LAYERS)
    read = 2 * rows * context * shape["kv_heads"] * HEAD * 2
    found = {}
    for name, one in {**IMPLEMENTATIONS, AttentionName.own: OWN}.items():
        memory = PagedCache(sizes, rows * -(-longest // BLOCK), BLOCK, rows, torch.bfloat16, torch.device("cuda"))
        for tensor in (*memory.keys, *memory.values):
            tensor.normal_()
        if (reason := one.unavailable(memory)) is not None:
            found[name.value] = {"unavailable": reason}
            continue
        one.prepare(memory)
        try:
            call = own_layers if one is OWN else functools.partial(layers_of, one)
            us = time_graph(*call(memory, rows, context, longest))
        except RuntimeError as error:
            found[name.value] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        else:
            found[name.value] = {
                "us": round(us, 2),
                "gb_s": round(read / us / 1e3),
                "block_size": BLOCK,
            }
        del memory
        torch.cuda.empty_cache()
    return found


def layers_of(one: Any, memory: Any, rows: int, context: int, max_seq_len: int) -> tuple[Callable[[], Any], int]:
    """A function that calls an attention once for each layer, as a decode step does; and for how many.

    Args:
        one: `Implementation`; memory: `PagedCache`.
        rows: of the batch, each with `context` tokens, in blocks of its own where the cache has as many.
        max_seq_len: what block tables have room for.
    """
    import torch

    from graphmod.decode.cache import CacheView
    from graphmod.decode.step import context_sizes

    size = memory.block_size
    layers = [SimpleNamespace(layer_idx=number) for number in range(len(memory.layers))]
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

    def call() -> list[Any]:
        view = CacheView(memory, slots, table, lengths, visited)
        pairs = zip(layers, queries, strict=True)
        return [one.function(layer, query, cache_view=view)[0] for layer, query in pairs]

    return call, len(layers)


def time_graph(function: Callable[[], Any], parts: int) -> float:
    """Microseconds that `function` takes in a CUDA graph, divided by its `parts`: a median.

    Raises:
        RuntimeError: it failed, or could not be captured.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        for _ in range(3):  # compiles, and loads what a capture may not load
            function()
        with torch.cuda.graph(graph):
            function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed() -> float:
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 5

    until = time.perf_counter() + 0.05  # an idle GPU runs at low clocks
    while time.perf_counter() < until:
        timed()
    return statistics.median(timed() for _ in range(15)) * 1e3 / parts


def own_layers(memory: Any, rows: int, context: int, longest: int) -> tuple[Callable[[], Any], int]:
    """A function that calls a model's own attention once for each layer; and for how many. All of `longest` is looked
    at where the context does not fit into less.

    Args:
        memory: `PagedCache`.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from graphmod.decode.cache import GatheredView
    from graphmod.decode.step import context_sizes

    layer, settings = memory.layers[0], {"dtype": memory.dtype, "device": memory.device}
    columns = next(size for size in context_sizes(BLOCK, longest, False) if size >= context)
    table = torch.arange(rows * longest // BLOCK, device=memory.device).add(memory.first_block).view(rows, -1)
    lengths = torch.full((rows,), context, device=memory.device)
    query = torch.ones((rows, layer.heads, 1, HEAD), **settings)
    new = torch.ones((rows, layer.kv_heads, 1, HEAD), **settings)
    slots = memory.spare_slots[:rows]

    def call() -> list[Any]:
        view = GatheredView(memory, slots, table, lengths, columns, 1)
        mask = view.mask.bool()[:, None, None, :]
        return [
            scaled_dot_product_attention(query, *view.update(new, new, number), attn_mask=mask, enable_gqa=True)
            for number in range(len(memory.layers))
        ]

    return call, len(memory.layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"choices, or of {', '.join(KNOWN)}")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    wanted = ",".join(CHOICES) if options.shapes == "choices" else options.shapes
    shapes = chosen(parser, wanted, KNOWN, "--shapes")
    if not gpu_is_there():
        return 2
    from benchmarks.measure import environment

    results = []
    for name in shapes:
        times = measure(KNOWN[name])
        results.append({"shape": name, **KNOWN[name], "attention": times})
        for which, found in times.items():
            said = f"{found}"
            if "us" in found:
                said = f"{found['us']:9.1f} us  {found['gb_s']:5d} GB/s"
            print(f"{name:16} {which:11} {said}", flush=True)
    if options.out:
        written = {
            "command": "python " + " ".join(sys.argv),
            "head_dim": HEAD,
            "layers": LAYERS,
            "dtype": "bfloat16",
            "results": results,
            "environment": environment(),
        }
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
