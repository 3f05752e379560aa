"""The settings of `model`, and what they cannot be."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from graphmod.train.libraries import require_library
from graphmod.train.schema.limits import at_least, positive, require

NO_DOWNLOAD = "give that of a saved model (save_pretrained of model and tokenizer); nothing is downloaded"
# In a checkpoint of adapters: the file they are described in, and the folder of the whole model that they make.
ADAPTER_FILE, MERGED_FOLDER = "adapter_config.json", "merged"


_SIZES = ("layers", "hidden_size", "heads", "intermediate_size", "max_positions")
_ROPE_ONLY = ("kv_heads", "head_dim", "rope_theta")


class Architecture(str, Enum):
    """Which transformers model is built; `local` loads a saved one."""

    llama = "llama"
    qwen3 = "qwen3"
    gpt2 = "gpt2"
    local = "local"


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
        architecture: which transformers model.
        path: folder with a saved transformers model (`local` only).
        layers, hidden_size, heads, intermediate_size, max_positions: the usual sizes; max_positions is in tokens.
        kv_heads, head_dim, rope_theta: llama and qwen3 only; null means heads, hidden_size / heads, 10000.
        vocab_size: null takes the data's vocabulary, rounded up to a multiple of 64.
        tie_embeddings: share the weights of the embedding and the output layer.
        dropout: gpt2 only; probability in [0, 1).
        lora: train low-rank adapters in place of the model's weights (`local` only).
    """

    architecture: Architecture = Architecture.llama
    path: str | None = None
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
    lora: LoraSettings = field(default_factory=LoraSettings)


def check_model(model: ModelConfig) -> None:
    """Raises ConfigError for sizes that are missing, superfluous or do not divide."""
    kind, lora = model.architecture.value, model.lora
    at_least("model.lora", lora, 1, "r")
    positive("model.lora", lora, "alpha")
    require(0 <= lora.dropout < 1, f"model.lora.dropout must be at least 0 and below 1, got {lora.dropout}")
    require(
        lora.r is None or model.architecture is Architecture.local,
        f"model.lora.r={lora.r} trains adapters of a saved model, and model.architecture={kind} is built with random "
        "weights; use model=local model.path=FOLDER, or leave it out",
    )
    require(
        lora.r is not None or lora == LoraSettings(),
        "model.lora is off without a rank; set model.lora.r=8, or leave the other settings of model.lora out",
    )
    if lora.r is not None:
        require_library("peft", "lora", f"model.lora.r={lora.r}")
    if model.architecture is Architecture.local:
        require(model.path is not None, "model=local needs model.path=FOLDER with a saved transformers model")
        folder = Path(model.path)
        require(folder.is_dir(), f"model.path={model.path} is not a folder; {NO_DOWNLOAD}")
        require(
            (folder / "config.json").is_file() or not (folder / ADAPTER_FILE).is_file(),
            f"model.path={model.path} holds LoRA adapters and no whole model; continue training them with train.resume="
            f"{model.path}, or have one saved with model.lora.merge=true and give its folder {MERGED_FOLDER}",
        )
        require(
            (folder / "config.json").is_file(),
            f"model.path={model.path} holds no config.json, so no saved model; those of a run are in its folders "
            "checkpoints/step_N",
        )
        for name in (*_SIZES, *_ROPE_ONLY, "vocab_size", "tie_embeddings", "dropout"):
            given = getattr(model, name)
            require(
                given is None, f"model.{name}={given} cannot be chosen with model=local: the saved model has its own"
            )
        return
    require(model.path is None, "model.path names a saved model; add model=local, or leave it out")
    for name in _SIZES:
        require(getattr(model, name) is not None, f"model.{name} is not set; model.architecture={kind} needs it")
    at_least("model", model, 1, *_SIZES, "kv_heads", "head_dim", "vocab_size")
    if model.architecture is Architecture.gpt2:
        for name in _ROPE_ONLY:
            require(getattr(model, name) is None, f"model.{name} does not exist in gpt2; drop it")
    else:
        require(not model.dropout, f"model.dropout={model.dropout}: {kind} has no dropout; use gpt2, or drop it")
    positive("model", model, "rope_theta")
    if model.dropout is not None:
        require(0 <= model.dropout < 1, f"model.dropout must be at least 0 and below 1, got {model.dropout}")
    require(
        model.head_dim is not None or model.hidden_size % model.heads == 0,
        f"model.hidden_size={model.hidden_size} does not divide by model.heads={model.heads}",
    )
    head_dim = model.head_dim or model.hidden_size // model.heads
    kv_heads = model.kv_heads or model.heads
    require(model.heads % kv_heads == 0, f"model.heads={model.heads} does not divide by model.kv_heads={kv_heads}")
    require(
        model.architecture is Architecture.gpt2 or head_dim % 2 == 0,
        f"rotary embeddings need an even size of a head, got {head_dim} (model.head_dim, or hidden_size / heads)",
    )
