"""Builds the model of a run: one of transformers with seeded random weights, one saved in a folder, or your own."""

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from graphmod.errors import ConfigError
from graphmod.train.architectures import transformers_config
from graphmod.train.attention import use_static_causal_attention
from graphmod.train.lora import add_adapters, is_adapter
from graphmod.train.settings import CUSTOM, LOCAL, ModelConfig, Precision
from graphmod.train.targets import located, made, named, taken_by

log = logging.getLogger("graphmod")

_VOCAB_MULTIPLE = 64  # matrix kernels are fastest on round sizes


def weights_dtype(precision: Precision) -> torch.dtype:
    """The dtype of the parameters; the mixed precisions keep them in fp32."""
    return torch.bfloat16 if precision is Precision.bf16 else torch.float32


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype of autocast, or None for none."""
    return {Precision.bf16_mixed: torch.bfloat16, Precision.fp16_mixed: torch.float16}.get(precision)


def rounded_vocabulary(size: int) -> int:
    """The vocabulary of a model for data with one of `size`."""
    return -(-size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def model_config(model: ModelConfig, data_vocab_size: int | None, length: int) -> PretrainedConfig | None:
    """The transformers config of the model; reads a local model's `config.json` but no weights. None for one's own,
    which has one or not when it is built.

    Args:
        model: checked settings.
        data_vocab_size: the data's tokens are below this; None where the data does not say.
        length: tokens of a sequence.

    Raises:
        ConfigError: a folder that transformers cannot read, a vocabulary or a length too small for the data, or one
            that nobody tells.
    """
    if model.architecture == CUSTOM:
        return None
    if model.architecture == LOCAL:
        try:
            config = AutoConfig.from_pretrained(str(model.path), local_files_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"model.path={model.path} is not a model that transformers can read: {reason}") from error
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise ConfigError(f"data.seq_len={length} is longer than the {limit} positions of {model.path}")
    else:
        size = model.vocab_size or (None if data_vocab_size is None else rounded_vocabulary(data_vocab_size))
        if size is None:
            raise ConfigError(
                "the data does not say how many different tokens it has; give your data set an attribute vocab_size, "
                "or set model.vocab_size"
            )
        if model.max_positions is not None and length > model.max_positions:
            raise ConfigError(
                f"a sequence of the data has {length} tokens, which is longer than model.max_positions="
                f"{model.max_positions}; raise it, or shorten the items"
            )
        config = transformers_config(model, size)
    require_vocabulary(config.vocab_size, data_vocab_size)
    config.use_cache = False
    return config


def require_vocabulary(size: int, data_vocab_size: int | None) -> None:
    """Raises ConfigError where a model with `size` tokens is too small for the data."""
    if data_vocab_size is not None and size < data_vocab_size:
        raise ConfigError(
            f"the data has a vocabulary of {data_vocab_size} and the model {size}; raise "
            "model.vocab_size, leave it null, which fits the data, or use the tokenizer the model was trained with "
            "(data.tokenizer=FOLDER)"
        )


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


def load_weights(
    folder: str | Path, config: PretrainedConfig, dtype: torch.dtype, kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The model saved in `folder`, on the CPU, with its adapters if it holds those. Raises ConfigError when weights are
    missing or cannot be read.

    Args:
        kind: its class; adapters say themselves what they belong to.
    """
    if is_adapter(Path(folder)):
        kind = AutoModelForCausalLM
    try:
        with no_transformers_bars():
            model, info = kind.from_pretrained(
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


def _own_model(model: ModelConfig, data_vocab_size: int | None) -> nn.Module:
    """What `model.target` makes. It gets the sizes that are set, and, if it asks for it, the data's vocabulary."""
    target = model.target
    given: dict[str, Any] = model.given()
    if "vocab_size" in taken_by(located("model", target)) and data_vocab_size is not None:
        given = {"vocab_size": rounded_vocabulary(data_vocab_size), **given}
    built = made("model", target, **given)
    said = named("model", target)
    if not isinstance(built, nn.Module):
        raise ConfigError(f"{said} made a {type(built).__name__}; a model must be a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise ConfigError(f"{said} made a {type(built).__name__} without parameters to train (requires_grad)")
    return built


def build_model(
    model: ModelConfig,
    config: PretrainedConfig | None,
    precision: Precision,
    device: torch.device,
    seed: int,
    data_vocab_size: int | None = None,
) -> nn.Module:
    """The model on `device`, in training mode; one of transformers with attention that can be captured, if it lets its
    attention be exchanged.

    Random weights depend on `seed` and the kind of device alone; the caller's random state is left as it was.

    Args:
        config: from `model_config`.
        data_vocab_size: for a model of one's own; None where the data does not say.

    Raises:
        ConfigError: the saved weights cannot be read, or a model of one's own cannot be made or is none.
    """
    dtype = weights_dtype(precision)
    if model.architecture == LOCAL:
        assert model.path is not None and config is not None
        loaded: Any = load_weights(model.path, config, dtype)  # transformers' types hide the arguments of `to`
        if model.lora.r is not None:
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)
                add_adapters(loaded, model.lora, model.path)
        built = loaded.to(device)
    else:
        gpus = [device] if device.type == "cuda" else []
        # Weights are made where they will live: drawing a large model on the CPU takes longer than a short run.
        with torch.random.fork_rng(gpus), torch.device(device):
            torch.manual_seed(seed)
            if model.architecture == CUSTOM:
                built = _own_model(model, data_vocab_size).to(device)
                # `to` would make complex buffers real.
                built._apply(lambda one: one.to(dtype) if one.is_floating_point() else one)
            else:
                built = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if isinstance(built, PreTrainedModel):
        built.config.use_cache = False
        try:
            use_static_causal_attention(built)
        except ConfigError as error:
            log.info(f"{type(built).__name__} keeps its own attention: {error}")
    return built.train()


def dims_of(model: nn.Module) -> PretrainedConfig | None:
    """The transformers config of a built model; None of one that is not of transformers."""
    return model.config if isinstance(model, PreTrainedModel) else None
