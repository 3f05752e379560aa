"""What replays cost the host for each layer of a model, forward and backward together, beyond the launches themselves.

    python benchmarks/replay_cost.py --out benchmarks/results/replay_cost.json
    python benchmarks/replay_cost.py --layers 4 --device cpu     # emulated graphs, without a GPU

A Llama-shaped model runs forward and backward, from graphs of each of its layers, and from one graph of the module
that runs them; embedding and head are eager where they lie in no graph. The time in which graphs are launched is
measured apart and left out: what remains is Python and autograd. Measured with the backward on the calling thread, as
`TrainStep` does it, and on autograd's own, as `loss.backward()` does. On the CPU it is the time of the processor, which
other programs do not change much.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class LaunchClock:
    """Adds up the time spent in the launches of some captured graphs.

    Args:
        now: the time, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.seconds = now, 0.0
        self._running = False

    def watch(self, graph: Any) -> None:
        for name in ("replay", "start", "finish"):
            if isinstance(getattr(type(graph), name, None), property):  # an emulated graph's, which gives one of these
                name = f"_{name}"
            launch = getattr(graph, name)
            if launch is not None:
                setattr(graph, name, self._timed(launch))

    def _timed(self, launch: Any) -> Any:
        def run() -> None:
            if self._running:  # a launch in two parts
                launch()
                return
            self._running = True
            began = self.now()
            launch()
            self.seconds += self.now() - began
            self._running = False

        return run


def measure(
    layers: int, width: int, length: int, device: str, steps: int, one_thread: bool, body: bool
) -> dict[str, float]:
    """Microseconds a layer: `total_us` of a step, `launch_us` of its graphs, and `python_us`, what remains.

    Args:
        body: whether one graph runs all layers.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from graphmod import graph_layers
    from graphmod.train.attention import use_static_causal_attention

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    use_static_causal_attention(model)
    wrappers = graph_layers(model, body=body)
    tokens = torch.randint(0, 64, (1, length), device=device)
    gradient = torch.randn(1, length, 64, device=device, dtype=torch.bfloat16)

    def synchronize() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    clock = LaunchClock(time.perf_counter if device != "cpu" else time.process_time)

    def step() -> tuple[float, float]:
        began, clock.seconds = clock.now(), 0.0
        logits = model(input_ids=tokens).logits
        with torch.autograd.set_multithreading_enabled(not one_thread):
            logits.backward(gradient)
        seconds = clock.now() - began
        synchronize()
        for parameter in model.parameters():
            parameter.grad = None
        return seconds, clock.seconds

    for _ in range(8):
        step()
    serving = wrappers[:1] if body else wrappers
    assert all(wrapper.stats.state == "captured" for wrapper in serving), [w.last_failure for w in wrappers]
    for wrapper in serving:
        for entry in wrapper._context.entries:
            for graph in entry.graphs:
                clock.watch(graph.graph)
                clock.watch(graph.backward.graph)
    total, launch = (
        statistics.median(spent) * 1e6 / layers for spent in zip(*(step() for _ in range(steps)), strict=True)
    )
    return {"total_us": total, "launch_us": launch, "python_us": total - launch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=256, help="tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=60, help="timed steps")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    options = parser.parse_args()
    from benchmarks.measure import environment

    result = {}
    sizes = options.layers, options.width, options.length, options.device, options.steps
    for body, thread in itertools.product((False, True), ("one_thread", "autograd_thread")):
        name = f"body_{thread}" if body else thread
        found = result[name] = measure(*sizes, thread == "one_thread", body)
        print(f"{name:21}", ", ".join(f"{what} {value:.1f}" for what, value in found.items()), flush=True)
    if options.out:
        written = {
            "command": "python benchmarks/replay_cost.py",
            "layers": options.layers,
            **result,
            "environment": environment(),
        }
        options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
