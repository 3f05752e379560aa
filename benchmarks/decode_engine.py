"""What `benchmarks/decode.py` measures of graphmod's own engine. Imports `decode_shapes`."""

import time
from typing import Any

from benchmarks.decode_shapes import build, progress, prompts, synchronize

PEAK_FETCHES = 3  # chunks at the beginning of the last row that are not timed


def engine_for(mode: str, model: Any, shape: dict[str, Any], attention: str, **more: Any) -> Any:
    from graphmod.decode import DecodeEngine, quantize_weights

    mode, _, weights = mode.partition("@")
    if weights:
        quantize_weights(model, weights)
    compile_mode = {"compiled": "compiled", "compiled_max": "max"}.get(mode, "none")
    return DecodeEngine(
        model,
        max_batch_size=shape["batch"],
        max_seq_len=shape["max_seq_len"],
        graphs=mode != "eager_step",
        compile="default" if compile_mode == "compiled" else compile_mode,
        attention=attention,
        **{"buckets": [shape["batch"]], **more},
    )


def time_engine(mode: str, shape: dict[str, Any], steps: int, attention: str, device: Any) -> dict[str, Any]:
    """Wall time of a token while a full batch decodes, what the host spends of it, and how long the GPU works."""
    import torch

    from graphmod.decode.memory import Ordinary

    model = build(shape, device)
    engine = engine_for(mode, model, shape, attention)
    batch, chunk = shape["batch"], engine.config.steps_per_sync
    given = prompts(batch, shape["context"], model.config.vocab_size)
    began = time.perf_counter()
    engine.generate(given, max_new_tokens=lead_of(batch, chunk))  # warm-up, capture, compilation, for all prompts
    synchronize()
    first = time.perf_counter() - began
    progress(f"warm-up, compilation and capture: {first:.1f} s; attention {engine.attention.name}")

    def steady(count: int) -> dict[str, float]:
        """Times `count` steps, from one batch of results to another, once all rows decode."""
        stream = engine.stream(given, max_new_tokens=lead_of(batch, chunk) + count + 2 * chunk + 1)
        all_decode(stream, batch, PEAK_FETCHES * chunk)
        waited, began = engine.stats.waited_seconds, time.perf_counter()
        for _ in range(batch * count):
            next(stream)
        wall = time.perf_counter() - began
        waiting = engine.stats.waited_seconds - waited
        stream.close()
        synchronize()
        return {"token_ms": wall / count * 1e3, "host_ms": (wall - waiting) / count * 1e3}

    steps = max(chunk, steps // chunk * chunk)
    rounds = sorted((steady(steps) for _ in range(3)), key=lambda r: r["token_ms"])
    result: dict[str, Any] = {"first_tokens_s": first, **rounds[1], "rounds": rounds}
    progress(f"{rounds[1]['token_ms']:.3f} ms a token, host {rounds[1]['host_ms']:.3f} ms")
    result["replay_ms"] = replay_ms(engine, given, steps)
    result["logprob_difference"] = logprob_difference(engine, model, given[0])
    if device == "cuda":
        result |= busy_ms(engine, given, 4 * chunk)
        result["busy_share"] = result["busy_ms"] / result["token_ms"]
    stats = engine.stats
    outside = 0 if isinstance(engine.memory.pages, Ordinary) else stats.cache_bytes  # PyTorch does not count it
    return result | {
        "attention": engine.attention.name,
        "state": stats.state,
        "launches": stats.total("launches"),
        "failures": stats.total("failures"),
        "last_failures": [w.last_failure for w in engine.graphs.wrappers.values() if w.last_failure],
        "eager_steps": stats.total("eager_steps"),
        "capture_seconds": stats.capture_seconds,
        "graph_mib": stats.graph_bytes / 2**20,
        "cache_mib": stats.cache_bytes / 2**20,
        "reserved_gib": (torch.cuda.max_memory_reserved() + outside) / 2**30 if device == "cuda" else None,
    }


def time_whole(mode: str, shape: dict[str, Any], attention: str, device: str) -> dict[str, Any]:
    """Wall time of requests from their prompts to their last tokens, beside that of as many steps in which all decode:
    what prefill, joining and the end cost. The median of three, after one that is not timed."""
    model = build(shape, device)
    engine = engine_for(mode, model, shape, attention)
    batch, new = shape["batch"], shape["new"]
    given = prompts(batch, shape["context"], model.config.vocab_size)
    engine.warm_up(max_context=shape["context"] + new, progress=False)
    rounds = []
    for _ in range(4):
        synchronize()
        began = time.perf_counter()
        stream = engine.stream(given, max_new_tokens=new)
        all_decode(stream, batch, PEAK_FETCHES * engine.config.steps_per_sync)
        since, ended, steady = time.perf_counter(), False, 0.0
        for counted, event in enumerate(stream, start=1):
            ended = ended or event.finish_reason is not None
            if not ended:
                steady = (time.perf_counter() - since) / counted * batch
        seconds = time.perf_counter() - began
        rounds.append({"seconds": seconds, "steady_ms": steady * 1e3, "over_steady": seconds / (new * steady)})
        progress(f"{seconds:.2f} s, {steady * 1e3:.3f} ms a step in which all decode")
    return {**sorted(rounds[1:], key=lambda one: one["over_steady"])[1], "rounds": rounds}


def lead_of(batch: int, chunk: int) -> int:
    """Tokens that the first row may be ahead when the last one decodes: prompts join while others run."""
    return PEAK_FETCHES * chunk + (0 if batch == 1 else 256)


def all_decode(stream: Any, batch: int, tokens: int) -> None:
    """Reads a stream until each of its rows has so many tokens."""
    found = [0] * batch
    while min(found) < tokens:
        found[next(stream).request] += 1


def logprob_difference(engine: Any, model: Any, prompt: list[int]) -> dict[str, float]:
    """How far log-probabilities of decoded tokens are from those of one forward pass over the whole text (nats)."""
    import torch

    (done,) = engine.generate([prompt], max_new_tokens=32)
    whole = torch.tensor([prompt + done.tokens], device=model.device)
    with torch.no_grad():
        expected = model(whole, use_cache=False, logits_to_keep=33).logits[0, :-1].float().log_softmax(-1)
    expected = expected.gather(1, whole[0, -32:].unsqueeze(1)).squeeze(1).cpu()
    difference = (torch.tensor(done.logprobs) - expected).abs()
    return {"max": float(difference.max()), "mean": float(difference.mean())}


def replay_ms(engine: Any, given: list[list[int]], steps: int) -> float | None:
    """Device time between the first and the last of the steps of one run, by CUDA events, a step."""
    import torch

    if engine.device.type != "cuda":
        return None
    launch, marks = engine.graphs.launch, []

    def marked(rows: int, context: int, kind: int, steps: int) -> int:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((event, rows, steps))
        return launch(rows, context, kind, steps)

    engine.graphs.launch = marked
    try:
        engine.generate(given, max_new_tokens=lead_of(len(given), engine.config.steps_per_sync) + steps + 1)
    finally:
        engine.graphs.launch = launch
    synchronize()
    full = [(event, count) for event, rows, count in marks if rows == len(given)]
    full = full[len(full) // 4 :]
    return full[0][0].elapsed_time(full[-1][0]) / sum(count for _, count in full[:-1])


def kernel_spans(run: Any) -> list[tuple[float, float]]:
    """Begin and end of what ran on the GPU during `run()`, in microseconds. Attaches CUPTI, after which graph launches
    cost more: everything else has been timed before."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
        synchronize()
    return sorted(
        (e.time_range.start, e.time_range.end)
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("ProfilerStep")
    )


def busy_ms(engine: Any, given: list[list[int]], steps: int) -> dict[str, float]:
    """Kernel time and kernels of a decode step."""
    chunk = engine.config.steps_per_sync
    stream = engine.stream(given, max_new_tokens=lead_of(len(given), chunk) + steps + 5 * chunk)

    def take(count: int) -> None:
        for _ in range(count * len(given)):
            next(stream)

    all_decode(stream, len(given), 2 * chunk)
    synchronize()  # the steps launched ahead are done; reading `steps` more launches as many
    spans = kernel_spans(lambda: take(steps))
    stream.close()
    return {"busy_ms": sum(end - start for start, end in spans) / steps / 1e3, "kernels": len(spans) / steps}


def busy_share(run: Any) -> float | None:
    """Share of the time with a kernel running, from the first to the last, with a profiler attached."""
    spans = kernel_spans(run)
    if not spans:
        return None
    working, until = 0.0, spans[0][0]
    for start, end in spans:
        working += max(0.0, end - max(start, until))
        until = max(until, end)
    return working / (until - spans[0][0])


def measure_capture(mode: str, shape: dict[str, Any], attention: str, device: Any) -> dict[str, Any]:
    """Seconds and memory of capturing ten buckets ahead of time."""
    import torch

    buckets = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56]
    model = build(shape, device)
    engine = engine_for(mode, model, shape, attention, buckets=buckets)
    # One step beforehand: cuBLAS workspaces and loaded kernels are there in any process that has decoded.
    engine.generate(prompts(1, 16, model.config.vocab_size), max_new_tokens=2)
    engine.suspend()
    engine.resume()
    synchronize()
    before = torch.cuda.memory_reserved() if device == "cuda" else 0
    began = time.perf_counter()
    engine.warm_up(max_context=256)
    synchronize()
    seconds = time.perf_counter() - began
    after = torch.cuda.memory_reserved() if device == "cuda" else 0
    stats = engine.stats
    return {
        "buckets": buckets,
        "seconds": seconds,
        "capture_seconds": stats.capture_seconds,
        "captures": stats.total("captures"),
        "reserved_mib": (after - before) / 2**20,
        "graph_mib": stats.graph_bytes / 2**20,
        "attention": engine.attention.name,
        "failures": stats.total("failures"),
    }
