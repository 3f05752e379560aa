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

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import torch
from torch import distributed

from graphmod.ranks.ballot import Ballot, LateRanks, connected
from graphmod.torch_private import groups_of_program

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
