"""Puts the comparison with Megatron-core into docs/benchmarks.md.

    python benchmarks/megatron_table.py   # after: benchmarks/megatron.py --out benchmarks/results/megatron.json
    python benchmarks/megatron_table.py --check    # exit status 1 if the page does not show these results

The speed-ups of benchmarks/results/training.json are shown below it. Imports nothing but the standard library.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pages import ROOT, BadInput, Part, host_of, run, table

TRAINING = ROOT / "benchmarks" / "results" / "training_h200.json"
BASELINE = "megatron_eager"
NAMES = {
    "megatron_eager": "Megatron-core, eager",
    "megatron_graphs": "Megatron-core, its graphs of layers",
    "megatron_graphmod": "Megatron-core, graphmod around its layers",
}
OURS = {
    "per_layer": "speed-up of `graph=per_layer` on the H200, above",
    "full_iteration": "speed-up of `graph=full_iteration` on the H200, above",
}
DETAILS = (
    ("step ms without synchronization", "free_ms"),
    ("GPU busy ms", "busy_ms"),
    ("host ms", "host_ms"),
    ("reserved GiB", "reserved_gib"),
)
Results = dict[tuple[str, str], dict[str, Any]]


def _by_place(results: list[dict[str, Any]]) -> Results:
    return {(result["mode"], result["shape"]): result for result in results}


def _step_cell(by: Results, mode: str, shape: str) -> str:
    result, base = by.get((mode, shape)), by.get((BASELINE, shape), {})
    if result is None:
        return "-"
    if "error" in result:
        return "failed"
    if result is base or "step_ms" not in base:
        return f"{result['step_ms']:.2f}"
    return f"{result['step_ms']:.2f} ({base['step_ms'] / result['step_ms']:.2f}x)"


def _loss_cell(result: dict[str, Any] | None) -> str:
    if result is None or "losses_equal_eager" not in result:
        return "-"
    if result["losses_equal_eager"]:
        return "bitwise eager's"
    apart = result["largest_loss_difference"]
    return "not finite" if apart is None else f"up to {apart:.2g} apart"


def _our_cell(ours: Results, mode: str, shape: str) -> str:
    eager, other = (ours.get((one, shape), {}) for one in ("eager", mode))
    if "step_ms" not in eager or "step_ms" not in other or host_of(eager) != host_of(other):
        return "-"
    return f"{eager['step_ms'] / other['step_ms']:.2f}x"


def render(content: dict[str, Any]) -> str:
    """The Markdown that shows the results of `benchmarks/megatron.py --out`.

    Raises:
        BadInput: there is no measured step in them.
    """
    by = _by_place(content["results"])
    good = [result for result in content["results"] if "error" not in result]
    if not good:
        raise BadInput("the results hold no step that was measured")
    ours = _by_place(json.loads(TRAINING.read_text(encoding="utf-8"))["results"]) if TRAINING.exists() else {}
    known = {result["shape"]: result for result in good}
    modes = [mode for mode in NAMES if any(result["mode"] == mode for result in content["results"])]
    heads = [
        f"{one['layers']} layers, width {one['width']}, {one['batch']} x {one['length']} tokens"
        for one in known.values()
    ]
    rows = [[NAMES[mode], *(_step_cell(by, mode, shape) for shape in known)] for mode in modes]
    rows += [[title, *(_our_cell(ours, mode, shape) for shape in known)] for mode, title in OURS.items()]
    details = []
    for title, key in DETAILS:
        for mode in modes:
            found = [by.get((mode, shape), {}).get(key) for shape in known]
            details.append([f"{title}, {NAMES[mode]}", *("-" if x is None else f"{x:.2f}" for x in found)])
    details += [
        [f"losses, {NAMES[mode]}", *(_loss_cell(by.get((mode, shape))) for shape in known)]
        for mode in modes
        if mode != BASELINE
    ]
    seen = [result["environment"] for result in good]
    gpu, version, library = (
        " and ".join(dict.fromkeys(str(one[name]) for one in seen)) for name in ("gpu", "torch", "megatron_core")
    )
    runs = dict.fromkeys((one["environment"]["date"], one["command"]) for one in good)
    commands = "; ".join(f"{date} `{command}`" for date, command in runs)
    return "\n\n".join(
        [
            "Training step of Megatron-core's GPTModel (local spec, without TransformerEngine) in ms (median), with a "
            "synchronization after each step. Speed-up over its own eager mode in brackets.",
            table(["", *heads], rows),
            table(["", *heads], details),
            f"{gpu}, torch {version}, Megatron-core {library}. {commands}",
        ]
    )


PARTS = [Part("docs/benchmarks.md", "<!-- table: megatron -->", "<!-- end megatron -->", render)]


def main(arguments: list[str] | None = None) -> int:
    """Rewrites the page, or checks it; returns the exit status."""
    return run(arguments, "megatron_table.py", __doc__, "megatron.json", PARTS)


if __name__ == "__main__":
    sys.exit(main())
