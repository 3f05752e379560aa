"""The tables of the pages, from `benchmarks/results/`. `make docs` puts each where a page has `<!-- table: NAME -->`.

    python benchmarks/tables.py            # writes those of the README, and its picture
    python benchmarks/tables.py --check    # exit status 1 if the README or its picture does not show the results
    python benchmarks/tables.py decode     # prints one

Imports nothing but the standard library, so that it runs wherever the results are looked at.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parallel import COMPILED
from benchmarks.training import SHAPES, VOCABULARY

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Result = dict[str, Any]


class BadResults(Exception):
    """The results cannot be shown; the message says why."""


# -- what all tables share ---------------------------------------------------------------------------------------------


def read(name: str) -> Result:
    """What a benchmark wrote with `--out`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    """A Markdown table. The first column is text; the others are numbers, or text as well."""
    align = ["---"] + ["---:" if numbers else "---"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, align, *rows))


def timed(results: Result, key: str = "step_ms") -> list[Result]:
    """The results that have a time. Raises BadResults where none has."""
    found = [one for one in results["results"] if key in one]
    if not found:
        raise BadResults(f"no result has {key}")
    return found


def cells_of(results: Result) -> dict[tuple[str, str], Result]:
    """The results by mode and shape."""
    return {(one["mode"], one["shape"]): one for one in results["results"]}


def sized(one: Result) -> str:
    return f"{one['layers']} layers, width {one['width']}, {one['batch']} x {one['length']} tokens"


def of_one_host(one: Result, other: Result) -> bool:
    """Whether two results may be compared. Older ones do not name their host: they have to be of one run."""

    def host(result: Result) -> Any:
        environment = result.get("environment", {})
        return environment.get("host") or (environment.get("date"), result.get("command"))

    return host(one) == host(other)


def cell(result: Result | None, base: Result | None = None, key: str = "step_ms", form: str = ".2f") -> str:
    """A number, with the speed-up over `base` in brackets; what is there instead, where there is none."""
    if result is None or (key not in result and "error" not in result):
        return "-"
    if "error" in result:
        return "not installed" if "ModuleNotFoundError" in result["error"] else "failed"
    number = format(result[key], form)
    return number if base is None or base is result or key not in base else f"{number} ({base[key] / result[key]:.2f}x)"


def detail(result: Result | None, key: str, form: str = ".2f") -> str:
    return "-" if result is None or result.get(key) is None else format(result[key], form)


def seen(found: list[Result], name: str) -> str:
    """What the environments of results say under a name: mostly one thing."""
    return " and ".join(dict.fromkeys(str(one["environment"][name]) for one in found))


def ran(found: list[Result], order: Callable[[Iterable[str]], Iterable[str]] = dict.fromkeys) -> str:
    """When which commands gave the results."""
    return "; ".join(order(f"{one['environment']['date']} `{one['command']}`" for one in found))


# -- training on one GPU -----------------------------------------------------------------------------------------------

