"""The settings of a training run: their names, types, defaults and meaning.

The YAML files under `cli/training/configs/` fill these classes in, and `cli/training/compose.py` turns a composed
config into them.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from graphmod.config import CompileMode
from graphmod.train.settings import TrainGraphConfig


class Architecture(str, Enum):
    """Which transformers model is built; `local` loads a saved one."""

    llama = "llama"
    qwen3 = "qwen3"
    gpt2 = "gpt2"
    local = "local"


class Source(str, Enum):
    """Where the training tokens come from."""

    stdlib = "stdlib"
    text = "text"
    hf = "hf"
    synthetic = "synthetic"


class Documents(str, Enum):
    """What counts as one document."""

    file = "file"
    line = "line"


class TrainOn(str, Enum):
    """Which tokens of pairs and chats are trained on: what completes a prompt and what the assistant says, or `all`."""

    completion = "completion"
    all = "all"


class PackingAttention(str, Enum):
    """How attention keeps packed documents apart: `mask` has a value for each pair of tokens; `varlen` is told where
    documents begin and skips the rest (on a GPU, in 16 bits); `auto` takes `varlen` where it can be used."""

    auto = "auto"
    mask = "mask"
    varlen = "varlen"


class Precision(str, Enum):
    """`fp32`; `bf16` (weights and arithmetic); `bf16_mixed` and `fp16_mixed` (fp32 weights, autocast; `fp16_mixed`
    with a loss scale)."""

    fp32 = "fp32"
    bf16 = "bf16"
    bf16_mixed = "bf16_mixed"
    fp16_mixed = "fp16_mixed"


class NonFinite(str, Enum):
    """What to do when a loss or gradient is NaN or infinite."""

    stop = "stop"
    skip = "skip"
    ignore = "ignore"


class OptimizerName(str, Enum):
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

DRAWS_IN_COMPILED_CODE = (
    "train.activation_checkpointing=true runs layers twice, and compiled code would draw other numbers for dropout the "
    "second time; set the model's dropout to 0, or use graph.compile=none"
)


class Schedule(str, Enum):
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


class LogTo(str, Enum):
    """Where the points of a run are written: an event file for TensorBoard, `metrics.csv`, Weights & Biases."""

    tensorboard = "tensorboard"
    csv = "csv"
    wandb = "wandb"


class DeviceName(str, Enum):
    """`auto` takes the GPU when there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


# In a checkpoint of adapters: the file they are described in, and the folder of the whole model that they make.
ADAPTER_FILE, MERGED_FOLDER = "adapter_config.json", "merged"


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


@dataclass
class DataConfig:
    """The data and the shape of a batch.

    Attributes:
        source: `stdlib`, `text`, `hf` (rows of files, read with the datasets library) or `synthetic`.
        path: file, folder, or list of them (`text` and `hf`).
        pattern: which files of a folder are read, such as `*.txt`.
        column: `hf` only; the column that holds the text. null takes chats in `messages`, pairs of `prompt` and
            `completion` (texts, or lists of messages), or `text`, whichever is there.
        train_on: `hf` only; in pairs and chats, `completion` (which is also what the assistant says) or `all`.
        split: `hf` only; the split of a folder that has several.
        cache: folder where tokens are kept for the next run on the same data; null keeps none.
        tokenizer: folder of a saved tokenizer, or `bytes`; null means bytes, unless `model.path` brings a tokenizer.
        max_bytes: read no more than this many bytes; null reads everything.
        vocab_size: `synthetic` only; null takes `model.vocab_size`, or 256.
        seq_len: tokens of one sequence the model sees.
        batch_size: sequences in one microbatch.
        eval_fraction: share of the tokens, from the end, kept for evaluation; in [0, 1).
        documents: what `buckets` and `packing` keep apart: the files, or the lines of all files.
        buckets: lengths in tokens, such as [256,512,1024], in place of `seq_len`: a batch holds documents of about
            equal length, padded to the next of these. `batch_size` is that of the longest; shorter ones have more rows.
        packing: documents that share a window do not see each other.
        packing_attention: `auto`, `mask` or `varlen`: how attention sees to that. They differ by rounding.
    """

    source: Source = Source.stdlib
    path: Any = None
    pattern: str = "*"
    column: str | None = None
    train_on: TrainOn = TrainOn.completion
    split: str = "train"
    cache: str | None = "~/.cache/graphmod"
    tokenizer: str | None = None
    max_bytes: int | None = None
    vocab_size: int | None = None
    seq_len: int = 256
    batch_size: int = 8
    eval_fraction: float = 0.05
    documents: Documents = Documents.file
    buckets: list[int] | None = None
    packing: bool = False
    packing_attention: PackingAttention = PackingAttention.auto


