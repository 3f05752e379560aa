"""Every causal LM of the installed transformers, as small as its config lets it be."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 96
POSITIONS = 128
_MOST_PARAMETERS = 4_000_000

# What configs call their sizes; each gets those that it has.
_WIDTHS = "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim input_embedding_size"
_INNER = "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp"
_DEPTHS = "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"
_HEADS = "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"
_LENGTHS = "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length"
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts"
_CHOSEN = "num_experts_per_tok num_experts_per_token moe_topk moe_k"
_SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), 32),
    **dict.fromkeys(_INNER.split(), 64),
    **dict.fromkeys(_DEPTHS.split(), 2),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_LENGTHS.split(), POSITIONS),
    **dict.fromkeys(_EXPERTS.split(), 4),
    **dict.fromkeys(_CHOSEN.split(), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(
        ("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), 1
    ),
    **dict.fromkeys(("hidden_dropout", "dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("state_size", "mamba_d_state", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("num_kv_shared_layers", "moe_layer_start_index", "pad_token_id"), 0),
    **dict.fromkeys(("layer_types", "mlp_layer_types", "eos_token_id"), None),
    **{"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "bos_token_id": 1, "qk_head_dim": 16},
    **{"time_step_rank": 4, "image_size": 32, "patch_size": 8, "sliding_window": 16},
}
_OF_KIND: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "longcat_flash": {"expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "olmo_hybrid": {"num_hidden_layers": 4},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_layers": None},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# Tokens in whose place pictures and sounds are put.
_MARKS = {"image_token_id": 90, "video_token_id": 91, "audio_token_id": 92}
_SETS_NO_DEPTH = ("prophetnet",)


class NotSmall(Exception):
    """A model cannot be built small from its config alone; the message says why."""


def kinds() -> list[str]:
    """The model types that transformers has a causal LM for."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _has(config: PretrainedConfig, name: str) -> bool:
    known = getattr(type(config), name, None)
    if isinstance(known, property) and known.fset is None:
        return False
    try:
        return hasattr(config, name) or name in type(config).attribute_map
    except Exception:  # of configs whose layers differ
        return False


def small_config(kind: str) -> PretrainedConfig:
    """A config of a model type, with small sizes and a window where it has one."""
    whole = CONFIG_MAPPING[kind]()
    text = whole.get_text_config()
    given = {name: value for name, value in _SIZES.items() if _has(text, name)}
    if getattr(text, "sliding_window", None) is None:
        given.pop("sliding_window", None)
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]
    if hasattr(text, "is_decoder") and not whole.is_encoder_decoder:
        given["is_decoder"] = True
    given |= _OF_KIND.get(kind, {})
    if kind in _SETS_NO_DEPTH:
        del given["num_hidden_layers"]
    config = type(text)(**given)
    if type(text) is not type(whole):
        part = next(name for name in whole.sub_configs if type(getattr(whole, name)) is type(text))
        marks = {name: number for name, number in _MARKS.items() if hasattr(whole, name)}
        config = type(whole)(**{part: config}, **marks)
    return config


def small_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model of a type, with random weights in fp32.

    Raises:
        NotSmall: it cannot be built, stays large, or does not run.
    """
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    cls = getattr(transformers, name if isinstance(name, str) else name[0])
    try:
        config = small_config(kind)
        with torch.device("meta"):
            parameters = sum(one.numel() for one in cls(copy.deepcopy(config)).parameters())
        if parameters > _MOST_PARAMETERS:
            raise NotSmall(f"{parameters:,} parameters")
        torch.manual_seed(seed)
        model = cls(config)
        with torch.no_grad():
            model.eval()(input_ids=torch.arange(4, 9)[None])
    except NotSmall:
        raise
    except Exception as error:  # of configs and models: anything
        raise NotSmall(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]) from error
    return model
