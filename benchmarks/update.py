"""Clipping and AdamW's step in a graph: torch's own, and `compiled_update`, beside what the memory allows.

    python benchmarks/update.py --out benchmarks/results/update.json
    python benchmarks/update.py --smoke           # tiny shapes on the CPU, to see that everything runs

The floor is the time that the same bytes take in a copy: weights and both moments read and written, gradients read
twice, once for their norm.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measure import save, show
from graphmod import CUDAGraphConfig, CUDAGraphModule, compiled_update

SHAPES = {"12 x 768": (12, 768, 32_000), "24 x 2048": (24, 2048, 32_000)}  # layers, width, vocabulary
SMOKE = {"2 x 64": (2, 64, 128)}
LOOPS = 5


def weights(layers: int, width: int, vocabulary: int, device: str) -> list[nn.Parameter]:
    """Those of a Llama, with gradients, in bfloat16 on a GPU."""
    inner, dtype = -(-width * 8 // 3 // 64) * 64, torch.bfloat16 if device == "cuda" else torch.float32
    layer = [*[(width, width)] * 4, *[(inner, width)] * 2, (width, inner), (width,), (width,)]
    sizes = [(vocabulary, width), *layer * layers, (width,), (vocabulary, width)]
    found = [nn.Parameter(torch.randn(size, device=device, dtype=dtype) * 0.02) for size in sizes]
    for one in found:
        one.grad = torch.randn_like(one)
    return found


def median_ms(run: Any, steps: int) -> float:
    """Of several loops; in each, the time of one of many calls."""
    run()
    times = []
    for _ in range(LOOPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / steps)
    return statistics.median(times)


def floor_ms(tensors: list[Tensor], steps: int) -> float:
    """The time in which a copy moves the bytes of an update."""
    count = sum(one.numel() for one in tensors)
    moved = sum(one.nbytes for one in tensors) * (2 + 2 + 2 + 2)  # weights, both moments, gradients twice
    half = torch.empty(2 * count, dtype=torch.uint8, device=tensors[0].device)
    other = torch.empty_like(half)
    return median_ms(lambda: other.copy_(half), steps) * moved / (2 * half.nbytes)


def measure(name: str, shape: tuple[int, int, int], how: str, steps: int, device: str) -> dict[str, Any]:
    parameters = weights(*shape, device)
    rate = torch.tensor(1e-6, device=device)
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=True, capturable=device == "cuda")
    if how == "compiled":
        update = compiled_update(optimizer, max_grad_norm=1.0)
    else:

        def update() -> Any:
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            return norm

    # Gradients are left as they are: after the first clipping torch's multiplies by one, in the same time.
    run = CUDAGraphModule(update, CUDAGraphConfig(verify="off"))
    for _ in range(8):
        run()
    result = {"shape": name, "update": how, "state": run.stats.state, "failure": run.last_failure}
    if device == "cuda":
        floor, took = floor_ms(parameters, steps), median_ms(run, steps)
        result |= {"ms": took, "floor_ms": floor, "x": took / floor}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="calls in each of the loops that are timed")
    parser.add_argument("--out", type=Path, help="the JSON file for the results")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, and no times")
    given = parser.parse_args()
    if not given.smoke and not torch.cuda.is_available():
        parser.error("times need a GPU; --smoke runs without one")
    shapes, device = (SMOKE, "cpu") if given.smoke else (SHAPES, "cuda")
    results = [measure(*one, how, given.steps, device) for one in shapes.items() for how in ("torch", "compiled")]
    show(results)
    save(given.out, results)


if __name__ == "__main__":
    main()
