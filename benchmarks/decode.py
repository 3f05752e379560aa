"""Time of a decoded token in every mode and with transformers' own ways to decode; one process per mode and shape.

    python benchmarks/decode.py --out benchmarks/results/decode.json
    python benchmarks/decode.py --shapes 0.6b_b1 --modes eager_step,uncompiled,compiled_max --steps 96
    python benchmarks/decode.py --smoke            # tiny shapes on the CPU, to see that everything runs

Models have random bf16 weights. Modes: `eager_step` (this engine without graphs), `uncompiled`, `compiled`,
`compiled_max` (coordinate-descent tuning), `hf_dynamic` (`model.generate`), `hf_static` (static cache, compiled by
generate), `hand_graph` (the static-cache model compiled, and one CUDA graph of it made by hand). The shape `capture`
measures capturing ten buckets, `ragged` 256 requests of different lengths.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.training import chosen, gpu_is_there  # noqa: E402

QWEN3_0_6B = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b_b1": {"model": QWEN3_0_6B, "batch": 1, "context": 128, "max_seq_len": 1024},
    "8b_b1": {"model": QWEN3_8B, "batch": 1, "context": 512, "max_seq_len": 2048},
    "0.6b_b32": {"model": QWEN3_0_6B, "batch": 32, "context": 512, "max_seq_len": 2048},
    "0.6b_b128": {"model": QWEN3_0_6B, "batch": 128, "context": 512, "max_seq_len": 2048},
    "0.6b_b1_2k": {"model": QWEN3_0_6B, "batch": 1, "context": 512, "max_seq_len": 2048},
    "0.6b_b1_32k": {"model": QWEN3_0_6B, "batch": 1, "context": 512, "max_seq_len": 32768},
    "capture": {"model": QWEN3_0_6B, "batch": 56, "context": 64, "max_seq_len": 2048},
    "ragged": {"model": QWEN3_0_6B, "batch": 64, "requests": 256, "prompt": 512, "new": 256, "max_seq_len": 1024},
}
SMOKE: dict[str, dict[str, Any]] = {
    "tiny_b1": {"model": TINY, "batch": 1, "context": 12, "max_seq_len": 64},
    "tiny_b4": {"model": TINY, "batch": 4, "context": 20, "max_seq_len": 64},
    "capture": {"model": TINY, "batch": 56, "context": 64, "max_seq_len": 128},
    "ragged": {"model": TINY, "batch": 8, "requests": 12, "prompt": 24, "new": 12, "max_seq_len": 64},
}
ENGINE_MODES = ("eager_step", "uncompiled", "compiled", "compiled_max")
FLAGS = ("shapes", "modes", "steps", "attention")
PEERS = ("hf_dynamic", "hf_static", "hand_graph")
MODES = (*ENGINE_MODES, *PEERS)
PEAK_FETCHES = 3  # tokens at the beginning that are not timed, beyond warm-up and capture


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def build(shape: dict[str, Any], device: Any) -> Any:
    """A Qwen3 model of the shape with random weights, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    tiny = shape["model"] is TINY
    config = Qwen3Config(
        **shape["model"],
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        vocab_size=512 if tiny else 151936,
        max_position_embeddings=40960,
        tie_word_embeddings=shape["model"]["hidden_size"] < 2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if tiny else torch.bfloat16)
    model.generation_config.eos_token_id = None
    progress(f"model of {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters")
    return model.eval()


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocabulary, (count, length), generator=generator).tolist()


def engine_for(mode: str, model: Any, shape: dict[str, Any], attention: str, **more: Any) -> Any:
    from graphmod.decode import DecodeEngine

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


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_engine(mode: str, shape: dict[str, Any], steps: int, attention: str, device: Any) -> dict[str, Any]:
    """Wall time of a token while a full batch decodes, what the host spends of it, and how long the GPU works."""
    import torch

    model = build(shape, device)
    engine = engine_for(mode, model, shape, attention)
    batch, chunk = shape["batch"], engine.config.steps_per_sync
    given = prompts(batch, shape["context"], model.config.vocab_size)
    began = time.perf_counter()
    engine.generate(given, max_new_tokens=2 * chunk + 2)  # warm-up, compilation, capture
    synchronize()
    first = time.perf_counter() - began
    progress(f"warm-up, compilation and capture: {first:.1f} s; attention {engine.attention.name}")

    def steady(count: int) -> dict[str, float]:
        """Times `count` steps, from one batch of results to another, after the prompts and the first of them."""
        lead = PEAK_FETCHES * chunk
        stream = engine.stream(given, max_new_tokens=lead + count + 2 * chunk + 1)
        for _ in range(batch * (1 + lead)):
            next(stream)
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
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else None,
    }


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
        marks.append((event, steps))
        return launch(rows, context, kind, steps)

    engine.graphs.launch = marked
    try:
        engine.generate(given, max_new_tokens=steps + 1)
    finally:
        engine.graphs.launch = launch
    synchronize()
    skip = len(marks) // 4
    return marks[skip][0].elapsed_time(marks[-1][0]) / sum(steps for _, steps in marks[skip:-1])


