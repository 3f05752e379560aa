"""Step time of training in every scope and with every peer that is installed; one process per mode and shape.

    python benchmarks/training.py --out benchmarks/results/training.json
    python benchmarks/training.py --shapes small --modes eager,per_layer --steps 50
    python benchmarks/training.py --shapes vocabulary --modes full_iteration,full_iteration_fused --steps 10
    python benchmarks/training.py --shapes large,small --modes full_iteration_compiled,full_iteration_compiled_fp8

Needs a GPU. Peers: torch.cuda.make_graphed_callables, torch.compile(mode="reduce-overhead"), tensordict's
CudaGraphModule (skipped where tensordict is not installed: pip install tensordict).
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.options import chosen, gpu_is_there, in_process, keep, tell

SHAPES: dict[str, dict[str, int]] = {
    "small": {"layers": 12, "width": 768, "batch": 1, "length": 256},
    "deep": {"layers": 96, "width": 512, "batch": 1, "length": 512},
    "batched": {"layers": 12, "width": 768, "batch": 8, "length": 1024},
    "wide": {"layers": 24, "width": 2048, "batch": 1, "length": 1024},
}
# What only some modes are for.
MORE_SHAPES = {
    "large": {"layers": 24, "width": 2048, "batch": 4, "length": 2048},
    "vocabulary": {"layers": 16, "width": 2048, "batch": 4, "length": 2048, "vocabulary": 128_256},
}
# Mode -> (scope, what torch.compile does inside).
OURS = {
    "eager": ("none", "none"),
    "per_layer": ("per_layer", "none"),
    "full_iteration": ("full_iteration", "none"),
    "per_layer_compiled": ("per_layer", "default"),
    "full_iteration_compiled": ("full_iteration", "default"),
    "full_iteration_max": ("full_iteration", "max"),
}
# With the fused loss, and with matmuls in 8 bits.
MORE = {
    "full_iteration_fused": ("full_iteration", "none"),
    "full_iteration_compiled_fused": ("full_iteration", "default"),
    "full_iteration_compiled_fp8": ("full_iteration", "default"),
}
AUTO = {"auto": "none", "auto_compiled": "default"}
PEERS = ("make_graphed_callables", "compile_reduce_overhead", "tensordict")
MODES = (*OURS, *AUTO, *PEERS)
VOCABULARY = 32_000


def build(shape: dict[str, int]) -> tuple[Any, Any]:
    """A Llama-shaped bf16 model with random weights and its fused AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from graphmod.train.attention import use_static_causal_attention

    torch.manual_seed(0)
    width = shape["width"]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=shape["layers"],
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=shape.get("vocabulary", VOCABULARY),
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    use_static_causal_attention(model)
    lr = torch.tensor(1e-4, device="cuda")
    return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)


