"""Requests of different lengths, for `benchmarks/decode.py`: continuous batching beside batches of `model.generate`.

Imports `decode_shapes` and `decode_engine`.
"""

import time
from collections.abc import Callable
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


ROUNDS = 3


def timed(generate: Callable[[], None], useful: int) -> dict[str, Any]:
    """Seconds of the median of some rounds of the same requests, after one that is not timed: what is compiled and
    captured when it is first needed is there then, and the garbage collector leaves it alone, as in a server."""
    from graphmod.trace.garbage import frozen_heap

    def seconds_of(name: str) -> float:
        synchronize()
        began = time.perf_counter()
        generate()
        synchronize()
        took = time.perf_counter() - began
        progress(f"{name}: {took:.2f} s, {useful / took:.0f} tokens/s")
        return took

    first = seconds_of("first round")
    with frozen_heap():
        seconds = [seconds_of(f"round {number + 1}") for number in range(ROUNDS)]
    median = sorted(seconds)[ROUNDS // 2]
    return {"first_round_s": first, "rounds_s": seconds, "seconds": median, "tokens_per_s": useful / median}


def measure_ragged(mode: str, shape: dict[str, Any], attention: str, device: Any) -> dict[str, Any]:
    """Useful tokens a second over requests of different lengths."""
    model = build(shape, device)
    given, new = ragged_requests(shape, model.config.vocab_size)
    useful = sum(new)
    if mode == "hf_dynamic":
        return {"tokens": useful, **timed(lambda: static_batches(model, given, new, shape["batch"], device), useful)}
    if mode == "hf_batch":
        return {"tokens": useful, **continuous_batches(model, given, new, shape, useful)}
    from graphmod.decode import Sampling

    sizes = [size for size in (32, 64, 96) if size < shape["batch"]]
    engine = engine_for(mode, model, shape, attention, buckets=sizes)
    settings = [Sampling(max_new_tokens=count) for count in new]
    began = time.perf_counter()
    engine.warm_up(max_context=shape["prompt"] + shape["new"], progress=False)
    ready = time.perf_counter() - began
    progress(f"captured after {ready:.1f} s")
    result = {"tokens": useful, "warm_up_s": ready}
    result |= timed(lambda: engine.generate(given, sampling=settings), useful)
    before = engine.stats
    engine.generate(given, sampling=settings)
    stats = engine.stats
    rows = stats.total("row_steps") - before.total("row_steps")
    wasted = stats.total("padding_row_steps") - before.total("padding_row_steps")
    filled = stats.prefill.row_steps - before.prefill.row_steps
    empty = stats.prefill.padding_row_steps - before.prefill.padding_row_steps
    result |= {
        "padding_waste": wasted / max(rows, 1),
        "prefill_padding": empty / max(filled, 1),
        "prefill_launches": stats.prefill.launches - before.prefill.launches,
        "eager_steps": stats.total("eager_steps") - before.total("eager_steps"),
        "prefill_eager_steps": stats.prefill.eager_steps - before.prefill.eager_steps,
        "waited_s": stats.waited_seconds - before.waited_seconds,
        "buckets": {size: vars(bucket) for size, bucket in stats.buckets.items() if bucket.launches},
        "attention": engine.attention.name,
    }
    if device == "cuda":
        result["busy_share"] = busy_share(lambda: engine.generate(given, sampling=settings))
    return result


def continuous_batches(model: Any, given: list, new: list[int], shape: dict[str, Any], useful: int) -> dict[str, Any]:
    """The same requests with transformers' own continuous batching, with its CUDA graphs, each with its own number of
    new tokens, which `generate_batch` does not take."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    block = 256
    settings = ContinuousBatchingConfig(
        block_size=block,
        num_blocks=shape["batch"] * -(-shape["max_seq_len"] // block),
        max_batch_tokens=4096 if shape["batch"] > 8 else 256,
        max_requests_per_batch=shape["batch"],
        use_cuda_graph=model.device.type == "cuda",
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=shape["new"])
    with model.continuous_batching_context_manager(generation, continuous_batching_config=settings) as manager:

        def run() -> None:
            asked = {manager.add_request(p, max_new_tokens=count): count for p, count in zip(given, new, strict=True)}
            while asked:
                done = manager.get_result(timeout=1)
                if done is None and not manager.is_running():
                    raise RuntimeError("continuous batching ended before its requests had")
                if done is not None and done.is_finished():
                    found = len(done.generated_tokens)
                    if done.error is not None or found != asked.pop(done.request_id):
                        raise RuntimeError(f"a request ended with {found} tokens: {done.error}")

        return timed(run, useful)


def static_batches(model: Any, given: list, new: list[int], size: int, device: Any) -> None:
    """The same requests with `model.generate`, in the order given, padded on the left, each batch as long as its
    longest request."""
    import torch

    for first in range(0, len(given), size):
        batch, count = given[first : first + size], max(new[first : first + size])
        longest = max(map(len, batch))
        tokens = torch.tensor([[0] * (longest - len(p)) + p for p in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=device)
        model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0)
