"""Small parts that a run is put together from: its settings as plain values, its training step."""

from collections.abc import Callable
from dataclasses import asdict, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from graphmod.train.model import autocast_dtype
from graphmod.train.run.ranks import ALONE, Ranks
from graphmod.train.settings import Precision, RunConfig, Scope
from graphmod.train.step import TrainStep
from graphmod.train.step.optim import build_optimizer, learning_rates
from graphmod.words import counted


def plain_config(config: RunConfig) -> dict[str, Any]:
    """The settings as plain dicts, lists, strings and numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return value.value if isinstance(value, Enum) else value

    return plain(asdict(config))


def device_name(device: torch.device) -> str:
    """The name of a device, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'thread')}"


def arrangement(config: RunConfig, ranks: Ranks) -> str:
    """How the ranks of a run share the model, in words."""
    return f"parallel={config.parallel.mode.value} on {ranks.arrangement}"


def divide(config: RunConfig, model: nn.Module, ranks: Ranks) -> None:
    """Leaves this rank its part of the model, in place, where `parallel` says that it holds a part only.

    Raises:
        ConfigError: the model cannot be split so.
    """
    if ranks.mesh is None:
        return
    # Loaded here, because it takes a second and few runs need it. Layers are split before they are sharded.
    if "tp" in ranks.mesh.mesh_dim_names:
        from graphmod.train.step.tensor_parallel import split_layers

        split_layers(model, ranks.mesh["tp"])
    if "dp" in ranks.mesh.mesh_dim_names:
        from graphmod.train.step.fully_sharded import shard

        reshard, dtype = config.parallel.reshard_after_forward, autocast_dtype(config.train.precision)
        shard(model, ranks.mesh["dp"], reshard_after_forward=reshard, dtype=dtype)


def step_maker(
    config: RunConfig, model: nn.Module, device: torch.device, loss_fn: Callable, ranks: Ranks = ALONE
) -> Callable[[Scope], TrainStep]:
    """Builds the optimizer of `model`; returns what builds the training step of a scope around both."""
    optimizer = build_optimizer(model, config.optim, device)
    train = config.train

    def make(scope: Scope) -> TrainStep:
        return TrainStep(
            model,
            optimizer,
            loss_fn=loss_fn,
            learning_rates=learning_rates(config.optim, train.steps),
            max_grad_norm=config.optim.max_grad_norm,
            autocast_dtype=autocast_dtype(train.precision),
            nonfinite=train.nonfinite.value,
            scale_loss=train.precision is Precision.fp16_mixed,
            ema_decay=train.ema_decay,
            compile=config.graph.compile.value,
            config=replace(config.graph, scope=scope),
            process_group=ranks.data_group,
        )

    return make
