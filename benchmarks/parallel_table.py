"""Shows benchmarks/results/parallel.json in docs/benchmarks.md.

python benchmarks/parallel_table.py            # rewrites the page
python benchmarks/parallel_table.py --check    # is it up to date?
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pages import Part, run, run_of, table
from benchmarks.training import SHAPES

WORDS = {
    "one_gpu": "one GPU, one graph",
    "ddp_eager": "DistributedDataParallel, eager",
    "ddp_compiled": "DistributedDataParallel, model compiled",
    "ddp_layers": "DistributedDataParallel, `graph_layers`",
    "flat": "by hand: one graph, one flat all-reduce",
    "ddp": "DistributedDataParallel, one graph",
    "ddp_one_stream": "DistributedDataParallel with `init_sync=False`, one graph",
    "fsdp_eager": "`fully_shard`, eager",
    "fsdp": "`fully_shard`, one graph",
    "tp_eager": "tensor parallelism, eager",
    "tp": "tensor parallelism, one graph",
}


def rows_of(results: dict[str, Any]) -> str:
    """A row for each shape and mode, with its time as a multiple of that of one GPU, where one run has both."""
    found = [one for one in results["results"] if "step_ms" in one and one["mode"] in WORDS]
    found.sort(key=lambda one: (list(SHAPES).index(one["shape"]), list(WORDS).index(one["mode"])))
    alone = {one["shape"]: one for one in found if one["mode"] == "one_gpu"}
    rows = []
    for one in found:
        base = alone.get(one["shape"])
        same = base is not None and base is not one and run_of(base) == run_of(one)
        shape = f"{one['layers']} layers, width {one['width']}, {one['batch']} x {one['length']} tokens"
        share = f"{one['step_ms'] / base['step_ms']:.2f}" if same else ""
        numbers = [f"{one[name]:.2f}" for name in ("step_ms", "free_ms", "busy_ms", "host_ms", "reserved_now_gib")]
        rows.append([shape, WORDS[one["mode"]], numbers[0], share, *numbers[1:]])
    head = [
        "a GPU's part",
        "",
        "ms per step",
        "x one GPU",
        "without synchronizing",
        "GPU busy ms",
        "host ms",
        "reserved GiB",
    ]
    about = found[0]["environment"]
    gpus = max(one["gpus"] for one in found)
    ran = "; ".join(sorted({f"{one['environment']['date']} `{one['command']}`" for one in found}))
    return f"{table(head, rows)}\n\n{gpus} x {about['gpu']}, torch {about['torch']}. {ran}"


PARTS = [Part("docs/benchmarks.md", "<!-- table: parallel -->", "<!-- end parallel -->", rows_of)]


def main(arguments: list[str] | None = None) -> int:
    """Rewrites the page, or checks it; returns the exit status."""
    return run(arguments, "parallel_table.py", __doc__, "parallel.json", PARTS)


if __name__ == "__main__":
    sys.exit(main())
