"""Looks at how a model attends and what it keeps, by calling it on a few tokens when an engine is made.

Nothing is taken from its config: what a layer stores, which tokens it sees and what its attention is asked for are seen
as the model's own code hands them over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from graphmod.attention import BESIDE, PROBE, Rule, Unclear, asker, attention, takes
from graphmod.decode.cache.cache import Layer
from graphmod.decode.errors import DecodeError
from graphmod.errors import ConfigError, reason

_TOKENS = 4
# What attention functions of this package compute with.
_UNDERSTOOD = {"scaling", "softcap", "s_aux", "cache_view"}


class Anatomy(NamedTuple):
    """What there is to know of a model for decoding.

    Attributes:
        layers: that keep keys and values, in order.
        own_reason: why only the model's own attention can be used; "" if an attention of this package can.
    """

    layers: tuple[Layer, ...]
    own_reason: str


class _Nothing(list):
    def __getitem__(self, _: Any) -> Any:
        raise DecodeError("it keeps a state of its own in the layers of its cache")


class _Notes(Cache):
    """A cache that holds nothing and notes what a model stores.

    Args:
        counts: whether it says how many tokens it holds.
    """

    def __init__(self, counts: bool = True) -> None:
        super().__init__(layers=_Nothing())
        self._counts = counts
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if layer_idx in self.kept:
            raise DecodeError(f"layer {layer_idx} stores keys and values twice")
        self.kept[layer_idx] = key_states, value_states
        return key_states, value_states

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("update_"):
            raise DecodeError(f"it keeps a state of another kind ({name.removeprefix('update_').replace('_', ' ')})")
        return super().__getattribute__(name)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if not self._counts:
            raise Unclear("it asks how many tokens are in the cache")
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


@dataclass
class _Probe:
    """What is seen in one forward call with the attention exchanged."""

    notes: _Notes
    layers: dict[int, Layer] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *more: Any,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """In the place of an attention function."""
        index: Any = getattr(module, "layer_idx", None)
        kept = self.notes.kept.get(index)
        if more or kept is None or kept[0] is not key or kept[1] is not value or index in self.layers:
            raise Unclear("it attends to something other than the keys and values that a layer stores")
        if not isinstance(attention_mask, Rule):
            raise Unclear("it makes a mask of its own")
        if given.get("cache_view") is not self.notes:
            raise Unclear("it passes no keywords to its attention")
        asked = {name for name, value in given.items() if value is not None}
        strange = sorted(asked - _UNDERSTOOD - BESIDE)
        if strange:
            raise Unclear(f"it asks its attention for {', '.join(strange)}")
        rows, heads, tokens, width = query.shape
        if width != key.shape[-1] or heads % key.shape[1] or given.get("is_causal") is False:
            raise Unclear("it attends with other heads than it stores, or not causally")
        sizes = heads, key.shape[1], width, value.shape[-1]
        self.layers[index] = Layer(*sizes, attention_mask, "softcap" in asked, "s_aux" in asked)
        return value.new_zeros((rows, tokens, heads, value.shape[-1])), None


def require_causal_lm(model: Any) -> None:
    """Raises ConfigError for what is no causal LM of transformers, with what is needed in its place."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ConfigError(
            f"model must be a transformers causal LM, got {name}, which has no config of transformers; load one with "
            "AutoModelForCausalLM, or give the model inside a wrapper"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model must be a transformers causal LM, got {name}, whose decoder reads what an encoder makes of the "
            "input; that is not decoded here. Use model.generate"
        )
    if not model.can_generate():
        raise ConfigError(
            f"model must be a transformers causal LM, got {name}, which does not predict the next token; load one with "
            "AutoModelForCausalLM"
        )


def look_at(model: PreTrainedModel, reach: int) -> Anatomy:
    """Calls the model on a few tokens, once as it is and once with its attention exchanged.

    Call it in inference and evaluation mode.

    Args:
        reach: how many tokens a sequence may have.

    Raises:
        DecodeError: it keeps something else than keys and values, or cannot be called with a cache.
    """
    tokens = torch.arange(_TOKENS, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    plain = _Notes()
    try:
        model(input_ids=tokens, past_key_values=plain, use_cache=True, **positions(model, tokens))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a model's own code: anything
        raise DecodeError(
            refusal(model, f"it cannot be called with a cache of keys and values: {reason(error)}")
        ) from error
    layers = _stored(model, plain)
    notes = _Notes(counts=False)
    probe = _Probe(notes)
    try:
        with attention(model, PROBE, probe.attend, asker(reach)):
            model(**step_arguments(model, tokens, tokens, notes))
        if sorted(probe.layers) != list(range(len(layers))):
            raise Unclear("not all of its layers go through transformers' attention interface")
    except Exception as error:  # whatever a model's code raises that meets what it does not know
        why = str(error) if isinstance(error, Unclear) else f"with a replaced attention, it fails: {reason(error)}"
        return Anatomy(layers, why)
    return Anatomy(tuple(probe.layers[number] for number in range(len(layers))), "")


def _stored(model: PreTrainedModel, notes: _Notes) -> tuple[Layer, ...]:
    if sorted(notes.kept) != list(range(len(notes.kept))) or not notes.kept:
        found = f"layers {sorted(notes.kept)} do" if notes.kept else "no layer does"
        raise DecodeError(refusal(model, f"not every layer stores keys and values in the cache it is given: {found}"))
    layers = []
    for number, (key, value) in sorted(notes.kept.items()):
        if key.dim() != 4 or key.shape[:3] != value.shape[:3] or key.shape[2] != _TOKENS:
            shapes = f"{tuple(key.shape)} and {tuple(value.shape)}"
            raise DecodeError(refusal(model, f"layer {number} stores keys and values of shapes {shapes}"))
        layers.append(Layer(key.shape[1], key.shape[1], key.shape[3], value.shape[3]))
    return tuple(layers)


def refusal(model: PreTrainedModel, why: str) -> str:
    """The message of a model that cannot be decoded."""
    return f"{type(model).__name__} cannot be decoded here, because {why}. Use model.generate"


def step_arguments(model: PreTrainedModel, tokens: Tensor, position: Tensor, view: Cache) -> dict[str, Any]:
    """What a model is called with where its attention is exchanged.

    Args:
        tokens, position: (B, S) int64.
    """
    config = model.config.get_text_config()
    if config is not model.config or getattr(config, "hidden_size_per_layer_input", None):
        # Something else stands for tokens of pictures and sounds; embeddings of layers are looked up by token, too.
        given = {"input_ids": tokens}
    else:  # with tokens some models look for padding on the host
        given = {"inputs_embeds": model.get_input_embeddings()(tokens)}
    return {**given, "position_ids": position, "cache_view": view, "past_key_values": view, "use_cache": True}


def positions(model: PreTrainedModel, position: Tensor) -> dict[str, Tensor]:
    """`position_ids` for a model that takes them; a model that does not counts what is in the mask and the cache."""
    return {"position_ids": position} if takes(model, "position_ids") else {}
