"""The settings of `parallel`, and what they cannot be."""

from dataclasses import dataclass
from enum import Enum

from graphmod.train.schema.limits import at_least


class ParallelMode(str, Enum):
    """How several GPUs train one model: not at all, or each with the whole model and its own part of every batch, with
    gradients that are averaged (DistributedDataParallel)."""

    none = "none"
    ddp = "ddp"


@dataclass
class ParallelConfig:
    """More than one GPU. Each is used by a process of its own, a rank.

    Attributes:
        mode: `none` or `ddp`.
        gpus: how many ranks are started, each on a GPU or, without GPUs, on the CPU; null is one for each GPU. Where a
            launcher such as torchrun starts them, it must be as many, or null.
    """

    mode: ParallelMode = ParallelMode.none
    gpus: int | None = None


def check_parallel(parallel: ParallelConfig) -> None:
    """Raises ConfigError for less than one rank."""
    at_least("parallel", parallel, 1, "gpus")
