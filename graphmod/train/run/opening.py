"""What a run says about itself before its first step."""

from pathlib import Path

import torch
from torch import nn

from graphmod.config import CompileMode
from graphmod.train.batches import Data
from graphmod.train.device import device_name
from graphmod.train.result import peak_flops
from graphmod.train.run.assembly import arrangement
from graphmod.train.run.ranks import ALONE, Ranks
from graphmod.train.settings import RunConfig
from graphmod.words import counted


def _model(config: RunConfig, model: nn.Module) -> str:
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    some = "" if trained == total else f", {trained:,} of them trained"
    name = type(model).__name__.removeprefix("FSDP")  # which fully_shard puts before it
    return f"{name}, {counted(total, 'parameter')}{some}, precision {config.train.precision.value}"


def _batches(config: RunConfig, length: int, tokens_per_step: int, first: int, ranks: int) -> str:
    data, train = config.data, config.train
    each = f"{ranks} ranks x " if ranks > 1 else ""
    micro = f"{counted(train.grad_accumulation, 'microbatch')} of " if train.grad_accumulation > 1 else ""
    size = f"{micro}{data.batch_size} x {length} tokens"
    if data.buckets is not None:
        size = (
            f"{micro}up to {data.batch_size * data.seq_len:,} tokens in buckets of {', '.join(map(str, data.buckets))}"
        )
    left = train.steps - first
    done = f", {first:,} of them done" if first else ""
    tokens = f"{left * tokens_per_step:,} tokens {'to go' if first else 'in all'}"
    return f"{counted(train.steps, 'step')}{done}, each of {each}{size}; {tokens}"


def _device(config: RunConfig, device: torch.device, ranks: Ranks) -> str:
    name = device_name(device)
    peak = peak_flops(name)
    known = "" if peak is None else f" (peak {peak / 1e12:,.0f} TFLOP/s in bf16)"
    scope = "auto" if config.graph.auto else config.graph.scope.value
    compiled = "" if config.graph.compile is CompileMode.none else f", graph.compile={config.graph.compile.value}"
    several = f", {arrangement(config, ranks)}" if ranks.count > 1 else ""
    return f"{name}{known}{several}, graph={scope}{compiled}"


def opening(
    config: RunConfig,
    model: nn.Module,
    corpus: Data,
    device: torch.device,
    folder: Path,
    tokens_per_step: int,
    first: int,
    ranks: Ranks = ALONE,
) -> str:
    """Five lines: model, data, batches, device and graphs, folder.

    Args:
        config: checked settings.
        model: as it is trained.
        corpus: the data.
        device: of the run.
        folder: of the run.
        tokens_per_step: over all microbatches of all ranks.
        first: steps done before.
        ranks: of the run.
    """
    lines = {
        "model": _model(config, model),
        "data": corpus.summary(),
        "batches": _batches(config, corpus.length, tokens_per_step, first, ranks.data_ranks),
        "device": _device(config, device, ranks),
        "folder": str(folder),
    }
    return "\n".join(f"{name + ':':<9}{text}" for name, text in lines.items())
