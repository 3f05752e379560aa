"""Builds the model of a run: one of transformers with seeded random weights, one saved in a folder, or your own."""

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from graphmod.errors import ConfigError, reason
from graphmod.text import SpecialTokens, special_ids
from graphmod.train.attention import use_static_causal_attention
from graphmod.train.settings import ADAPTER_FILE, CUSTOM, LOCAL, LoraSettings, ModelConfig, Precision, require_library
from graphmod.train.targets import located, made, named, taken_by
from graphmod.words import nearest

# -- from the sizes that settings name to the config of a transformers model -------------------------------------------

# Under which names the configs of transformers know a size; its own `attribute_map` counts as well. All that are there
# are set.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layers"),
    "hidden_size": ("hidden_size", "d_model"),
    "heads": ("num_attention_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "max_positions": ("max_position_embeddings", "max_seq_len"),
    "tie_embeddings": ("tie_word_embeddings",),
    "dropout": ("embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout", "dropout"),
    "rope_theta": ("rope_parameters",),
}
_NEEDED = ("layers", "hidden_size", "heads", "intermediate_size", "max_positions")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # those of the data are set later


def _names_of(config: PretrainedConfig, size: str) -> list[str]:
    """What the config calls a size, by the names that it saves; none where it has no such thing."""
    saved, other = config.to_dict(), config.attribute_map
    found = (other.get(name, name) for name in _NAMES[size])
    return [name for name in dict.fromkeys(found) if name in saved]


def _default_config(kind: str) -> PretrainedConfig:
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = nearest(kind, [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, CUSTOM, LOCAL])
        hint = f"; did you mean {near}?" if near else "."
        what = "a model of transformers that predicts no next token" if kind in CONFIG_MAPPING else "not known"
        raise ConfigError(
            f"model.architecture={kind} is {what}{hint} Choose a model type that AutoModelForCausalLM builds, such as "
            "llama, qwen3, gpt2 or mistral; local; or custom"
        )
    return AutoConfig.for_model(kind)


def _rope(kind: str, config: PretrainedConfig, theta: float) -> dict[str, Any]:
    known = config.rope_parameters
    if not isinstance(known, dict) or "rope_theta" not in known:
        raise ConfigError(
            f"model.rope_theta is one number and {kind} has several, or none; set model.options.rope_parameters={known}"
        )
    return {**known, "rope_theta": theta}


def _config_settings(model: ModelConfig, default: PretrainedConfig) -> dict[str, Any]:
    kind, given = model.architecture, model.given()
    given.pop("vocab_size", None)
    found: dict[str, Any] = dict.fromkeys(_TOKENS)
    for size in _NAMES:
        names = _names_of(default, size)
        value = given.get(size)
        if value is not None and not names:
            own = [name for name in default.to_dict() if size in name]
            more = f", or set what it has: {', '.join(f'model.options.{name}' for name in own)}" if own else ""
            raise ConfigError(f"model.{size} does not exist in {kind}; drop it (model.{size}=null){more}")
        if value is None and size in _NEEDED and names and not {*names, *_NAMES[size]} & {*model.options}:
            raise ConfigError(f"model.{size} is not set; model.architecture={kind} needs it")
        if value is None and size == "kv_heads":
            value = model.heads
        elif value is None and size == "head_dim" and model.hidden_size and model.heads:
            value = model.hidden_size // model.heads
        elif value is None and size in ("tie_embeddings", "dropout"):
            value = False if size == "tie_embeddings" else 0.0
        elif value is not None and size == "rope_theta":
            value = _rope(kind, default, value)
        if value is not None:
            found |= dict.fromkeys(names, value)
    return found | _options(model, default, found)