TRAINING = {
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
DETAILED = ("eager", "per_layer", "full_iteration", "full_iteration_compiled")
SUMMARY = {
    "eager": "eager",
    "per_layer": "graphmod, layers",
    "full_iteration": "graphmod, whole step",
    "full_iteration_compiled": "graphmod, whole step, compiled",
    "compile_reduce_overhead": '`torch.compile`, `"reduce-overhead"`',
}


def training_cell(cells: dict[tuple[str, str], Result], mode: str, shape: str) -> str:
    result, base = cells.get((mode, shape)), cells.get(("eager", shape))
    return cell(result, base if result and base and of_one_host(result, base) else None)


def shapes_of(found: list[Result]) -> dict[str, str]:
    """The shapes that were measured, in their usual order, with their sizes."""
    known = {one["shape"]: sized(one) for one in found}
    return {shape: known[shape] for shape in (*SHAPES, *sorted(known)) if shape in known}


def training(results: Result) -> str:
    """Steps, speed-ups, memory and host time, of each mode and shape."""
    found, cells = timed(results), cells_of(results)
    shapes = shapes_of(found)
    modes = [mode for mode in TRAINING if any(one["mode"] == mode for one in results["results"])]
    details = [
        [f"{title}, {TRAINING[mode]}", *(detail(cells.get((mode, shape)), key) for shape in shapes)]
        for title, key in (("reserved GiB", "reserved_gib"), ("GPU busy ms", "busy_ms"), ("host ms", "host_ms"))
        for mode in DETAILED
        if mode in modes
    ]
    return "\n\n".join(
        [
            "Training step in ms (median), with a synchronization after each step. Speed-up over eager in brackets; "
            "entries without one come from a different host.",
            table(
                ["", *shapes.values()],
                [[TRAINING[mode], *(training_cell(cells, mode, shape) for shape in shapes)] for mode in modes],
            ),
            "Peak of reserved GPU memory; GPU-busy and host time per step.",
            table(["", *shapes.values()], details),
            f"{seen(found, 'gpu')}, torch {seen(found, 'torch')}. Compare numbers of one run only: hosts differ. "
            f"{ran(found)}",
        ]
    )


def summary(results: Result) -> str:
    """What the README shows of it: a row for each shape."""
    found, cells = timed(results), cells_of(results)
    rows = [
        [name, *(training_cell(cells, mode, shape) for mode in SUMMARY)] for shape, name in shapes_of(found).items()
    ]
    return (
        f"{table(['', *SUMMARY.values()], rows)}\n\nMilliseconds per training step, {seen(found, 'gpu')}, torch "
        f"{seen(found, 'torch')}; in brackets the speed-up over eager, if measured on the same host."
    )


BARS = {"eager": "#9aa5b1", "per_layer": "#4db6ac", "full_iteration": "#00897b", "full_iteration_compiled": "#004d40"}


def picture(results: Result) -> str:
    """The steps of shapes that one host measured in all of these modes, as bars: an SVG."""
    cells, shown, y = cells_of(results), [], 44
    for place, (mode, color) in enumerate(BARS.items()):
        x = 10 + 140 * place
        shown.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{color}"/>')
        shown.append(f'<text x="{x + 18}" y="20">{SUMMARY[mode].removeprefix("graphmod, ")}</text>')
    for shape, name in shapes_of(timed(results)).items():
        found = [cells.get((mode, shape), {}) for mode in BARS]
        if any("step_ms" not in one or not of_one_host(one, found[0]) for one in found):
            continue
        shown.append(f'<text x="246" y="{y + 32}" text-anchor="end">{name}</text>')
        for one, color in zip(found, BARS.values(), strict=True):
            width = round(370 * one["step_ms"] / found[0]["step_ms"])
            shown.append(f'<rect x="254" y="{y}" width="{width}" height="12" fill="{color}"/>')
            shown.append(f'<text x="{width + 260}" y="{y + 10}" font-size="11">{one["step_ms"]:.1f} ms</text>')
            y += 14
        y += 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {y}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *shown, "</svg>\n"])


# -- Megatron-core -----------------------------------------------------------------------------------------------------

MEGATRON = {
    "megatron_eager": "Megatron-core, eager",
    "megatron_graphs": "Megatron-core, its graphs of layers",
    "megatron_graphmod": "Megatron-core, graphmod around its layers",
}


def loss_cell(result: Result | None) -> str:
    if result is None or "losses_equal_eager" not in result:
        return "-"
    if result["losses_equal_eager"]:
        return "bitwise eager's"
    apart = result["largest_loss_difference"]
    return "not finite" if apart is None else f"up to {apart:.2g} apart"


