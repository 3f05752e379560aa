"""The settings of `train`, and what they cannot be."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from graphmod.train.libraries import require_library
from graphmod.train.schema.limits import at_least, require
from graphmod.train.targets import check_target


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


@dataclass
class TrainConfig:
    """The loop.

    Attributes:
        steps: optimizer steps.
        epochs: passes over the data, in place of `steps`; null takes `steps`.
        grad_accumulation: microbatches in a step.
        precision: `fp32`, `bf16`, `bf16_mixed` or `fp16_mixed`.
        device: `auto`, `cpu` or `cuda`.
        loss: `_target_`, the full name of a loss of your own, and arguments for it; empty takes that of the data.
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
    loss: dict[str, Any] = field(default_factory=dict)
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


def check_resume(train: TrainConfig) -> None:
    """Raises ConfigError for a run that is not there."""
    require(
        train.resume in ("none", "auto") or Path(train.resume).is_dir(),
        f"train.resume={train.resume} is not a folder; give that of a run or of a checkpoint, auto or none",
    )


def check_train(train: TrainConfig) -> None:
    """Raises ConfigError for numbers outside their range and runs that are not there; makes `train.log` a list."""
    _check_log(train)
    if train.loss:
        check_target("train.loss", train.loss)
    at_least(
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
    at_least("train", train, 0, "eval_every", "checkpoint_every", "sample_every", "sample_temperature", "seed")
    require(train.seed < 2**64, f"train.seed must fit into 64 bits, got {train.seed}")
    decay = train.ema_decay
    require(decay is None or 0 <= decay < 1, f"train.ema_decay must be at least 0 and below 1, or null, got {decay}")
    check_resume(train)
    require(
        train.resume == "none" or train.checkpoint,
        f"train.resume={train.resume} needs checkpoints and train.checkpoint=false writes none; drop one of them",
    )
    require(train.sample_prompt != "", "train.sample_prompt is empty; a model needs a text to continue")
