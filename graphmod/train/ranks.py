"""The ranks of a run: processes that train one model together, each on a GPU of its own.

A launcher (torchrun, or `cli/launch.py`) says in the environment how many there are and which one this is. The
first one speaks and writes for all.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from graphmod.errors import ConfigError
from graphmod.ranks.agreement import Ballot
from graphmod.train.device import pick_device
from graphmod.train.settings import DeviceName, ParallelConfig, ParallelMode, RunConfig, sizes
from graphmod.words import counted

T = TypeVar("T")
# One rank may save a large checkpoint, or tokenize, while the others wait.
_PATIENCE = timedelta(hours=2)
_TOLD = ("RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """One process and those it trains with; by default there are none."""

    rank: int = 0  # which one this is, from 0
    count: int = 1  # how many there are
    group: Any = None  # for tensors on the device of the run; None where this is the only one
    host: Any = None  # the group for what the host says, and for tensors on the CPU
    _ballot: Any = None
    # How they are arranged where each holds a part only of the model: `dp` for those with different batches, `tp` for
    # those that compute each batch together, without what is 1; None where each has all of it.
    mesh: Any = None

    def _size(self, name: str) -> int:
        return self.mesh[name].size() if name in (self.mesh.mesh_dim_names or ()) else 1

    @property
    def data_ranks(self) -> int:
        """How many have different batches."""
        return self.count if self.mesh is None else self._size("dp")

    @property
    def data_rank(self) -> int:
        """Whose batches this one takes, from 0; those that compute together take the same."""
        return self.rank // (self.count // self.data_ranks)

    @property
    def data_group(self) -> Any:
        """Those with different batches, for tensors on the device of the run; None where all take the same."""
        if self.mesh is None:
            return self.group
        return self.mesh["dp"].get_group() if self.data_ranks > 1 else None

    def of_data(self, value: T) -> list[T]:
        """What each has that takes other batches, in their order."""
        return self.all(value)[:: self.count // self.data_ranks]

    @property
    def first(self) -> bool:
        """Whether this one speaks and writes."""
        return self.rank == 0

    def arrangement(self, mode: ParallelMode) -> str:
        """How many they are, and how they share the model, in words."""
        parts = 1 if self.mesh is None else self._size("tp")
        groups = "" if parts in (1, self.count) else f" ({self.data_ranks} groups of {parts})"
        return f"parallel={mode} on {counted(self.count, 'rank')}{groups}"

    def told(self, value: T) -> T:
        """What the first rank has; values must be of plain kinds."""
        box = [value]
        if self.count > 1:
            distributed.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    def all(self, value: T) -> list[T]:
        """What each rank has, in their order."""
        found = [value] * self.count
        if self.count > 1:
            distributed.all_gather_object(found, value, group=self.host)
        return found

    def most(self, number: int) -> int:
        """The greatest number of all ranks, each of 0 to 15; some microseconds, and no wait for a GPU."""
        return number if self._ballot is None else self._ballot.vote(number)[1]

    def wait(self) -> None:
        """Returns when all ranks are here."""
        if self.count > 1:
            distributed.barrier(self.host)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all with different batches, in place, on the device."""
        if self.data_ranks > 1:
            distributed.all_reduce(tensor, group=self.data_group)
        return tensor

    def arranged(self, parallel: ParallelConfig, device: torch.device) -> "Ranks":
        """These ranks with their mesh, where `parallel` takes one; all ranks have to call this. Raises ConfigError
        where so many cannot be arranged so."""
        if not parallel.mode.leaves_parts or self.count == 1:
            return self
        wanted = {name: size for name, size in sizes(parallel, self.count).items() if size > 1}
        mesh = init_device_mesh(device.type, tuple(wanted.values()), mesh_dim_names=tuple(wanted))
        if len(wanted) > 1:
            mesh._flatten()  # what is added up over both is then added up at once
        return replace(self, mesh=mesh)


ALONE = Ranks()


def ranks_of(config: RunConfig) -> int:
    """How many ranks a run has: those that a launcher has started, else as many as `parallel` asks for. Raises
    ConfigError where these do not agree, there are too few GPUs, or so many cannot be arranged as `parallel` asks."""
    started, wanted = int(os.environ.get("WORLD_SIZE") or 1), config.parallel.gpus
    count = wanted or started
    if config.parallel.mode is ParallelMode.none:
        if started > 1:
            raise ConfigError(
                f"WORLD_SIZE={started} asks for {started} processes that work together, and parallel=none trains in "
                "one; add parallel=ddp or another mode, start it without a launcher, or unset WORLD_SIZE"
            )
        count = 1
    elif started > 1:
        if count != started:
            raise ConfigError(
                f"parallel.gpus={wanted}, and a launcher has started {started} processes; leave parallel.gpus out"
            )
    elif pick_device(config.train.device).type == "cpu":
        if wanted is None:
            raise ConfigError(
                f"parallel={config.parallel.mode} starts a process for each GPU, and this run has none; say how "
                f"many processes are to share the CPU: parallel.gpus={2 * (config.parallel.tp or 1)}"
            )
    else:
        there = torch.cuda.device_count()
        if wanted is not None and wanted > there:
            raise ConfigError(f"parallel.gpus={wanted}, and PyTorch finds {there} on this machine")
        count = wanted or there
    sizes(config.parallel, count)
    return count


def own_seed(seed: int, rank: int, done: int) -> int:
    """What a rank's random numbers begin with that has no random state from before: another for each."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {rank} {done}".encode(), digest_size=7).digest(), "big")


def _own_gpu(wanted: DeviceName) -> torch.device | None:
    """The GPU of this rank, made current; None where the run is on the CPU."""
    if wanted is DeviceName.cpu or not torch.cuda.is_available():
        return None
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", place + 1))
    if here > count:
        raise ConfigError(
            f"{here} ranks were started on this machine, and PyTorch finds {count} GPUs; start as many ranks as there "
            f"are GPUs (torchrun --nproc-per-node {count}), or train.device=cpu"
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


@contextmanager
def joined(wanted: DeviceName) -> Iterator[Ranks]:
    """Joins the ranks that a launcher has started, and leaves them at the end; graphs must be gone by then. Raises
    ConfigError where there is no GPU for this rank, if one is wanted, or the environment does not say which one it
    is."""
    if missing := [name for name in _TOLD if not os.environ.get(name)]:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set and {', '.join(missing)} is not; start the ranks with "
            "torchrun, or unset WORLD_SIZE"
        )
    gpu = _own_gpu(wanted)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if gpu is None:
        distributed.init_process_group("gloo", timeout=_PATIENCE)
    else:
        distributed.init_process_group("nccl", device_id=gpu)
    try:
        # Of its own, so that what the host says never waits for what a device does.
        host = distributed.new_group(backend="gloo", timeout=_PATIENCE)
        yield Ranks(rank, count, distributed.group.WORLD, host, Ballot(range(count), _PATIENCE.total_seconds()))
    finally:
        distributed.destroy_process_group()
