"""Causal attention for transformers models whose forward pass never asks the host about its inputs."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.errors import ConfigError
from graphmod.train.varlen import within_documents

NAME = "causal_sdpa"
BLOCK_MASK, DOCUMENT_BOUNDS = "block_mask", "document_bounds"
_WAY_OUT = "for padded or packed batches use model.set_attn_implementation('sdpa'), which cannot be captured"


def causal_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Transformers' own SDPA attention with `is_causal`; query, key, value are (B, heads, S, head_dim).

    A model called with `block_mask`, (B, 1, S, S) bool, True where a query may see a key, uses that instead; with
    `document_bounds` it uses `train.varlen.within_documents`, which describes them.

    Raises:
        ConfigError: a mask was passed, there are fewer queries than keys, or a sliding window is shorter than the
            sequence: each needs another mask than the causal one.
    """
    if attention_mask is not None:
        raise ConfigError(f"{NAME} attention is for whole, unpadded sequences and takes no attention mask; {_WAY_OUT}")
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{NAME} attention is for training, on whole sequences; got {query.shape[2]} queries for {key.shape[2]} "
            "keys. To generate with a cache use model.set_attn_implementation('sdpa')"
        )
    window = kwargs.get("sliding_window")
    if window is not None and key.shape[2] > window:
        raise ConfigError(
            f"{NAME} attention sees the whole past, and this model looks back {window} tokens only; "
            f"use sequences of at most {window} tokens (data.seq_len={window})"
        )
    bounds = kwargs.pop(DOCUMENT_BOUNDS, None)
    if bounds is not None:
        return within_documents(query, key, value, bounds, kwargs.get("scaling"), kwargs.get("dropout", 0.0)), None
    mask = kwargs.pop(BLOCK_MASK, None)
    causal = {**kwargs, "is_causal": mask is None}
    return sdpa_attention_forward(module, query, key, value, mask, **causal)


def _refuse_mask(module: PreTrainedModel, args: tuple, kwargs: dict) -> None:
    # With an unknown mask implementation transformers drops a given mask without a word; better to stop than to
    # train on padding.
    if kwargs.get("attention_mask") is not None and module.config._attn_implementation == NAME:
        raise ConfigError(
            f"the model was given an attention_mask and uses {NAME} attention, without one; leave out a mask of ones, "
            f"sample with graphmod.decode.DecodeEngine instead of generate(); {_WAY_OUT}"
        )


def use_static_causal_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Switches `model`, in place, to `causal_sdpa` and returns it. Only right for unpadded causal batches.

    Transformers' `sdpa` inspects `position_ids` on the host in each forward, to find packed sequences. That stalls
    eager training and cannot be captured in a graph. `causal_sdpa` is registered as an attention function and, on
    purpose, not as a mask function: then no mask is built at all and SDPA applies the causal one itself. The numbers
    are those of `sdpa`, bit for bit. What `save_pretrained` writes does not mention it.

    Raises:
        ConfigError: it is no model of transformers, or its attention cannot be exchanged.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"expected a model of transformers, whose attention can be exchanged, got {type(model).__name__}"
        )
    ALL_ATTENTION_FUNCTIONS.register(NAME, causal_sdpa)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ConfigError(
            f"{type(model).__name__} does not let its attention be chosen; train it with graph=none, or use a model "
            "that goes through transformers' attention interface (llama, qwen3, gpt2, ...)"
        )
    model.register_forward_pre_hook(_refuse_mask, with_kwargs=True)
    return model
