"""Puts the measured training steps into docs/benchmarks.md, and four rows of them into README.md.

    python benchmarks/table.py            # after: python benchmarks/training.py --out benchmarks/results/training.json
    python benchmarks/table.py --check    # exit status 1 if a page does not show these results

Imports nothing but the standard library, so that it runs wherever the results are looked at.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pages import BadInput, Part, host_of, run, run_of, table
from benchmarks.training import SHAPES

BASELINE = "eager"
NAMES = {
    "eager": "eager",
    "per_layer": "graphmod, `per_layer`",
    "full_iteration": "graphmod, `full_iteration`",
    "per_layer_compiled": "graphmod, `per_layer`, `compile=default`",
    "full_iteration_compiled": "graphmod, `full_iteration`, `compile=default`",
    "full_iteration_max": "graphmod, `full_iteration`, `compile=max`",
    "auto": "graphmod, `graph=auto`",
    "auto_compiled": "graphmod, `graph=auto`, `compile=default`",
    "make_graphed_callables": "`torch.cuda.make_graphed_callables`",
    "compile_reduce_overhead": '`torch.compile(mode="reduce-overhead")`',
    "tensordict": "tensordict `CudaGraphModule`",
}
OWN = ("eager", "per_layer", "full_iteration", "full_iteration_compiled")
SUMMARY = {
    "eager": "eager",
    "per_layer": "graphmod, layers",
    "full_iteration": "graphmod, whole step",
    "full_iteration_compiled": "graphmod, whole step, compiled",
    "compile_reduce_overhead": '`torch.compile`, `"reduce-overhead"`',
}
DETAILS = (("reserved GiB", "reserved_gib", ".2f"), ("GPU busy ms", "busy_ms", ".2f"), ("host ms", "host_ms", ".2f"))


def _shape_name(known: dict[str, Any]) -> str:
    return f"{known['layers']} layers, width {known['width']}, {known['batch']} x {known['length']} tokens"


def _step_cell(result: dict[str, Any] | None, base: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    if "error" in result:
        return "not installed" if "ModuleNotFoundError" in result["error"] else "failed"
    step = result["step_ms"]
    if result is base or base is None or "error" in base or host_of(result) != host_of(base):
        return f"{step:.2f}"
    return f"{step:.2f} ({base['step_ms'] / step:.2f}x)"


def _detail_cell(result: dict[str, Any] | None, key: str, form: str) -> str:
    return "-" if result is None or key not in result else format(result[key], form)


def render(content: dict[str, Any]) -> str:
    """The Markdown that shows the results of `benchmarks/training.py --out`.

    Raises:
        BadInput: there is no measured step in them.
    """
    results = content["results"]
    good = [result for result in results if "error" not in result]
    if not good:
        raise BadInput("the results hold no step that was measured")
    by = {(result["mode"], result["shape"]): result for result in results}
    shapes = sorted({result["shape"] for result in good}, key=lambda shape: ([*SHAPES, shape].index(shape), shape))
    modes = sorted({result["mode"] for result in results}, key=lambda mode: ([*NAMES, mode].index(mode), mode))
    heads = [_shape_name(next(result for result in good if result["shape"] == shape)) for shape in shapes]
    steps = [
        [NAMES.get(mode, mode)] + [_step_cell(by.get((mode, shape)), by.get((BASELINE, shape))) for shape in shapes]
        for mode in modes
    ]
    details = [
        [f"{title}, {NAMES[mode]}"] + [_detail_cell(by.get((mode, shape)), key, form) for shape in shapes]
        for title, key, form in DETAILS
        for mode in OWN
        if mode in modes
    ]
    seen = [result["environment"] for result in good]
    gpu, version = (" and ".join(dict.fromkeys(str(one[name]) for one in seen)) for name in ("gpu", "torch"))
    runs = dict.fromkeys(map(run_of, good))
    commands = "; ".join(f"{date} `{command}`" for date, command in runs)
    return "\n\n".join(
        [
            "Training step in ms (median), with a synchronization after each step. Speed-up over eager in brackets; "
            "entries without one come from a different host.",
            table(["", *heads], steps),
            "Peak of reserved GPU memory; GPU-busy and host time per step.",
            table(["", *heads], details),
            f"{gpu}, torch {version}. Compare numbers of one run only: hosts differ. {commands}",
        ]
    )


def render_summary(content: dict[str, Any]) -> str:
    """The README's table: a row for each shape of the model. Raises BadInput as `render` does."""
    results = content["results"]
    good = [result for result in results if "error" not in result]
    if not good:
        raise BadInput("the results hold no step that was measured")
    by = {(result["mode"], result["shape"]): result for result in results}
    rows = []
    for shape in [shape for shape in SHAPES if any(result["shape"] == shape for result in good)]:
        name = _shape_name(next(result for result in good if result["shape"] == shape))
        rows.append([name, *(_step_cell(by.get((mode, shape)), by.get((BASELINE, shape))) for mode in SUMMARY)])
    seen = [result["environment"] for result in good]
    gpu, version = (" and ".join(dict.fromkeys(str(one[name]) for one in seen)) for name in ("gpu", "torch"))
    note = (
        f"Milliseconds per training step, {gpu}, torch {version}; in brackets the speed-up over eager, if measured on "
        "the same host."
    )
    return f"{table(['', *SUMMARY.values()], rows)}\n\n{note}"


PARTS = [
    Part("docs/benchmarks.md", "<!-- table: training -->", "<!-- end training -->", render),
    Part(
        "docs/benchmarks.md",
        "<!-- table: training h200 -->",
        "<!-- end training h200 -->",
        render,
        results="training_h200.json",
    ),
    Part("README.md", "<!-- table: summary -->", "<!-- end summary -->", render_summary),
]


def main(arguments: list[str] | None = None) -> int:
    """Rewrites the pages, or checks them; returns the exit status."""
    return run(arguments, "table.py", __doc__, "training.json", PARTS)


if __name__ == "__main__":
    sys.exit(main())
