"""A model of which each rank keeps a part of every parameter (fully_shard), on a batch of its own.

A layer's parameters are collected before its forward and its backward; gradients are averaged where they are given
back, to the rank that keeps that part of them.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphmod.wrap.layers import find_layers


def shard(model: nn.Module, mesh: Any, *, reshard_after_forward: bool, dtype: torch.dtype | None) -> nn.Module:
    """Leaves this rank its part of every parameter of `model`, in place, and returns it. All ranks must have built it
    alike.

    Each layer is collected by itself, and together what lies beside the layers.

    Args:
        model: a model with layers, on its device.
        mesh: of the ranks with different batches, one-dimensional.
        reshard_after_forward: give a layer's parameters back after its forward, and collect them again in the backward.
        dtype: that of autocast, in which layers are collected: half of what would be sent in float32. Gradients are
            added up over ranks in float32 then. What lies beside the layers is collected as it is, so that what passes
            from layer to layer has the dtype that it has on one GPU. None collects everything as it is.
    """
    policy = MixedPrecisionPolicy()
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for name in find_layers(model):
        layer = model.get_submodule(name)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # After the last layer comes the backward, which needs this part at once.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model
