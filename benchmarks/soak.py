"""Thousands of training steps in every scope, with accumulation, evaluation and decode in between: the losses, metrics,
tokens and weights must be those of eager, bit for bit, and memory must not grow.

    python benchmarks/soak.py --out benchmarks/results/soak.json     # 10,000 steps of each scope
    python benchmarks/soak.py --steps 300 --device cpu               # emulated

Each scope is a process of its own. Steps take one batch or accumulate over two, in turn; dropout is on; calls are
verified as by default. Ends with an error where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SCOPES = ("none", "per_layer", "full_iteration")
VOCABULARY, LENGTH = 256, 32
EVALUATE, DECODE, LOOK = 100, 500, 500  # every so many steps
PROMPTS = [[1, 2, 3], [7, 5], [11, 13, 17, 19, 23]]


def work(scope: str, steps: int, device: str) -> dict[str, Any]:
    """Trains in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.measure import environment
    from graphmod.decode import DecodeEngine
    from graphmod.train.attention import use_static_causal_attention
    from graphmod.train.settings import TrainGraphConfig
    from graphmod.train.step import TrainStep

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    use_static_causal_attention(model)
    rate = torch.tensor(1e-3, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=device == "cuda")
    step = TrainStep(model, optimizer, max_grad_norm=1.0, config=TrainGraphConfig(scope=scope))
    engine = DecodeEngine(model, max_batch_size=4, max_seq_len=64)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (a, 2, LENGTH + 1), generator=generator) for a in (1, 1, 2, 1, 2)]
    digest = hashlib.sha256()
    kept, tokens, memory = [], [], {}
    seconds, began = 0.0, time.perf_counter()
    for index in range(1, steps + 1):
        if index == LOOK + 1:  # everything has been captured
            began = time.perf_counter()
        rate.fill_(1e-3 * (1 - index / (2 * steps)))
        kept.append(step(batches[index % len(batches)]))
        if index % EVALUATE == 0:
            model.eval()
            kept.append(step.evaluate(batches[0]))
            model.train()
            digest.update(torch.stack(kept).double().cpu().numpy().tobytes())
            kept.clear()
        if index % DECODE == 0:
            model.eval()
            tokens.append([done.tokens for done in engine.generate(PROMPTS, max_new_tokens=12)])
            model.train()
        if index % LOOK == 0 or index == steps:
            seconds = time.perf_counter() - began
            memory[index] = torch.cuda.memory_allocated() if device == "cuda" else 0
            print(
                f"{scope} {index} steps, {seconds:.0f} s, {memory[index] / 2**20:.1f} MiB", file=sys.stderr, flush=True
            )
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    digest.update(json.dumps(tokens).encode())
    return {
        "scope": scope,
        "steps": steps,
        "sha256": digest.hexdigest(),
        "step_ms": 1e3 * seconds / (steps - LOOK if steps > LOOK else steps),
        "memory_bytes": memory,
        "stats": vars(step.stats),
        "environment": environment(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="of each scope (default: 10000)")
    parser.add_argument("--scopes", default=",".join(SCOPES[1:]), help="beside eager, with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print("RESULT " + json.dumps(work(options.worker, options.steps, options.device)))
        return 0
    unknown = set(options.scopes.split(",")) - set(SCOPES)
    if unknown or options.steps < 1:
        parser.error(f"--scopes are of {', '.join(SCOPES)}, and --steps at least 1")
    scopes = dict.fromkeys(("none", *options.scopes.split(",")))
    command = [sys.executable, __file__, "--steps", str(options.steps), "--device", options.device, "--worker"]
    running = {scope: subprocess.Popen([*command, scope], stdout=subprocess.PIPE, text=True) for scope in scopes}
    results, wrong = [], []
    for scope, process in running.items():
        lines = process.communicate()[0].splitlines()
        line = next((one for one in lines if one.startswith("RESULT ")), None)
        if line is None:
            wrong.append(f"{scope} ended with {process.returncode}")
            continue
        result = json.loads(line.removeprefix("RESULT "))
        results.append(result)
        result["as_eager"] = result["sha256"] == results[0]["sha256"]
        sizes = list(result["memory_bytes"].values())
        result["memory_grew_bytes"] = sizes[-1] - sizes[min(1, len(sizes) - 1)]
        stats = result["stats"]
        print(
            f"{scope:16} {result['step_ms']:7.3f} ms a step  {'as eager' if result['as_eager'] else 'DIFFERS':8}  "
            f"memory {sizes[0] / 2**20:.1f} -> {sizes[-1] / 2**20:.1f} MiB  {stats['captures']} captures  "
            f"{stats['replays']} replays  {stats['eager_calls']} eager calls, {stats['verified']} of them to verify",
            flush=True,
        )
        if not result["as_eager"]:
            wrong.append(f"{scope} has other numbers than eager")
        if result["memory_grew_bytes"] > 2**20:
            wrong.append(f"{scope} holds {result['memory_grew_bytes']} bytes more at its end")
    if options.out is not None:
        settings = f"--steps {options.steps} --scopes {options.scopes} --device {options.device}"
        command = f"python benchmarks/soak.py {settings}"
        options.out.write_text(json.dumps({"command": command, "results": results}, indent=1) + "\n")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
