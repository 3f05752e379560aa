"""What an engine gives back while a model is trained, and how soon it generates again.

    python benchmarks/suspend.py --out benchmarks/results/suspend.json
    python benchmarks/suspend.py --smoke       # a tiny model on the CPU, to see that everything runs

Qwen3-0.6B's shape with random bf16 weights, not compiled. With `keep="none"` graphs go too, and those that the prompts
need are captured again.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.decode_shapes import QWEN3_0_6B, TINY, build, progress, prompts, synchronize  # noqa: E402


def used_mib(device: str) -> float | None:
    """Memory of the GPU that is not free."""
    import torch

    if device != "cuda":
        return None
    free, there = torch.cuda.mem_get_info()
    return (there - free) / 2**20


def timed(act: Any) -> tuple[float, Any]:
    """Milliseconds that a call takes, with everything that it launches; and its result."""
    synchronize()
    began = time.perf_counter()
    found = act()
    synchronize()
    return (time.perf_counter() - began) * 1e3, found


def captures(engine: Any) -> int:
    stats = engine.stats
    return stats.total("captures") + stats.prefill.captures


def measure(keep: str, rows: int, length: int, rounds: int, device: str, shape: dict[str, Any]) -> dict[str, Any]:
    from graphmod.decode import DecodeEngine

    model = build({"model": shape}, device)
    engine = DecodeEngine(model, max_batch_size=rows, max_seq_len=length, buckets=[rows])
    engine.warm_up(progress=False)
    given = prompts(rows, length // 8, model.config.vocab_size)

    def tokens() -> list[list[int]]:
        return [done.tokens for done in engine.generate(given, max_new_tokens=16)]

    tokens()
    plain_ms, expected = timed(tokens)
    cache, before = engine.stats.cache_bytes, captures(engine)
    memory: dict[str, list[float | None]] = {"generating": [], "suspended": [], "resumed": []}
    times: dict[str, list[float]] = {"suspend_ms": [], "resume_ms": [], "resume_inside_ms": [], "first_call_ms": []}
    equal = True
    for number in range(rounds):
        memory["generating"].append(used_mib(device))
        times["suspend_ms"].append(timed(lambda: engine.suspend(keep=keep))[0])
        memory["suspended"].append(used_mib(device))
        times["resume_ms"].append(timed(engine.resume)[0])
        times["resume_inside_ms"].append(engine.stats.resume_seconds * 1e3)
        memory["resumed"].append(used_mib(device))
        first_call_ms, found = timed(tokens)
        times["first_call_ms"].append(first_call_ms)
        equal = equal and found == expected
        progress(f"keep={keep}, round {number + 1}: resume in {times['resume_ms'][-1]:.2f} ms")
    stats = engine.stats
    return {
        "keep": keep,
        "rows": rows,
        "max_seq_len": length,
        "cache_mib": cache / 2**20,
        "graph_mib": stats.graph_bytes / 2**20,
        **{name: statistics.median(found) for name, found in times.items()},
        **{f"most_{name}": max(found) for name, found in times.items()},
        "usual_call_ms": plain_ms,
        **{f"{name}_mib": found[-1] for name, found in memory.items()},
        "captures": before,
        "captures_again": captures(engine) - before,
        "failures": stats.total("failures"),
        "equal_tokens": equal,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is suspended")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    from benchmarks.measure import save, show
    from benchmarks.options import gpu_is_there

    if not options.smoke and not gpu_is_there():
        return 2
    if options.smoke:
        results = [measure(keep, 4, 64, options.rounds, "cpu", TINY) for keep in ("none", "graphs")]
    else:
        sizes = [(32, 2048), (128, 4096)]  # caches of 7 and 57 GiB
        results = [
            measure(keep, rows, length, options.rounds, "cuda", QWEN3_0_6B)
            for rows, length in sizes
            for keep in ("none", "graphs")
        ]
    show(results)
    save(options.out, results)
    return 0 if all(result["equal_tokens"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
