"""Weights in 8 bits: linear layers read a byte for each number, and multiply what they sum by a scale of each column.

A step of few rows takes little longer than its weights take from memory, of which these are half.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from graphmod.config import choice
from graphmod.decode.types import WeightsName
from graphmod.errors import ConfigError
from graphmod.fuse.operations import reads_8_bits, scaled_linear

log = logging.getLogger("graphmod")

_LARGEST = {WeightsName.int8: 127, WeightsName.fp8: 448}  # that the dtype holds, of int8 that has a negative


class ScaledLinear(nn.Module):
    """A linear layer whose weight has 8 bits.

    Args:
        weight: (out features, features) floating point, which is not changed.
        bias: (out features,), or None.
        weights: `int8` or `fp8` (float8_e4m3fn).
        device: where it is put.

    Attributes:
        qweight: (out features, features) int8 or float8_e4m3fn: the weight divided by `scale`, rounded to nearest. No
            `weight`, since that would be taken for what it stands for, by code that reads it and in saved models.
        scale: (out features,) float32: the largest magnitude of a row of the weight, divided by that of its dtype.
        bias: as given.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, weights: WeightsName, device: torch.device) -> None:
        super().__init__()
        self.hold(weight, bias, weights, device)

    def hold(self, weight: Tensor, bias: Tensor | None, weights: WeightsName, device: torch.device) -> None:
        """Makes these its own, with the arguments of the class; also of another layer, which is to become one."""
        self.out_features, self.in_features = weight.shape
        wide = torch.empty(weight.shape, device=device, dtype=torch.float32).copy_(weight)
        scale = wide.abs().amax(1).div_(_LARGEST[weights])
        scale = torch.where(scale == 0, 1, scale)  # of a row of zeros
        wide /= scale.unsqueeze(1)
        self.register_buffer(
            "qweight", wide.round_().to(torch.int8) if weights == "int8" else wide.to(torch.float8_e4m3fn)
        )
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias.to(device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        bias, kind = self.bias, x.device.type
        # Not in the operation: a compiled step repeats that without autocast, which there is none of on `meta`.
        if x.is_floating_point() and not x.is_meta and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        return scaled_linear(x, self.qweight, self.scale, bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Lets `to(dtype)` change its bias alone."""
        before = {"qweight": self.qweight, "scale": self.scale}
        super()._apply(fn, recurse)
        for name, kept in before.items():
            if (now := getattr(self, name)).dtype != kept.dtype:
                setattr(self, name, kept.to(now.device))
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@torch.no_grad()
def quantize_weights(model: nn.Module, weights: str, device: torch.device | str | None = None) -> None:
    """Exchanges the linear layers of a model for such with weights in 8 bits, in place and for good: it can be decoded,
    and no longer trained.

    Each row of a weight is divided by a scale, its largest magnitude by that of the dtype, and rounded to nearest. Sums
    are float32. What shares its weight with something else stays as it is (an output layer tied to the embedding), and
    so does what is no plain `nn.Linear` or `Conv1D` of transformers (experts, layers of adapters). These layers have no
    `weight` any more: code that reads it fails, such as DoRA and the merging of adapters. Save the model before.

    Args:
        model: with weights in floating point.
        weights: `int8`, or `fp8` (float8_e4m3fn).
        device: where each of these layers is put, so that the others' weights need not fit there in full; None leaves
            them where they are.

    Raises:
        ConfigError: `weights` is neither; the GPU cannot multiply them; or no layer of the model can have them.
    """
    name = choice(WeightsName, weights, "weights")
    if name is WeightsName.saved:
        raise ConfigError("weights=saved leaves a model as it is; choose int8 or fp8")
    users = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    # Of a layer of peft, which reads their weights itself.
    adapters = [getattr(one, each, None) for one in model.modules() for each in getattr(one, "adapter_layer_names", ())]
    apart = {id(one) for each in adapters if isinstance(each, nn.Module) for one in each.modules()}
    found: list[Any] = [one for one in model.modules() if type(one) in (nn.Linear, Conv1D) and id(one) not in apart]
    found = [
        one
        for one in found
        if "forward" not in vars(one) and one.weight.is_floating_point() and users[id(one.weight)] == 1
    ]
    if not found:
        raise ConfigError(
            f"weights={name}: {type(model).__name__} has no linear layer with a weight of its own; leave it out"
        )
    places = [torch.device(device or one.weight.device) for one in found]
    if name is WeightsName.fp8 and any(
        place.type == "cuda" and torch.cuda.get_device_capability(place) < (8, 9) for place in {*places}
    ):
        raise ConfigError("weights=fp8 needs a GPU of compute capability 8.9 or newer; use weights=int8")
    copied, before = 0, sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    for linear, place in zip(found, places, strict=True):
        weight, bias = linear.weight.T if type(linear) is Conv1D else linear.weight, linear.bias
        # In place: hooks stay, and who else holds the layer has this one. What fails does so before.
        ScaledLinear.hold(linear, weight, bias, name, place)
        del linear.weight
        linear.__class__ = ScaledLinear
        copied += not reads_8_bits(linear.qweight, weight.dtype)
    after = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    log.info("%d linear layers in %s: %.1f MiB instead of %.1f", len(found), name, after / 2**20, before / 2**20)
    if copied:
        log.info(
            "%d of them copy their weights in each call, and so are slower than before: a GPU reads 8 bits as they are "
            "in models of bfloat16 or float16, with out features in multiples of 64, and features of 128",
            copied,
        )
