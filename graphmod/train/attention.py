"""Causal attention for transformers models whose forward pass never asks the host about its inputs."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.attention import BESIDE, PROBE, STATIC, Rule, Unclear, asker, attention, decoding, takes
from graphmod.errors import ConfigError, reason
from graphmod.train.settings import PackingAttention, Precision

log = logging.getLogger("graphmod")

# -- within documents that share a row ---------------------------------------------------------------------------------

_SHARES_KEYS = "enable_gqa" in inspect.signature(varlen_attn).parameters
_LEAST_CAPABILITY = (8, 0)
_HEAD_MULTIPLE, _LARGEST_HEAD = 8, 256
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def unavailable(device: torch.device, precision: Precision, dims: Any = None) -> str | None:
    """Why varlen attention cannot be used, or None; `dims` is the transformers config of the model, None where it is
    not known yet."""
    if device.type != "cuda":
        return "it needs a GPU"
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


def choose_attention(
    wanted: PackingAttention, device: torch.device, precision: Precision, dims: Any
) -> PackingAttention:
    """What `data.packing_attention` stands for, `mask` or `varlen`, with a model of this transformers config. Raises
    ConfigError where varlen was asked for and cannot be used; the message says why."""
    if wanted is PackingAttention.mask:
        return wanted
    why = unavailable(device, precision, dims)
    if why is None:
        return PackingAttention.varlen
    if wanted is PackingAttention.varlen:
        raise ConfigError(f"data.packing_attention=varlen cannot be used: {why}; use mask, or auto")
    if device.type == "cuda":
        log.info(f"packed documents are kept apart by a mask and not by varlen attention: {why}")
    return PackingAttention.mask


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
        dropout: must be 0, else ConfigError is raised.

    Returns:
        (B, S, heads, head_dim) in the dtype of `value`, or that of autocast.
    """
    if dropout:
        raise ConfigError(f"varlen attention has no dropout, got {dropout}; use data.packing_attention=mask")
    rows, heads, length, size = query.shape
    kind = query.device.type
    # Rotary embeddings leave query and key in float32 under autocast, which knows nothing of this operation.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    more: dict[str, Any] = {}
    if key.shape[1] != heads:
        if _SHARES_KEYS:
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


# -- of whole sequences ------------------------------------------------------------------------------------------------

NAME = STATIC
BLOCK_MASK, DOCUMENT_BOUNDS = "block_mask", "document_bounds"
_MASKS = "causal_masks"  # of what sees less than everything before: made once for all layers of a rule
_RULE, _RULES = "_causal_rule", "_causal_rules"  # of an attention module; of a model, those that differ
_TOKENS = 4
_REACH = 4096  # for models that tell no number of positions
_UNDERSTOOD = BESIDE | {"scaling", _MASKS}
_WAY_OUT = "use model.set_attn_implementation('sdpa')"


