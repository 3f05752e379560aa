"""What processes tell each other through the store of their program, without a process group of its own: such groups
are numbered, and a rank that is in fewer of them than another would wait for the wrong name.
"""

from __future__ import annotations

import pickle
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

    def __init__(self, ranks: list[int], timeout: float) -> None:
        self._ranks, self._timeout, self._count = ranks, timedelta(seconds=timeout), 0
        self._me = ranks.index(distributed.get_rank())
        store = distributed_c10d._get_default_store()
        name = f"graphmod/{'-'.join(map(str, ranks))}"
        # Boards of the same ranks follow each other, also in a program that makes its process groups anew.
        number = (store.add(f"{name}/boards", 1) - 1) // len(ranks)
        self.store = distributed.PrefixStore(f"{name}/{number}", store)

    def exchange(self, value: Any) -> list[Any]:
        """What each rank has put there.

        Raises:
            LateRanks: one did not.
        """
        self._count += 1
        self.store.set(f"{self._count}/{self._me}", pickle.dumps(value))
        keys = [f"{self._count}/{rank}" for rank in range(len(self._ranks))]
        try:
            self.store.wait(keys, self._timeout)
            return [pickle.loads(self.store.get(key)) for key in keys]
        except (RuntimeError, ConnectionError) as error:
            raise LateRanks(f"ranks {self._ranks} could not tell each other what they do: {error}") from error
