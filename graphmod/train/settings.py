"""The settings of a training run: their names, types, defaults and meaning, and which cannot be meant together.

The YAML files in `configs/` fill these classes in, and `cli/app.py` turns a composed config into them. Nothing here
loads PyTorch, which takes seconds: what is wrong is said at once. What is asked of the device and of the libraries,
`train/device.py` looks at. Checks read nothing but file names and change nothing, save `data.path` and `train.log`,
which they make lists, `model.path`, which becomes a folder, and `data.seq_len`, which is the longest of `data.buckets`.
"""

import math
import operator
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from enum import Enum, StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphmod.config import CompileMode, CUDAGraphConfig, choice, names_settings
from graphmod.errors import ConfigError, install
from graphmod.train.folders import MERGED_FOLDER, require_no_own_model, saved_folder
from graphmod.train.targets import TARGET, check_target

# -- what checks share -------------------------------------------------------------------------------------------------


def require_library(name: str, extra: str, why: str) -> None:
    """Raises ConfigError unless a library is installed, which this extra of the package brings; `why` is the setting
    that needs it."""
    if name in sys.modules:
        found = sys.modules[name] is not None
    else:
        spec = find_spec(name)
        found = spec is not None and spec.origin is not None  # else a folder of that name, such as W&B leaves behind
    if not found:
        raise ConfigError(f"{why} needs the {name} library: {install(extra)}")


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with that message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_read(chooses: str, values: Any, choice: str, read_by: dict[str, Collection[str]]) -> None:
    """Raises ConfigError for a setting of `values` that does nothing with this choice; each is read by some choices of
    the setting `chooses`, and says nothing with its default, false or 0."""
    defaults = type(values)()
    for name, readers in read_by.items():
        value, written = getattr(values, name), TARGET if name == "target" else name
        require(
            choice in readers or not value or value == getattr(defaults, name),
            f"{chooses.partition('.')[0]}.{written} does nothing with {chooses}={choice}; leave it out"
            f", or choose {chooses}={' | '.join(sorted(readers))}",
        )


# -- graph: what `TrainStep` may be told -------------------------------------------------------------------------------


class Scope(StrEnum):
    """How much of a training run one graph holds."""

    none = "none"
    per_layer = "per_layer"
    full_iteration = "full_iteration"


@names_settings
@dataclass
class TrainGraphConfig(CUDAGraphConfig):
    """The settings of `CUDAGraphConfig`, and what `TrainStep` captures with them.

    Attributes:
        scope: what is captured: each layer, the whole iteration (optimizer included), or nothing.
        optimizer: in `per_layer` scope, capture clipping and the optimizer step too. Not of a model of which
            each rank holds a part.
    """

    scope: Scope = Scope.per_layer
    optimizer: bool = True

    def __post_init__(self) -> None:
        self.scope = choice(Scope, self.scope, "scope")
        super().__post_init__()


# -- model -------------------------------------------------------------------------------------------------------------

ADAPTER_FILE = "adapter_config.json"  # in which adapters are described

LOCAL, CUSTOM = "local", "custom"


@dataclass
class LoraSettings:
    """Low-rank adapters on a saved model."""

    r: int | None = None  # their rank; null trains the whole model
    alpha: float = 16.0  # their results are scaled by alpha / r
    dropout: float = 0.0  # of what goes into them; probability in [0, 1)
    # Names of the linear layers that get one, such as [q_proj,v_proj], or [all-linear]; null takes what peft takes for
    # the kind of model.
    target_modules: list[str] | None = None
    merge: bool = False  # also save the whole model with its adapters merged, in the folder `merged` of each checkpoint


class ModelPrecision(StrEnum):
    """Whether layers multiply by their large matrices in 8 bits: `none` do, or all with one scale for each matrix
    (`fp8`), or with one for each row and column, which is more exact and slower (`fp8_rowwise`)."""

    none = "none"
    fp8 = "fp8"
    fp8_rowwise = "fp8_rowwise"


