"""The settings of `parallel`, and what they cannot be."""

from dataclasses import dataclass
from enum import Enum

from graphmod.errors import ConfigError
from graphmod.train.schema.limits import at_least, require


class ParallelMode(str, Enum):
    """How several GPUs train one model.

    `none`: not at all. `ddp`: each has the whole model and its own part of every batch, and gradients are averaged
    (DistributedDataParallel). `fsdp`: likewise, but each keeps a part of every parameter (fully_shard). `tp`: all
    compute every sequence together, each with a part of every layer (tensor parallelism). `fsdp_tp`: groups of
    `parallel.tp` ranks do that, and the groups share batches and parameters as with `fsdp`.
    """

    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"
    tp = "tp"
    fsdp_tp = "fsdp_tp"

    @property
    def shards(self) -> bool:
        """Whether ranks with different batches keep a part of every parameter each."""
        return self in (ParallelMode.fsdp, ParallelMode.fsdp_tp)

    @property
    def splits_layers(self) -> bool:
        """Whether a layer is computed by several ranks."""
        return self in (ParallelMode.tp, ParallelMode.fsdp_tp)


@dataclass
class ParallelConfig:
    """More than one GPU. Each is used by a process of its own, a rank.

    Attributes:
        mode: `none`, `ddp`, `fsdp`, `tp` or `fsdp_tp`.
        gpus: how many ranks are started, each on a GPU or, without GPUs, on the CPU; null is one for each GPU. Where a
            launcher such as torchrun starts them, it must be as many, or null.
        tp: over how many ranks each layer is split, with `fsdp_tp`; with `tp` these are all ranks, and it may be null.
        reshard_after_forward: with `fsdp` and `fsdp_tp`, give whole parameters of a layer back after its forward and
            collect them again for its backward; false keeps them in between, which takes memory for all layers.
    """

    mode: ParallelMode = ParallelMode.none
    gpus: int | None = None
    tp: int | None = None
    reshard_after_forward: bool = True


def check_parallel(parallel: ParallelConfig) -> None:
    """Raises ConfigError for numbers that cannot be, and settings that do nothing."""
    at_least("parallel", parallel, 1, "gpus")
    at_least("parallel", parallel, 2, "tp")
    mode = parallel.mode
    require(
        parallel.tp is None or mode.splits_layers,
        f"parallel.tp={parallel.tp} splits layers, and parallel={mode.value} does not; choose parallel=tp or "
        "parallel=fsdp_tp",
    )
    require(
        parallel.tp is not None or mode is not ParallelMode.fsdp_tp,
        "parallel=fsdp_tp has to be told over how many GPUs each layer is split, such as parallel.tp=2",
    )


def sizes(parallel: ParallelConfig, ranks: int) -> dict[str, int]:
    """How so many ranks are arranged: `dp` with different batches times `tp` that split each layer.

    Raises:
        ConfigError: they cannot be.
    """
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
