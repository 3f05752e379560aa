"""Small parts that a run is put together from: its settings as plain values, its training step."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from graphmod.train.model import autocast_dtype
from graphmod.train.optim import build_optimizer, learning_rates
from graphmod.train.parallel import shard, split_layers
from graphmod.train.run.ranks import ALONE, Ranks
from graphmod.train.settings import Precision, RunConfig, Scope
from graphmod.train.step import TrainStep


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
    # Layers are split before they are sharded.
    if "tp" in ranks.mesh.mesh_dim_names:
        split_layers(model, ranks.mesh["tp"])
    if "dp" in ranks.mesh.mesh_dim_names:
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
