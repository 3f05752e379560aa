"""What all ranks of a program do alike: a call in which they communicate is a replay on all of them, or on none.

Whether a collective is captured has to be the same on all its ranks (NCCL's user guide, "Using NCCL with CUDA Graphs"),
and a rank that stays behind would leave the others waiting. So each call of a callable that communicates holds one
vote, on the host: after a rank has found what it would do, and before anything is launched that others see. One that
captures votes again before the first launch. Calls that do not communicate hold none.

Who votes: all ranks that are reached from one another through the process groups in which such calls have communicated.
A rank begins alone. One whose last call communicated with ranks that do not vote with it says so in the next vote, and
all then find out together who votes from there on (`connected`). So groups may overlap in any way, as in a pipeline,
and others may come later.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import pickle
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import distributed

from graphmod.torch_private import default_store, groups_of_program

_FAILED, _WORKED = 8, 9  # votes after captures, which cannot be taken for others
_TIMEOUT = 1800.0  # seconds, as long as Gloo waits
_ballots: weakref.WeakKeyDictionary[Any, dict[tuple, Ballot]] = weakref.WeakKeyDictionary()
_frees: list[weakref.WeakMethod] = []


class Choice(IntEnum):
    """What a rank would do with a call; the least of all is done. Those that `meet` then vote once more."""

    meet = 0
    eager = 1
    capture = 2
    replay = 3


def several_ranks() -> bool:
    """Whether this process is one of several of a distributed program. Those of a `fake` group are not there."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() < 2:
        return False
    return distributed.get_backend() != "fake"


def communicated() -> dict[Any, int]:
    """How many collectives each process group has seen so far."""
    groups: Iterable[Any] = groups_of_program.pg_map
    return {group: group._get_sequence_number_for_group() for group in groups}


class Agreement:
    """The votes of one callable.

    Attributes:
        is_open: whether the vote of this call is still to come.
        why: the last vote was for an eager call, for this reason, though this rank had another choice.
        lasts: and a rank will always vote so.
    """

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = (distributed.get_rank(),)
        self._ballot: Ballot | None = None  # of these ranks, where they are several
        self._others: set[tuple[int, ...]] = set()  # groups with ranks that do not vote yet
        self.is_open = False
        self._captures = False
        self.why, self.lasts = "", False

    def learn(self, groups: Iterable[Any]) -> None:
        """A call has communicated in these process groups."""
        ranks = (tuple(distributed.get_process_group_ranks(group)) for group in groups)
        self._others.update(one for one in ranks if not set(one) <= set(self._ranks))

    def begin(self) -> None:
        """A call begins, in which nobody has voted yet."""
        self.is_open, self._captures, self.why, self.lasts = True, False, "", False

    def choose(self, choice: Choice, why: str = "", lasts: bool = False) -> bool:
        """Votes, if the call has not; waits for all others.

        Args:
            why: for an eager call, what others are told.
            lasts: it will be eager from now on.

        Returns:
            Whether all ranks replay or capture. Where some capture, they have.
        """
        if not self.is_open:
            return False
        self.is_open = False
        least, most = self._votes(Choice.meet if self._others else choice, tuple(Choice))
        if least == Choice.meet:
            self._meet()
            least, most = self._votes(choice, tuple(Choice))
        if self._ballot is not None and least == Choice.eager and most != Choice.eager:
            self._explain(self._ballot, choice, why, lasts)
        self._captures = least == Choice.capture
        if choice is Choice.replay and self._captures:
            return self.captured(True)
        return least != Choice.eager

    def captured(self, worked: bool) -> bool:
        """Votes after the captures of a call, if there are any and it has not; whether they worked on all ranks."""
        if not self._captures:
            return worked
        self._captures = False
        return self._votes(_WORKED if worked else _FAILED, (_FAILED, _WORKED))[0] == _WORKED

    def _votes(self, choice: int, of: tuple) -> tuple[int, int]:
        least, most = (choice, choice) if self._ballot is None else self._ballot.vote(choice)
        if not (of[0] <= least and most <= of[-1]):
            raise LateRanks("ranks are at different calls, after one was interrupted")
        return least, most

    def _meet(self) -> None:
        self._ranks, self._others = connected({self._ranks, *self._others}, _TIMEOUT), set()
        known = _ballots.setdefault(distributed.group.WORLD, {})
        if self._ranks not in known:
            known[self._ranks] = Ballot(self._ranks, _TIMEOUT)
        self._ballot = known[self._ranks]

    def _explain(self, ballot: Ballot, choice: Choice, why: str, lasts: bool) -> None:
        said = ballot.board.exchange((distributed.get_rank(), int(choice), why, lasts))
        others = [one for one in said if one[1] == Choice.eager]
        if choice is not Choice.eager:
            rank, _, reason, _ = min(others, key=lambda one: (not one[3], one[0]))
            self.why = reason if reason.startswith("rank ") else f"rank {rank} does" + (f": {reason}" if reason else "")
        self.lasts = any(one[3] for one in others)


def free_before_destruction(free: Callable[[Any], None]) -> None:
    """Calls a method with each process group that is about to be destroyed, as long as the object lives. Graphs with
    collectives are freed by then: to shut a group of NCCL's down waits for them."""
    _frees[:] = [known for known in _frees if known() is not None]
    if not any(known() == free for known in _frees):
        _frees.append(weakref.WeakMethod(free))
    # All ways to destroy a group lead here, under whatever name a program has imported them.
    original = distributed.ProcessGroup.shutdown
    if not hasattr(original, "_graphmod_frees"):
        distributed.ProcessGroup.shutdown = _freeing(original)


def _freeing(original: Callable) -> Callable:
    @functools.wraps(original)
    def shutdown(group: Any) -> Any:
        frees = [free for known in _frees if (free := known()) is not None]
        for free in frees:
            free(group)
        if frees:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # CUDA tells NCCL of a graph's end in a thread of its own
        return original(group)

    vars(shutdown)["_graphmod_frees"] = True
    return shutdown


# -- votes -------------------------------------------------------------------------------------------------------------


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

    They go through memory that the ranks of one machine share, and through Gloo between machines. Where all have come,
    that takes some microseconds, which is why it is not left to a collective alone: one of Gloo's takes a hundred.

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
            both, options = torch.tensor([least, -most]), distributed.AllreduceOptions()
            options.reduceOp = distributed.ReduceOp.MIN
            try:
                self._leaders.allreduce([both], options).wait()
            except RuntimeError as error:
                raise LateRanks(f"the machines of this program could not vote: {error}") from error
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
