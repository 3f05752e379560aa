"""Puts the measured decode times into docs/benchmarks.md.

    python benchmarks/decode_table.py            # after: benchmarks/decode.py --out benchmarks/results/decode.json
    python benchmarks/decode_table.py --check    # exit status 1 if the page does not show these results

Imports nothing but the standard library.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pages import BadInput, Part, run, table

NAMES = {
    "hf_dynamic": "`model.generate`",
    "hf_static": '`model.generate(cache_implementation="static")`, compiled',
    "hand_graph": "hand-made graph of that model, compiled",
    "eager_step": "graphmod, without graphs",
    "uncompiled": "graphmod",
    "compiled": 'graphmod, `compile="default"`',
    "compiled_max": 'graphmod, `compile="max"`',
    "hf_batch": "continuous batching of transformers, with its graphs",
}
MODELS = {1024: "Qwen3-0.6B", 4096: "Qwen3-8B"}
BASELINE = "hf_static"


def _title(result: dict[str, Any]) -> str:
    model = MODELS.get(result["hidden_size"], f"width {result['hidden_size']}")
    return f"{model}, B{result['batch']}, {result['context']} of {result['max_seq_len']}"


def _cell(result: dict[str, Any] | None, base: dict[str, Any] | None, key: str = "token_ms") -> str:
    if result is None or (key not in result and "error" not in result):
        return "-"
    if "error" in result:
        return "failed"
    if result is base or base is None or key not in base:
        return f"{result[key]:.3f}"
    return f"{result[key]:.3f} ({base[key] / result[key]:.2f}x)"


def render(content: dict[str, Any]) -> str:
    """The Markdown that shows the results of `benchmarks/decode.py --out`.

    Raises:
        BadInput: there is no measured token in them.
    """
    results = content["results"]
    timed = [result for result in results if "token_ms" in result]
    if not timed:
        raise BadInput("the results hold no token that was measured")
    by = {(result["mode"], result["shape"]): result for result in results}
    shapes = list(dict.fromkeys(result["shape"] for result in timed))
    modes = [mode for mode in NAMES if any(result["mode"] == mode for result in timed)]
    heads = [_title(next(result for result in timed if result["shape"] == shape)) for shape in shapes]
    parts = [
        "Milliseconds per token, host included, in bf16 with random weights. In brackets: speed-up over the compiled "
        "static cache of transformers.",
        table(
            ["", *heads],
            [[NAMES[m], *(_cell(by.get((m, s)), by.get((BASELINE, s))) for s in shapes)] for m in modes],
        ),
    ]
    own = [mode for mode in modes if any("host_ms" in by.get((mode, shape), {}) for shape in shapes)]
    details = [
        [f"{title}, {NAMES[mode]}", *(_cell(by.get((mode, shape)), None, key) for shape in shapes)]
        for title, key in (
            ("host ms per token", "host_ms"),
            ("kernel ms per token (kernels overlap)", "busy_ms"),
        )
        for mode in own
    ]
    parts.append(table(["", *heads], [line for line in details if set(line[1:]) != {"-"}]))
    captures = by.get(("uncompiled", "capture"))
    if captures is not None and "error" not in captures:
        parts.append(
            f"Capturing {len(captures['buckets'])} batch sizes up to {max(captures['buckets'])}: "
            f"{captures['seconds']:.2f} s and {captures['reserved_mib']:.0f} MiB."
        )
    ragged = [r for r in results if r["shape"] == "ragged" and "error" not in r]
    if ragged:
        head = ["", "tokens/s", "row steps without a token", "GPU busy"]
        rows = []
        for result in ragged:
            name = (
                f"`model.generate`, batches of {result['batch']}"
                if result["mode"] == "hf_dynamic"
                else NAMES[result["mode"]]
            )
            shares = [
                f"{result[key]:.1%}" if result.get(key) is not None else "-" for key in ("padding_waste", "busy_share")
            ]
            rows.append([name, f"{result['tokens_per_s']:,.0f}", *shares])
        parts += [f"{ragged[0]['requests']} requests of different lengths, Qwen3-0.6B:", table(head, rows)]
    whole = [r for r in results if "over_steady" in r]
    if whole:
        head = ["", "s", "ms of a step in which all decode", "over as many such steps"]
        rows = [
            [NAMES[one["mode"]], f"{one['seconds']:.2f}", f"{one['steady_ms']:.3f}", f"{one['over_steady']:.3f}"]
            for one in whole
        ]
        one = whole[0]
        about = f"{one['batch']} requests of {one['context']} tokens with {one['new']} new ones, prefill included"
        parts += [f"{about}, {MODELS[one['hidden_size']]}:", table(head, rows)]
    seen = [result["environment"] for result in timed]
    gpu, version, library, date = (
        " and ".join(dict.fromkeys(str(one[name]) for one in seen)) for name in ("gpu", "torch", "transformers", "date")
    )
    commands = " ; ".join(content["commands"])
    parts.append(f"{gpu}, torch {version}, transformers {library}, {date}: `{commands}`")
    return "\n\n".join(parts)


PARTS = [Part("docs/benchmarks.md", "<!-- table: decode -->", "<!-- end decode -->", render)]


def main(arguments: list[str] | None = None) -> int:
    """Rewrites the page, or checks it; returns the exit status."""
    return run(arguments, "decode_table.py", __doc__, "decode.json", PARTS)


if __name__ == "__main__":
    sys.exit(main())
