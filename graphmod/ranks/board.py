"""What processes tell each other through the store of their program, without a process group of its own: such groups
are numbered, and a rank that is in fewer of them than another would wait for the wrong name.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d


class LateRanks(RuntimeError):
    """Some ranks did not come to a vote in time, or their last one was interrupted."""


class Board:
    """A place where each of some ranks puts something for the others. All have to come to each exchange.

    Args:
        ranks: of the whole program.
        timeout: seconds to wait for the others.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self._ranks, self._timeout, self._count = ranks, timedelta(seconds=timeout), 0
        self._me = ranks.index(distributed.get_rank())
        store = distributed_c10d._get_default_store()
        self.store = distributed.PrefixStore(_next(store, "boards", ranks), store)

    def exchange(self, value: Any) -> list[Any]:
        """What each rank has put there.

        Raises:
            LateRanks: one did not.
        """
        self._count += 1
        self.store.set(f"{self._count}/{self._me}", pickle.dumps(value))
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
    store, me = distributed_c10d._get_default_store(), distributed.get_rank()
    mine = {ranks: _next(store, "groups", ranks) for ranks in groups}
    for place in mine.values():
        store.set(f"{place}/{me}", pickle.dumps(mine))
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
