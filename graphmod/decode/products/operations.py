"""Products of few rows with several weights (query, key and value; gate and up, with SiLU) by one kernel, and of a
narrow weight (the output of attention, down) by enough programs to fill a GPU.

With few rows a product takes a GPU little more than its launch and the way of the first bytes from memory, and the
products of one input do not wait for each other. Compiled decode steps call these operations in place of linear layers;
the weights stay where they are. The kernels read them before the one before has ended, so no kernel of a step may write
to them.
"""

import torch
from torch import Tensor, library

__all__ = ["divided_product", "gated_product", "products"]


@library.custom_op("graphmod::products", mutates_args=())
def products(x: Tensor, weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`[x @ weight.T for weight in weights]`, summed in float32.

    Args:
        x: (..., features) of 1 to 128 rows in bfloat16 or float16; features a multiple of 128.
        weights: up to three, (out features, features), contiguous; out features a multiple of 64.
        dtype: of the results: that of `x`, or float32.
    """
    if not x.is_cuda:
        x = x.to(dtype)
        return [torch.nn.functional.linear(x, weight.to(dtype)) for weight in weights]
    from graphmod.decode.products import kernels

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    outs = [flat.new_empty(len(flat), len(weight), dtype=dtype) for weight in weights]
    with torch.cuda.device_of(x):
        kernels.multiply(flat, weights, outs)
    return [out.view(*x.shape[:-1], -1) for out in outs]


@products.register_fake
def _(x: Tensor, weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], len(weight), dtype=dtype) for weight in weights]


@library.custom_op("graphmod::gated_product", mutates_args=())
def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, computed in float32 and rounded once.

    Args:
        x: (..., features) of 1 to 128 rows in bfloat16 or float16; features a multiple of 128.
        gate, up: (out features, features) each, contiguous; out features a multiple of 64.
    """
    if not x.is_cuda:
        opened, given = (torch.nn.functional.linear(x.float(), weight.float()) for weight in (gate, up))
        return (torch.nn.functional.silu(opened) * given).to(x.dtype)
    from graphmod.decode.products import kernels

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = flat.new_empty(len(flat), len(gate))
    with torch.cuda.device_of(x):
        kernels.multiply(flat, [gate, up], [out], gated=True)
    return out.view(*x.shape[:-1], -1)


@gated_product.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(gate))


@library.custom_op("graphmod::divided_product", mutates_args=())
def divided_product(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """(parts, ..., out features) in float32, whose sum over the parts is `x @ weight.T`: of each part of the features.

    Args:
        x: (..., features) of 1 to 128 rows in bfloat16 or float16.
        weight: (out features, features), contiguous; out features a multiple of 64.
        parts: each of a multiple of 128 features.
    """
    if not x.is_cuda:
        pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
        return torch.stack([torch.nn.functional.linear(some.float(), other.float()) for some, other in pairs])
    from graphmod.decode.products import kernels

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = flat.new_empty(parts, len(flat), len(weight), dtype=torch.float32)
    with torch.cuda.device_of(x):
        kernels.multiply(flat, [weight], [out], parts=parts)
    return out.view(parts, *x.shape[:-1], -1)


@divided_product.register_fake
def _(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    return x.new_empty(parts, *x.shape[:-1], len(weight), dtype=torch.float32)
