"""Shows benchmarks/results/loops.json in docs/benchmarks.md.

python benchmarks/loops_table.py            # rewrites the page
python benchmarks/loops_table.py --check    # is it up to date?
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pages import Part, run, table

WORDS = {
    ("compiled", "train_step"): "`TrainStep(compile=\"default\")`",
    ("compiled", "own_step"): "a step around `torch.compile(model)`, wrapped",
    ("compiled", "own_step_with_labels"): "likewise, the loss in the model",
    ("compiled", "own_step_eager"): "the same step, not wrapped",
    ("plain", "qwen3_static"): "Qwen3, static causal attention",
    ("plain", "qwen3"): "Qwen3 as it comes",
    ("plain", "llama_static"): "Llama, static causal attention",
    ("plain", "llama"): "Llama as it comes",
    ("plain", "gemma_static"): "Gemma, static causal attention",
    ("plain", "gemma"): "Gemma as it comes",
    ("moe", "eager"): "Qwen3-MoE, eager",
    ("moe", "whole_step"): "Qwen3-MoE, whole step",
    ("moe", "layers"): "Qwen3-MoE, `graph_layers`",
    ("decode", "llama"): "decode, Llama",
    ("decode", "mistral_window"): "decode, Mistral with a window",
    ("decode", "gemma3"): "decode, Gemma 3",
    ("decode_compiled", "llama"): "compiled decode, Llama",
    ("decode_compiled", "mistral_window"): "compiled decode, Mistral with a window",
    ("decode_compiled", "gemma3"): "compiled decode, Gemma 3",
}  # fmt: skip


def loops(results: dict[str, Any]) -> str:
    """A row for each program, with its time as a share of that of the program it is compared with."""
    found = [one for one in results["results"] if "step_ms" in one and (one["group"], one["program"]) in WORDS]
    found.sort(key=lambda one: list(WORDS).index((one["group"], one["program"])))  # new programs come last in the file
    times = {(one["group"], one["program"]): one["step_ms"] for one in found}
    rows = []
    for one in found:
        key, against = (one["group"], one["program"]), (one["group"], one["against"])
        share = "" if key == against else f"{one['step_ms'] / times[against]:.2f}"
        host, busy = (f"{one[name]:.2f}" if name in one else "-" for name in ("host_ms", "busy_ms"))
        rows.append([WORDS[key], f"{one['step_ms']:.2f}", share, host, busy])
    head = ["", "ms per step or token", "over the row above that has none", "host ms", "GPU busy ms"]
    about = found[0]["environment"]
    ran = "; ".join(sorted({f"{one['environment']['date']} `{one['command']}`" for one in found}))
    return f"{table(head, rows)}\n\n{about['gpu']}, torch {about['torch']}, transformers {about['transformers']}. {ran}"


PARTS = [Part("docs/benchmarks.md", "<!-- table: loops -->", "<!-- end loops -->", loops)]


def main(arguments: list[str] | None = None) -> int:
    """Rewrites the page, or checks it; returns the exit status."""
    return run(arguments, "loops_table.py", __doc__, "loops.json", PARTS)


if __name__ == "__main__":
    sys.exit(main())
