"""How much of a GPU's arithmetic a run uses: model FLOPs utilization (MFU).

Counted as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): for each token 6 FLOPs a parameter and
12 * layers * heads * head size * sequence length for attention, forward and backward; what runs again in the backward
does not count.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

# Dense bf16 tensor-core TFLOP/s by the name that CUDA reports, from NVIDIA's data sheets of these products, which give
# twice as much for sparse matrices. The first pattern that is found counts.
_PEAKS = (
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.5),
    (r"\b(GH|H)200\b", 989.5),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100\b", 989.5),
    (r"\bA100\b", 312.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.05),
    (r"\bL40\b", 181.05),
    (r"\bL4\b", 121.0),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b", 71.0),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def peak_flops(device: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None where it is not known, as of a CPU or a part of a GPU (MIG)."""
    if "MIG" in device:
        return None
    return next((peak * 1e12 for pattern, peak in _PEAKS if re.search(pattern, device)), None)


def multiplied_parameters(model: nn.Module) -> int:
    """Parameters of the model without the embeddings that are only looked up."""
    looked_up = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    looked_up -= {id(part.weight) for part in model.modules() if isinstance(part, nn.Linear)}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in looked_up)


def flops_per_token(model: nn.Module, config: Any, length: int) -> float | None:
    """FLOPs that training takes for each token.

    Args:
        model: with all its parameters.
        config: its transformers config.
        length: tokens of a sequence.

    Returns:
        None for a model of experts, not all of which see each token, or one whose attention is not described in the
        terms of the config.
    """
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    hidden = getattr(config, "hidden_size", None)
    size = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)
    if not layers or not heads or not size or any(getattr(config, name, None) for name in _EXPERTS):
        return None
    return 6.0 * multiplied_parameters(model) + 12.0 * layers * heads * size * length


@dataclass(frozen=True)
class Utilization:
    """Turns tokens per second into MFU.

    Attributes:
        flops_per_token: of the model, forward and backward.
        peak: FLOP/s of the devices.
    """

    flops_per_token: float
    peak: float

    def __call__(self, tokens_per_s: float) -> float:
        """The share of the devices' peak, 1 being all of it."""
        return tokens_per_s * self.flops_per_token / self.peak


def utilization(model: nn.Module, config: Any, length: int, device: str, count: int = 1) -> Utilization | None:
    """What computes the MFU of a run on `count` such devices; None where the model's FLOPs or the device's peak are not
    known."""
    flops, peak = flops_per_token(model, config, length), peak_flops(device)
    return None if flops is None or peak is None else Utilization(flops, count * peak)
