"""What each attention of decode steps takes on this GPU: microseconds a layer, in a CUDA graph, in bf16.

    python benchmarks/attention.py --out benchmarks/results/attention.json
    python benchmarks/attention.py --shapes b1_544_of_2048

Several layers run one after the other, each over keys of its own, as in a decode step. Attentions that cannot be used
are listed with the reason. `gb_s` is how many keys and values of the contexts were read in a second, each counted once.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.options import chosen, gpu_is_there

LAYERS, HEAD, BLOCK = 8, 128, 64
# Contexts that are no multiple of what a kernel takes at a time: those would flatter kernels that take much.
SHAPES = {
    "b1_544_of_2048": {"rows": 1, "heads": 16, "kv_heads": 8, "context": 544, "max_seq_len": 2048},
    "b1_544_of_32768": {"rows": 1, "heads": 16, "kv_heads": 8, "context": 544, "max_seq_len": 32768},
    "b32_544_of_2048": {"rows": 32, "heads": 16, "kv_heads": 8, "context": 544, "max_seq_len": 2048},
    "b128_544_of_2048": {"rows": 128, "heads": 16, "kv_heads": 8, "context": 544, "max_seq_len": 2048},
    "b32_2000_of_2048": {"rows": 32, "heads": 32, "kv_heads": 8, "context": 2000, "max_seq_len": 2048},
    "b128_2000_of_2048": {"rows": 128, "heads": 32, "kv_heads": 8, "context": 2000, "max_seq_len": 2048},
}


def measure(shape: dict[str, int]) -> dict[str, Any]:
    """For each attention `us` and `gb_s`, or `unavailable` or `failed`: why there is no time."""
    import torch

    from graphmod.decode.attention import IMPLEMENTATIONS, layers_of, time_graph
    from graphmod.decode.cache import PagedCache, uniform

    rows, context, longest = shape["rows"], shape["context"], shape["max_seq_len"]
    sizes = uniform(shape["heads"], shape["kv_heads"], HEAD, LAYERS)
    read = 2 * rows * context * shape["kv_heads"] * HEAD * 2
    found = {}
    for name, one in IMPLEMENTATIONS.items():
        memory = PagedCache(sizes, rows * -(-longest // BLOCK), BLOCK, rows, torch.bfloat16, torch.device("cuda"))
        for tensor in (*memory.keys, *memory.values):
            tensor.normal_()
        reason = one.unavailable(memory) or one.prepare(memory)
        if reason is not None:
            found[name.value] = {"unavailable": reason}
            continue
        try:
            us = time_graph(*layers_of(one, memory, rows, context, longest))
        except RuntimeError as error:
            found[name.value] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        else:
            found[name.value] = {
                "us": round(us, 2),
                "gb_s": round(read / us / 1e3),
                "block_size": BLOCK,
            }
        del memory
        torch.cuda.empty_cache()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    shapes = chosen(parser, options.shapes, SHAPES, "--shapes")
    if not gpu_is_there():
        return 2
    from importlib.metadata import PackageNotFoundError, version

    from benchmarks.measure import environment

    results = []
    for name in shapes:
        times = measure(SHAPES[name])
        results.append({"shape": name, **SHAPES[name], "attention": times})
        for which, found in times.items():
            said = f"{found}"
            if "us" in found:
                said = f"{found['us']:9.1f} us  {found['gb_s']:5d} GB/s"
            print(f"{name:16} {which:11} {said}", flush=True)
    if options.out:
        try:
            flashinfer = version("flashinfer-python")
        except PackageNotFoundError:
            flashinfer = None
        written = {
            "command": "python benchmarks/attention.py",
            "head_dim": HEAD,
            "layers": LAYERS,
            "dtype": "bfloat16",
            "results": results,
            "environment": environment() | {"flashinfer": flashinfer},
        }
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
