"""Requests of different lengths, for `benchmarks/decode.py`: continuous batching beside batches of `model.generate`.

Imports `decode_shapes` and `decode_engine`.
"""

import time
from typing import Any

from benchmarks.decode_engine import busy_share, engine_for
from benchmarks.decode_shapes import build, progress, synchronize


def ragged_requests(shape: dict[str, Any], vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of new tokens, uniformly distributed."""
    import torch

    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(8, shape["prompt"] + 1, (shape["requests"],), generator=generator).tolist()
    new = torch.randint(4, shape["new"] + 1, (shape["requests"],), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths], new


def measure_ragged(mode: str, shape: dict[str, Any], attention: str, device: Any) -> dict[str, Any]:
    """Useful tokens a second over requests of different lengths."""
    model = build(shape, device)
    given, new = ragged_requests(shape, model.config.vocab_size)
    useful = sum(new)
    if mode == "hf_dynamic":
        return {"tokens": useful, **static_batches(model, given, new, shape["batch"], device)}
    from graphmod.decode import Sampling

    engine = engine_for(mode, model, shape, attention, buckets=None if mode == "uncompiled" else [16, 32, 64])
    settings = [Sampling(max_new_tokens=count) for count in new]
    began = time.perf_counter()
    engine.warm_up(max_context=shape["prompt"] + shape["new"])
    progress(f"captured after {time.perf_counter() - began:.1f} s")
    before, began = engine.stats, time.perf_counter()
    engine.generate(given, sampling=settings)
    synchronize()
    seconds = time.perf_counter() - began
    stats = engine.stats
    rows = stats.total("row_steps") - before.total("row_steps")
    wasted = stats.total("padding_row_steps") - before.total("padding_row_steps")
    result = {
        "tokens": useful,
        "seconds": seconds,
        "tokens_per_s": useful / seconds,
        "padding_waste": wasted / max(rows, 1),
        "eager_steps": stats.total("eager_steps") - before.total("eager_steps"),
        "buckets": {size: vars(bucket) for size, bucket in stats.buckets.items() if bucket.launches},
        "attention": engine.attention.name,
    }
    progress(f"{result['tokens_per_s']:.0f} tokens/s, padding {result['padding_waste']:.1%}")
    if device == "cuda":
        few = slice(0, 64)
        result["busy_share"] = busy_share(lambda: engine.generate(given[few], sampling=settings[few]))
    return result


def static_batches(model: Any, given: list, new: list[int], size: int, device: Any) -> dict[str, float]:
    """The same requests with `model.generate`, in the order given, padded on the left, each batch as long as its
    longest request."""
    import torch

    began = time.perf_counter()
    for first in range(0, len(given), size):
        batch, count = given[first : first + size], max(new[first : first + size])
        longest = max(map(len, batch))
        tokens = torch.tensor([[0] * (longest - len(p)) + p for p in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=device)
        model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0)
        progress(f"{first + len(batch)} requests after {time.perf_counter() - began:.1f} s")
    synchronize()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens_per_s": sum(new) / seconds}