def megatron(results: Result, ours: Result) -> str:
    """Its own modes beside graphmod around its layers; below, the speed-ups of graphmod's own training step."""
    found, cells, own = timed(results), cells_of(results), cells_of(ours)
    shapes = {one["shape"]: sized(one) for one in found}
    modes = [mode for mode in MEGATRON if any(one["mode"] == mode for one in results["results"])]

    def own_cell(mode: str, shape: str) -> str:
        eager, other = own.get(("eager", shape), {}), own.get((mode, shape), {})
        if "step_ms" not in eager or "step_ms" not in other or not of_one_host(eager, other):
            return "-"
        return f"{eager['step_ms'] / other['step_ms']:.2f}x"

    rows = [
        [MEGATRON[mode], *(cell(cells.get((mode, shape)), cells.get(("megatron_eager", shape))) for shape in shapes)]
        for mode in modes
    ] + [
        [f"speed-up of `graph={mode}` on the H200, above", *(own_cell(mode, shape) for shape in shapes)]
        for mode in ("per_layer", "full_iteration")
    ]
    details = [
        [f"{title}, {MEGATRON[mode]}", *(detail(cells.get((mode, shape)), key) for shape in shapes)]
        for title, key in (
            ("step ms without synchronization", "free_ms"),
            ("GPU busy ms", "busy_ms"),
            ("host ms", "host_ms"),
            ("reserved GiB", "reserved_gib"),
        )
        for mode in modes
    ] + [
        [f"losses, {MEGATRON[mode]}", *(loss_cell(cells.get((mode, shape))) for shape in shapes)]
        for mode in modes
        if mode != "megatron_eager"
    ]
    return "\n\n".join(
        [
            "Training step of Megatron-core's GPTModel (local spec, without TransformerEngine) in ms (median), with a "
            "synchronization after each step. Speed-up over its own eager mode in brackets.",
            table(["", *shapes.values()], rows),
            table(["", *shapes.values()], details),
            f"{seen(found, 'gpu')}, torch {seen(found, 'torch')}, Megatron-core {seen(found, 'megatron_core')}. "
            f"{ran(found)}",
        ]
    )


# -- several GPUs ------------------------------------------------------------------------------------------------------