def _options(model: ModelConfig, default: PretrainedConfig, found: dict[str, Any]) -> dict[str, Any]:
    known = {**default.to_dict(), **dict.fromkeys(default.attribute_map)}
    sizes = {name: size for size in _NAMES for name in (*_names_of(default, size), *_NAMES[size])}
    for name, value in model.options.items():
        if name not in known or name in ("model_type", "transformers_version"):
            near = nearest(name, known)
            hint = f"; did you mean model.options.{near}?" if near else ""
            raise ConfigError(f"model.options.{name}={value} does not exist in {model.architecture}{hint}")
        size = "vocab_size" if name == "vocab_size" else sizes.get(name)
        if size is not None and getattr(model, size) is not None:
            raise ConfigError(
                f"model.options.{name}={value} and model.{size}={getattr(model, size)} set the same; drop one of them"
            )
    return {default.attribute_map.get(name, name): value for name, value in model.options.items()}


def transformers_config(model: ModelConfig, vocab_size: int) -> PretrainedConfig:
    """The config of a model with random weights, whose `architecture` is a model type of transformers. Raises
    ConfigError where there is no such architecture, or not as a causal language model; where it lacks a size that is
    given, or one that it needs is not; or where transformers refuses the sizes."""
    kind = model.architecture
    default = _default_config(kind)
    settings = {"vocab_size": vocab_size, **_config_settings(model, default)}
    try:
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # its validation raises what it likes
        said = " ".join(str(error).split()) or reason(error)
        raise ConfigError(f"transformers refuses these sizes of model.architecture={kind}: {said}") from error
    head = getattr(config, "head_dim", None) or (model.hidden_size or 0) // (model.heads or 1)
    if getattr(config, "rope_parameters", None) and head % 2:
        raise ConfigError(
            f"rotary embeddings need an even size of a head, got {head} (model.head_dim, or hidden_size / heads)"
        )
    return config


# -- low-rank adapters (LoRA) of the `peft` library (the extra `lora`) on a saved model --------------------------------
# The model keeps its class and its layers: graphs, checkpoints and sampling see a transformers model as without
# adapters.


def add_adapters(model: PreTrainedModel, settings: LoraSettings, base: str) -> PreTrainedModel:
    """Puts adapters into a transformers model, in place, freezes all else, and returns it; they are saved with the name
    of the folder `base`. Draws from torch's random generators. Raises ConfigError where the model has no such
    modules."""
    from peft import LoraConfig

    targets = settings.target_modules
    given: dict[str, Any] = {"r": settings.r, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout}
    config = LoraConfig(
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(base).resolve()),
        **given,
    )
    try:
        model.add_adapter(config)
    except ValueError as error:
        linear = (name for name, module in model.named_modules() if "Linear" in type(module).__name__)
        names = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"model.lora.target_modules={'null' if targets is None else list(targets)} cannot be used with "
            f"{type(model).__name__}: {reason(error)} Its linear layers are {', '.join(names)}"
        ) from error
    return model


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds adapters and not a whole model. Raises ConfigError where `peft` is needed and missing."""
    found = (folder / ADAPTER_FILE).is_file()
    if found:
        require_library("peft", "lora", f"{folder}, which holds LoRA adapters,")
    return found


def save_merged(model: PreTrainedModel, adapters: Path, folder: Path) -> None:
    """Writes to `folder` the whole model that the adapters of `model`, saved in `adapters`, and their base make, with
    the special tokens of `model`."""
    from peft import PeftConfig, PeftModel

    base = AutoModelForCausalLM.from_pretrained(
        PeftConfig.from_pretrained(str(adapters)).base_model_name_or_path, dtype="auto", local_files_only=True
    )
    with torch.no_grad():
        merged = PeftModel.from_pretrained(base, adapters).merge_and_unload()
    for name in ("config", "generation_config"):
        of_merged, trained = getattr(merged, name), getattr(model, name)
        if of_merged is not None and trained is not None:
            of_merged.bos_token_id, of_merged.eos_token_id = trained.bos_token_id, trained.eos_token_id
    merged.save_pretrained(folder)


# -- the special tokens of the data ------------------------------------------------------------------------------------


def _ids(found: int | list[int] | None) -> list[int]:
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def set_special_tokens(model: PreTrainedModel, tokenizer: Any) -> None:
    """Sets `bos_token_id` and `eos_token_id` in the model's config and generation config, in place, to those of the
    tokenizer of the training data, so that generation with its checkpoints stops where a document ends.

    End tokens that a saved model already has, such as the end of a turn in a chat, are kept if they are special tokens
    of this tokenizer; other ids belong to some other tokenizer and are dropped.
    """
    known = set(special_ids(tokenizer).values())
    end = _ids(SpecialTokens.of(tokenizer).end)
    configs: list[Any] = [model.config, model.generation_config]
    for config in configs:
        if config is None:
            continue
        ends = list(dict.fromkeys([*end, *(one for one in _ids(config.eos_token_id) if one in known)]))
        config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
        config.bos_token_id = tokenizer.bos_token_id


# -- the model ---------------------------------------------------------------------------------------------------------

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
    which has one or not when it is built. The data's tokens are below `data_vocab_size`, which may not say so, and its
    sequences have `length`. Raises ConfigError for a folder that transformers cannot read, a vocabulary or a length too
    small for the data, or one that nobody tells."""
    if model.architecture == CUSTOM:
        return None
    if model.architecture == LOCAL:
        assert model.path is not None
        config = saved_config(model.path)
    else:
        size = model.vocab_size or (None if data_vocab_size is None else rounded_vocabulary(data_vocab_size))
        if size is None:
            raise ConfigError(
                "the data does not say how many different tokens it has; give your data set an attribute vocab_size, "
                "or set model.vocab_size"
            )
        config = transformers_config(model, size)
    limit = model.max_positions or getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ConfigError(
            f"a sequence of the data has {length} tokens, which is longer than the {limit} positions of the model "
            "(model.max_positions); raise them, or shorten the sequences (data.seq_len)"
        )
    if data_vocab_size is not None and config.vocab_size < data_vocab_size:
        raise ConfigError(
            f"the data has a vocabulary of {data_vocab_size} and the model {config.vocab_size}; raise "
            "model.vocab_size, leave it null, which fits the data, or use the tokenizer the model was trained with "
            "(data.tokenizer=FOLDER)"
        )
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


