"""What a decode step takes with its key-value cache in the memory of the host, beside copies alone and compute alone.

    python benchmarks/offload.py --out benchmarks/results/offload.json
    python benchmarks/offload.py --smoke           # a tiny model on the CPU, to see that everything runs

Qwen3-8B's shape with random bf16 weights, one row with a context of 16,384 tokens. Beside the engine: a graph of each
layer and copies on a second stream, by hand.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.decode_shapes import QWEN3_8B, TINY, build, prompts, synchronize  # noqa: E402

_GIB = 2**30
_STEPS = 8  # of a chunk with the cache on the GPU; with one in memory of the host, a chunk is one step
# What is measured: settings of the engine beside `offload=layers`. The first keeps all on the GPU: compute alone.
CASES: dict[str, dict[str, Any]] = {
    "on the GPU": {"offload": "none"},
    "all layers far": {},
    "all layers far, 3 buffers": {"offload_buffers": 3},
    "a quarter stays": {"offload_resident": 0.25},
    "all layers far, a launch for each kernel": {"graphs": False},
}


def bandwidth(nbytes: int) -> float:
    """Bytes a second of copies from pinned memory, the median of nine."""
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return nbytes / statistics.median(times[1:])


def step_ms(engine: Any, prompt: list[int], chunks: int) -> tuple[float, list[int]]:
    """Milliseconds a token of one request, the median over chunks of steps; and its tokens."""
    handle = engine.submit(prompt, max_new_tokens=(chunks + 4) * _STEPS)
    times, before, seen = [], time.perf_counter(), 0
    while not handle.done:
        engine.step()
        found = len(handle.completions[0].tokens)
        if found > seen:
            now = time.perf_counter()
            times.append((now - before) / (found - seen) * 1e3)
            before, seen = now, found
    return statistics.median(times[3:]), handle.completions[0].tokens


def by_hand(model: Any, context: int, steps: int, device: str, layer_bytes: int, rate: float | None) -> dict[str, Any]:
    """Of the same model a graph of each layer, which has no engine around it."""
    from benchmarks.offload_by_hand import layer_graphs_ms

    ms = layer_graphs_ms(model, context, steps, device)
    copied = model.config.num_hidden_layers * layer_bytes
    row = {"case": "by hand, a graph of each layer", "step_ms": ms, "copied_gib": copied / _GIB}
    row["copied_gib_s"] = copied / _GIB / ms * 1e3
    if rate:
        row |= {"copy_ms": copied / rate * 1e3, "bandwidth_gib_s": rate / _GIB, "ratio": ms * rate / copied / 1e3}
    return row


def measure(shape: dict[str, Any], context: int, chunks: int, device: str) -> list[dict[str, Any]]:
    import torch

    from graphmod.decode import DecodeEngine

    model = build({"model": shape}, device)
    config = model.config
    (prompt,) = prompts(1, context, config.vocab_size)
    token_bytes = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    rate = bandwidth(_GIB) if device == "cuda" else None
    room = {"max_batch_size": 1, "max_seq_len": context + (chunks + 8) * _STEPS, "steps_per_sync": _STEPS}
    rows: list[dict[str, Any]] = []
    for name, settings in CASES.items():
        synchronize()
        engine = DecodeEngine(model, **room, **{"offload": "layers", **settings})
        ms, tokens = step_ms(engine, prompt, chunks)
        stats = engine.stats
        far = 0 if engine.memory.ring is None else len(engine.memory.ring.far)
        copied = far * (context + chunks * _STEPS // 2) * token_bytes
        row = {
            "case": name,
            "step_ms": ms,
            "copied_gib": copied / _GIB,
            "copied_gib_s": copied / _GIB / ms * 1e3,
            "cache_gib": stats.cache_bytes / _GIB,
            "host_cache_gib": stats.host_cache_bytes / _GIB,
            "launches": stats.total("launches"),
            "eager_steps": stats.total("eager_steps"),
            "same_tokens": tokens == rows[0]["tokens"] if rows else True,
            "tokens": tokens,
        }
        if rate:
            row["copy_ms"] = copied / rate * 1e3
            row["bandwidth_gib_s"] = rate / _GIB
            row["ratio"] = ms / max(row["copy_ms"], rows[0]["step_ms"] if rows else ms)
        rows.append(row)
        del engine
        if device == "cuda":
            torch.cuda.empty_cache()
    rows.append(by_hand(model, context, chunks * _STEPS, device, context * token_bytes, rate))
    return [{key: value for key, value in row.items() if key != "tokens"} for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--context", type=int, default=16384, help="tokens of the prompt")
    parser.add_argument("--chunks", type=int, default=12, help=f"of {_STEPS} steps that are timed")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    from benchmarks.measure import save, show
    from benchmarks.options import gpu_is_there

    if not options.smoke and not gpu_is_there():
        return 2
    if options.smoke:
        results = measure(TINY, 100, 3, "cpu")
    else:
        results = measure(QWEN3_8B, options.context, options.chunks, "cuda")
    show(results)
    save(options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