def causal_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Transformers' own SDPA attention with `is_causal`; query, key, value are (B, heads, S, head_dim).

    A layer that sees a window or chunk shorter than the sequence gets the mask of that instead. A model called with
    `block_mask`, (B, 1, S, S) bool, True where a query may see a key, uses that as well; with `document_bounds` it uses
    `within_documents`, which describes them.

    Raises:
        ConfigError: a mask was passed, there are fewer queries than keys, or the attention is asked for something that
            was not there when the model was looked at.
    """
    if attention_mask is not None:
        raise ConfigError(
            f"{NAME} attention is for whole, unpadded sequences and takes no attention mask; for padded or packed "
            f"batches {_WAY_OUT}"
        )
    length = key.shape[2]
    if query.shape[2] != length:
        raise ConfigError(
            f"{NAME} attention is for training, on whole sequences; got {query.shape[2]} queries for {length} "
            f"keys. To generate with a cache {_WAY_OUT}"
        )
    rule = getattr(module, _RULE, None)
    if rule is None:
        raise ConfigError(
            f"{type(module).__name__} came into the model after use_static_causal_attention(model); call it once more"
        )
    bounds, mask, masks = kwargs.pop(DOCUMENT_BOUNDS, None), kwargs.pop(BLOCK_MASK, None), kwargs.pop(_MASKS, None)
    _refuse_unknown(kwargs)
    if rule.matters(length):
        if bounds is not None or masks is None:
            how = DOCUMENT_BOUNDS if bounds is not None else "layers called outside of their model"
            raise ConfigError(
                f"{NAME} attention does not know {how} where a layer sees {rule} and the sequence has {length} tokens; "
                f"take a block mask (data.packing_attention=mask), or {_WAY_OUT}"
            )
        mask = masks[str(rule)] if mask is None else masks[str(rule)] & mask
    if bounds is not None:
        return within_documents(query, key, value, bounds, kwargs.get("scaling"), kwargs.get("dropout", 0.0)), None
    kwargs["is_causal"] = mask is None
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    strange = sorted(name for name, value in kwargs.items() if value is not None and name not in _UNDERSTOOD)
    if strange:
        raise ConfigError(
            f"{NAME} attention does not compute {', '.join(strange)}, which this model asks for; leave its attention "
            "as it is"
        )


def _before_forward(model: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    if model.config._attn_implementation != NAME:
        return None
    # With an unknown mask implementation transformers drops a given mask without a word; better to stop than to
    # train on padding.
    if kwargs.get("attention_mask") is not None:
        raise ConfigError(
            f"the model was given an attention_mask and uses {NAME} attention, which takes none; drop a mask of ones, "
            f"sample with graphmod.decode.DecodeEngine instead of generate(); for padded or packed batches {_WAY_OUT}"
        )
    if kwargs.get("position_ids") is not None and not {BLOCK_MASK, DOCUMENT_BOUNDS} & kwargs.keys():
        raise ConfigError(
            f"the model was given position_ids, which may be those of packed sequences, and {NAME} attention does not "
            f"look at them; leave them out for one sequence a row, give a {BLOCK_MASK} for packed ones, or {_WAY_OUT}"
        )
    given = next(
        (one for one in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if one is not None), None
    )
    if given is None:
        return None
    rows, length = given.shape[:2]
    short = [rule for rule in getattr(model, _RULES, ()) if rule.matters(length)]
    if not short:
        return None
    masks = {str(rule): rule.mask(length, given.device).expand(rows, 1, length, length) for rule in short}
    return args, {**kwargs, _MASKS: masks}


def use_static_causal_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Switches `model`, in place, to `causal_sdpa` and returns it. Only right for unpadded causal batches.

    Transformers' `sdpa` inspects `position_ids` on the host in each forward, to find packed sequences, which stalls
    eager training. `causal_sdpa` is registered as an attention function and, on purpose, not as a mask function: then
    no mask is built at all and SDPA applies the causal one itself. The numbers are those of `sdpa`, bit for bit. What
    `save_pretrained` writes does not mention it.

    The model is called on four tokens, in evaluation mode and without gradients, to see what its layers look at.

    Raises:
        ConfigError: it is no model of transformers, its attention cannot be exchanged, or it is asked for something
            else than causal attention, whole or within windows or chunks; the message says for what.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"expected a model of transformers, whose attention can be exchanged, got {type(model).__name__}"
        )
    rules = _rules(model)
    if rules:
        ALL_ATTENTION_FUNCTIONS.register(NAME, causal_sdpa)
        model.set_attn_implementation(NAME)
    if not rules or model.config._attn_implementation != NAME:
        raise ConfigError(
            f"{type(model).__name__} does not let its attention be chosen; leave it as it is, or use a model that goes "
            "through transformers' attention interface (llama, qwen3, gpt2, ...)"
        )
    for module, rule in rules:
        setattr(module, _RULE, rule)
    setattr(model, _RULES, tuple(sorted({rule for _, rule in rules}, key=str)))
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    return model


def _rules(model: PreTrainedModel) -> list[tuple[nn.Module, Rule]]:
    """Its attention modules, and what each of them sees. Raises ConfigError where that is not understood."""
    text = model.config.get_text_config()
    reach = getattr(text, "max_position_embeddings", None) or _REACH
    found: dict[int, tuple[nn.Module, Rule]] = {}

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any) -> Any:
        if not isinstance(attention_mask, Rule):
            raise Unclear("it makes a mask of its own, or none")
        if not given.get("is_causal") and not getattr(module, "is_causal", True):
            raise Unclear("its attention is not causal")
        if attention_mask != Rule() and _MASKS not in given:
            raise Unclear("it passes no keywords to its attention")
        _refuse_unknown(given)
        found[id(module)] = module, attention_mask
        rows, heads, tokens, _ = query.shape
        return value.new_zeros((rows, tokens, heads, value.shape[-1])), None

    tokens = torch.arange(_TOKENS, device=model.device).unsqueeze(0) % text.vocab_size
    more: dict[str, Any] = {"use_cache": False} if takes(model, "use_cache") else {}

    def ask() -> None:
        with attention(model, PROBE, attend, asker(reach)):
            try:
                model(input_ids=tokens, **more, **{_MASKS: {}})
            except TypeError:  # it takes no keywords for its attention
                found.clear()
                model(input_ids=tokens, **more)

    try:
        decoding(list(model.modules()), ask)
    except ConfigError:  # of `_refuse_unknown`
        raise
    except Exception as error:  # of a model's own code: anything
        why = str(error) if isinstance(error, Unclear) else f"it fails with an exchanged attention: {reason(error)}"
        raise ConfigError(
            f"use_static_causal_attention cannot replace the attention of {type(model).__name__}: {why}; "
            "leave the model as it is"
        ) from error
    return list(found.values())
