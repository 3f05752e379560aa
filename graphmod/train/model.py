"""Builds the model of a run: a transformers causal LM with seeded random weights, or one saved in a folder."""

from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from graphmod.errors import ConfigError
from graphmod.train.attention import use_static_causal_attention
from graphmod.train.lora import add_adapters, is_adapter
from graphmod.train.schema.model import Architecture, ModelConfig
from graphmod.train.schema.train import Precision

_VOCAB_MULTIPLE = 64  # matrix kernels are fastest on round sizes


def weights_dtype(precision: Precision) -> torch.dtype:
    """The dtype of the parameters; the mixed precisions keep them in fp32."""
    return torch.bfloat16 if precision is Precision.bf16 else torch.float32


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype of autocast, or None for none."""
    return {Precision.bf16_mixed: torch.bfloat16, Precision.fp16_mixed: torch.float16}.get(precision)


def _sizes(model: ModelConfig, vocab_size: int) -> PretrainedConfig:
    if model.architecture is Architecture.gpt2:
        dropout = model.dropout or 0.0
        return GPT2Config(
            vocab_size=vocab_size,
            n_layer=model.layers,
            n_embd=model.hidden_size,
            n_head=model.heads,
            n_inner=model.intermediate_size,
            n_positions=model.max_positions,
            tie_word_embeddings=bool(model.tie_embeddings),
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
        )
    kind = LlamaConfig if model.architecture is Architecture.llama else Qwen3Config
    return kind(
        vocab_size=vocab_size,
        num_hidden_layers=model.layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads or model.heads,
        head_dim=model.head_dim or model.hidden_size // model.heads,
        intermediate_size=model.intermediate_size,
        max_position_embeddings=model.max_positions,
        tie_word_embeddings=bool(model.tie_embeddings),
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta or 10000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def model_config(model: ModelConfig, data_vocab_size: int, seq_len: int) -> PretrainedConfig:
    """The transformers config of the model; reads a local model's `config.json` but no weights.

    Args:
        model: checked settings.
        data_vocab_size: the data's tokens are below this.
        seq_len: tokens of a sequence.

    Raises:
        ConfigError: a folder that transformers cannot read, a vocabulary or a length too small for the data.
    """
    if model.architecture is Architecture.local:
        try:
            config = AutoConfig.from_pretrained(model.path, local_files_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"model.path={model.path} is not a model that transformers can read: {reason}") from error
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and seq_len > limit:
            raise ConfigError(f"data.seq_len={seq_len} is longer than the {limit} positions of {model.path}")
    else:
        rounded = -(-data_vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        config = _sizes(model, model.vocab_size or rounded)
    if config.vocab_size < data_vocab_size:
        raise ConfigError(
            f"the data has a vocabulary of {data_vocab_size} and the model {config.vocab_size}; raise "
            "model.vocab_size, leave it null, which fits the data, or use the tokenizer the model was trained with "
            "(data.tokenizer=FOLDER)"
        )
    config.use_cache = False
    return config


@contextmanager
def no_transformers_bars():
    """Keeps transformers from drawing its own progress bars, for a moment."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def load_weights(folder: str | Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model saved in `folder`, on the CPU, with its adapters if it holds those. Raises ConfigError when weights are
    missing or cannot be read."""
    is_adapter(Path(folder))
    try:
        with no_transformers_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # whatever the readers of the many file formats raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{folder} holds no weights that transformers can read: {reason}") from error
    if info["missing_keys"]:
        # transformers would go on with random numbers in their place.
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"{folder} lacks {len(info['missing_keys'])} weights of its model, such as {some}")
    return model


def build_model(
    model: ModelConfig, config: PretrainedConfig, precision: Precision, device: torch.device, seed: int
) -> PreTrainedModel:
    """The model on `device`, in training mode, with attention that can be captured.

    Random weights depend on `seed` and the kind of device alone; the caller's random state is left as it was.

    Raises:
        ConfigError: the saved weights cannot be read.
    """
    dtype = weights_dtype(precision)
    if model.architecture is Architecture.local:
        built = load_weights(model.path, config, dtype)
        if model.lora.r is not None:
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)
                add_adapters(built, model.lora, model.path)
        built = built.to(device)
    else:
        gpus = [device] if device.type == "cuda" else []
        # Weights are made where they will live: drawing a large model on the CPU takes longer than a short run.
        with torch.random.fork_rng(gpus), torch.device(device):
            torch.manual_seed(seed)
            built = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return use_static_causal_attention(built).train()
