"""How far the log-probabilities of a sampler are from those that a trainer computes of the same tokens.

    python benchmarks/rollouts.py --out benchmarks/results/rollouts.json
    python benchmarks/rollouts.py --model FOLDER   # a saved model; else Qwen3-0.6B's shape with random weights
    python benchmarks/rollouts.py --smoke          # a tiny model on the CPU

The sampler is a `DecodeEngine`, at temperature 1. As a trainer does, the model is called on the whole sequences.
Weights and dtype are the same; kernels, and the shapes that they are given, differ, but for `batch_invariant`, in which
the differences are to be zero.
"""

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.decode_shapes import QWEN3_0_6B, TINY, build, progress, prompts  # noqa: E402


def measure(model: Any, rows: int, prompt: int, new: int, exact: bool) -> dict[str, Any]:
    """The differences, in nats, of all tokens of `rows` sequences, and how long these take once graphs are there."""
    import torch

    from graphmod.decode import DecodeEngine, batch_invariant

    sizes = {"max_batch_size": rows, "max_seq_len": prompt + new, "buckets": [rows]}
    engine = DecodeEngine(model, **sizes, batch_invariant=exact)
    given = prompts(rows, prompt, model.config.vocab_size)
    for _ in range(2):
        began = time.perf_counter()
        done = engine.generate(given, temperature=1.0, max_new_tokens=new, seed=0, ignore_eos=True)
        seconds = time.perf_counter() - began
    told = torch.tensor([one.logprobs for one in done])
    own = []
    for one in done:  # one at a time, since the logits of all would not fit
        ids = torch.tensor([[*one.prompt, *one.tokens]], device=model.device)
        with torch.no_grad(), batch_invariant(model) if exact else nullcontext():
            logits = model(ids, use_cache=False, logits_to_keep=new + 1).logits[0, :-1].float()
            own.append(logits.log_softmax(-1).gather(1, ids[0, -new:, None])[:, 0].cpu())
    off = (told - torch.stack(own)).abs()
    found = {
        "batch_invariant": exact,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": engine.attention.name or "own",
        "rows": rows,
        "prompt": prompt,
        "tokens": off.numel(),
        "mean": float(off.mean()),
        "max": float(off.max()),
        "equal": float((off == 0).float().mean()),
        "mean_logprob": float(told.mean()),
        "seconds": seconds,
    }
    progress(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--model", help="folder of a saved causal LM")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of each completion")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.measure import save, show
    from benchmarks.options import gpu_is_there

    if options.smoke:
        options.device, options.rows, options.prompt, options.new = "cpu", [4], 16, 16
    if options.device == "cuda" and not gpu_is_there():
        return 2
    results = []
    for dtype in (getattr(torch, name) for name in options.dtypes):
        if options.model:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
        else:
            model = build({"model": TINY if options.smoke else QWEN3_0_6B}, options.device).to(dtype)
        for exact in (False, True):
            results += [measure(model, rows, options.prompt, options.new, exact) for rows in options.rows]
    show(results)
    save(options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
