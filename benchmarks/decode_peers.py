"""Other ways to decode: transformers' own, and a graph made by hand. Imports `decode_shapes`."""

import time
from typing import Any

from benchmarks.decode_shapes import build, progress, prompts, synchronize


def time_generate(mode: str, shape: dict[str, Any], steps: int, device: Any) -> dict[str, Any]:
    """Median time of a token of `model.generate`, dynamic or with a static cache that it compiles by itself."""
    import statistics

    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        """Notes the time of each token and ends after `count` of them; generate waits for the device each time."""

        def __init__(self, count: int) -> None:
            self.count, self.times = count, []

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            synchronize()
            self.times.append(time.perf_counter())
            return torch.full((len(input_ids),), len(self.times) >= self.count, device=input_ids.device)

    model = build(shape, device)
    given = torch.tensor(prompts(shape["batch"], shape["context"], model.config.vocab_size), device=device)
    settings = {"cache_implementation": "static"} if mode == "hf_static" else {}
    began, clock = time.perf_counter(), None
    for count in (8, steps):
        clock = Clock(count)
        model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_length=shape["max_seq_len"],
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
            **settings,
        )
        progress(f"{count} tokens after {time.perf_counter() - began:.1f} s")
    gaps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return {"token_ms": statistics.median(gaps[len(gaps) // 4 :]) * 1e3}


def time_hand_graph(shape: dict[str, Any], steps: int, device: Any) -> dict[str, Any]:
    """The model with transformers' StaticCache, compiled, one greedy step captured by hand."""
    import torch
    from transformers import StaticCache

    model = build(shape, device)
    given = torch.tensor(prompts(shape["batch"], shape["context"], model.config.vocab_size), device=device)
    cache = StaticCache(config=model.config, max_cache_len=shape["max_seq_len"])
    began = time.perf_counter()
    with torch.inference_mode():
        logits = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1).clone()
        position = torch.full((shape["batch"], 1), shape["context"], device=device)
        forward = torch.compile(model.forward, dynamic=False) if device == "cuda" else model.forward

        def step() -> None:
            out = forward(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits
            token.copy_(out[:, -1:].argmax(-1))
            position.add_(1)

        replay = step
        if device == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        progress(f"compiled and captured after {time.perf_counter() - began:.1f} s")
        for _ in range(3):
            replay()
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            replay()
        synchronize()
    return {"token_ms": (time.perf_counter() - began) / steps * 1e3}