@dataclass
class ModelConfig:
    """The model. A size that an architecture does not have stays null; `local` reads all of them from its folder."""

    # `local`, a saved model; `custom`, a model of your own; or a model type of transformers (`llama`, `qwen3`, `gpt2`,
    # `mistral`, ...), built with random weights.
    architecture: str = "llama"
    # Folder with a saved transformers model, or the name of one in the cache of Hugging Face (`local` only).
    path: str | None = None
    # `custom` only; `_target_`, the full name of a class or function, and arguments for it. Other settings of this
    # group that are not null are arguments, too.
    target: Any = None  # a dict; omegaconf cannot put values into one that may be null
    layers: int | None = None  # how many there are
    hidden_size: int | None = None  # width of the model
    heads: int | None = None  # attention heads
    kv_heads: int | None = None  # as many as `heads` where null
    head_dim: int | None = None  # hidden_size / heads where null
    intermediate_size: int | None = None  # width inside of the MLP
    max_positions: int | None = None  # tokens that it may see
    vocab_size: int | None = None  # null takes the data's vocabulary, rounded up to a multiple of 64
    rope_theta: float | None = None  # what is usual for the architecture where null
    tie_embeddings: bool | None = None  # share the weights of the embedding and the output layer
    # Probability in [0, 1), of all dropout between layers, and in gpt2 of that of attention.
    dropout: float | None = None
    # `fp8`, or `fp8_rowwise`, more exact and slower: multiply in 8 bits by the large matrices of the layers (torchao);
    # weights, and all else, stay in `train.precision`. `none` does not.
    precision: ModelPrecision = ModelPrecision.none
    # What else the config of the architecture in transformers has, by its own names.
    options: dict[str, Any] = field(default_factory=dict)
    # Train low-rank adapters in place of the model's weights (`local` only).
    lora: LoraSettings = field(default_factory=LoraSettings)

    def given(self) -> dict[str, Any]:
        """The sizes that are not null, by name."""
        others = ("architecture", "target", "precision", "options", "lora")
        sizes = (one.name for one in fields(self) if one.name not in others)
        return {name: getattr(self, name) for name in sizes if getattr(self, name) is not None}


def check_model(model: ModelConfig) -> None:
    """Raises ConfigError for settings that go with another kind of model, and sizes that do not divide; makes
    `model.path` a folder."""
    _check_lora(model)
    if model.precision is not ModelPrecision.none:
        require_library("torchao", "fp8", f"model.precision={model.precision}")
        require(
            model.lora.r is None,
            f"model.precision={model.precision} multiplies by the weights in 8 bits to train them, and model.lora.r="
            f"{model.lora.r} trains adapters beside them; drop one of them",
        )
    kind = model.architecture
    require_read("model", model, kind, {"target": {CUSTOM}, "path": {LOCAL, CUSTOM}})
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
    if model.heads is not None:
        require(
            model.head_dim is not None or model.hidden_size is None or model.hidden_size % model.heads == 0,
            f"model.hidden_size={model.hidden_size} does not divide by model.heads={model.heads}",
        )
        kv_heads = model.kv_heads or model.heads
        require(model.heads % kv_heads == 0, f"model.heads={model.heads} does not divide by model.kv_heads={kv_heads}")


def _check_lora(model: ModelConfig) -> None:
    lora = model.lora
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


# -- data --------------------------------------------------------------------------------------------------------------


class Source(StrEnum):
    """Where the training tokens come from."""

    stdlib = "stdlib"
    text = "text"
    hf = "hf"
    synthetic = "synthetic"
    custom = "custom"


class Documents(StrEnum):
    """What counts as one document."""

    file = "file"
    line = "line"


class TrainOn(StrEnum):
    """Which tokens of pairs and chats are trained on: what completes a prompt and what the assistant says, or `all`."""

    completion = "completion"
    all = "all"


class PackingAttention(StrEnum):
    """How attention keeps packed documents apart: `mask` has a value for each pair of tokens; `varlen` is told where
    documents begin and skips the rest (on a GPU, in 16 bits); `auto` takes `varlen` where it can be used."""

    auto = "auto"
    mask = "mask"
    varlen = "varlen"


