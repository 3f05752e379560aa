"""Time of a decoded token in every mode and with transformers' own ways to decode; one process per mode and shape.

    python benchmarks/decode.py --out benchmarks/results/decode.json
    python benchmarks/decode.py --shapes 0.6b_b1 --modes eager_step,uncompiled,compiled_max --steps 96
    python benchmarks/decode.py --smoke            # tiny shapes on the CPU, to see that everything runs

Models have random bf16 weights. Modes: `eager_step` (this engine without graphs), `uncompiled`, `compiled`,
`compiled_max` (coordinate-descent tuning), `compiled_max@int8` and `compiled_max@fp8` (weights of 8 bits),
`hf_dynamic` (`model.generate`), `hf_static` (static cache, compiled by generate), `hand_graph` (the static-cache
model compiled, and one CUDA graph of it made by hand). The shape `capture` measures capturing ten buckets, `ragged`
256 requests of different lengths, where `hf_batch` is the continuous batching of transformers, and `8b_whole` 32
requests from their prompts to their last tokens.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.decode_engine import measure_capture, time_engine, time_whole  # noqa: E402
from benchmarks.decode_peers import time_generate, time_hand_graph  # noqa: E402
from benchmarks.decode_ragged import measure_ragged  # noqa: E402
from benchmarks.decode_shapes import SHAPES, SMOKE  # noqa: E402
from benchmarks.options import chosen, gpu_is_there, in_process, keep, tell  # noqa: E402

ENGINE_MODES = ("eager_step", "uncompiled", "compiled", "compiled_max", "compiled_max@int8", "compiled_max@fp8")
FLAGS = ("shapes", "modes", "steps", "attention")
PEERS = ("hf_dynamic", "hf_static", "hand_graph", "hf_batch")
MODES = (*ENGINE_MODES, *PEERS)


def modes_of(shape: str) -> tuple[str, ...]:
    """The modes that mean something for a shape."""
    if shape == "capture":
        return ("uncompiled",)
    if shape == "ragged":
        return ("uncompiled", "compiled", "hf_batch", "hf_dynamic")
    if shape.endswith("whole"):
        return ENGINE_MODES
    return tuple(mode for mode in MODES if mode != "hf_batch")


def work(mode: str, name: str, steps: int, attention: str, smoke: bool) -> dict[str, Any]:
    """Measures one mode on one shape in this process."""
    import torch
    import transformers

    from benchmarks.measure import environment

    device = "cpu" if smoke else "cuda"
    if smoke:
        torch.set_num_threads(1)
    shape = (SMOKE if smoke else SHAPES)[name]
    if name == "capture":
        result = measure_capture(mode, shape, attention, device)
    elif name == "ragged":
        result = measure_ragged(mode, shape, attention, device)
    elif name.endswith("whole"):
        result = time_whole(mode, shape, attention, device)
    elif mode in ENGINE_MODES:
        result = time_engine(mode, shape, steps, attention, device)
    elif mode == "hand_graph":
        result = time_hand_graph(shape, steps, device)
    else:
        result = time_generate(mode, shape, steps, device)
    known = {key: value for key, value in shape.items() if key != "model"} | shape["model"]
    result = {"mode": mode, "shape": name, **known, **result}
    return result | {"environment": environment() | {"transformers": transformers.__version__}}


def report(result: dict[str, Any]) -> str:
    numbers = []
    for key in (
        "token_ms",
        "steady_ms",
        "over_steady",
        "replay_ms",
        "host_ms",
        "busy_ms",
        "busy_share",
        "seconds",
        "tokens_per_s",
        "padding_waste",
        "prefill_padding",
        "waited_s",
        "warm_up_s",
    ):
        if result.get(key) is not None:
            numbers.append(f"{key} {result[key]:.3f}")
    for key in ("graph_mib", "reserved_mib", "first_tokens_s"):
        if result.get(key) is not None:
            numbers.append(f"{key} {result[key]:.1f}")
    if "logprob_difference" in result:
        numbers.append(f"logprob_difference {result['logprob_difference']['max']:.2e}")
    if result.get("failures"):
        numbers.append(f"failures {result['failures']} {result.get('last_failures', '')}")
    return "  ".join(numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)}; with --smoke of {', '.join(SMOKE)}")
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}; default: all that a shape has")
    parser.add_argument("--steps", type=int, help="timed decode steps, three times; 96, and 12 with --smoke")
    parser.add_argument("--attention", default="auto", help="of this engine, as decode.attention of generate.py")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one mode and shape")
    parser.add_argument(
        "--out", type=Path, help="write the results there as JSON; those of other shapes and modes stay"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--worker", nargs=2, metavar=("MODE", "SHAPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (12 if options.smoke else 96)
    if options.worker:
        return tell(work(*options.worker, options.steps, options.attention, options.smoke))
    known = SMOKE if options.smoke else SHAPES
    shapes = chosen(parser, options.shapes, known, "--shapes") if options.shapes else list(known)
    modes = chosen(parser, options.modes, MODES, "--modes") if options.modes else MODES
    if not options.smoke and not gpu_is_there():
        return 2
    failed = False
    for shape in shapes:
        for mode in modes:
            if mode not in modes_of(shape):
                continue
            more = ["--steps", str(options.steps), "--attention", options.attention]
            more += ["--smoke"] if options.smoke else []
            print(f"{shape:12} {mode:13} ...", file=sys.stderr, flush=True)
            began = time.perf_counter()
            result = {"mode": mode, "shape": shape} | in_process(__file__, (mode, shape), more, options.timeout)
            failed = failed or "error" in result
            said = f"failed: {result['error']}" if "error" in result else report(result)
            print(f"{shape:12} {mode:13} {said}  ({time.perf_counter() - began:.0f} s)", flush=True)
            keep(options.out, result, flags=FLAGS)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