PARALLEL = {
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
# Of each way to share the work: eager, one graph, and the shape that the README shows.
SHARED = (
    ("DDP", "ddp_eager", "ddp_one_stream", "small"),
    ("`fully_shard`", "fsdp_eager", "fsdp", "wide"),
    ("tensor parallelism", "tp_eager", "tp", "wide"),
)
NETWORK = 50e9  # bytes a second and GPU between machines: assumed, not measured
GPUS_A_MACHINE = 8
ESTIMATED = {"ddp_one_stream": 2, "fsdp": 3}  # how often parameters or gradients as a whole are sent in a step


def parallel(results: Result) -> str:
    """A row for each shape and mode, with its time as a multiple of that of one GPU, where one run has both."""
    found = [one for one in timed(results) if one["mode"] in PARALLEL]
    found.sort(key=lambda one: (list(SHAPES).index(one["shape"]), list(PARALLEL).index(one["mode"])))
    cells, rows = cells_of(results), []
    for one in found:
        base = cells.get(("one_gpu_compiled" if one["mode"] in COMPILED else "one_gpu", one["shape"]))
        same = base is not None and base is not one and of_one_host(base, one)
        share = f"{one['step_ms'] / base['step_ms']:.2f}" if same else ""
        step, *others = (detail(one, name) for name in ("step_ms", "free_ms", "busy_ms", "host_ms", "reserved_now_gib"))
        rows.append([sized(one), PARALLEL[one["mode"]], step, share, *others])
    times = ["ms per step", "x one GPU", "without synchronizing", "GPU busy ms", "host ms", "reserved GiB"]
    shown = table(["a GPU's part", "", *times], rows)
    gpus = f"{max(one['gpus'] for one in found)} x {found[0]['environment']['gpu']}"
    return f"{shown}\n\n{gpus}, torch {found[0]['environment']['torch']}. {ran(found, sorted_once)}"


def sorted_once(commands: Iterable[str]) -> list[str]:
    return sorted(set(commands))


def parallel_summary(results: Result) -> str:
    """Steps on two GPUs, eager and as one graph, and on one GPU; ratios where one run has both."""
    cells, rows = cells_of(results), []
    for words, eager, captured, _ in SHARED:
        for one in (cells[captured, shape] for shape in SHAPES if "step_ms" in cells.get((captured, shape), {})):
            before, alone = (cells.get((mode, one["shape"])) for mode in (eager, "one_gpu"))
            same = before if before is not None and of_one_host(before, one) else None
            single = None if captured == "tp" else alone
            rows.append([f"{words}, {sized(one)}", detail(before, "step_ms"), cell(one, same), cell(single)])
    about = timed(results)[0]["environment"]
    return (
        f"{table(['', 'eager', 'graphmod, whole step', 'the same on one GPU'], rows)}\n\nMilliseconds per training "
        f"step on 2 x {about['gpu']}, torch {about['torch']}. Each GPU has a batch of its own; with tensor parallelism "
        "both have the same. DDP is made with `init_sync=False`; eager steps depend on the CPU."
    )


def gpus(results: Result) -> str:
    """What the README shows: one row for each way to share the work; eager and one graph of one host."""
    cells, rows = cells_of(results), []
    for words, eager, captured, shape in SHARED:
        before, after = cells[eager, shape], cells[captured, shape]
        if not of_one_host(before, after):
            raise BadResults(f"{words}: eager and one graph were measured on two hosts")
        rows.append([words, cell(before), cell(after, before)])
    return table(["Two GPUs", "eager", "graphmod"], rows)


def parameter_bytes(one: Result) -> float:
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


def estimates(results: Result) -> str:
    """What more GPUs would take, for each mode that was measured beside one GPU in one run."""
    cells, rows = cells_of(results), []
    for two in sorted(timed(results), key=lambda one: list(SHAPES).index(one["shape"])):
        alone = cells.get(("one_gpu", two["shape"]))
        if two["mode"] not in ESTIMATED or alone is None or not of_one_host(alone, two) or two["gpus"] != 2:
            continue
        known = alone["step_ms"], two["step_ms"]
        more = [estimate(*known, parameter_bytes(two), ESTIMATED[two["mode"]], count) for count in (8, 1024)]
        numbers = [f"{one:.1f}" for one in (*known, *more)] + [f"{known[0] / one:.0%}" for one in more]
        rows.append([sized(two), PARALLEL[two["mode"]], *numbers])
    head = ["a GPU's part", "", "1 GPU, measured", "2, measured", "8", "1,024", "scaling, 8", "1,024"]
    return table(head, rows)


# -- decode ------------------------------------------------------------------------------------------------------------

DECODE = {
    "hf_dynamic": "`model.generate`",
    "hf_static": '`model.generate(cache_implementation="static")`, compiled',
    "hand_graph": "hand-made graph of that model, compiled",
    "eager_step": "graphmod, without graphs",
    "uncompiled": "graphmod",
    "compiled": 'graphmod, `compile="default"`',
    "compiled_max": 'graphmod, `compile="max"`',
    "compiled_max@int8": 'graphmod, `compile="max"`, int8',
    "compiled_max@fp8": 'graphmod, `compile="max"`, fp8',
    "hf_batch": "continuous batching of transformers, with its graphs",
}
MODELS = {1024: "Qwen3-0.6B", 4096: "Qwen3-8B"}


def decode(results: Result) -> str:
    """Times of a token, of requests of different lengths, and of whole requests."""
    found, cells = timed(results, "token_ms"), cells_of(results)
    shapes = {
        one["shape"]: f"{MODELS.get(one['hidden_size'], 'width ' + str(one['hidden_size']))}, B{one['batch']}, "
        f"{one['context']} of {one['max_seq_len']}"
        for one in found
    }
    modes = [mode for mode in DECODE if any(one["mode"] == mode for one in found)]
    tokens = [
        [
            DECODE[mode],
            *(cell(cells.get((mode, one)), cells.get(("hf_static", one)), "token_ms", ".3f") for one in shapes),
        ]
        for mode in modes
    ]
    details = [
        [f"{title}, {DECODE[mode]}", *(cell(cells.get((mode, shape)), None, key, ".3f") for shape in shapes)]
        for title, key in (("host ms per token", "host_ms"), ("kernel ms per token (kernels overlap)", "busy_ms"))
        for mode in modes
        if any("host_ms" in cells.get((mode, shape), {}) for shape in shapes)
    ]
    parts = [
        "Milliseconds per token, host included, in bf16 with random weights, those of linear layers in 8 bits where "
        "that is said. In brackets: speed-up over the compiled static cache of transformers.",
        table(["", *shapes.values()], tokens),
        table(["", *shapes.values()], [line for line in details if set(line[1:]) != {"-"}]),
    ]
    captures = cells.get(("uncompiled", "capture"), {"error": "not measured"})
    if "error" not in captures:
        parts.append(
            f"Capturing {len(captures['buckets'])} batch sizes up to {max(captures['buckets'])}: "
            f"{captures['seconds']:.2f} s and {captures['reserved_mib']:.0f} MiB."
        )
    ragged = [one for one in results["results"] if one["shape"] == "ragged" and "error" not in one]
    if ragged:
        rows = [
            [
                DECODE[one["mode"]] + (f", batches of {one['batch']}" if one["mode"] == "hf_dynamic" else ""),
                f"{one['tokens_per_s']:,.0f}",
                detail(one, "padding_waste", ".1%"),
                detail(one, "busy_share", ".1%"),
            ]
            for one in ragged
        ]
        parts += [
            f"{ragged[0]['requests']} requests of different lengths, Qwen3-0.6B:",
            table(["", "tokens/s", "row steps without a token", "GPU busy"], rows),
        ]
    whole = [one for one in results["results"] if "over_steady" in one]
    if whole:
        one, head = whole[0], ["", "s", "ms of a step in which all decode", "over as many such steps"]
        rows = [
            [DECODE[one["mode"]], f"{one['seconds']:.2f}", f"{one['steady_ms']:.3f}", f"{one['over_steady']:.3f}"]
            for one in whole
        ]
        about = f"{one['batch']} requests of {one['context']} tokens with {one['new']} new ones, prefill included"
        parts += [f"{about}, {MODELS[one['hidden_size']]}:", table(head, rows)]
    parts.append(
        f"{seen(found, 'gpu')}, torch {seen(found, 'torch')}, transformers {seen(found, 'transformers')}. "
        f"{ran([one for one in results['results'] if 'environment' in one])}"
    )
    return "\n\n".join(parts)


# -- programs as people write them -------------------------------------------------------------------------------------

LOOPS = {
    ("compiled", "train_step"): '`TrainStep(compile="default")`',
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
}


def loops(results: Result) -> str:
    """A row for each program, with its time as a share of that of the program it is compared with."""
    by = {(one["group"], one["program"]): one for one in timed(results)}
    found = [by[key] for key in LOOPS if key in by]
    rows = []
    for one in found:
        base = by[one["group"], one["against"]]
        share = "" if base is one else f"{one['step_ms'] / base['step_ms']:.2f}"
        words = LOOPS[one["group"], one["program"]]
        rows.append([words, detail(one, "step_ms"), share, detail(one, "host_ms"), detail(one, "busy_ms")])
    head = ["", "ms per step or token", "over the row above that has none", "host ms", "GPU busy ms"]
    about = found[0]["environment"]
    return (
        f"{table(head, rows)}\n\n{about['gpu']}, torch {about['torch']}, transformers {about['transformers']}. "
        f"{ran(found, sorted_once)}"
    )


# -- hazards -----------------------------------------------------------------------------------------------------------

WAYS = {
    "cuda_graph": "`torch.cuda.graph`",
    "make_graphed_callables": "`make_graphed_callables`",
    "graphmod": "graphmod",
}
# Of a reason: the operation, its place, and what a replay would make of it or what to do.
BESIDE = (
    re.compile(r"^\S+ at .* in [\w<>]+( \(in the backward pass\))?: "),
    re.compile(r" \(\S+\.py:\d+ in .*?\)(?=,|$)"),
    re.compile(r" \(\.item\(\).*slice bound\)|, (and a replay|which (a|no) replay).*$"),
)


def hazard_cell(found: Result | None) -> str:
    if found is None:
        return ""
    outcome = found["outcome"]
    if outcome in ("fine", "-", "captured"):
        return outcome
    if outcome in ("silent", "wrong"):
        return f"**{outcome}**"
    reason = (found.get("reason") or found.get("detail") or "").partition("; ")[0]
    for beside in BESIDE:
        reason = beside.sub("", reason)
    reason = " ".join(reason.replace("|", "\\|").split())[:120]
    return f"{outcome}: {reason}" if reason else outcome


def hazards(results: Result) -> str:
    """What became of each program in each way to capture it."""
    ways = [way for way in WAYS if any(way in row for row in results["rows"])]
    rows = [[row["title"], *(hazard_cell(row.get(way)) for way in ways)] for row in results["rows"]]
    shown = table(["program", *(WAYS[way] for way in ways)], rows, numbers=False)
    return f"{shown}\n\n{results['device']}, torch {results['torch']}."


# -- models ------------------------------------------------------------------------------------------------------------

MODEL_WAYS = {"layers": "`graph_layers`", "step": "whole step", "decode": "decode"}
OTHER_WAYS = {
    "layers": "`graph_layers`",
    "step": "whole step",
    "layers in bf16": "`graph_layers`, bf16",
    "step in bf16": "whole step, bf16",
}


def shortened(text: str, most: int) -> str:
    return textwrap.shorten(text, most, placeholder=" ...")


def cause(detail: str) -> str:
    """The first clause of a reason, without the operation that it is about and where that is."""
    where, _, why = detail.partition(": ")
    clause = (why if why and " at " in where else detail).partition(" at ")[0]
    return shortened(re.split(r" \(|, |; ", clause)[0], 80) or "not captured"


def model_cell(found: Result | None) -> str:
    if found is None or found["outcome"] == "-":
        return "-"
    said = " ".join(found.get("detail", "").replace("|", "\\|").split())
    if found["outcome"] == "right":
        if "wrapped" in found:
            all_of_them = found["captured"] == found["wrapped"]
            return "captured" if all_of_them else f"eager: {cause(said)}" if not found["captured"] else "in part"
        attention = ", own attention" if found["attention"] == "own" else ""
        return f"right{attention}" if found["captured"] else f"right, eager{attention}: {cause(said)}"
    if found["outcome"] == "refused":
        return "refused: " + shortened(said.partition("because ")[2].removesuffix(". Use model.generate"), 160)
    return f"**{found['outcome']}** {shortened(said, 90)}"


def model_rows(found: list[Result], ways: dict[str, str]) -> str:
    def where(one: Result) -> str:
        return f" ({one['environment'].partition(',')[0]})" if "environment" in one else ""

    rows = [[one["model"] + where(one), *(model_cell(one.get(way)) for way in ways)] for one in found]
    return table(["model", *ways.values()], rows, numbers=False)


def causal_models(results: Result) -> str:
    """Each causal LM of transformers."""
    causal = [one for one in results["models"] if not one.get("other")]
    found, missing = [one for one in causal if "not_built" not in one], [one for one in causal if "not_built" in one]
    return (
        f"{model_counts(results)}\n\n{model_rows(found, MODEL_WAYS)}\n\nNot built from a small config "
        f"({len(missing)}): {', '.join(one['model'] for one in missing)}."
    )


def model_counts(results: Result) -> str:
    """How many there are, and what became of them."""
    found = [one for one in results["models"] if not one.get("other") and "not_built" not in one]
    counts = {way: sum(one.get(way, {}).get("outcome") == "right" for one in found) for way in MODEL_WAYS}
    refused = sum(one.get("decode", {}).get("outcome") == "refused" for one in found)
    return (
        f"{results['environment']}. {len(found)} models; equal to plain PyTorch: {counts['layers']} with "
        f"`graph_layers`, {counts['step']} as a whole step; decode: {counts['decode']} right, {refused} refused."
    )


def other_models(results: Result) -> str:
    """Encoders, images, sound and diffusion."""
    found = [one for one in results["models"] if one.get("other") and "not_built" not in one]
    return model_rows(found, OTHER_WAYS)


# -- what was noted by hand --------------------------------------------------------------------------------------------

NOTED = ("second stream", "GPU figures", "host figures", "rank figures", "offload", "attention kernels", "early launch")


def noted(name: str, results: Result) -> str:
    """A table of single figures, each of which says where and when it was taken."""
    found = results[name]
    return table(found["head"], found["rows"], found["numbers"])


# -- all of them -------------------------------------------------------------------------------------------------------

# Name -> what makes it, of which results.
TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "summary": (summary, ("training",)),
    "training": (training, ("training",)),
    "training h200": (training, ("training_h200",)),
    "gpus": (gpus, ("parallel",)),
    "parallel": (parallel, ("parallel",)),
    "parallel h100": (parallel, ("parallel_h100",)),
    "parallel 4": (parallel, ("parallel_4",)),
    "parallel summary": (parallel_summary, ("parallel",)),
    "estimate": (estimates, ("parallel",)),
    "decode": (decode, ("decode",)),
    "megatron": (megatron, ("megatron", "training_h200")),
    "loops": (loops, ("loops",)),
    "hazards": (hazards, ("hazards",)),
    "models": (causal_models, ("models",)),
    "other models": (other_models, ("models",)),
    **{name: (partial(noted, name), ("noted",)) for name in NOTED},
}
IN_README = ("summary", "gpus")