@dataclass
class DataConfig:
    """The data and the shape of a batch."""

    # `stdlib`, `text`, `hf` (rows of files, read with the datasets library), `synthetic` or `custom` (a data set of
    # your own).
    source: Source = Source.stdlib
    path: Any = None  # file, folder, or list of them (`text` and `hf`)
    # `custom` only; `_target_`, the full name of a class or function, and arguments for it. Of the other settings of
    # this group it gets those that it takes by name.
    target: Any = None  # a dict; omegaconf cannot put values into one that may be null
    pattern: str = "*"  # which files of a folder are read, such as `*.txt`
    # `hf` only; the column that holds the text. null takes chats in `messages`, pairs of `prompt` and `completion`
    # (texts, or lists of messages), or `text`, whichever is there.
    column: str | None = None
    # `hf` only; in pairs and chats, `completion` (which is also what the assistant says) or `all`.
    train_on: TrainOn = TrainOn.completion
    split: str = "train"  # `hf` only; the split of a folder that has several
    # Folder where tokens are kept for the next run on the same data; null keeps none.
    cache: str | None = "~/.cache/graphmod"
    # Folder of a saved tokenizer, or `bytes`; null means bytes, unless `model.path` brings a tokenizer.
    tokenizer: str | None = None
    max_bytes: int | None = None  # read no more than this many bytes; null reads everything
    vocab_size: int | None = None  # `synthetic` only; null takes `model.vocab_size`, or 256
    seq_len: int = 256  # tokens of one sequence the model sees
    batch_size: int = 8  # sequences in one microbatch
    eval_fraction: float = 0.05  # share of the tokens, from the end, kept for evaluation; in [0, 1)
    # What `buckets` and `packing` keep apart: the files, or the lines of all files.
    documents: Documents = Documents.file
    # Lengths in tokens, such as [256,512,1024], in place of `seq_len`: a batch holds documents of about equal length,
    # padded to the next of these. `batch_size` is that of the longest; shorter ones have more rows.
    buckets: list[int] | None = None
    packing: bool = False  # documents that share a window do not see each other
    # `auto`, `mask` or `varlen`: how attention sees to that. They differ by rounding.
    packing_attention: PackingAttention = PackingAttention.auto


_OF_SOURCES: dict[str, Collection[str]] = {
    # What a data set of one's own takes of these is known when it is loaded (`train/batches.py`).
    "path": {Source.text, Source.hf, Source.custom},
    "tokenizer": {*Source} - {Source.synthetic},
    "max_bytes": {Source.stdlib, Source.text, Source.custom},
    "vocab_size": {Source.synthetic, Source.custom},
    "column": {Source.hf, Source.custom},
    "train_on": {Source.hf, Source.custom},
    "split": {Source.hf, Source.custom},
    "pattern": {Source.text, Source.hf, Source.custom},
    # Its items are whole, and no texts to be cut.
    "buckets": {*Source} - {Source.custom},
    "packing": {*Source} - {Source.custom},
    "target": {Source.custom},
}


def check_data(data: DataConfig, model: ModelConfig) -> None:
    """Raises ConfigError for a path that is missing or not there; makes `data.path` a list of str, or None."""
    require_read("data", data, data.source, _OF_SOURCES)
    if data.source is Source.custom:
        require(data.target is not None, "data=custom needs data._target_=my_package.Items, the name of your data set")
        check_target("data", data.target)
        return
    if data.source in (Source.text, Source.hf):
        require(
            isinstance(data.path, bool) or not isinstance(data.path, (int, float)),
            f"data.path={data.path} was read as a number; write data.path=./{data.path}",
        )
        paths: Any = [data.path] if isinstance(data.path, (str, Path)) else data.path
        require(
            bool(paths) and isinstance(paths, (list, tuple)),
            f"data={data.source} needs data.path=FILE_OR_FOLDER, or a list",
        )
        data.path = [str(path) for path in paths]
        for path in data.path:
            where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
            require(Path(path).exists(), f"data.path: there is no file or folder {path!r}{where}")
    require(
        data.tokenizer in (None, "bytes") or Path(data.tokenizer).is_dir(),
        f"data.tokenizer={data.tokenizer} is neither a folder nor 'bytes'; give the folder of a saved tokenizer, with "
        "a file that transformers looks for, such as tokenizer.json",
    )
    if data.buckets is not None:
        sizes = list(data.buckets)
        require(
            bool(sizes) and all(size >= 1 for size in sizes) and sizes == sorted(set(sizes)),
            f"data.buckets must be lengths in ascending order, such as [256,512,1024], got {sizes}",
        )
        require(not data.packing, "data.buckets pads documents and data.packing=true packs them; use one of the two")
        data.seq_len = sizes[-1]
    require(
        data.packing or data.packing_attention is PackingAttention.auto,
        f"data.packing_attention={data.packing_attention} needs data.packing=true; add that, or drop it",
    )
    length = f"data.seq_len={data.seq_len}" if data.buckets is None else f"the longest of data.buckets, {data.seq_len},"
    limit = model.max_positions
    require(
        limit is None or data.seq_len <= limit,
        f"{length} is longer than model.max_positions={limit}; lower one or raise the other",
    )


