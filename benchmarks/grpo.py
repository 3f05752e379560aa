"""A step of TRL's GRPOTrainer, rollout and update, with each way to sample; and the most GPU memory that is in use.

    python benchmarks/grpo.py --out benchmarks/results/grpo.json
    python benchmarks/grpo.py --smoke          # a tiny model on the CPU, to see that everything runs

Qwen3-0.6B's shape with random bf16 weights, which sample to the full length; prompts of one length, without padding.
`engine` is `use_decode_engine`, `engine_layers` that with `graph_layers`; `generate` is transformers' `generate`, which
TRL uses by default, `continuous` its continuous batching.
"""

import argparse
import gc
import importlib
import itertools
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.decode_shapes import QWEN3_0_6B, TINY, build, progress, synchronize  # noqa: E402
from benchmarks.suspend import used_mib  # noqa: E402

MODES = ("engine", "engine_layers", "generate", "continuous")
SKIPPED = 2  # steps that warm up and capture


class Watch(threading.Thread):
    """Looks at the memory in use a hundred times a second."""

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self.most, self._device, self._over = 0.0, device, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, used_mib(self._device) or 0.0)

    def end(self) -> float:
        self._over.set()
        self.join()
        return self.most


def measure(mode: str, options: argparse.Namespace, shape: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    from examples.trl_grpo import byte_tokenizer
    from graphmod import graph_layers
    from graphmod.decode import use_decode_engine

    trl = importlib.import_module("trl")  # an extra
    torch.manual_seed(0)
    model = build({"model": shape}, options.device).to(torch.bfloat16)
    before = used_mib(options.device) or 0.0
    if mode == "engine_layers":
        graph_layers(model)
    ends: list[float] = []

    class Times(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            ends.append(time.perf_counter())
            progress(f"{mode}: step {len(ends)} of {options.steps}")

    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.rows,
            num_generations=min(8, options.rows),
            max_completion_length=options.new,
            learning_rate=1e-6,
            beta=0.0,
            bf16=options.device == "cuda",
            gradient_checkpointing=False,
            use_transformers_continuous_batching=mode == "continuous",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=options.device == "cpu",
        )
        trainer = trl.GRPOTrainer(
            model,
            lambda completion_ids, **_: [sum(ids) / len(ids) for ids in completion_ids],
            arguments,
            train_dataset=Dataset.from_list([{"prompt": f"The square of {n:04} is "} for n in range(512)]),
            processing_class=byte_tokenizer(),
            callbacks=[Times()],
        )
        if mode.startswith("engine"):
            use_decode_engine(trainer, max_seq_len=64 + options.new, buckets=[options.rows])
        watch = Watch(options.device)
        watch.start()
        try:
            trainer.train()
        finally:
            most = watch.end()
    steps = [after - begun for begun, after in itertools.pairwise(ends)][SKIPPED - 1 :]
    return {
        "mode": mode,
        "rows": options.rows,
        "new": options.new,
        "steps": len(steps),
        "step_s": statistics.median(steps),
        "memory_before_mib": before,
        "most_memory_mib": most,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--rows", type=int, default=32, help="completions of a step")
    parser.add_argument("--new", type=int, default=128, help="tokens of each completion")
    parser.add_argument("--steps", type=int, default=6, help=f"of which {SKIPPED} are not counted")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    from benchmarks.measure import save, show
    from benchmarks.options import gpu_is_there

    if options.steps <= SKIPPED:
        parser.error(f"--steps must be more than {SKIPPED}, got {options.steps}")
    if options.smoke:
        options.device, options.rows, options.new = "cpu", 4, 8
    if options.device == "cuda" and not gpu_is_there():
        return 2
    results = []
    for mode in options.modes:
        results.append(measure(mode, options, TINY if options.smoke else QWEN3_0_6B))
        gc.collect()
        if options.device == "cuda":
            import torch

            torch.cuda.empty_cache()
        save(options.out, results)  # what was measured stays, whatever becomes of the next
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