def kernel_spans(run: Any) -> list[tuple[float, float]]:
    """Begin and end of what ran on the GPU during `run()`, in microseconds. Attaches CUPTI, after which graph launches
    cost more: everything else has been timed before."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
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
    stream = engine.stream(given, max_new_tokens=steps + 5 * chunk)

    def take(count: int) -> None:
        for _ in range(count * len(given)):
            next(stream)

    take(1 + 2 * chunk)
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


def modes_of(shape: str) -> tuple[str, ...]:
    """The modes that mean something for a shape."""
    if shape == "capture":
        return ("uncompiled",)
    return ("uncompiled", "compiled", "hf_dynamic") if shape == "ragged" else MODES


def work(mode: str, name: str, steps: int, attention: str, smoke: bool) -> dict[str, Any]:
    """Measures one mode on one shape in this process."""
    import torch
    import transformers

    from benchmarks.measure import environment

    device = "cpu" if smoke else "cuda"
    if smoke:
        torch.set_num_threads(1)
    shape = (SMOKE if smoke else SHAPES)[name]
    if name == "capture":
        result = measure_capture(mode, shape, attention, device)
    elif name == "ragged":
        result = measure_ragged(mode, shape, attention, device)
    elif mode in ENGINE_MODES:
        result = time_engine(mode, shape, steps, attention, device)
    elif mode == "hand_graph":
        result = time_hand_graph(shape, steps, device)
    else:
        result = time_generate(mode, shape, steps, device)
    known = {key: value for key, value in shape.items() if key != "model"} | shape["model"]
    result = {"mode": mode, "shape": name, **known, **result}
    return result | {"environment": environment() | {"transformers": transformers.__version__}}


def report(result: dict[str, Any]) -> str:
    numbers = []
    for key in (
        "token_ms",
        "replay_ms",
        "host_ms",
        "busy_ms",
        "busy_share",
        "seconds",
        "tokens_per_s",
        "padding_waste",
    ):
        if result.get(key) is not None:
            numbers.append(f"{key} {result[key]:.3f}")
    for key in ("graph_mib", "reserved_mib", "first_tokens_s"):
        if result.get(key) is not None:
            numbers.append(f"{key} {result[key]:.1f}")
    if "logprob_difference" in result:
        numbers.append(f"logprob_difference {result['logprob_difference']['max']:.2e}")
    if result.get("failures"):
        numbers.append(f"failures {result['failures']} {result.get('last_failures', '')}")
    return "  ".join(numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)}; with --smoke of {', '.join(SMOKE)}")
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}; default: all that a shape has")
    parser.add_argument("--steps", type=int, help="timed decode steps, three times; 96, and 12 with --smoke")
    parser.add_argument("--attention", default="auto", help="of this engine: auto, sdpa, flex, varlen")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one mode and shape")
    parser.add_argument(
        "--out", type=Path, help="write the results there as JSON; those of other shapes and modes stay"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--worker", nargs=2, metavar=("MODE", "SHAPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (12 if options.smoke else 96)
    if options.worker:
        result = work(*options.worker, options.steps, options.attention, options.smoke)
        print("RESULT " + json.dumps(result))
        return 0
    known = SMOKE if options.smoke else SHAPES
    shapes = chosen(parser, options.shapes, known, "--shapes") if options.shapes else list(known)
    modes = chosen(parser, options.modes, MODES, "--modes") if options.modes else MODES
    if not options.smoke and not gpu_is_there():
        return 2
    results = []
    for shape in shapes:
        for mode in modes:
            if mode not in modes_of(shape):
                continue
            command = [sys.executable, __file__, "--worker", mode, shape, "--steps", str(options.steps)]
            command += ["--attention", options.attention, *(["--smoke"] if options.smoke else [])]
            print(f"{shape:12} {mode:13} ...", file=sys.stderr, flush=True)
            began = time.perf_counter()
            line, tail = None, f"no result after {options.timeout} s"
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, env={**os.environ}, timeout=options.timeout
                )
                line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
                tail = f"exit status {done.returncode}, see above"
            except subprocess.TimeoutExpired:
                pass
            if line is None:
                print(f"{shape:12} {mode:13} failed: {tail}", flush=True)
                results.append({"mode": mode, "shape": shape, "error": tail})
                continue
            results.append(json.loads(line.removeprefix("RESULT ")))
            print(f"{shape:12} {mode:13} {report(results[-1])}  ({time.perf_counter() - began:.0f} s)", flush=True)
            write(options.out, results)
    write(options.out, results)
    return int(any("error" in result for result in results))


def write(out: Path | None, results: list[dict[str, Any]]) -> None:
    """Puts the results into `out`, in place of earlier ones of the same mode and shape."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(out.read_text()) if out.is_file() else {"commands": [], "results": []}
    new = {(result["mode"], result["shape"]) for result in results}
    kept = [result for result in old["results"] if (result["mode"], result["shape"]) not in new]
    flags = [f"--{name} {sys.argv[i + 1]}" for i, arg in enumerate(sys.argv) for name in FLAGS if arg == f"--{name}"]
    command = " ".join(["python benchmarks/decode.py", *flags])
    commands = [*(c for c in old["commands"] if c != command), command]
    out.write_text(json.dumps({"commands": commands, "results": kept + results}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
