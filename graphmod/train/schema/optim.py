"""The settings of `optim`, and what they cannot be. What the libraries refuse, `train/run/device.py` finds out."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from graphmod.train.schema.limits import at_least, positive, require, share


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


def check_optim(optim: OptimConfig) -> None:
    """Raises ConfigError for rates and shares outside their range."""
    positive("optim", optim, "learning_rate", "eps")
    require(
        len(optim.betas) == 2 and all(0 <= beta < 1 for beta in optim.betas),
        f"optim.betas must be two numbers of at least 0 and below 1, such as [0.9,0.95], got {list(optim.betas)}",
    )
    require(0 <= optim.momentum < 1, f"optim.momentum must be at least 0 and below 1, got {optim.momentum}")
    require(
        not optim.nesterov or optim.momentum > 0 or optim.name not in (OptimizerName.sgd, OptimizerName.muon),
        "optim.nesterov=true needs optim.momentum above 0; raise it, or set optim.nesterov=false",
    )
    at_least("optim", optim, 0, "weight_decay")
    require(optim.weight_decay < math.inf, "optim.weight_decay must be finite, got inf")
    share("optim", optim, "warmup_fraction", "min_lr_ratio")
    norm = optim.max_grad_norm
    require(norm is None or norm > 0, f"optim.max_grad_norm must be above 0, or null to not clip, got {norm}")
