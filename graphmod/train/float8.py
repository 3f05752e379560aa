"""Matmuls of a model's layers in 8 bits (`model.precision`), by the float8 training of the torchao library."""

import logging
import re
from dataclasses import replace
from importlib.metadata import version

import torch
from torch import nn

from graphmod.errors import ConfigError
from graphmod.train.settings import ModelPrecision
from graphmod.words import warn_once
from graphmod.wrap.layers import find_layers

log = logging.getLogger("graphmod")

_TORCHAO = (0, 18)
_CAPABILITY = (8, 9)
_RECIPES = {ModelPrecision.fp8: "tensorwise", ModelPrecision.fp8_rowwise: "rowwise"}


def check_float8(precision: ModelPrecision, device: torch.device) -> None:
    """Raises ConfigError where the device, or the installed torchao, has no such matmuls."""
    said, found = f"model.precision={precision}", version("torchao")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _TORCHAO:
        needed = ".".join(map(str, _TORCHAO))
        raise ConfigError(f"{said} needs torchao {needed} or newer, got {found}: pip install 'torchao>={needed}'")
    if device.type != "cuda":
        warn_once(f"{said} on the CPU rounds to 8 bits and multiplies in more: for tests, not for speed")
    elif (got := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        raise ConfigError(
            f"{said} needs a GPU with 8-bit matmuls (compute capability {'.'.join(map(str, _CAPABILITY))}: Ada, Hopper "
            f"or newer), got {torch.cuda.get_device_name(device)} ({'.'.join(map(str, got))}); leave it out"
        )


def use_float8(model: nn.Module, precision: ModelPrecision, sharded: bool) -> None:
    """Has the linear layers of the model's layers multiply in 8 bits, in place, but for those so small that this takes
    longer. Head and embedding stay as they are.

    Args:
        sharded: `fully_shard` will gather the weights, which it then does in 8 bits, where each has one scale.

    Raises:
        ConfigError: none of them is large enough.
    """
    from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training

    recipe = _RECIPES[precision]
    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        enable_fsdp_float8_all_gather=sharded and precision is ModelPrecision.fp8,
        pad_inner_dim=True,  # of tokens, which need not be a multiple of 16
        emulate=next(model.parameters()).device.type != "cuda",
    )
    fits, layers = _auto_filter_for_recipe(recipe, filter_fqns=[]), [f"{name}." for name in find_layers(model)]
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    chosen = {name for name in linear if name.startswith(tuple(layers)) and fits(model.get_submodule(name), name)}
    if not chosen:
        raise ConfigError(
            f"model.precision={precision} would take longer than without: no linear layer in the layers of "
            f"{type(model).__name__} is large enough, or has sizes that 16 divides; leave it out"
        )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in chosen)
    log.info(f"{len(chosen)} of {len(linear)} linear layers multiply in 8 bits")
