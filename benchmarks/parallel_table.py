"""Shows the results of two GPUs in README.md, docs/parallel.md and docs/benchmarks.md, and an estimate for more.

python benchmarks/parallel_table.py            # rewrites the pages
python benchmarks/parallel_table.py --check    # are they up to date?
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pages import Part, host_of, run, table
from benchmarks.parallel import COMPILED
from benchmarks.training import SHAPES, VOCABULARY

WORDS = {
    "one_gpu": "one GPU, one graph",
    "ddp_eager": "DistributedDataParallel, eager",
    "ddp_compiled": "DistributedDataParallel, model compiled",
    "ddp_layers": "DistributedDataParallel, `graph_layers`",
    "flat": "by hand: one graph, one flat all-reduce",
    "ddp": "DistributedDataParallel, one graph",
    "ddp_one_stream": "DistributedDataParallel with `init_sync=False`, one graph",
    "one_gpu_compiled": "one GPU, `TrainStep`, compiled",
    "train_step_compiled": "`TrainStep` with `process_group`, compiled",
    "fsdp_eager": "`fully_shard`, eager",
    "fsdp_layers": "`fully_shard`, `graph_layers`",
    "fsdp": "`fully_shard`, one graph",
    "tp_eager": "tensor parallelism, eager",
    "tp_layers": "tensor parallelism, `graph_layers`",
    "tp": "tensor parallelism, one graph",
}


def rows_of(results: dict[str, Any]) -> str:
    """A row for each shape and mode, with its time as a multiple of that of one GPU, where one run has both."""
    found = [one for one in results["results"] if "step_ms" in one and one["mode"] in WORDS]
    found.sort(key=lambda one: (list(SHAPES).index(one["shape"]), list(WORDS).index(one["mode"])))
    alone = {(one["shape"], one["mode"]): one for one in found if one["mode"].startswith("one_gpu")}
    rows = []
    for one in found:
        base = alone.get((one["shape"], "one_gpu_compiled" if one["mode"] in COMPILED else "one_gpu"))
        same = base is not None and base is not one and host_of(base) == host_of(one)
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


NETWORK = 50e9  # bytes a second and GPU between machines: assumed, not measured
GPUS_A_MACHINE = 8
ESTIMATED = {"ddp_one_stream": 2, "fsdp": 3}  # how often parameters or gradients as a whole are sent in a step


def parameter_bytes(one: dict[str, Any]) -> float:
    """The size of the parameters of a shape, in bf16; that of their gradients."""
    width = one["width"]
    layer = 4 * width**2 + 3 * width * (-(-width * 8 // 3 // 64) * 64)
    return 2.0 * (one["layers"] * layer + 2 * VOCABULARY * width)


def estimate(alone_ms: float, two_ms: float, size: float, sent: int, gpus: int) -> float:
    """Milliseconds of a step on more GPUs than were measured; docs/parallel.md has the formula.

    Args:
        alone_ms, two_ms: measured on one GPU and on two.
        size: bytes of all parameters.
        sent: how often that much is sent.
        gpus: a multiple of 8.
    """
    machines = gpus // GPUS_A_MACHINE
    inside = 2 * (GPUS_A_MACHINE - 1) / GPUS_A_MACHINE * (two_ms - alone_ms)
    between = sent * (machines - 1) / machines * size / GPUS_A_MACHINE / NETWORK
    return alone_ms + inside + between * 1e3


def estimates(results: dict[str, Any]) -> str:
    """What more GPUs would take, for each mode that was measured beside one GPU in one run."""
    found = {(host_of(one), one["shape"], one["mode"]): one for one in results["results"] if "step_ms" in one}
    rows = []
    for (host, name, mode), two in sorted(found.items(), key=lambda item: list(SHAPES).index(item[0][1])):
        alone = found.get((host, name, "one_gpu"))
        if mode not in ESTIMATED or alone is None or two["gpus"] != 2:
            continue
        known = alone["step_ms"], two["step_ms"]
        more = [estimate(*known, parameter_bytes(two), ESTIMATED[mode], gpus) for gpus in (8, 1024)]
        shape = f"{two['layers']} layers, width {two['width']}, {two['batch']} x {two['length']} tokens"
        numbers = [f"{one:.1f}" for one in (*known, *more)] + [f"{known[0] / one:.0%}" for one in more]
        rows.append([shape, WORDS[mode], *numbers])
    head = ["a GPU's part", "", "1 GPU, measured", "2, measured", "8", "1,024", "scaling, 8", "1,024"]
    return table(head, rows)


# What docs/parallel.md shows first: of each way to share the work, eager and as one graph.
SHOWN = (
    ("DDP", "ddp_eager", "ddp_one_stream"),
    ("`fully_shard`", "fsdp_eager", "fsdp"),
    ("tensor parallelism", "tp_eager", "tp"),
)


def summary(results: dict[str, Any]) -> str:
    """Steps on two GPUs, eager and as one graph, and on one GPU; ratios where one run has both."""
    found = {(one["shape"], one["mode"]): one for one in results["results"] if "step_ms" in one}
    rows = []
    for words, eager, captured in SHOWN:
        for one in (found[shape, captured] for shape in SHAPES if (shape, captured) in found):
            before, alone = (found.get((one["shape"], mode)) for mode in (eager, "one_gpu"))
            same = before is not None and host_of(before) == host_of(one)
            rows.append(
                [
                    f"{words}, {one['layers']} layers, width {one['width']}, {one['batch']} x {one['length']} tokens",
                    "-" if before is None else f"{before['step_ms']:.2f}",
                    f"{one['step_ms']:.2f}" + (f" ({before['step_ms'] / one['step_ms']:.2f}x)" if same else ""),
                    "-" if alone is None or captured == "tp" else f"{alone['step_ms']:.2f}",
                ]
            )
    about = next(iter(found.values()))["environment"]
    end = (
        f"Milliseconds per training step on 2 x {about['gpu']}, torch {about['torch']}. Each GPU has a batch of its "
        "own; with tensor parallelism both have the same. DDP is made with `init_sync=False`; eager steps depend on "
        "the CPU."
    )
    return f"{table(['', 'eager', 'graphmod, whole step', 'the same on one GPU'], rows)}\n\n{end}"


# Of each way to share the work, the shape that the README shows.
FIRST = {"DDP": "small", "`fully_shard`": "wide", "tensor parallelism": "wide"}


def first(results: dict[str, Any]) -> str:
    """One row for each way to share the work; eager and one graph of one host."""
    found = {(one["shape"], one["mode"]): one for one in results["results"] if "step_ms" in one}
    rows = []
    for words, eager, captured in SHOWN:
        before, after = (found[FIRST[words], mode] for mode in (eager, captured))
        if host_of(before) != host_of(after):
            raise ValueError(f"{words}: eager and one graph were measured on two hosts")
        ratio = before["step_ms"] / after["step_ms"]
        rows.append([words, f"{before['step_ms']:.2f}", f"{after['step_ms']:.2f} ({ratio:.2f}x)"])
    return table(["Two GPUs", "eager", "graphmod"], rows)


PARTS = [
    Part("README.md", "<!-- table: gpus -->", "<!-- end gpus -->", first),
    Part("docs/parallel.md", "<!-- table: gpus -->", "<!-- end gpus -->", summary),
    Part("docs/benchmarks.md", "<!-- table: parallel -->", "<!-- end parallel -->", rows_of),
    Part(
        "docs/benchmarks.md",
        "<!-- table: parallel h100 -->",
        "<!-- end parallel h100 -->",
        rows_of,
        results="parallel_h100.json",
    ),
    Part("docs/parallel.md", "<!-- table: estimate -->", "<!-- end estimate -->", estimates),
]


def main(arguments: list[str] | None = None) -> int:
    """Rewrites the pages, or checks them; returns the exit status."""
    return run(arguments, "parallel_table.py", __doc__, "parallel.json", PARTS)


if __name__ == "__main__":
    sys.exit(main())
