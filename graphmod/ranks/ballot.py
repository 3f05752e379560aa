"""Votes of processes, on the host: through memory that those of one machine share, and through Gloo between machines.

A vote takes some microseconds where all have come, which is why it is not left to a collective alone: one of Gloo's
takes a hundred.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from graphmod.torch_private import default_store


class LateRanks(RuntimeError):
    """Some ranks did not come to a vote in time, or their last one was interrupted."""


class Board:
    """A place in the program's store where each of some ranks puts something for the others. All have to come to each
    exchange. No process group of its own: such groups are numbered, and a rank that is in fewer of them than another
    would wait for the wrong name.

    Args:
        ranks: of the whole program.
        timeout: seconds to wait for the others.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self._ranks, self._timeout, self._count = ranks, timedelta(seconds=timeout), 0
        self._me = ranks.index(distributed.get_rank())
        store = default_store()
        self.store = distributed.PrefixStore(_next(store, "boards", ranks), store)

    def exchange(self, value: Any) -> list[Any]:
        """What each rank has put there.

        Raises:
            LateRanks: one did not.
        """
        self._count += 1
        _write(self.store, f"{self._count}/{self._me}", value)
        keys = {rank: f"{self._count}/{place}" for place, rank in enumerate(self._ranks)}
        return _read(self.store, keys, self._timeout)


def connected(groups: Iterable[tuple[int, ...]], timeout: float) -> tuple[int, ...]:
    """All ranks that are reached from this one through groups: those of these groups, of the groups that their members
    name in turn, and so on. Each member of a group has to name it.

    Each tells what it knows before it waits for any, and to all alike; so no order of groups can make ranks wait for
    each other.

    Args:
        groups: the ranks of each.
        timeout: seconds to wait for the others.

    Raises:
        LateRanks: some said nothing.
    """
    store, me = default_store(), distributed.get_rank()
    mine = {ranks: _next(store, "groups", ranks) for ranks in groups}
    for place in mine.values():
        _write(store, f"{place}/{me}", mine)
    known: dict[tuple[int, ...], str] = {}
    found = dict(mine)
    while found:
        ranks, place = found.popitem()
        known[ranks] = place
        for told in _read(store, {rank: f"{place}/{rank}" for rank in ranks}, timedelta(seconds=timeout)):
            found.update((one, where) for one, where in told.items() if one not in known)
    return tuple(sorted(set().union(*known)))


def _next(store: Any, what: str, ranks: Sequence[int]) -> str:
    """A name that these ranks share, and that was not used before: each of them asks for it once. That of the ranks
    alone would be used again in a program that makes its process groups anew."""
    name = f"graphmod/{what}/{'-'.join(map(str, ranks))}"
    return f"{name}/{(store.add(name, 1) - 1) // len(ranks)}"


def _write(store: Any, key: str, value: Any) -> None:
    """Puts something there, as bytes, of which the stub of a store says nothing."""
    store.set(key, pickle.dumps(value))


def _read(store: Any, keys: dict[int, str], timeout: timedelta) -> list[Any]:
    """What each rank has put there under its key.

    Raises:
        LateRanks: naming those that have put nothing there in time.
    """
    try:
        store.wait(list(keys.values()), timeout)
        return [pickle.loads(store.get(key)) for key in keys.values()]
    except (RuntimeError, ConnectionError) as error:
        silent = list(keys)
        with contextlib.suppress(RuntimeError, ConnectionError):
            silent = [rank for rank, key in keys.items() if not store.check([key])]
        raise LateRanks(f"ranks {list(keys)} meet, and nothing came from {silent}: {error}") from error


_SPINS = 2_000  # looks before a process sleeps in between
_SLEEP = 50e-6
_WORD = 8


