"""Where the ranks of a program meet in a check: each tells the others what it communicates.

They meet in the store of the program and not in a process group, where what one rank tells could be taken for what
another computes. Before a collective runs, its ranks make sure that all have come to the same one: it would hang
otherwise. In the end all know what each did.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import distributed

from graphmod.check.collectives import Collective, collectives_of
from graphmod.check.order import Way
from graphmod.errors import GraphmodError
from graphmod.ranks.agreement import several_ranks
from graphmod.torch_private import default_store
from graphmod.trace.lines import lines
from graphmod.words import ranks_in_words

_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two looks at the store


class RanksMissing(GraphmodError, RuntimeError):
    """Ranks did not come to a check that others make; the message says where they were seen last."""


class Parted(BaseException):
    """Ends a call in which this rank would wait for others for ever. No `Exception`, which code may catch."""


class Meeting:
    """Of all ranks of a program, in one check.

    Args:
        store: that all of them use.
        rank, ranks: this one, and how many there are.
        timeout: seconds to wait for others.
        waits: whether a collective waits for all of its ranks; not where none really runs.
    """

    def __init__(self, store: Any, rank: int, ranks: int, timeout: float, waits: bool) -> None:
        self.rank, self.ranks, self._timeout, self._waits = rank, ranks, timeout, waits
        number = store.add(f"graphmod/check/{rank}", 1)  # ranks make their checks in the same order
        self._store: Any = distributed.PrefixStore(f"graphmod/check/{number}/", store)
        self._steps: list[Collective] = []
        self._counts: Counter = Counter()
        self._stopped = False
        self._call = 0

    def begin_call(self) -> None:
        """Takes in that the callable which is checked is about to be called."""
        self._call += 1

    def before(self, op: Any, args: tuple, kwargs: dict) -> None:
        """Takes in that an operator of `torch.distributed` is about to run.

        Raises:
            Parted: other ranks do not come to the same.
        """
        for one in collectives_of(op, args, kwargs, lines()):
            self.note(one)
            if self._waits and not one.message:
                self._together(one)

    def note(self, one: Collective) -> None:
        """Takes in what comes next."""
        self._steps.append(one._replace(call=self._call))
        self._store.set(f"at/{self.rank}", f"{one.told} at {one.place}")

    def _together(self, one: Collective) -> None:
        alike = (self._call, one.alike)
        if any(other != alike for other in self.exchange(alike, one.ranks, one.group).values()):
            self._stopped = True
            raise Parted

    def exchange(self, value: Any, ranks: Iterable[int], group: Any) -> dict[int, Any]:
        """What each rank of a group, in its order, has put there as this one puts `value`.

        Raises:
            Parted: one has come to the end of its call instead.
        """
        self._counts[group] += 1
        name = f"{group}/{self._counts[group]}"
        self._store.set(f"{name}/{self.rank}", pickle.dumps(value))
        if not self._come(name, ranks):
            self._stopped = True
            raise Parted
        return dict(zip(ranks, self._read(name, ranks), strict=True))

    def finish(self, error: BaseException | None = None) -> list[Way]:
        """Ends this rank's part, and waits for the others.

        Args:
            error: what the call has raised.

        Returns:
            What each rank did.

        Raises:
            RanksMissing: some did not come.
        """
        said = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
        self._store.set(f"end/{self.rank}", pickle.dumps(Way(self.rank, self._steps, self._stopped, said, self._call)))
        if error is not None:
            return []
        self._come("end", range(self.ranks))
        return self._read("end", range(self.ranks))

    def _read(self, name: str, ranks: Iterable[int]) -> list[Any]:
        return [pickle.loads(self._store.get(f"{name}/{rank}")) for rank in ranks]

    def _come(self, name: str, ranks: Iterable[int]) -> bool:
        """Waits for ranks to put something under a name; false where one has come to its end without."""
        missing, pause = list(ranks), _SHORTEST
        until = time.monotonic() + self._timeout
        while True:
            # Who has ended puts nothing more: so it is asked before what is put.
            ended = [] if name == "end" else [rank for rank in missing if self._store.check([f"end/{rank}"])]
            missing = [rank for rank in missing if not self._store.check([f"{name}/{rank}"])]
            if not missing:
                return True
            if set(ended) & set(missing):
                return False
            if time.monotonic() > until:
                raise RanksMissing(self._where(name, missing))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _where(self, name: str, missing: list[int]) -> str:
        here = f"{self._steps[-1].told} at {self._steps[-1].place}" if self._steps else "an exchange of objects"
        awaited = "at the end of the check" if name == "end" else f"in {here}"
        seen = []
        for rank in missing:
            at = f"at/{rank}"
            came = f"came last to {self._store.get(at).decode()}" if self._store.check([at]) else "came to none before"
            seen.append(f"rank {rank} {came}")
        return (
            f"rank {self.rank} waited {self._timeout:g} s {awaited} for {ranks_in_words(missing)} "
            f"({'; '.join(seen)}); all ranks have to make the same check"
        )


def meeting_of_ranks(timeout: float) -> Meeting | None:
    """That of the program in which this process is one of several ranks; None where it is not."""
    if not timeout or not several_ranks():
        return None
    store = default_store()
    return Meeting(store, distributed.get_rank(), distributed.get_world_size(), timeout, waits=True)
