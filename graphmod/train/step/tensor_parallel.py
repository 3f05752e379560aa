"""Tensor parallelism: the matrices of each layer split over ranks, which compute every sequence together.

The projections into attention and MLP are split by what they give (heads, channels), those out of them by what they
take; what they give is added up, twice a layer. Norms, embeddings and the head are on every rank as a whole.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from graphmod.errors import ConfigError
from graphmod.wrap.layers import find_layers

_INTO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_OUT_OF = ("self_attn.o_proj", "mlp.down_proj")
# Applied to each head by itself, (B, S, heads, head_dim): their weights are whole, their gradients sums over ranks.
_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
_HEADS = 2  # the dimension of these
_OTHERWISE = "train it whole (parallel=ddp) or sharded (parallel=fsdp)"


def split_layers(model: nn.Module, mesh: Any) -> nn.Module:
    """Leaves this rank its part of each layer of `model`, in place, and returns it. All ranks must have built it alike.

    Args:
        model: a transformers model with layers like Llama's, on its device.
        mesh: of the ranks that compute together, one-dimensional.

    Raises:
        ConfigError: it has other layers, or they cannot be divided by so many ranks.
    """
    ranks = mesh.size()
    _require_divisible(model.config, ranks)
    names = find_layers(model)
    plans = {name: _plan(name, model.get_submodule(name), model) for name in names}
    for name, plan in plans.items():
        parallelize_module(model.get_submodule(name), mesh, plan)
    return model


def _require_divisible(config: Any, ranks: int) -> None:
    counts = {
        "attention heads": getattr(config, "num_attention_heads", None),
        "key-value heads": getattr(config, "num_key_value_heads", None),
        "channels of the MLP (intermediate size)": getattr(config, "intermediate_size", None),
    }
    uneven = [f"{count} {name}" for name, count in counts.items() if count is not None and count % ranks]
    if uneven:
        raise ConfigError(
            f"tensor parallelism over {ranks} ranks needs numbers that {ranks} divides, and the model has "
            f"{' and '.join(uneven)}; choose a number of ranks that divides all of them (parallel.gpus, or parallel.tp "
            f"with parallel=fsdp_tp), or {_OTHERWISE}"
        )


def _plan(name: str, layer: nn.Module, model: nn.Module) -> dict[str, ParallelStyle]:
    """How each part of a layer is split."""
    plan: dict[str, ParallelStyle] = {}
    config: Any = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    strange = []
    for part, module in layer.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if part in (*_INTO, *_OUT_OF) and type(module) is nn.Linear:
            plan[part] = ColwiseParallel() if part in _INTO else RowwiseParallel()
        elif part in _OF_HEADS and next(module.parameters()).shape == (head,):
            plan[part] = SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
        elif "." in part or not part.endswith("norm"):
            strange.append(f"{part or 'parameters of its own'} ({type(module).__name__})")
    missing = [part for part in (*_INTO, *_OUT_OF) if part not in plan]
    if strange or missing:
        got = f"has {', '.join(strange)}" if strange else f"lacks {', '.join(missing)}"
        raise ConfigError(
            f"{type(model).__name__} cannot be split over ranks: {name} {got}. Tensor parallelism is for layers with "
            f"the linear parts of Llama ({', '.join(one.rpartition('.')[2] for one in (*_INTO, *_OUT_OF))}) and norms; "
            f"{_OTHERWISE}"
        )
    return plan
