"""What the replay of one layer costs the host, forward and backward together, beyond the launches themselves.

    python benchmarks/replay_cost.py --out benchmarks/results/replay_cost.json
    python benchmarks/replay_cost.py --layers 4 --device cpu     # emulated graphs, without a GPU

Decoder layers of a Llama-shaped model run one after the other from their graphs; then their backwards do. The time in
which graphs are launched is measured apart and left out: what remains is Python and autograd. Measured with the
backward on the calling thread, as `TrainStep` does it, and on autograd's own, as `loss.backward()` does.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class LaunchClock:
    """Adds up the time spent in the launches of some captured graphs."""

    def __init__(self) -> None:
        self.seconds = 0.0
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
            began = time.perf_counter()
            launch()
            self.seconds += time.perf_counter() - began
            self._running = False

        return run


def measure(layers: int, width: int, length: int, device: str, steps: int, one_thread: bool) -> dict[str, float]:
    """Microseconds a layer: `python_us`, and `launch_us` of its two graphs."""
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
    wrappers = graph_layers(model)
    hidden = torch.randn(1, length, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(length, device=device).unsqueeze(0)
    rotary = model.model.rotary_emb(hidden, positions)
    gradient = torch.randn_like(hidden)

    def synchronize() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def step() -> float:
        began = time.perf_counter()
        x = hidden
        for layer in model.model.layers:
            x = layer(x, position_embeddings=rotary)
        with torch.autograd.set_multithreading_enabled(not one_thread):
            x.backward(gradient)
        seconds = time.perf_counter() - began
        synchronize()
        for parameter in model.parameters():
            parameter.grad = None
        return seconds

    for _ in range(8):
        step()
    assert all(wrapper.stats.state == "captured" for wrapper in wrappers), [w.last_failure for w in wrappers]
    whole = [step() for _ in range(steps)]
    clock = LaunchClock()
    for wrapper in wrappers:
        for entry in wrapper._context.entries:
            for graph in entry.graphs:
                clock.watch(graph.graph)
                clock.watch(graph.backward.graph)
    spent = []
    for _ in range(steps):
        clock.seconds = 0.0
        step()
        spent.append(clock.seconds)
    total, launch = statistics.median(whole) * 1e6 / layers, statistics.median(spent) * 1e6 / layers
    return {"total_us": total, "launch_us": launch, "python_us": total - launch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=256, help="tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=60, help="timed steps, twice")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    options = parser.parse_args()
    from benchmarks.measure import environment

    result = {}
    for name in ("one_thread", "autograd_thread"):
        result[name] = measure(
            options.layers, options.width, options.length, options.device, options.steps, name == "one_thread"
        )
        print(f"{name:16}", ", ".join(f"{what} {value:.1f}" for what, value in result[name].items()), flush=True)
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