def make_step(mode: str, shape: dict[str, int]) -> tuple[Any, Any]:
    """`(step(batch) -> loss, its GraphStats or None)` for a mode."""
    import torch

    from graphmod.train.settings import TrainGraphConfig
    from graphmod.train.step import TrainStep, next_token_loss

    model, optimizer = build(shape)
    if mode in (OURS | MORE):
        (scope, how), loss_fn = (OURS | MORE)[mode], next_token_loss
        if mode.endswith("fp8"):
            from graphmod.train.float8 import use_float8
            from graphmod.train.settings import ModelPrecision

            use_float8(model, ModelPrecision.fp8, sharded=False)
        elif mode.endswith("fused"):
            from graphmod.train.fused_loss import fused_loss

            loss_fn = fused_loss(model)
        config = TrainGraphConfig(scope=scope)
        step = TrainStep(model, optimizer, loss_fn=loss_fn, max_grad_norm=1.0, compile=how, config=config)
        return step, lambda: step.stats

    if mode in AUTO:
        return _choosing(model, optimizer, AUTO[mode])

    loss_fn = next_token_loss
    if mode == "make_graphed_callables":
        _graph_with_torch(model, shape)
    elif mode == "compile_reduce_overhead":
        loss_fn = torch.compile(next_token_loss, mode="reduce-overhead")

    def plain(batch: Any) -> Any:
        batch = batch.cuda(non_blocking=True)
        loss = loss_fn(model, batch[0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if mode == "tensordict":
        from tensordict.nn import CudaGraphModule

        def whole(tokens: Any) -> Any:
            loss = next_token_loss(model, tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        graphed = CudaGraphModule(whole, warmup=3)
        return lambda batch: graphed(batch[0].cuda(non_blocking=True)), None
    return plain, None


def _choosing(model: Any, optimizer: Any, how: str) -> tuple[Any, Any]:
    """What `graph=auto` does in a run: measures the scopes on the first steps and keeps one."""
    from graphmod.train.auto import AutoScope, candidates
    from graphmod.train.settings import TrainGraphConfig
    from graphmod.train.step import TrainStep

    def make(scope: Any) -> Any:
        return TrainStep(model, optimizer, max_grad_norm=1.0, compile=how, config=TrainGraphConfig(scope=scope))

    auto = AutoScope(make, candidates(how != "none"), TrainGraphConfig().warmup_steps, 10_000)

    def step(batch: Any) -> Any:
        loss = auto.before_step()(batch)
        auto.after_step()
        return loss

    step.auto = auto
    return step, lambda: auto.step.stats


def _graph_with_torch(model: Any, shape: dict[str, int]) -> None:
    import torch

    class Positional(torch.nn.Module):
        """The layer with tensors as its only arguments, as make_graphed_callables wants it."""

        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden: Any, cos: Any, sin: Any) -> Any:
            return self.layer(hidden, position_embeddings=(cos, sin))

    class Adapter(torch.nn.Module):
        def __init__(self, graphed: Any) -> None:
            super().__init__()
            self.graphed = graphed

        def forward(self, hidden: Any, position_embeddings: Any = None, **_: Any) -> Any:
            return self.graphed(hidden, *position_embeddings)

    batch, length, width = shape["batch"], shape["length"], shape["width"]
    like = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(batch, length, width, **like)
    cos, sin = (torch.randn(1, length, 64, **like) for _ in range(2))
    layers = tuple(Positional(layer) for layer in model.model.layers)
    samples = tuple((hidden.clone().requires_grad_(), cos.clone(), sin.clone()) for _ in layers)
    graphed = torch.cuda.make_graphed_callables(layers, samples)
    model.model.layers = torch.nn.ModuleList(Adapter(layer) for layer in graphed)


def work(mode: str, name: str, steps: int) -> dict[str, Any]:
    """Measures one mode on one shape in this process."""
    import torch

    from benchmarks.measure import environment, gpu_busy_ms, memory, time_steps

    shape = (SHAPES | MORE_SHAPES)[name]
    step, stats = make_step(mode, shape)
    generator = torch.Generator().manual_seed(1)
    size = (1, shape["batch"], shape["length"] + 1)
    batches = [
        torch.randint(0, shape.get("vocabulary", VOCABULARY), size, generator=generator).pin_memory() for _ in range(8)
    ]
    losses = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    for index in range(8):
        loss = step(batches[index])
        losses.append(float(loss))
    setup = time.perf_counter() - began
    auto = getattr(step, "auto", None)
    while auto is not None and auto.chosen is None:
        step(batches[0])
    for index in range(8 if auto is not None else 0):  # the graphs of the chosen scope are captured anew
        step(batches[index])

    def run(index: int) -> Any:
        return step(batches[index % len(batches)])

    result = {"mode": mode, "shape": name, **shape, "first_8_steps_s": setup, "first_losses": losses}
    result |= time_steps(run, steps)
    result |= memory()
    if stats is not None:
        result["stats"] = vars(stats())
    if auto is not None:
        result["auto"] = auto.report()
    result |= gpu_busy_ms(run)
    return result | {"environment": environment()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES | MORE_SHAPES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join((*MODES, *MORE))}")
    parser.add_argument("--steps", type=int, default=40, help="timed steps, twice")
    parser.add_argument(
        "--out", type=Path, help="write the results there as JSON, beside those of other shapes and modes"
    )
    parser.add_argument("--worker", nargs=2, metavar=("MODE", "SHAPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return tell(work(*options.worker, options.steps))
    shapes = chosen(parser, options.shapes, SHAPES | MORE_SHAPES, "--shapes")
    modes = chosen(parser, options.modes, (*MODES, *MORE), "--modes")
    if not gpu_is_there():
        return 2
    failed = False
    for shape in shapes:
        for mode in modes:
            if mode == "tensordict" and importlib.util.find_spec(mode) is None:
                print(f"{shape:9} {mode:26} skipped: it is not installed (pip install tensordict)", flush=True)
                continue
            began = time.perf_counter()
            result = {"mode": mode, "shape": shape} | in_process(
                __file__, (mode, shape), ("--steps", str(options.steps))
            )
            keep(options.out, result)
            if "error" in result:
                print(f"{shape:9} {mode:26} failed: {result['error'][:160]}", flush=True)
                failed = True
                continue
            print(
                f"{shape:9} {mode:26} step {result['step_ms']:8.3f} ms  free {result['free_ms']:8.3f}  host "
                f"{result['host_ms']:7.3f}  busy {result['busy_ms']:8.3f}  kernels {result['kernels']:6.0f}  reserved "
                f"{result['reserved_gib']:6.2f} GiB  first 8 steps {result['first_8_steps_s']:5.1f} s  "
                f"({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
