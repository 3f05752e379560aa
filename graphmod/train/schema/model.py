"""The settings of `model`, and what they cannot be. `train/architectures.py` knows what those of transformers have."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from graphmod.train.libraries import require_library
from graphmod.train.saved import require_no_own_model, saved_folder
from graphmod.train.schema.limits import at_least, positive, require
from graphmod.train.targets import check_target

# In a checkpoint of adapters: the file they are described in, and the folder of the whole model that they make.
ADAPTER_FILE, MERGED_FOLDER = "adapter_config.json", "merged"

LOCAL, CUSTOM = "local", "custom"


@dataclass
class LoraSettings:
    """Low-rank adapters on a saved model.

    Attributes:
        r: their rank; null trains the whole model.
        alpha: their results are scaled by alpha / r.
        dropout: of what goes into them; probability in [0, 1).
        target_modules: names of the linear layers that get one, such as [q_proj,v_proj], or [all-linear]; null takes
            what peft takes for the kind of model.
        merge: also save the whole model with its adapters merged, in the folder `merged` of each checkpoint.
    """

    r: int | None = None
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: list[str] | None = None
    merge: bool = False


@dataclass
class ModelConfig:
    """The model. A size that an architecture does not have stays null; `local` reads all of them from its folder.

    Attributes:
        architecture: `local`, a saved model; `custom`, a model of your own; or a model type of transformers (`llama`,
            `qwen3`, `gpt2`, `mistral`, ...), built with random weights.
        path: folder with a saved transformers model, or the name of one in the cache of Hugging Face (`local` only).
        target: `custom` only; `_target_`, the full name of a class or function, and arguments for it. Other settings of
            this group that are not null are arguments, too.
        layers, hidden_size, heads, intermediate_size, max_positions: the usual sizes; max_positions is in tokens.
        kv_heads, head_dim, rope_theta: null means heads, hidden_size / heads, and what is usual for the architecture.
        vocab_size: null takes the data's vocabulary, rounded up to a multiple of 64.
        tie_embeddings: share the weights of the embedding and the output layer.
        dropout: probability in [0, 1), of all dropout between layers, and in gpt2 of that of attention.
        options: what else the config of the architecture in transformers has, by its own names.
        lora: train low-rank adapters in place of the model's weights (`local` only).
    """

    architecture: str = "llama"
    path: str | None = None
    target: Any = None  # a dict; omegaconf cannot put values into one that may be null
    layers: int | None = None
    hidden_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_positions: int | None = None
    vocab_size: int | None = None
    rope_theta: float | None = None
    tie_embeddings: bool | None = None
    dropout: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    lora: LoraSettings = field(default_factory=LoraSettings)

    def given(self) -> dict[str, Any]:
        """The sizes that are not null, by name."""
        sizes = (one.name for one in fields(self) if one.name not in ("architecture", "target", "options", "lora"))
        return {name: getattr(self, name) for name in sizes if getattr(self, name) is not None}


def check_model(model: ModelConfig) -> None:
    """Raises ConfigError for settings that go with another kind of model, and sizes that do not divide; makes
    `model.path` a folder."""
    _check_lora(model)
    at_least("model", model, 1, "layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size")
    at_least("model", model, 1, "max_positions", "vocab_size")
    positive("model", model, "rope_theta")
    if model.dropout is not None:
        require(0 <= model.dropout < 1, f"model.dropout must be at least 0 and below 1, got {model.dropout}")
    kind = model.architecture
    require(
        model.target is None or kind == CUSTOM,
        f"model._target_ names a model of your own, and model.architecture={kind}; use model=custom (in an "
        "experiment: `override /model: custom`; in a file of the group: `architecture: custom`), or leave it out",
    )
    require(
        not model.options or kind not in (LOCAL, CUSTOM),
        f"model.options={model.options} are those of a config of transformers, and do nothing with model={kind}; "
        "leave them out, or write them as model.NAME=VALUE with model=custom",
    )
    if kind == CUSTOM:
        require(model.target is not None, "model=custom needs model._target_=my_package.Net, the name of your model")
        check_target("model", model.target)
        return
    if kind == LOCAL:
        _check_saved(model)
        return
    require(model.path is None, "model.path names a saved model; add model=local, or leave it out")
    if model.heads is not None:
        require(
            model.head_dim is not None or model.hidden_size is None or model.hidden_size % model.heads == 0,
            f"model.hidden_size={model.hidden_size} does not divide by model.heads={model.heads}",
        )
        kv_heads = model.kv_heads or model.heads
        require(model.heads % kv_heads == 0, f"model.heads={model.heads} does not divide by model.kv_heads={kv_heads}")


def _check_lora(model: ModelConfig) -> None:
    lora = model.lora
    at_least("model.lora", lora, 1, "r")
    positive("model.lora", lora, "alpha")
    require(0 <= lora.dropout < 1, f"model.lora.dropout must be at least 0 and below 1, got {lora.dropout}")
    require(
        lora.r is None or model.architecture == LOCAL,
        f"model.lora.r={lora.r} trains adapters of a saved model, and model.architecture={model.architecture} is built "
        "with random weights; use model=local model.path=FOLDER, or leave it out",
    )
    require(
        lora.r is not None or lora == LoraSettings(),
        "model.lora is off without a rank; set model.lora.r=8, or leave the other settings of model.lora out",
    )
    if lora.r is not None:
        require_library("peft", "lora", f"model.lora.r={lora.r}")


def _check_saved(model: ModelConfig) -> None:
    require(model.path is not None, "model=local needs model.path=FOLDER with a saved transformers model")
    folder = saved_folder(str(model.path))
    if folder != Path(str(model.path)):
        model.path = str(folder)
    whole = (folder / "config.json").is_file()
    require(
        whole or not (folder / ADAPTER_FILE).is_file(),
        f"model.path={model.path} holds LoRA adapters and no whole model; continue training them with train.resume="
        f"{model.path}, or have one saved with model.lora.merge=true and give its folder {MERGED_FOLDER}",
    )
    require_no_own_model(folder)
    require(
        whole,
        f"model.path={model.path} holds no config.json, so no saved model; those of a run are in its folders "
        "checkpoints/step_N",
    )
    for name, given in model.given().items():
        require(name == "path", f"model.{name}={given} cannot be chosen with model=local: the saved model has its own")
