"""Votes of processes, on the host: through memory that those of one machine share, and through Gloo between machines.

A vote takes some microseconds where all have come, which is why it is not left to a collective alone: one of Gloo's
takes a hundred.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import time
from typing import Any

import torch
from torch import distributed

_SPINS = 2_000  # looks before a process sleeps in between
_SLEEP = 50e-6
_WORD = 8


class LateRanks(RuntimeError):
    """Some ranks did not come to a vote in time."""


class Ballot:
    """Votes with small numbers, of all ranks of a group; each has to take part in each of them, in the same order.

    Args:
        group: a process group for tensors on the CPU.
        timeout: seconds to wait for the others.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self._group, self._timeout = group, timeout
        self._count = 0
        rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
        hosts: list[Any] = [None] * ranks
        distributed.all_gather_object(hosts, (socket.gethostname(), _boot()), group=group)
        self._here = [other for other in range(ranks) if hosts[other] == hosts[rank]]
        self._position = self._here.index(rank)
        leaders = sorted({hosts.index(host) for host in hosts})
        self._leaders: Any = None
        if len(leaders) > 1:
            names = [distributed.get_global_rank(group, leader) for leader in leaders]
            if rank in leaders:
                self._leaders = distributed.new_group(names, backend="gloo", use_local_synchronization=True)
        self._several = len(leaders) > 1
        self._words = self._share(rank, hosts)

    def _share(self, rank: int, hosts: list[Any]) -> memoryview:
        """Memory of all ranks of this machine: for each of two votes in turn, a word of each rank, and the result."""
        size = 2 * (len(self._here) + 1) * _WORD
        file, path = None, None
        if self._position == 0:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            file, path = tempfile.mkstemp(prefix="graphmod-vote-", dir=folder)
            os.ftruncate(file, size)
        paths: list[Any] = [None] * len(hosts)
        distributed.all_gather_object(paths, path, group=self._group)
        if file is None:
            file = os.open(paths[self._here[0]], os.O_RDWR)
        memory = mmap.mmap(file, size)
        os.close(file)
        distributed.barrier(self._group)
        if path is not None:
            os.unlink(path)
        return memoryview(memory).cast("q")

    def vote(self, choice: int) -> tuple[int, int]:
        """The least and the greatest choice, each of 0 to 15, of all ranks.

        Raises:
            LateRanks: naming them.
        """
        self._count += 1
        # A rank may be one vote ahead of those that still read the last one, and no more: two sets of words do.
        base = (self._count % 2) * (len(self._here) + 1)
        self._words[base + self._position] = self._count << 8 | choice << 4 | choice
        if self._position and self._several:
            return self._read([base + len(self._here)], "the first rank of this machine")[0]
        found = self._read(range(base, base + len(self._here)))
        least, most = min(low for low, _ in found), max(high for _, high in found)
        if self._several:
            both = torch.tensor([least, -most])
            distributed.all_reduce(both, distributed.ReduceOp.MIN, group=self._leaders)
            least, most = int(both[0]), -int(both[1])
            self._words[base + len(self._here)] = self._count << 8 | least << 4 | most
        return least, most

    def _read(self, places: Any, who: str = "") -> list[tuple[int, int]]:
        """What lies at these places, once it is of this vote."""
        words, count, looks, began = self._words, self._count, 0, 0.0
        for place in places:
            while words[place] >> 8 != count:
                looks += 1
                if looks > _SPINS:
                    began = began or time.monotonic()
                    if time.monotonic() - began > self._timeout:
                        raise LateRanks(self._late(places, who))
                    time.sleep(_SLEEP)
        return [(words[place] >> 4 & 15, words[place] & 15) for place in places]

    def _late(self, places: Any, who: str) -> str:
        base = (self._count % 2) * (len(self._here) + 1)
        late = [self._here[place - base] for place in places if place - base < len(self._here)]
        late = [rank for rank in late if self._words[base + self._here.index(rank)] >> 8 != self._count]
        named = who or f"rank {', '.join(map(str, late))}"
        return f"waited {self._timeout:.0f} s for {named}, which did not make this call, or has ended"


def _boot() -> str:
    """What tells machines of one name apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
