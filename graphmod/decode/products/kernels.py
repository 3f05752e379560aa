"""Which kernel computes a product. Importing this module needs Triton."""

from torch import Tensor

from graphmod.decode.early_launch import can_start_early
from graphmod.decode.products import batch_kernel, bulk_kernel, row_kernel
from graphmod.decode.products.limits import FEWEST_IN_BULK, MOST_WEIGHTS


def multiply(x: Tensor, weights: list[Tensor], outs: list[Tensor], parts: int = 1, gated: bool = False) -> None:
    """`outs[i] = x @ weights[i].T`, for up to three.

    Args:
        x: (rows, features), contiguous, of two bytes a number.
        weights: (out features, features) each, contiguous; out features a multiple of 64.
        outs: (rows, out features) each, contiguous; (parts, rows, out features) of several parts.
        parts: that features are divided into, each a multiple of 128; one for a single row.
        gated: then `outs[0] = silu(x @ weights[0].T) * (x @ weights[1].T)`, of two weights that are as large.
    """
    widths = [len(weight) for weight in weights] + (MOST_WEIGHTS - len(weights)) * [0]
    # Kernels take three of each; those too many are not used.
    weights = [*weights, *(MOST_WEIGHTS - len(weights)) * weights[:1]]
    outs = [*outs, *(MOST_WEIGHTS - len(outs)) * outs[:1]]
    early = can_start_early(x.device)
    if early and len(x) == 1 and parts == 1:
        row_kernel.multiply(x, weights, widths, outs, gated)
    elif early and len(x) >= FEWEST_IN_BULK and not gated and _aligned(x, *weights):
        bulk_kernel.multiply(x, weights, widths, outs, parts)
    else:
        batch_kernel.multiply(x, weights, widths, outs, parts, gated)


def _aligned(*tensors: Tensor) -> bool:
    """As the tensor memory accelerator needs it."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
