"""Megatron-core's own training step: eager, with its built-in graphs of layers, and with graphmod around its layers.

    python benchmarks/megatron.py --smoke                       # a tiny model in every mode: does all of it run here?
    python benchmarks/megatron.py --out benchmarks/results/megatron.json
    python benchmarks/megatron.py --shapes small --modes megatron_eager,megatron_graphmod --steps 20

Needs a GPU and Megatron-core, and does nothing where it is not installed. It is no dependency of graphmod:

    pip install --no-deps megatron-core     # written for 0.19.2 (Python 3.12) and 0.16.1 (Python 3.11)

Besides torch it imports numpy and packaging, and 0.19 also triton, which comes with torch's builds for CUDA.
TransformerEngine and Apex are not needed; with them Megatron-core would choose other kernels for some of its parts.

Every mode trains the same GPTModel of the local layer spec with the same loop, weights, batches and fused AdamW. Each
gradient is a view into one buffer that is zeroed once a step and that everything accumulates into, because
Megatron-core's captured backward adds to `main_grad` and returns no gradient. Against the models of
benchmarks/training.py: attention is computed with a matrix of all scores, softmax in float32, and a causal mask that
each layer makes anew; the loss is its vocabulary-parallel cross entropy; its fusions are off, since they need
torch.compile. Embedding, head, loss and optimizer are eager in every mode. Dropout is 0, so its random-state tracker is
the one that does nothing.
"""

import argparse
import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# This file's name is also Megatron-core's package: its folder must not be searched for imports.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from benchmarks.options import chosen, gpu_is_there, in_process, keep, tell  # noqa: E402
from benchmarks.training import SHAPES, VOCABULARY  # noqa: E402

EAGER, BUILT_IN, GRAPHMOD = MODES = ("megatron_eager", "megatron_graphs", "megatron_graphmod")
SMOKE = {"smoke": {"layers": 2, "width": 128, "batch": 2, "length": 64}}
ALL_SHAPES = {**SHAPES, **SMOKE}
FIRST = 8  # steps before the timed ones: graphmod captures in the fourth, Megatron-core after the first
INSTALL = (
    "skipped: Megatron-core is not installed. It is optional; to compare with it:\n"
    "    pip install --no-deps megatron-core\n"
    "Besides torch it needs numpy and packaging, and 0.19 also triton, which comes with torch's builds for CUDA."
)


def installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def start_megatron() -> None:
    """Megatron-core's global state for one process on one GPU."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    backend = "nccl" if torch.distributed.is_nccl_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    # Else each attention forks the random state on the host, for a dropout that is off.
    tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)


def build(shape: dict[str, int], built_in_graphs: bool) -> Any:
    """Megatron-core's GPT of a shape, like that of benchmarks/training.py as far as the local spec allows."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    width = shape["width"]
    config = TransformerConfig(
        num_layers=shape["layers"],
        hidden_size=width,
        num_attention_heads=width // 64,
        ffn_hidden_size=-(-width * 8 // 3 // 64) * 64,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        cuda_graph_impl="local" if built_in_graphs else "none",
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=shape["length"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.to(torch.cuda.current_device()).bfloat16()  # its RMSNorms are made in float32, on the host


def place_gradients(parameters: list[Any]) -> Any:
    """Lets every gradient, also as `main_grad`, be a view into one zeroed buffer, which is returned."""
    import torch

    starts, total = [], 0
    for parameter in parameters:
        starts.append(total)
        total += -(-parameter.numel() // 64) * 64  # fused kernels are slower on what is not aligned
    buffer = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.grad = parameter.main_grad = buffer[start : start + parameter.numel()].view_as(parameter)
    return buffer


def make_step(mode: str, shape: dict[str, int]) -> tuple[Any, Any]:
    """`(step(batch) -> loss, check() -> facts about the graphs)` for a mode; `check` raises where there are none."""
    import torch
    from megatron.core.transformer import cuda_graphs

    model = build(shape, mode == BUILT_IN)
    device = torch.cuda.current_device()
    parameters = list(model.parameters())
    gradients = place_gradients(parameters)
    lr = torch.tensor(1e-4, device=device)
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=True, capturable=True)
    positions = torch.arange(shape["length"], device=device).expand(shape["batch"], -1)
    wrapped: list[Any] = []
    if mode == GRAPHMOD:
        from graphmod import graph_layers

        wrapped = graph_layers(model, layers="decoder.layers.*")
    model.train()

    def step(batch: Any) -> Any:
        tokens = batch[0].to(device, non_blocking=True)
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        if mode == BUILT_IN:
            cuda_graphs.create_cudagraphs()  # as its schedules do; only the first call has something to do
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        gradients.zero_()
        return loss.detach()

    def check() -> dict[str, Any]:
        if mode == EAGER:
            return {}
        if mode == BUILT_IN:
            runners = [runner for layer in model.decoder.layers for runner in layer.cudagraph_manager.cudagraph_runners]
            graphs = sum(graph is not None for runner in runners for graph in (runner.fwd_graph, runner.bwd_graph))
            if graphs != 2 * shape["layers"]:
                raise RuntimeError(f"Megatron-core made {graphs} graphs for {shape['layers']} layers")
            return {"graphs": graphs}
        stats = sum((layer.stats for layer in wrapped[1:]), wrapped[0].stats)
        stats.pool_bytes = wrapped[0].stats.pool_bytes  # the layers share their pools
        if stats.failures or not stats.replays:
            reason = next((layer.last_failure for layer in wrapped if layer.last_failure), "no reason is known")
            raise RuntimeError(f"graphmod did not graph Megatron-core's layers: {reason}; {stats}")
        return {"stats": vars(stats)}

    return step, check


def work(mode: str, name: str, steps: int) -> dict[str, Any]:
    """Measures one mode on one shape in this process."""
    import megatron.core
    import torch

    from benchmarks.measure import environment, gpu_busy_ms, memory, time_steps

    shape = ALL_SHAPES[name]
    start_megatron()
    step, check = make_step(mode, shape)
    generator = torch.Generator().manual_seed(1)
    size = (1, shape["batch"], shape["length"] + 1)
    batches = [torch.randint(0, VOCABULARY, size, generator=generator).pin_memory() for _ in range(FIRST)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    losses = [float(step(batch)) for batch in batches]
    setup = time.perf_counter() - began
    graphs = check()

    def run(index: int) -> Any:
        return step(batches[index % FIRST])

    result = {"mode": mode, "shape": name, **shape, "first_8_steps_s": setup}
    result |= time_steps(run, steps)
    result |= memory()
    losses.append(float(run(0)))
    result |= {"losses": losses, **graphs, **check()}
    result |= gpu_busy_ms(run)
    return result | {"environment": environment() | {"megatron_core": megatron.core.__version__}}


def compare_losses(result: dict[str, Any], eager: dict[str, Any] | None) -> dict[str, Any]:
    """Whether the losses of the first steps, and of one after the timed steps, are those of eager in the same run."""
    if eager is None or result is eager or len(eager["losses"]) != len(result["losses"]):
        return {}
    apart = [abs(one - other) for one, other in zip(result["losses"], eager["losses"], strict=True)]
    largest = max(apart) if all(map(math.isfinite, apart)) else None
    return {"losses_equal_eager": result["losses"] == eager["losses"], "largest_loss_difference": largest}


def show(result: dict[str, Any], eager: dict[str, Any] | None, took: float) -> None:
    head = f"{result['shape']:9} {result['mode']:18}"
    if "error" in result:
        print(f"{head} failed: {result['error'][:200]}", flush=True)
        return
    ratio = f"{eager['step_ms'] / result['step_ms']:5.2f}x" if eager is not None else "      "
    losses = ""
    if "losses_equal_eager" in result:
        losses = "losses as eager" if result["losses_equal_eager"] else f"off by {result['largest_loss_difference']}"
    print(
        f"{head} step {result['step_ms']:8.3f} ms {ratio}  free {result['free_ms']:8.3f}  host {result['host_ms']:8.3f}"
        f"  busy {result['busy_ms']:8.3f}  kernels {result['kernels']:6.0f}  reserved {result['reserved_gib']:6.2f} GiB"
        f"  first 8 steps {result['first_8_steps_s']:5.1f} s  {losses}  ({took:.0f} s)",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=30, help="timed steps, twice")
    parser.add_argument("--timeout", type=float, default=240, help="seconds a mode of a shape may take")
    parser.add_argument("--smoke", action="store_true", help="a tiny model instead of the shapes, and few steps")
    parser.add_argument(
        "--out", type=Path, help="write the results there as JSON, beside those of other shapes and modes"
    )
    parser.add_argument("--worker", nargs=2, metavar=("MODE", "SHAPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: {options.steps} is less than 1")
    if options.worker:
        return tell(work(*options.worker, options.steps))
    shapes = ["smoke"] if options.smoke else chosen(parser, options.shapes, SHAPES, "--shapes")
    modes = chosen(parser, options.modes, MODES, "--modes")
    if options.smoke and options.out is not None:
        parser.error("--smoke takes no --out: its times say nothing")
    if not installed():
        print(INSTALL)
        return 0
    if not gpu_is_there():
        return 2
    steps = min(options.steps, 5) if options.smoke else options.steps
    failed = False
    for shape in shapes:
        eager = None
        for mode in modes:
            began = time.perf_counter()
            result = {"mode": mode, "shape": shape}
            result |= in_process(__file__, (mode, shape), ("--steps", str(steps)), options.timeout)
            if mode == EAGER and "error" not in result:
                eager = result
            if "error" not in result:
                result |= compare_losses(result, eager)
            keep(options.out, result)
            show(result, eager, time.perf_counter() - began)
            failed = failed or "error" in result
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
