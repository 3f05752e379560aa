"""What the layers of a model keep in the KV cache, and how far back they look."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layer(NamedTuple):
    """One attention layer.

    Attributes:
        heads: of queries; kv_heads: of keys and values.
        head_dim: of queries and keys; value_dim: of values.
        window: the last tokens that a token sees, itself included; None for all.
        chunk: a token sees those of its own chunk of so many tokens; None for all.
        softcap: whether scores are capped by a tanh; sinks: whether each head has a logit that takes probability away.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
    softcap: bool = False
    sinks: bool = False

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Layers of one reach look at the same tokens."""
        return self.window, self.chunk

    def first_seen(self, context: Tensor) -> Tensor | None:
        """(B,) int64: the first token that the last of `context` tokens sees; None if that is always the first."""
        if self.window is not None:
            return (context - self.window).clamp(min=0)
        if self.chunk is not None:
            return torch.div((context - 1).clamp(min=0), self.chunk, rounding_mode="floor") * self.chunk
        return None


def uniform(heads: int, kv_heads: int, head_dim: int, count: int) -> tuple[Layer, ...]:
    """`count` layers that are all alike and see everything."""
    return (Layer(heads, kv_heads, head_dim, head_dim),) * count


def not_plain(layers: tuple[Layer, ...]) -> str | None:
    """What keeps an attention that takes one size of heads and looks at everything from these layers, or None."""
    if len({one[:4] for one in layers}) > 1:
        return "its layers have heads of different sizes"
    if any(one.head_dim != one.value_dim for one in layers):
        return "its keys and values are of different sizes"
    found = {
        "layers that see a window or chunk": any(one.window or one.chunk for one in layers),
        "capped scores": any(one.softcap for one in layers),
        "attention sinks": any(one.sinks for one in layers),
    }
    return next((f"the model has {name}" for name, there in found.items() if there), None)