class Ballot:
    """Votes with small numbers, of some ranks; each has to take part in each of them, in the same order.

    Args:
        ranks: of the whole program, those that vote.
        timeout: seconds to wait for the others.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        rank = ranks.index(distributed.get_rank())
        self._timeout, self._count, self._broken = timeout, 0, ""
        self.board = Board(ranks, timeout)
        told = self.board.exchange((socket.gethostname(), _boot(), os.getpid()))
        hosts = [one[:2] for one in told]
        self._here = [other for other in range(len(ranks)) if hosts[other] == hosts[rank]]
        self._names = [ranks[other] for other in self._here]
        self._processes = [told[other][2] for other in self._here]
        self._position = self._here.index(rank)
        leaders = sorted({hosts.index(host) for host in hosts})
        self._several = len(leaders) > 1
        self._leaders: Any = None  # a process group of Gloo, whose stub lacks what it does
        if self._several and rank in leaders:
            store = distributed.PrefixStore("leaders", self.board.store)
            patience = timedelta(seconds=timeout)
            self._leaders = distributed.ProcessGroupGloo(store, leaders.index(rank), len(leaders), patience)
        self._words = self._share()

    def _share(self) -> memoryview:
        """Memory of all ranks of this machine: for each of two votes in turn, a word of each rank, and the result."""
        size = 2 * (len(self._here) + 1) * _WORD
        file, path = None, None
        if self._position == 0:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            file, path = tempfile.mkstemp(prefix="graphmod-vote-", dir=folder)
            os.ftruncate(file, size)
        path = self.board.exchange(path)[self._here[0]]
        why = None
        try:
            file = os.open(path, os.O_RDWR) if file is None else file
            memory = mmap.mmap(file, size)
            os.close(file)
        except OSError as error:
            why = f"{path}: {error}"
        missing = [one for one in self.board.exchange(why) if one is not None]
        if self._position == 0:
            os.unlink(path)
        if missing:
            raise LateRanks(f"ranks of one machine do not share its memory: {missing[0]}")
        return memoryview(memory).cast("q")

    def vote(self, choice: int) -> tuple[int, int]:
        """The least and the greatest choice, each of 0 to 15, of all ranks.

        Raises:
            LateRanks: naming those that did not come in time, or whose process has ended; or that a vote before was
                interrupted, so that nobody knows what the others think.
        """
        if self._broken:
            raise LateRanks(self._broken)
        try:
            return self._vote(choice)
        except BaseException as error:
            self._broken = f"the vote before was interrupted: {type(error).__name__}: {error}"
            raise

    def _vote(self, choice: int) -> tuple[int, int]:
        self._count += 1
        # A rank may be one vote ahead of those that still read the last one, and no more: two sets of words do.
        base = (self._count % 2) * (len(self._here) + 1)
        self._words[base + self._position] = self._count << 8 | choice << 4 | choice
        if self._position and self._several:
            return self._read([base + len(self._here)], "the first rank of this machine")[0]
        found = self._read(range(base, base + len(self._here)))
        least, most = min(low for low, _ in found), max(high for _, high in found)
        if self._several:
            least, most = self._of_all_machines(torch.tensor([least, -most]))
            self._words[base + len(self._here)] = self._count << 8 | least << 4 | most
        return least, most

    def _of_all_machines(self, both: torch.Tensor) -> tuple[int, int]:
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MIN
        try:
            self._leaders.allreduce([both], options).wait()
        except RuntimeError as error:
            raise LateRanks(f"the machines of this program could not vote: {error}") from error
        return int(both[0]), -int(both[1])

    def _read(self, places: Any, who: str = "") -> list[tuple[int, int]]:
        """What lies at these places, once it is of this vote."""
        words, count, looks, began = self._words, self._count, 0, 0.0
        for place in places:
            while words[place] >> 8 != count:
                looks += 1
                if looks > _SPINS:
                    began = began or time.monotonic()
                    late = looks % _SPINS == 0 and self._late(places)
                    if late and (gone := [index for index in late if _has_ended(self._processes[index])]):
                        raise LateRanks(f"{self._named(gone)} has ended, and did not make this call")
                    if late and time.monotonic() - began > self._timeout:
                        named = who or self._named(late)
                        raise LateRanks(
                            f"waited {self._timeout:.0f} s for {named}, which did not make this call, or has ended"
                        )
                    time.sleep(_SLEEP)
        return [(words[place] >> 4 & 15, words[place] & 15) for place in places]

    def _late(self, places: Any) -> list[int]:
        """Which of this machine's ranks have not written what is to be there; the first writes the result."""
        base = (self._count % 2) * (len(self._here) + 1)
        return [(place - base) % len(self._here) for place in places if self._words[place] >> 8 != self._count]

    def _named(self, late: list[int]) -> str:
        return f"rank {', '.join(str(self._names[index]) for index in late)}"


def _boot() -> str:
    """What tells machines of one name apart, and containers whose processes have numbers of their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _has_ended(process: int) -> bool:
    """Whether a process of this machine is no more; False where that cannot be told."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return os.path.isdir("/proc/self")
    except OSError:
        return False