@dataclass
class OptimConfig:
    """The optimizer, its schedule and gradient clipping.

    Attributes:
        name: `adamw`, `adam`, `sgd` or `muon` (the matrices of the layers; embeddings, output layer and vectors have
            AdamW).
        learning_rate: the peak.
        betas: of AdamW and Adam, two numbers in [0, 1).
        eps: of AdamW and Adam.
        momentum: of SGD and Muon, in [0, 1).
        nesterov: of SGD and Muon.
        weight_decay: of the matrices; vectors (norms, biases) have none. Part of the gradient in `adam` and `sgd`.
        schedule: the name of a schedule of `transformers.get_scheduler`.
        schedule_options: what that function takes as `scheduler_specific_kwargs`, such as {num_cycles: 2}.
        warmup_fraction: share of the steps that warms up linearly; in [0, 1].
        min_lr_ratio: where schedules that have a floor end, as a share of the peak; in [0, 1].
        max_grad_norm: clip gradients to this 2-norm; null does not clip.
    """

    name: OptimizerName = OptimizerName.adamw
    learning_rate: float = 3e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    schedule: Schedule = Schedule.cosine_with_min_lr
    schedule_options: dict[str, Any] = field(default_factory=dict)
    warmup_fraction: float = 0.05
    min_lr_ratio: float = 0.1
    max_grad_norm: float | None = 1.0


@dataclass
class GraphConfig(TrainGraphConfig):
    """The settings of `TrainGraphConfig`, and what only a training run has.

    Attributes:
        compile: `default` fuses kernels with torch.compile before they are captured; `max` also lets it try out which
            variants are fastest, which takes minutes once.
        auto: measure the scopes on the first steps and keep the fastest; `scope` is then what it starts with.
        check: train nothing; say what would keep the step out of graphs, write `check.json`, and end with status 0 (it
            would be captured) or 1.
    """

    compile: CompileMode = CompileMode.none
    auto: bool = False
    check: bool = False


@dataclass
class TrainConfig:
    """The loop.

    Attributes:
        steps: optimizer steps.
        epochs: passes over the data, in place of `steps`; null takes `steps`.
        grad_accumulation: microbatches in a step.
        precision: `fp32`, `bf16`, `bf16_mixed` or `fp16_mixed`.
        device: `auto`, `cpu` or `cuda`.
        seed: of the weights, the data order and dropout.
        deterministic: use kernels whose result does not vary from run to run.
        log: where points are written: `tensorboard`, `csv`, `wandb`, or a list of them; an empty list is nowhere.
        log_every: steps between two points; nothing is read from the device in between.
        eval_every: steps between evaluations; 0 never evaluates.
        eval_batches: batches of one evaluation.
        sync_steps: wait for the device after each step, as a loop that reads the loss each step does.
        sample_every: steps between texts that the model writes, printed and logged; 0 never samples.
        sample_prompt: what it goes on from; on the command line all after `=`, as it is, without quotes for Hydra.
        sample_tokens: how many tokens it writes.
        sample_temperature: 0 takes the most likely token each time.
        nonfinite: when a loss or gradient is NaN or infinite: `stop` ends the run, with the weights of before, and
            names the step; `skip` leaves that update out and goes on; `ignore` does not look.
        ema_decay: keep averaged weights, this much of them at each step; in [0, 1). null keeps none. They are
            evaluated (`eval/ema_loss`) and saved beside the others.
        activation_checkpointing: keep no activations inside the layers and compute them again in the backward; less
            memory, about a third more time. In graphs the results of dropout stay; with `compile` there may be none.
        profile: when all steps are done, record a few more, as the run does them and eagerly, in `trace.json` for
            Perfetto, and sum up how busy the GPU was.
        checkpoint: save the model and the optimizer at the end, and when the run is told to stop.
        checkpoint_every: also save after each so many steps; 0 does not.
        keep_checkpoints: how many of the newest stay on the disk.
        resume: `none`; `auto`: resume from a checkpoint in the folder that `hydra.run.dir` names, or, where it names
            none, the newest unfinished run with these settings; or the folder of a run or of a checkpoint, whose
            settings are then those that the command line does not give.
    """

    steps: int = 500
    epochs: int | None = None
    grad_accumulation: int = 1
    precision: Precision = Precision.fp32
    device: DeviceName = DeviceName.auto
    seed: int = 0
    deterministic: bool = False
    log: Any = field(default_factory=lambda: ["tensorboard"])
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 4
    sync_steps: bool = False
    nonfinite: NonFinite = NonFinite.stop
    ema_decay: float | None = None
    activation_checkpointing: bool = False
    profile: bool = False
    checkpoint: bool = True
    sample_every: int = 0
    sample_prompt: str = "def "
    sample_tokens: int = 120
    sample_temperature: float = 0.8
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    resume: str = "none"


@dataclass
class RunConfig:
    """Everything one run of `train.py` is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