def render(name: str) -> str:
    """The Markdown of a table. Raises KeyError for a name that is none, BadResults for results that show nothing."""
    make, results = TABLES[name]
    return make(*map(read, results))


def replaced(text: str, name: str, block: str) -> str:
    """A page with `block` between the markers of a table. Raises BadResults where they are not there."""
    opening, closing = f"<!-- table: {name} -->", f"<!-- end {name} -->"
    before, opened, rest = text.partition(opening)
    _, closed, after = rest.partition(closing)
    if not opened or not closed:
        raise BadResults(f"no {opening} followed by {closing}")
    return f"{before}{opening}\n\n{block}\n\n{closing}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Writes what the README shows, checks it, or prints a table; returns 0, 1 if stale, 2 for unusable files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=TABLES, help="prints this one, and writes nothing")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the README is stale")
    options = parser.parse_args(arguments)
    image = options.readme.parent / "docs" / "images" / "steps.svg"
    try:
        if options.table:
            print(render(options.table))
            return 0
        text = options.readme.read_text(encoding="utf-8")
        for name in IN_README:
            text = replaced(text, name, render(name))
        pages = {options.readme: text, image: picture(read("training"))}
        stale = [path for path, new in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != new]
    except (OSError, ValueError, KeyError, BadResults) as error:
        print(f"error: {RESULTS} and {options.readme}: {error!r}", file=sys.stderr)
        return 2
    for path in stale:
        if options.check:
            print(f"{path} does not show {RESULTS}: run python benchmarks/tables.py", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages[path], encoding="utf-8")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