# -- optim -------------------------------------------------------------------------------------------------------------


class OptimizerName(StrEnum):
    """Those that can be captured, and leave out an update without asking the host."""

    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"
    muon = "muon"


# What else torch and transformers have, and why a graph cannot hold it or a run cannot use it.
_NO_GUARD = "it cannot leave out an update on the device, which train.nonfinite needs"
REFUSED_OPTIMIZERS = {
    "adafactor": "it reads its step count and learning rate on the host in each step, which a graph cannot repeat",
    "lbfgs": "it calls the model several times in a step, and decides on the host how often",
    **dict.fromkeys(("adagrad", "adadelta", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"), _NO_GUARD),
}


class Schedule(StrEnum):
    """The schedules of `transformers.get_scheduler` that are known before the run."""

    cosine_with_min_lr = "cosine_with_min_lr"
    cosine = "cosine"
    cosine_with_restarts = "cosine_with_restarts"
    linear = "linear"
    polynomial = "polynomial"
    constant = "constant"
    constant_with_warmup = "constant_with_warmup"
    inverse_sqrt = "inverse_sqrt"
    warmup_stable_decay = "warmup_stable_decay"


@dataclass
class OptimConfig:
    """The optimizer, its schedule and gradient clipping."""

    # `adamw`, `adam`, `sgd` or `muon` (the matrices of the layers; embeddings, output layer and vectors have AdamW).
    name: OptimizerName = OptimizerName.adamw
    learning_rate: float = 3e-3  # the peak
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of AdamW and Adam, two numbers in [0, 1)
    eps: float = 1e-8  # of AdamW and Adam
    momentum: float = 0.95  # of SGD and Muon, in [0, 1)
    nesterov: bool = True  # of SGD and Muon
    # Of the matrices; vectors (norms, biases) have none. Part of the gradient in `adam` and `sgd`.
    weight_decay: float = 0.1
    schedule: Schedule = Schedule.cosine_with_min_lr  # the name of a schedule of `transformers.get_scheduler`
    # What that function takes as `scheduler_specific_kwargs`, such as {num_cycles: 2}.
    schedule_options: dict[str, Any] = field(default_factory=dict)
    warmup_fraction: float = 0.05  # share of the steps that warms up linearly; in [0, 1]
    min_lr_ratio: float = 0.1  # where schedules that have a floor end, as a share of the peak; in [0, 1]
    max_grad_norm: float | None = 1.0  # clip gradients to this 2-norm; null does not clip


_OF_OPTIMIZERS: dict[str, Collection[str]] = {
    "betas": {*OptimizerName} - {OptimizerName.sgd},
    "eps": {*OptimizerName} - {OptimizerName.sgd},
    "momentum": {OptimizerName.sgd, OptimizerName.muon},
    "nesterov": {OptimizerName.sgd, OptimizerName.muon},
}
_OF_SCHEDULES: dict[str, Collection[str]] = {
    "warmup_fraction": {*Schedule} - {Schedule.constant},
    "min_lr_ratio": {Schedule.cosine_with_min_lr, Schedule.polynomial, Schedule.warmup_stable_decay},
}


def check_optim(optim: OptimConfig) -> None:
    """Raises ConfigError for numbers that do not go together, and for settings that nothing reads."""
    require_read("optim", optim, optim.name, _OF_OPTIMIZERS)
    require_read("optim.schedule", optim, optim.schedule, _OF_SCHEDULES)
    require(
        len(optim.betas) == 2 and all(0 <= beta < 1 for beta in optim.betas),
        f"optim.betas must be two numbers of at least 0 and below 1, such as [0.9,0.95], got {list(optim.betas)}",
    )
    require(
        not optim.nesterov or optim.momentum > 0 or optim.name not in (OptimizerName.sgd, OptimizerName.muon),
        "optim.nesterov=true needs optim.momentum above 0; raise it, or set optim.nesterov=false",
    )
    norm = optim.max_grad_norm
    require(norm is None or norm > 0, f"optim.max_grad_norm must be above 0, or null to not clip, got {norm}")


# -- train -------------------------------------------------------------------------------------------------------------


class Precision(StrEnum):
    """`fp32`; `bf16` (weights and arithmetic); `bf16_mixed` and `fp16_mixed` (fp32 weights, autocast; `fp16_mixed`
    with a loss scale)."""

    fp32 = "fp32"
    bf16 = "bf16"
    bf16_mixed = "bf16_mixed"
    fp16_mixed = "fp16_mixed"


class NonFinite(StrEnum):
    """What to do when a loss or gradient is NaN or infinite."""

    stop = "stop"
    skip = "skip"
    ignore = "ignore"


class LogTo(StrEnum):
    """Where the points of a run are written: an event file for TensorBoard, `metrics.csv`, Weights & Biases."""

    tensorboard = "tensorboard"
    csv = "csv"
    wandb = "wandb"


class DeviceName(StrEnum):
    """`auto` takes the GPU when there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


FUSED = "fused"


@dataclass
class TrainConfig:
    """The loop."""

    steps: int = 500  # optimizer steps
    epochs: int | None = None  # passes over the data, in place of `steps`; null takes `steps`
    grad_accumulation: int = 1  # microbatches in a step
    precision: Precision = Precision.fp32  # `fp32`, `bf16`, `bf16_mixed` or `fp16_mixed`
    device: DeviceName = DeviceName.auto  # `auto`, `cpu` or `cuda`
    # `fused`, that of the data without ever holding the logits of all tokens; or `_target_`, the full name of a loss of
    # your own, and arguments for it; empty takes that of the data.
    loss: Any = field(default_factory=dict)
    seed: int = 0  # of the weights, the data order and dropout
    deterministic: bool = False  # use kernels whose result does not vary from run to run
    # Where points are written: `tensorboard`, `csv`, `wandb`, or a list of them; an empty list is nowhere.
    log: Any = field(default_factory=lambda: ["tensorboard"])
    log_every: int = 10  # steps between two points; nothing is read from the device in between
    eval_every: int = 100  # steps between evaluations; 0 never evaluates
    eval_batches: int = 4  # batches of one evaluation
    # When a loss or gradient is NaN or infinite: `stop` ends the run, with the weights of before, and names the step;
    # `skip` leaves that update out and goes on; `ignore` does not look.
    nonfinite: NonFinite = NonFinite.stop
    # Keep averaged weights, this much of them at each step; in [0, 1). null keeps none. They are evaluated
    # (`eval/ema_loss`) and saved beside the others.
    ema_decay: float | None = None
    # Keep no activations inside the layers and compute them again in the backward; less memory, about a third more
    # time. In graphs the results of dropout stay; with `compile` there may be none.
    activation_checkpointing: bool = False
    # When all steps are done, record a few more, as the run does them and eagerly, in `trace.json` for Perfetto, and
    # sum up how busy the GPU was.
    profile: bool = False
    checkpoint: bool = True  # save the model and the optimizer at the end, and when the run is told to stop
    sample_every: int = 0  # steps between texts that the model writes, printed and logged; 0 never samples
    # What it goes on from; on the command line all after `=`, as it is, without quotes for Hydra.
    sample_prompt: str = "def "
    sample_tokens: int = 120  # how many tokens it writes
    sample_temperature: float = 0.8  # 0 takes the most likely token each time
    checkpoint_every: int = 0  # also save after each so many steps; 0 does not
    keep_checkpoints: int = 2  # how many of the newest stay on the disk
    # `none`; `auto`: resume from a checkpoint in the folder that `hydra.run.dir` names, or, where it names none, the
    # newest unfinished run with these settings; or the folder of a run or of a checkpoint, whose settings are then
    # those that the command line does not give.
    resume: str = "none"

    @property
    def own_loss(self) -> dict[str, Any]:
        """What `loss` says of a loss of one's own; empty without one."""
        return {} if self.loss == FUSED else self.loss


def _check_log(train: TrainConfig) -> None:
    given = train.log if isinstance(train.log, (list, tuple)) else [train.log]
    allowed = [one.value for one in LogTo]
    for name in given:
        require(
            name in allowed,
            f"train.log={name} is not a logger; write one of {', '.join(allowed)}, a list such as "
            "'train.log=[tensorboard,csv]', or 'train.log=[]' for none",
        )
    if LogTo.wandb in given:
        require_library("wandb", "wandb", "train.log=wandb")
    train.log = list(dict.fromkeys(LogTo(name).value for name in given))


def check_resume(resume: str) -> None:
    """Raises ConfigError for a run that is not there."""
    require(
        resume in ("none", "auto") or Path(resume).is_dir(),
        f"train.resume={resume} is not a folder; give that of a run or of a checkpoint, auto or none",
    )


def check_train(train: TrainConfig) -> None:
    """Raises ConfigError for a log, loss or run that is not there; makes `train.log` a list."""
    _check_log(train)
    require(
        train.loss == FUSED or isinstance(train.loss, dict),
        f"train.loss must be {FUSED} or have settings, got {train.loss}; for a loss of your own write "
        "train.loss._target_=my_package.loss, or leave it out for that of the data",
    )
    if train.own_loss:
        check_target("train.loss", train.own_loss)
    require(train.seed < 2**64, f"train.seed must fit into 64 bits, got {train.seed}")
    check_resume(train.resume)
    require(
        train.resume == "none" or train.checkpoint,
        f"train.resume={train.resume} needs checkpoints and train.checkpoint=false writes none; drop one of them",
    )
    require(train.sample_prompt != "", "train.sample_prompt is empty; a model needs a text to continue")


# -- parallel ----------------------------------------------------------------------------------------------------------


class ParallelMode(StrEnum):
    """How several GPUs train one model.

    `none`: not at all. `ddp`: each has the whole model and its own part of every batch, and gradients are averaged
    (DistributedDataParallel). `fsdp`: batches and gradients as with `ddp`, but each keeps a part of every parameter
    (fully_shard). `tp`: all compute every sequence together, each with a part of every layer (tensor parallelism).
    `fsdp_tp`: groups of `parallel.tp` ranks do that, and the groups share batches and parameters as with `fsdp`.
    `experts`: as with `ddp`, but each keeps a part of the experts, to which all send their tokens.
    """

    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"
    tp = "tp"
    fsdp_tp = "fsdp_tp"
    experts = "experts"

    @property
    def shards(self) -> bool:
        """Whether ranks with different batches keep a part of every parameter each."""
        return self in (ParallelMode.fsdp, ParallelMode.fsdp_tp)

    @property
    def splits_layers(self) -> bool:
        """Whether a layer is computed by several ranks."""
        return self in (ParallelMode.tp, ParallelMode.fsdp_tp)

    @property
    def leaves_parts(self) -> bool:
        """Whether no rank has all of the model."""
        return self.shards or self.splits_layers or self is ParallelMode.experts


@dataclass
class ParallelConfig:
    """More than one GPU. Each is used by a process of its own, a rank."""

    mode: ParallelMode = ParallelMode.none  # `none`, `ddp`, `fsdp`, `tp`, `fsdp_tp` or `experts`
    # How many ranks are started, each on a GPU or, without GPUs, on the CPU; null is one for each GPU. Where a launcher
    # such as torchrun starts them, it must be as many, or null.
    gpus: int | None = None
    # Over how many ranks each layer is split, with `fsdp_tp`; with `tp` these are all ranks, and it may be null.
    tp: int | None = None
    # With `fsdp` and `fsdp_tp`, give whole parameters of a layer back after its forward and collect them again for its
    # backward; false keeps them in between, which takes memory for all layers.
    reshard_after_forward: bool = True
    # With `experts`, the most tokens that a rank may get from another, as a multiple of the mean, and half of what an
    # expert may get from all. A step with more runs again without a graph. With `bf16` and `bf16_mixed` only ranks
    # count, and as many as there are ranks is always enough.
    capacity_factor: float = 2.0


def check_parallel(parallel: ParallelConfig) -> None:
    """Raises ConfigError for settings that do nothing, or are missing."""
    mode = parallel.mode
    require(
        parallel.reshard_after_forward or mode.shards,
        f"parallel.reshard_after_forward=false does nothing with parallel={mode}; leave it out, or choose "
        "parallel=fsdp | fsdp_tp",
    )
    splits = {one for one in ParallelMode if one.splits_layers}
    require_read("parallel", parallel, mode, {"tp": splits, "capacity_factor": {ParallelMode.experts}})
    require(
        parallel.tp is not None or mode is not ParallelMode.fsdp_tp,
        "parallel=fsdp_tp has to be told over how many GPUs each layer is split, such as parallel.tp=2",
    )


def sizes(parallel: ParallelConfig, ranks: int) -> dict[str, int]:
    """How so many ranks are arranged: `dp` with different batches times `tp` that split each layer. Raises ConfigError
    where they cannot be."""
    if not parallel.mode.splits_layers:
        return {"dp": ranks, "tp": 1}
    tp = parallel.tp or ranks
    if parallel.mode is ParallelMode.tp and tp != ranks:
        raise ConfigError(
            f"parallel=tp splits each layer over all of the {ranks} ranks, and parallel.tp={tp}; leave parallel.tp "
            f"out, start {tp} ranks, or let groups of {tp} share the batches: parallel=fsdp_tp parallel.tp={tp}"
        )
    if ranks % tp or (parallel.mode is ParallelMode.fsdp_tp and ranks == tp):
        raise ConfigError(
            f"parallel=fsdp_tp parallel.tp={tp} takes a multiple of {tp} ranks, at least {2 * tp}, got {ranks}; start "
            "another number (parallel.gpus), or use parallel=tp or parallel=fsdp"
        )
    return {"dp": ranks // tp, "tp": tp}


# -- all of them -------------------------------------------------------------------------------------------------------

DRAWS_IN_COMPILED_CODE = (
    "train.activation_checkpointing=true runs layers twice, and compiled code would draw other numbers for dropout the "
    "second time; set the model's dropout to 0, or use graph.compile=none"
)


@dataclass
class GraphConfig(TrainGraphConfig):
    """The settings of `TrainGraphConfig`, and what only a training run has."""

    # `default` fuses kernels with torch.compile before they are captured; `max` also lets it try out which variants are
    # fastest, which takes minutes once.
    compile: CompileMode = CompileMode.none
    # Measure the scopes on the first steps and keep the fastest; `scope` is then what it starts with.
    auto: bool = False
    # Train nothing; say what would keep the step out of graphs, write `check.json`, and end with status 0 (it would be
    # captured) or 1.
    check: bool = False


@dataclass
class RunConfig:
    """Everything one run of `train.py` is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


# What numbers must be where they are not null.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "at least 1": (
        lambda value: value >= 1,
        "model.layers model.hidden_size model.heads model.kv_heads model.head_dim model.intermediate_size "
        "model.max_positions model.vocab_size model.lora.r data.max_bytes data.vocab_size data.seq_len data.batch_size "
        "train.steps train.epochs train.grad_accumulation train.log_every train.eval_batches train.keep_checkpoints "
        "train.sample_tokens parallel.gpus",
    ),
    "at least 2": (lambda value: value >= 2, "parallel.tp"),
    "at least 0": (
        lambda value: value >= 0,
        "train.eval_every train.checkpoint_every train.sample_every train.sample_temperature train.seed",
    ),
    "at least 0 and finite": (lambda value: 0 <= value < math.inf, "optim.weight_decay"),
    "at least 0 and below 1": (
        lambda value: 0 <= value < 1,
        "model.dropout model.lora.dropout data.eval_fraction optim.momentum train.ema_decay",
    ),
    "a share, from 0 to 1": (lambda value: 0 <= value <= 1, "optim.warmup_fraction optim.min_lr_ratio"),
    "above 0 and finite": (
        lambda value: 0 < value < math.inf,
        "model.rope_theta model.lora.alpha optim.learning_rate optim.eps parallel.capacity_factor",
    ),
}


def _check_ranges(config: RunConfig) -> None:
    for words, (fits, names) in _RANGES.items():
        for name in names.split():
            value = operator.attrgetter(name)(config)
            require(value is None or fits(value), f"{name} must be {words}, got {value}")


def _check_split(config: RunConfig) -> None:
    """Raises ConfigError for what needs a whole model on each rank."""
    mode = config.parallel.mode
    if not mode.leaves_parts:
        return
    experts = mode is ParallelMode.experts
    asked = {
        f"train.sample_every={config.train.sample_every}, which writes text with a model": config.train.sample_every,
        "optim=muon, which updates whole matrices": not experts and config.optim.name is OptimizerName.muon,
        "optim=sgd, which PyTorch fuses for whole parameters only": config.optim.name is OptimizerName.sgd,
        f"model.lora.r={config.model.lora.r}, whose adapters lie inside the matrices": (mode.splits_layers or experts)
        and config.model.lora.r,
        f"model.precision={config.model.precision}, which scales whole matrices": (mode.splits_layers or experts)
        and config.model.precision is not ModelPrecision.none,
    }
    for what, wanted in asked.items():
        require(
            not wanted,
            f"parallel={mode} leaves each rank a part of the model, and {what}, needs all of it; leave that out, "
            "or use parallel=ddp",
        )


def check(config: RunConfig) -> None:
    """Raises ConfigError for the first setting, combination or path that cannot work."""
    train, graph = config.train, config.graph
    _check_ranges(config)
    check_model(config.model)
    check_data(config.data, config.model)
    check_optim(config.optim)
    check_train(train)
    check_parallel(config.parallel)
    _check_split(config)
    require(
        config.model.precision is not ModelPrecision.fp8
        or not config.parallel.mode.shards
        or graph.scope is not Scope.per_layer,
        f"parallel={config.parallel.mode} gathers the weights of model.precision=fp8 in 8 bits, which lie elsewhere in "
        "each step, where graphs of single layers (graph=per_layer) cannot read them; use graph=full_iteration",
    )
    require(
        config.model.precision is ModelPrecision.none or not train.sample_every,
        f"train.sample_every={train.sample_every} writes text with a model, and with model.precision="
        f"{config.model.precision} how a token is rounded depends on those beside it; drop one of them",
    )
    require(
        train.eval_every == 0 or config.data.eval_fraction > 0,
        "train.eval_every asks for evaluations, but data.eval_fraction=0 keeps nothing to evaluate on; "
        "set data.eval_fraction=0.05, or train.eval_every=0",
    )
    require(
        not graph.auto or graph.scope is Scope.none,
        f"graph.auto=true chooses the scope itself; got graph.scope={graph.scope} too. Use graph=auto alone",
    )
    require(
        not graph.auto or config.data.buckets is None,
        "graph=auto measures steps of one shape and data.buckets has several; choose a scope, or data.packing=true",
    )
    require(
        graph.scope is Scope.none or config.data.buckets is None or len(config.data.buckets) <= graph.max_graphs,
        f"data.buckets has {len(config.data.buckets or ())} lengths and graph.max_graphs={graph.max_graphs} allows "
        "fewer graphs; raise it",
    )
    require(
        graph.layers is None or graph.scope is Scope.per_layer or graph.auto,
        f"graph.layers chooses the modules of graph=per_layer and does nothing with graph.scope={graph.scope}",
    )
    require(
        graph.body or graph.layers is None,  # a comparison has it for all of its runs
        "graph.body=false leaves the module that runs the layers of graph=per_layer out, and does nothing with "
        "graph.layers, which names all modules; leave it out",
    )
    require(
        config.parallel.mode is not ParallelMode.experts or config.data.buckets is None or not train.eval_every,
        "parallel=experts needs batches of one shape on all ranks, and an evaluation with data.buckets has others on "
        "each; set train.eval_every=0, or pack documents (data.packing=true)",
    )
    draws = config.model.dropout or config.model.lora.dropout
    require(graph.compile is CompileMode.none or not (train.activation_checkpointing and draws), DRAWS_IN_COMPILED_CODE)


def plain_config(config: RunConfig) -> dict[str, Any]:
    """The settings as plain dicts, lists, strings and numbers."""

    def plain(settings: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value.value if isinstance(value, Enum) else value for name, value in settings}

    return asdict(config, dict_factory=plain)
