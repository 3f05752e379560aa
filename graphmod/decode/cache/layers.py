"""What the layers of a model keep in the KV cache, and how far back they look."""

from __future__ import annotations

from typing import NamedTuple

from graphmod.attention import Rule


class Layer(NamedTuple):
    """One attention layer.

    Attributes:
        heads: of queries; kv_heads: of keys and values.
        head_dim: of queries and keys; value_dim: of values.
        rule: which tokens a token sees.
        softcap: whether scores are capped by a tanh; sinks: whether each head has a logit that takes probability away.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rule: Rule = Rule()
    softcap: bool = False
    sinks: bool = False


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
        "layers that see a window or chunk": any(one.rule != Rule() for one in layers),
        "capped scores": any(one.softcap for one in layers),
        "attention sinks": any(one.sinks for one in layers),
    }
    return next((f"the model has {name}" for name, there in found.items() if there), None)
