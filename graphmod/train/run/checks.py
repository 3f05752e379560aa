"""Which settings of a run cannot be meant together, and which files must be there before it starts; without PyTorch,
which takes seconds to load. What is asked of the device, `train/run/device.py` looks at.

Reads nothing but file names and changes nothing, save `data.path` and `train.log`, which it makes lists, and
`data.seq_len`, which is the longest of `data.buckets`.
"""

import math
from pathlib import Path

from graphmod.config import CompileMode
from graphmod.errors import ConfigError
from graphmod.train.libraries import require_library
from graphmod.train.schema import (
    ADAPTER_FILE,
    DRAWS_IN_COMPILED_CODE,
    MERGED_FOLDER,
    Architecture,
    DataConfig,
    LogTo,
    LoraSettings,
    ModelConfig,
    OptimConfig,
    OptimizerName,
    PackingAttention,
    RunConfig,
    Source,
    TrainConfig,
    TrainOn,
)
from graphmod.train.settings import Scope

_SIZES = ("layers", "hidden_size", "heads", "intermediate_size", "max_positions")
_ROPE_ONLY = ("kv_heads", "head_dim", "rope_theta")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _at_least(group: str, part: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        _require(value is None or value >= least, f"{group}.{name} must be at least {least}, got {value}")


def _share(group: str, part: object, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        _require(0 <= value <= 1, f"{group}.{name} is a share and must be from 0 to 1, got {value}")


def _positive(group: str, part: object, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        _require(value is None or 0 < value < math.inf, f"{group}.{name} must be above 0 and finite, got {value}")


def check_model(model: ModelConfig) -> None:
    """Raises ConfigError for sizes that are missing, superfluous or do not divide."""
    kind, lora = model.architecture.value, model.lora
    _at_least("model.lora", lora, 1, "r")
    _positive("model.lora", lora, "alpha")
    _require(0 <= lora.dropout < 1, f"model.lora.dropout must be at least 0 and below 1, got {lora.dropout}")
    _require(
        lora.r is None or model.architecture is Architecture.local,
        f"model.lora.r={lora.r} trains adapters of a saved model, and model.architecture={kind} is built with random "
        "weights; use model=local model.path=FOLDER, or leave it out",
    )
    _require(
        lora.r is not None or lora == LoraSettings(),
        "model.lora is off without a rank; set model.lora.r=8, or leave the other settings of model.lora out",
    )
    if lora.r is not None:
        require_library("peft", "lora", f"model.lora.r={lora.r}")
    if model.architecture is Architecture.local:
        _require(model.path is not None, "model=local needs model.path=FOLDER with a saved transformers model")
        folder = Path(model.path)
        _require(folder.is_dir(), f"model.path={model.path} is not a folder")
        _require(
            (folder / "config.json").is_file() or not (folder / ADAPTER_FILE).is_file(),
            f"model.path={model.path} holds LoRA adapters and no whole model; train them on with train.resume="
            f"{model.path}, or have one saved with model.lora.merge=true and give its folder {MERGED_FOLDER}",
        )
        _require(
            (folder / "config.json").is_file(),
            f"model.path={model.path} holds no config.json, so no saved model; those of a run are in its folders "
            "checkpoints/step_N",
        )
        for name in (*_SIZES, *_ROPE_ONLY, "vocab_size", "tie_embeddings", "dropout"):
            given = getattr(model, name)
            _require(
                given is None, f"model.{name}={given} cannot be chosen with model=local: the saved model has its own"
            )
        return
    _require(model.path is None, f"model.path is for model=local only, and model.architecture is {kind}")
    for name in _SIZES:
        _require(getattr(model, name) is not None, f"model.{name} is not set; model.architecture={kind} needs it")
    _at_least("model", model, 1, *_SIZES, "kv_heads", "head_dim", "vocab_size")
    if model.architecture is Architecture.gpt2:
        for name in _ROPE_ONLY:
            _require(getattr(model, name) is None, f"model.{name} does not exist in gpt2; drop it")
    else:
        _require(not model.dropout, f"model.dropout={model.dropout}: {kind} has no dropout; use gpt2, or drop it")
    _positive("model", model, "rope_theta")
    if model.dropout is not None:
        _require(0 <= model.dropout < 1, f"model.dropout must be at least 0 and below 1, got {model.dropout}")
    _require(
        model.head_dim is not None or model.hidden_size % model.heads == 0,
        f"model.hidden_size={model.hidden_size} does not divide by model.heads={model.heads}",
    )
    head_dim = model.head_dim or model.hidden_size // model.heads
    kv_heads = model.kv_heads or model.heads
    _require(model.heads % kv_heads == 0, f"model.heads={model.heads} does not divide by model.kv_heads={kv_heads}")
    _require(
        model.architecture is Architecture.gpt2 or head_dim % 2 == 0,
        f"rotary embeddings need an even size of a head, got {head_dim} (model.head_dim, or hidden_size / heads)",
    )


def check_data(data: DataConfig, model: ModelConfig) -> None:
    """Raises ConfigError for a path that is missing or not there; makes `data.path` a list of str, or None."""
    _at_least("data", data, 1, "max_bytes", "vocab_size", "seq_len", "batch_size")
    _require(
        0 <= data.eval_fraction < 1, f"data.eval_fraction must be at least 0 and below 1, got {data.eval_fraction}"
    )
    if data.source in (Source.text, Source.hf):
        _require(
            isinstance(data.path, bool) or not isinstance(data.path, (int, float)),
            f"data.path={data.path} was read as a number; write data.path=./{data.path}",
        )
        paths = [data.path] if isinstance(data.path, (str, Path)) else data.path
        _require(
            bool(paths) and isinstance(paths, (list, tuple)),
            f"data={data.source.value} needs data.path=FILE_OR_FOLDER, or a list",
        )
        data.path = [str(path) for path in paths]
        for path in data.path:
            _require(Path(path).exists(), f"data.path: there is no file or folder {path!r}")
    else:
        _require(
            data.path is None,
            f"data.path is read with data=text and data=hf only, and data.source is {data.source.value}",
        )
    if data.source is Source.synthetic:
        _require(data.tokenizer is None, "data.tokenizer has no meaning with data=synthetic: its tokens are random")
    else:
        _require(data.vocab_size is None, "data.vocab_size is for data=synthetic only; set model.vocab_size instead")
    if data.source is Source.hf:
        _require(data.max_bytes is None, "data.max_bytes has no meaning with data=hf, which reads rows; leave it out")
    else:
        _require(
            data.column is None and data.train_on is TrainOn.completion,
            f"data.column and data.train_on are for data=hf only, and data.source is {data.source.value}",
        )
    if data.tokenizer not in (None, "bytes"):
        _require(
            not Path(data.tokenizer).is_file(),
            f"data.tokenizer={data.tokenizer} is a file; give its folder, in which its name must be one that "
            "transformers looks for, such as tokenizer.json",
        )
        _require(Path(data.tokenizer).is_dir(), f"data.tokenizer={data.tokenizer} is neither a folder nor 'bytes'")
    if data.buckets is not None:
        sizes = list(data.buckets)
        _require(
            bool(sizes) and all(size >= 1 for size in sizes) and sizes == sorted(set(sizes)),
            f"data.buckets must be lengths in ascending order, such as [256,512,1024], got {sizes}",
        )
        _require(not data.packing, "data.buckets pads documents and data.packing=true packs them; use one of the two")
        data.seq_len = sizes[-1]
    _require(
        data.packing or data.packing_attention is PackingAttention.auto,
        f"data.packing_attention={data.packing_attention.value} needs data.packing=true; add that, or drop it",
    )
    length = f"data.seq_len={data.seq_len}" if data.buckets is None else f"the longest of data.buckets, {data.seq_len},"
    limit = model.max_positions
    _require(
        limit is None or data.seq_len <= limit,
        f"{length} is longer than model.max_positions={limit}; lower one or raise the other",
    )


def check_optim(optim: OptimConfig) -> None:
    """Raises ConfigError for rates and shares outside their range."""
    _positive("optim", optim, "learning_rate", "eps")
    _require(
        len(optim.betas) == 2 and all(0 <= beta < 1 for beta in optim.betas),
        f"optim.betas must be two numbers of at least 0 and below 1, such as [0.9,0.95], got {list(optim.betas)}",
    )
    _require(0 <= optim.momentum < 1, f"optim.momentum must be at least 0 and below 1, got {optim.momentum}")
    _require(
        not optim.nesterov or optim.momentum > 0 or optim.name not in (OptimizerName.sgd, OptimizerName.muon),
        "optim.nesterov=true needs optim.momentum above 0; raise it, or set optim.nesterov=false",
    )
    _at_least("optim", optim, 0, "weight_decay")
    _require(optim.weight_decay < math.inf, "optim.weight_decay must be finite, got inf")
    _share("optim", optim, "warmup_fraction", "min_lr_ratio")
    norm = optim.max_grad_norm
    _require(norm is None or norm > 0, f"optim.max_grad_norm must be above 0, or null to not clip, got {norm}")


def check_log(train: TrainConfig) -> None:
    """Raises ConfigError for an unknown logger, or one whose library is missing; makes `train.log` a list of str."""
    given = train.log if isinstance(train.log, (list, tuple)) else [train.log]
    allowed = [one.value for one in LogTo]
    for name in given:
        _require(
            name in allowed,
            f"train.log={name} is no place to log to; write one of {', '.join(allowed)}, a list such as "
            "'train.log=[tensorboard,csv]', or 'train.log=[]' for none",
        )
    if LogTo.wandb in given:
        require_library("wandb", "wandb", "train.log=wandb")
    train.log = list(dict.fromkeys(LogTo(name).value for name in given))


def check(config: RunConfig) -> None:
    """Raises ConfigError for the first setting, combination or path that cannot work."""
    train, graph = config.train, config.graph
    check_model(config.model)
    check_data(config.data, config.model)
    check_optim(config.optim)
    check_log(train)
    _at_least(
        "train",
        train,
        1,
        "steps",
        "epochs",
        "grad_accumulation",
        "log_every",
        "eval_batches",
        "keep_checkpoints",
        "sample_tokens",
    )
    _at_least("train", train, 0, "eval_every", "checkpoint_every", "sample_every", "sample_temperature", "seed")
    _require(train.seed < 2**64, f"train.seed must fit into 64 bits, got {train.seed}")
    decay = train.ema_decay
    _require(decay is None or 0 <= decay < 1, f"train.ema_decay must be at least 0 and below 1, or null, got {decay}")
    _require(
        train.resume in ("none", "auto") or Path(train.resume).is_dir(),
        f"train.resume={train.resume} is not a folder; give that of a run or of a checkpoint, auto or none",
    )
    _require(
        train.resume == "none" or train.checkpoint,
        f"train.resume={train.resume} needs checkpoints and train.checkpoint=false writes none; drop one of them",
    )
    _require(train.sample_prompt != "", "train.sample_prompt is empty; a model needs a text to continue")
    _require(
        train.eval_every == 0 or config.data.eval_fraction > 0,
        "train.eval_every asks for evaluations, but data.eval_fraction=0 keeps nothing to evaluate on; "
        "set data.eval_fraction=0.05, or train.eval_every=0",
    )
    _require(
        not graph.auto or graph.scope is Scope.none,
        f"graph.auto=true chooses the scope itself; got graph.scope={graph.scope.value} too. Use graph=auto alone",
    )
    _require(
        not graph.auto or config.data.buckets is None,
        "graph=auto measures steps of one shape and data.buckets has several; choose a scope, or data.packing=true",
    )
    _require(
        graph.scope is Scope.none or config.data.buckets is None or len(config.data.buckets) <= graph.max_graphs,
        f"data.buckets has {len(config.data.buckets or ())} lengths and graph.max_graphs={graph.max_graphs} allows "
        "fewer graphs; raise it",
    )
    _require(
        graph.layers is None or graph.scope is Scope.per_layer or graph.auto,
        f"graph.layers chooses the modules of graph=per_layer and does nothing with graph.scope={graph.scope.value}",
    )
    draws = config.model.dropout or config.model.lora.dropout
    _require(
        graph.compile is CompileMode.none or not (train.activation_checkpointing and draws),
        DRAWS_IN_COMPILED_CODE,
    )