def saved_config(folder: str | Path) -> PretrainedConfig:
    """The config of the model saved in `folder`, that of `model.path`. Raises ConfigError when it cannot be read."""
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ConfigError(f"model.path={folder} is not a model that transformers can read: {reason(error)}") from error


def load_weights(
    folder: str | Path,
    config: PretrainedConfig | None,
    dtype: torch.dtype | str,
    kind: Any = AutoModelForCausalLM,
    setting: str = "",
) -> PreTrainedModel:
    """The model saved in `folder`, on the CPU, with its adapters if it holds those. Raises ConfigError when weights are
    missing or cannot be read.

    Args:
        config: None takes that of the folder.
        dtype: of the weights; `auto` is the one they were saved in.
        kind: its class; adapters say themselves what they belong to.
        setting: that names the folder, for errors, such as `model.path=`.
    """
    if is_adapter(Path(folder)):
        kind = AutoModelForCausalLM
    try:
        with no_transformers_bars():
            model, info = kind.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # whatever the readers of the many file formats raise
        raise ConfigError(f"{setting}{folder} holds no weights that transformers can read: {reason(error)}") from error
    if info["missing_keys"]:
        # transformers would go on with random numbers in their place.
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"{setting}{folder} lacks {len(info['missing_keys'])} weights of its model, such as {some}")
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

    Random weights depend on `seed` and the kind of device alone; the caller's random state is left as it was. A model
    of one's own may ask for the data's vocabulary. Raises ConfigError where the saved weights cannot be read, or a
    model of one's own cannot be made or is none.
    """
    dtype = weights_dtype(precision)
    if model.architecture == LOCAL:
        assert model.path is not None and config is not None
        # Of any type, because those of transformers hide the arguments of `to`.
        loaded: Any = load_weights(model.path, config, dtype, setting="model.path=")
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
