"""From the sizes that settings name to the config of a transformers model: one mapping for all architectures."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from graphmod.errors import ConfigError, reason
from graphmod.train.settings import CUSTOM, LOCAL, ModelConfig
from graphmod.words import nearest

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


def _names(config: PretrainedConfig, size: str) -> list[str]:
    """What the config calls a size, by the names that it saves; none where it has no such thing."""
    saved, other = config.to_dict(), config.attribute_map
    found = (other.get(name, name) for name in _NAMES[size])
    return [name for name in dict.fromkeys(found) if name in saved]


def _defaults(kind: str) -> PretrainedConfig:
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


def _settings(model: ModelConfig, default: PretrainedConfig) -> dict[str, Any]:
    kind, given = model.architecture, model.given()
    given.pop("vocab_size", None)
    found: dict[str, Any] = dict.fromkeys(_TOKENS)
    for size in _NAMES:
        names = _names(default, size)
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
    sizes = {name: size for size in _NAMES for name in (*_names(default, size), *_NAMES[size])}
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
    """The config of a model with random weights.

    Args:
        model: checked settings; `architecture` is a model type of transformers.
        vocab_size: of the model.

    Raises:
        ConfigError: there is no such architecture, or not as a causal language model; it lacks a size that is given,
            or one that it needs is not; transformers refuses the sizes.
    """
    kind = model.architecture
    default = _defaults(kind)
    settings = {"vocab_size": vocab_size, **_settings(model, default)}
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


def check_architecture(model: ModelConfig) -> None:
    """Raises ConfigError where `transformers_config` does."""
    if model.architecture not in (LOCAL, CUSTOM):
        transformers_config(model, model.vocab_size or 1)
