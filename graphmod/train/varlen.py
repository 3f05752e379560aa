"""Causal attention within documents that share a row, with torch's `varlen_attn`: it skips what other documents hold,
where a mask would have it computed and thrown away.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from graphmod.errors import ConfigError
from graphmod.train.settings import Precision

_NEEDED = {"scale", "window_size"}
_KNOWN = set(inspect.signature(varlen_attn).parameters)
_LEAST_CAPABILITY = (8, 0)
_HEAD_MULTIPLE, _LARGEST_HEAD = 8, 256
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def unavailable(device: torch.device, precision: Precision, dims: Any = None) -> str | None:
    """Why it cannot be used, or None.

    Args:
        device: of the run.
        precision: of the run.
        dims: the transformers config of the model; None where it is not known yet.
    """
    if device.type != "cuda":
        return "it needs a GPU"
    if not _KNOWN >= _NEEDED:
        return f"torch {torch.__version__} has no varlen_attn that can scale and be causal"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"it needs a GPU of compute capability 8.0 or newer, and this one has {capability[0]}.{capability[1]}"
    if precision is Precision.fp32:
        return "it computes in 16 bits, and train.precision=fp32"
    if dims is None:
        return None
    head = getattr(dims, "head_dim", None) or dims.hidden_size // dims.num_attention_heads
    if head % _HEAD_MULTIPLE or head > _LARGEST_HEAD:
        return f"it needs heads of a multiple of {_HEAD_MULTIPLE} up to {_LARGEST_HEAD}, and the model's have {head}"
    if any(getattr(dims, name, 0) for name in _ATTENTION_DROPOUT):
        return "it has no dropout, and the model's attention does"
    return None


def within_documents(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scaling: float | None, dropout: float
) -> Tensor:
    """Attention of each token to itself and what comes before it in its document.

    Args:
        query: (B, heads, S, head_dim).
        key, value: (B, kv_heads, S, head_dim).
        bounds: (documents + 1,) int32 on the device: where each document begins in the B * S tokens, B * S for those
            that are not there and at the end. No document reaches over the end of a row.
        scaling: of the scores; None means 1 / sqrt(head_dim).
        dropout: must be 0.

    Returns:
        (B, S, heads, head_dim) in the dtype of `value`, or that of autocast.

    Raises:
        ConfigError: there is dropout.
    """
    if dropout:
        raise ConfigError(f"varlen attention has no dropout, got {dropout}; use data.packing_attention=mask")
    rows, heads, length, size = query.shape
    kind = query.device.type
    # Rotary embeddings leave query and key in float32 under autocast, which knows nothing of this operation.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    more: dict[str, Any] = {}
    if key.shape[1] != heads:
        if "enable_gqa" in _KNOWN:
            more["enable_gqa"] = True
        else:
            key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (key, value))
    query, key, value = (
        part.transpose(1, 2).reshape(rows * length, part.shape[1], size).to(dtype) for part in (query, key, value)
    )
    out: Any = varlen_attn(
        query, key, value, bounds, bounds, length, length, scale=scaling, window_size=(-1, 0), **more
    )
    return out.view(rows, length, heads, size)
