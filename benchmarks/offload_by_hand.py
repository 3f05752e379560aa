"""A decode step with a cache in the memory of the host as one would write it by hand, for `benchmarks/offload.py`: a
CUDA graph of each layer, and copies on a second stream, ordered by events.

It is for one row of a fixed context, and does not store its token in the host's memory: a part of what an engine does.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

_BUFFERS = 2
_WARMUP = 3  # steps


def layer_graphs_ms(model: Any, context: int, steps: int, device: str) -> float:
    """Milliseconds of a step, the median.

    Args:
        model: of `decode_shapes.build`.
        context: tokens in the cache.
    """
    import torch

    with torch.inference_mode():
        step = _Step(model, context, device)
        times = []
        for _ in range(_WARMUP + steps):
            began = time.perf_counter()
            step.run()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[_WARMUP:])


class _Step:
    def __init__(self, model: Any, context: int, device: str) -> None:
        import torch

        config = model.config
        size = 1, config.num_key_value_heads, context, config.head_dim
        count, on_gpu = config.num_hidden_layers, device == "cuda"

        def pair(**where: Any) -> tuple[Any, Any]:
            return torch.zeros(size, dtype=model.dtype, **where), torch.zeros(size, dtype=model.dtype, **where)

        self.kept = [pair(pin_memory=on_gpu) for _ in range(count)]
        self.near = [pair(device=device) for _ in range(_BUFFERS)]
        self.copies = torch.cuda.Stream() if on_gpu else None
        self.copied = [torch.cuda.Event() for _ in range(count)] if on_gpu else []
        self.done = [torch.cuda.Event() for _ in range(_BUFFERS)] if on_gpu else []
        hidden = torch.zeros(1, 1, config.hidden_size, dtype=model.dtype, device=device)
        place = torch.full((1, 1), context - 1, device=device)
        angles = model.model.rotary_emb(hidden, place)
        cache = _near_cache(self.near, context - 1)
        # The output of each layer is the input of the next; that of the last chooses the token that the first is given.
        between = [hidden, *(torch.zeros_like(hidden) for _ in range(count))]

        def layer(number: int) -> Callable[[], None]:
            def run() -> None:
                found = model.model.layers[number](
                    between[number], position_embeddings=angles, position_ids=place, past_key_values=cache
                )
                between[number + 1].copy_(found)

            return run

        def head() -> None:
            token = model.lm_head(model.model.norm(between[-1])).argmax(-1)
            hidden.copy_(model.model.embed_tokens(token))

        launches = [*map(layer, range(count)), head]
        *self.layers, self.head = map(_captured, launches) if on_gpu else launches

    def run(self) -> None:
        for number, launch in enumerate(self.layers):
            self._bring(number)
            launch()
            if self.done:
                self.done[number % _BUFFERS].record()
        self.head()

    def _bring(self, number: int) -> None:
        """Copies keys and values of a layer, once those that had their place have been read."""
        import torch

        both = list(zip(self.near[number % _BUFFERS], self.kept[number], strict=True))
        if self.copies is None:
            for near, kept in both:
                near.copy_(kept)
            return
        with torch.cuda.stream(self.copies):
            self.done[number % _BUFFERS].wait()
            for near, kept in both:
                near.copy_(kept, non_blocking=True)
            self.copied[number].record()
        self.copied[number].wait()


def _near_cache(near: list[tuple[Any, Any]], place: int) -> Any:
    from transformers.cache_utils import Cache

    class Near(Cache):
        def __init__(self) -> None:
            super().__init__(layers=[])

        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            keys, values = near[layer_idx % len(near)]
            keys[:, :, place : place + 1].copy_(key_states)
            values[:, :, place : place + 1].copy_(value_states)
            return keys, values

    return Near()


def _captured(function: Callable[[], None]) -> Callable[[], None]:
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
