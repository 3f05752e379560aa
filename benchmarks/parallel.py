"""Step time on several GPUs of one machine, beside one GPU; the ranks of each mode in processes of their own.

    python benchmarks/parallel.py --out benchmarks/results/parallel.json
    python benchmarks/parallel.py --shapes small --modes one_gpu,ddp_eager,ddp --gpus 2

Each GPU has the batch of the shape. Modes: the step on `one_gpu`, from one graph; DistributedDataParallel as it comes
(`ddp_eager`), with its model compiled (`ddp_compiled`), with graphs of its layers (`ddp_layers`), in a step that is one
graph (`ddp`), likewise when made with `init_sync=False` (`ddp_one_stream`); what one writes by hand with
`torch.cuda.graph`: gradients in one flat buffer, reduced after the backward (`flat`); each layer in `fully_shard`
(`fsdp`) or `parallelize_module` (`tp`, whose gradients are not clipped), eager and in a step that is one graph; with
graphs of these layers (`fsdp_layers`, `tp_layers`). `one_gpu_compiled` and `train_step_compiled` are graphmod's
`TrainStep` with `compile="default"` on one GPU and on all. `fsdp_bf16` is the same with layers collected in bfloat16
and gradients added up in float32, `fsdp_whole` without giving layers back after their forward, each of them with
`_eager` or `_layers`. Where they are asked for, a mixture of 64 experts of the shape, in `TrainStep`: shared out over
the ranks (`experts`, `experts_eager`) with room for all tokens, so that `reruns` of a step stay 0, or whole on each of
them (`experts_whole`). `reserved` is the peak of memory since the process began, `of steps` that of the timed steps
alone.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.options import chosen, gpu_is_there, keep
from benchmarks.training import SHAPES, VOCABULARY, build

DDP = ("one_gpu", "ddp_eager", "ddp_compiled", "ddp_layers", "flat", "ddp", "ddp_one_stream")
SHARDED = ("fsdp_eager", "fsdp_layers", "fsdp", "tp_eager", "tp_layers", "tp")
WAYS = ("fsdp_bf16_eager", "fsdp_bf16_layers", "fsdp_whole_eager", "fsdp_whole_layers")  # where they are asked for
COMPILED = ("one_gpu_compiled", "train_step_compiled")
EXPERTS = ("experts_eager", "experts", "experts_whole")  # where they are asked for
MODES = (*DDP, *COMPILED, *SHARDED)


def make_step(mode: str, shape: dict[str, int], rank: int, ranks: int) -> tuple[Any, list[Any]]:
    """`(step(tokens) -> loss, the wrappers)` of a mode."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from graphmod import CUDAGraphModule, graph_layers
    from graphmod.train.step import next_token_loss

    if mode in EXPERTS:
        return _experts(mode, shape)
    model, optimizer = build(shape)
    if mode in COMPILED:
        return _compiled(model, optimizer, ranks)
    called = model
    if mode.startswith("ddp"):
        settings = {"init_sync": mode != "ddp_one_stream"}  # all ranks make the same model
        called = DistributedDataParallel(model, device_ids=[rank], broadcast_buffers=False, **settings)
    if mode == "ddp_compiled":
        called = torch.compile(called)
    if mode.startswith(("fsdp", "tp")):
        optimizer = _shard(model, mode, ranks)

    def step(tokens: Any) -> Any:
        loss = next_token_loss(called, tokens)
        loss.backward()
        if not mode.startswith("tp"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if mode == "flat":
        return _by_hand(model, optimizer, shape, ranks), []
    if mode.endswith("_layers"):
        return step, graph_layers(called)
    if mode in ("ddp", "ddp_one_stream", "one_gpu", "fsdp", "tp"):
        wrapper = CUDAGraphModule(step)
        return wrapper, [wrapper]
    return step, []


def _compiled(model: Any, optimizer: Any, ranks: int) -> tuple[Any, list[Any]]:
    from torch import distributed

    from graphmod.train.settings import TrainGraphConfig
    from graphmod.train.step import TrainStep

    step = TrainStep(
        model,
        optimizer,
        max_grad_norm=1.0,
        compile="default",
        config=TrainGraphConfig(scope="full_iteration"),
        process_group=distributed.group.WORLD if ranks > 1 else None,
    )
    return lambda tokens: step(tokens[None]), []


def _experts(mode: str, shape: dict[str, int]) -> tuple[Any, list[Any]]:
    import torch
    from torch import distributed
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from graphmod.train.attention import use_static_causal_attention
    from graphmod.train.experts import split_experts
    from graphmod.train.optim import build_optimizer
    from graphmod.train.settings import OptimConfig, TrainGraphConfig
    from graphmod.train.step import TrainStep

    torch.manual_seed(0)
    width = shape["width"]
    heads: dict[str, Any] = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64, "head_dim": 64}
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": width // 4}
    config = Qwen3MoeConfig(
        hidden_size=width, num_hidden_layers=shape["layers"], vocab_size=VOCABULARY, use_cache=False, **heads, **experts
    )
    with torch.device("cuda"):
        model = use_static_causal_attention(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    if mode != "experts_whole":
        split_experts(model, capacity_factor=distributed.get_world_size())  # with which no step ever runs again
    step = TrainStep(
        model,
        build_optimizer(model, OptimConfig(learning_rate=1e-4), torch.device("cuda")),
        max_grad_norm=1.0,
        config=TrainGraphConfig(scope="none" if mode == "experts_eager" else "full_iteration"),
        process_group=distributed.group.WORLD,
    )

    def run(tokens: Any) -> Any:
        return step(tokens[None])

    run.step = step
    return run, step.graphs


def _shard(model: Any, mode: str, ranks: int) -> Any:
    """Shards a model in place; returns an optimizer of what it has then."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (ranks,))
    if mode.startswith("fsdp"):
        policy = MixedPrecisionPolicy()
        if mode.startswith("fsdp_bf16"):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        given_back = not mode.startswith("fsdp_whole")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=given_back)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        columns, rows = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)
        columns, rows = (*columns, "mlp.gate_proj", "mlp.up_proj"), (*rows, "mlp.down_proj")
        for layer in model.model.layers:
            plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
            parallelize_module(layer, mesh, plan)
    kinds: dict[bool, list[Any]] = {}
    for parameter in model.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    groups = [{"params": parameters} for parameters in kinds.values()]
    lr = torch.tensor(1e-4, device="cuda")
    return torch.optim.AdamW(groups, lr=lr, fused=True, capturable=True)


def _by_hand(model: Any, optimizer: Any, shape: dict[str, int], ranks: int) -> Any:
    import torch
    from torch import distributed

    from graphmod.train.step import next_token_loss

    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), device="cuda", dtype=parameters[0].dtype)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    static = torch.zeros(shape["batch"], shape["length"] + 1, device="cuda", dtype=torch.long)

    def run() -> Any:
        flat.zero_()
        loss = next_token_loss(model, static)
        loss.backward()
        flat.mul_(1 / ranks)
        distributed.all_reduce(flat)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        loss = run()

    def step(tokens: Any) -> Any:
        static.copy_(tokens)
        graph.replay()
        return loss

    step.reads = run, graph  # a graph does not hold the memory that it reads: the model, what the optimizer keeps
    return step


def work(rank: int, mode: str, name: str, steps: int, ranks: int, port: int, results: Any) -> None:
    """Measures one mode on one shape in one rank."""
    import torch
    from torch import distributed

    from benchmarks.measure import environment, gpu_busy_ms, memory, time_steps

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    if ranks > 1:
        device = torch.device("cuda", rank)
        distributed.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    shape = SHAPES[name]
    step, wrappers = make_step(mode, shape, rank, ranks)
    generator = torch.Generator().manual_seed(1 + rank)
    size = (shape["batch"], shape["length"] + 1)
    batches = [torch.randint(0, VOCABULARY, size, generator=generator).cuda() for _ in range(8)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    losses = [float(step(batch)) for batch in batches]
    setup = time.perf_counter() - began

    def run(index: int) -> Any:
        return step(batches[index % len(batches)])

    result = {"mode": mode, "shape": name, **shape, "gpus": ranks, "first_8_steps_s": setup, "first_losses": losses}
    began = memory()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result |= time_steps(run, steps)
    result |= {name: max(value, began[name]) for name, value in memory().items()}
    result |= {f"steps_{name}": value for name, value in memory().items() if not name.endswith("now_gib")}
    if wrappers:
        result |= {"state": wrappers[0].stats.state, "failure": wrappers[0].last_failure}
    if mode in EXPERTS:
        result["reruns"] = step.step.reruns
    result |= gpu_busy_ms(run) | {"environment": environment()}
    if rank == 0:
        results.put(result)
    torch.cuda.synchronize()
    if ranks > 1:
        distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # ends as a killed job does: what is measured here is no teardown


def measure(mode: str, name: str, steps: int, gpus: int, timeout: int) -> dict[str, Any]:
    """The result of the first rank, or what went wrong."""
    import torch.multiprocessing as processes

    ranks = 1 if mode.startswith("one_gpu") else gpus
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = processes.get_context("spawn")
    results = context.SimpleQueue()
    arguments = (mode, name, steps, ranks, port, results)
    workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + timeout
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        if any(worker.exitcode for worker in workers):
            break  # the others would wait for it
        time.sleep(0.1)
    codes = [worker.exitcode for worker in workers]
    found = None if results.empty() else results.get()
    for worker in workers:
        worker.kill()
    return found or {"mode": mode, "shape": name, "error": f"no result within {timeout} s; ranks ended with {codes}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="small,batched,deep", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join((*MODES, *WAYS, *EXPERTS))}")
    parser.add_argument("--steps", type=int, default=40, help="timed steps, twice")
    parser.add_argument("--gpus", type=int, default=2, help="ranks, one a GPU")
    parser.add_argument("--timeout", type=int, default=150, help="seconds for one mode and shape")
    parser.add_argument("--out", type=Path, help="write the results there as JSON, in place of earlier ones")
    options = parser.parse_args()
    shapes = chosen(parser, options.shapes, SHAPES, "--shapes")
    modes = chosen(parser, options.modes, (*MODES, *WAYS, *EXPERTS), "--modes")
    if not gpu_is_there():
        return 2
    import torch

    if torch.cuda.device_count() < options.gpus:
        print(f"error: needs {options.gpus} GPUs, and torch sees {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    failed = False
    for shape in shapes:
        alone: dict[bool, float] = {}  # compiled or not -> ms of one GPU
        for mode in modes:
            result = measure(mode, shape, options.steps, options.gpus, options.timeout)
            keep(options.out, result)
            if "error" in result:
                print(f"{shape:9} {mode:14} failed: {result['error']}", flush=True)
                failed = True
                continue
            like = mode in COMPILED
            if mode.startswith("one_gpu"):
                alone[like] = result["step_ms"]
            against = f" ({result['step_ms'] / alone[like]:5.3f} x one GPU)" if like in alone else ""
            print(
                f"{shape:9} {mode:14} step {result['step_ms']:8.3f} ms{against}  free {result['free_ms']:8.3f}  host "
                f"{result['host_ms']:7.3f}  busy {result['busy_ms']:8.3f}  kernels {result['kernels']:6.0f}  reserved "
                f"{result['reserved_gib']:6.2f} GiB, of steps {result['steps_reserved_gib']:6.2f}  "
                f"{result.get('state', '')} {result.get('failure', '')[:200]}"
                f"{' reruns ' + str(result['reruns']) if 'reruns' in result else ''}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
