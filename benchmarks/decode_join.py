"""How long those who decode wait while a long prompt joins, and how soon a prompt that comes alone has its first token.

    python benchmarks/decode_join.py --out benchmarks/results/decode_join.json
    python benchmarks/decode_join.py --smoke       # a tiny model on the CPU, to see that everything runs

Qwen3-0.6B's shape with random bf16 weights, not compiled.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.decode_shapes import QWEN3_0_6B, TINY, build, prompts, synchronize  # noqa: E402


def turns(engine: Any, handles: list[Any], until: Any) -> list[float]:
    """Milliseconds between the tokens of each turn of `handles`, up to `until`."""
    found, before = [], time.perf_counter()
    while not until():
        mine = {id(done) for handle in handles for done in handle.completions}
        most = max((len(run.tokens) for run in engine.step() if id(run.completion) in mine), default=0)
        if most:
            now = time.perf_counter()
            found.append((now - before) / most * 1e3)
            before = now
    return found


def measure(rows: int, short: int, long: int, device: str, model: dict[str, Any]) -> dict[str, Any]:
    from graphmod.decode import DecodeEngine

    room = {"model": model, "max_seq_len": 2 * long}
    built = build(room, device)
    engine = DecodeEngine(
        built, max_batch_size=rows + 1, max_seq_len=2 * long, cache_tokens=rows * 8 * short + 2 * long, buckets=[rows]
    )
    engine.warm_up(progress=False)
    vocabulary = built.config.vocab_size
    (joins,) = prompts(1, long, vocabulary)
    few = prompts(rows, short, vocabulary)

    first = []
    for number in range(9):
        synchronize()
        began = time.perf_counter()
        handle = engine.submit([*few[0][1:], number + 3], max_new_tokens=2)
        while not handle.completions[0].tokens:
            engine.step()
        first.append((time.perf_counter() - began) * 1e3)
        while engine.unfinished:
            engine.step()
    handles = [engine.submit(prompt, max_new_tokens=6 * short) for prompt in few]
    waits = [turns(engine, handles, lambda: len(handles[0].completions[0].tokens) > 2 * short)]
    late = engine.submit(joins, max_new_tokens=8)
    waits.append(turns(engine, handles, lambda: bool(late.completions[0].tokens)))
    engine.abort_all()
    steady, joining = statistics.median(waits[0]), waits[1][1:] or waits[1]
    return {
        "rows": rows,
        "prompt": short,
        "long_prompt": long,
        "first_token_ms": statistics.median(first),
        "token_ms": steady,
        "token_while_joining_ms": statistics.median(joining),
        "worst_token_while_joining_ms": max(joining),
        "turns_while_joining": len(joining),
        "ratio": statistics.median(joining) / steady,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    from benchmarks.measure import save, show

    if options.smoke:
        results = [measure(4, 8, 64, "cpu", TINY)]
    else:
        results = [measure(rows, 128, 8192, "cuda", QWEN3_0_6B) for rows in (1, 32)]
    show(results)
    save(options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
