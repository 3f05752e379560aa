"""What a rank communicates, in terms that ranks can compare, and where they meet in a check: each tells the others its
collectives, and its messages to and from others.

What two ranks must do alike (`alike`) is less than what is told of each (`told`): NCCL and Gloo compare no shapes, only
elements, and in an all_to_all each rank may send other amounts.

They meet in the store of the program and not in a process group, where what one rank tells could be taken for what
another computes. Before a collective runs, its ranks make sure that all have come to the same one: it would hang
otherwise. In the end all know what each did.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from graphmod.check.order import Way
from graphmod.check.report import shortened
from graphmod.errors import GraphmodError
from graphmod.ranks.agreement import several_ranks
from graphmod.torch_private import ProcessGroup, default_store, group_named, groups_of_program
from graphmod.trace.lines import Lines, lines
from graphmod.trace.operations import reduction_of, tensors_in
from graphmod.words import ranks_in_words

_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall_base": "all_to_all_single",
    "alltoall": "all_to_all",
    "isend": "send",
    "irecv": "recv",
    "recv_any_source": "recv",
}
_OWN_AMOUNTS = ("all_to_all_single", "all_to_all")  # each rank may have its own
# Which argument has the same number of elements on all ranks; elsewhere it is the first.
_SAME_ON_ALL = {"gather": 1, "reduce_scatter": 1}


class Collective(NamedTuple):
    """One collective of one rank, or a message that it sends or receives."""

    name: str  # as in `torch.distributed`: `all_reduce`, `send`
    ranks: tuple[int, ...]  # those of its group
    nth: int  # which group of these ranks it is, in the order in which they were made
    alike: tuple  # what has to be the same on the other side
    told: str  # the same and more, in words
    location: str  # the line it comes from
    peer: int | None = None  # the other rank of a message; None in a collective, and where it may come from any
    tag: int = 0  # of a message
    call: int = 0  # of the callable that is checked, counted from 1

    @property
    def group(self) -> tuple:
        return self.ranks, self.nth

    @property
    def message(self) -> bool:
        """Whether two ranks alone take part in it."""
        return self.name in ("send", "recv")


def collectives_of(op: Any, args: tuple, kwargs: dict, lines: Lines) -> list[Collective]:
    """What a call of an operator of `torch.distributed` communicates."""
    given = dict(zip([one.name for one in op._schema.arguments], args, strict=False)) | kwargs
    name = op._schema.name.partition("::")[2].removesuffix("_out").removesuffix("_")
    ranks, nth = _group(given)
    location = _location(lines)
    if name == "batch_p2p_ops":
        messages = zip(given["op_list"], given["peer_list"], given["tag_list"], given["tensors"], strict=True)
        return [
            _message(_NAMES.get(kind, kind), ranks, nth, peer, tag, of, location) for kind, peer, tag, of in messages
        ]
    name = _NAMES.get(name, name)
    if name in ("send", "recv"):
        first = next(value for value in given.values() if any(True for _ in tensors_in((value,))))
        peer = given.get("dst", given.get("src"))
        return [_message(name, ranks, nth, peer, given.get("tag", 0), first, location)]
    return [_collective(name, ranks, nth, args, given, location)]


def objects_exchanged(name: str, ranks: tuple[int, ...], root: int | None, lines: Lines) -> Collective:
    """A collective of Python objects."""
    told = name if root is None else f"{name} of rank {root}"
    return Collective(name, ranks, 0, (name, root), told + _over(ranks, 0), _location(lines))


def _collective(name: str, ranks: tuple, nth: int, args: tuple, given: dict, location: str) -> Collective:
    how = _reduction(given.get("reduce_op"))
    root = given.get("root_rank", given.get("src"))
    told = f"{name} ({how})" if how else name
    if root is not None:
        told += f" {'to' if name in ('reduce', 'gather') else 'from'} rank {ranks[root]}"
    alike: tuple = (name, how, root)
    if "barrier" not in name:
        tensors = list(tensors_in((args[_SAME_ON_ALL.get(name, 0)],)))
        elements = None if name in _OWN_AMOUNTS else sum(one.numel() for one in tensors)
        alike += (elements, sorted({str(one.dtype) for one in tensors}))
        told += f" of {_described(tensors)}"
    return Collective(name, ranks, nth, alike, told + _over(ranks, nth), location)


def _message(
    name: str, ranks: tuple, nth: int, peer: int | None, tag: int, tensors: Tensor | list[Tensor], location: str
) -> Collective:
    tensors = list(tensors_in((tensors,)))
    other = None if peer is None else ranks[peer]
    where = "from any rank" if other is None else f"{'to' if name == 'send' else 'from'} rank {other}"
    told = f"{name} {where} of {_described(tensors)}" + (f" with tag {tag}" if tag else "") + _over(ranks, nth)
    alike = (sum(one.numel() for one in tensors), sorted({str(one.dtype) for one in tensors}))
    return Collective(name, ranks, nth, alike, told, location, other, tag)


def _group(given: dict) -> tuple[tuple[int, ...], int]:
    """The ranks of the group of a collective, and how many groups of the same ranks were made before it.

    Groups are numbered and not named, because names count all groups that a rank has made, also those of its own.
    """
    group = next(value for key, value in given.items() if key in ("process_group", "group_name"))
    if isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    name: Any = group if isinstance(group, str) else group.group_name
    ranks = tuple(distributed.get_process_group_ranks(group_named(name)))
    return ranks, [one.group_name for one in _groups_of(ranks)].index(name)


def _groups_of(ranks: tuple[int, ...]) -> Iterator[Any]:
    for one, members in groups_of_program.pg_group_ranks.items():
        if tuple(sorted(members, key=members.__getitem__)) == ranks:
            yield one


def _reduction(given: Any) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    number = reduction_of(given)
    if number is None:
        return "a reduction"
    return distributed.ReduceOp.RedOpType(number).name.lower()


def _described(tensors: list[Tensor]) -> str:
    """`(16, 16) float32`, `a float32 scalar`, or `4 tensors, 1,024 elements, float32`."""
    types = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in tensors}))
    if len(tensors) == 1:
        return f"{tuple(tensors[0].shape)} {types}" if tensors[0].dim() else f"a {types} scalar"
    return f"{len(tensors)} tensors, {sum(one.numel() for one in tensors):,} elements, {types}"


def _over(ranks: tuple[int, ...], nth: int) -> str:
    """Of a group that is not the whole program, its ranks."""
    if len(ranks) == distributed.get_world_size() and not nth:
        return ""
    return f" over {ranks_in_words(ranks)}" + (f" (group {nth + 1} of these ranks)" if nth else "")


def _location(lines: Lines) -> str:
    """The line of the user's, or else that of the library."""
    return shortened((lines if lines.user is None else lines._replace(library=None)).location)


_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two looks at the store


class RanksMissing(GraphmodError, RuntimeError):
    """Ranks did not come to a check that others make; the message says where they were seen last."""


class Parted(BaseException):
    """Ends a call in which this rank would wait for others for ever. No `Exception`, which code may catch."""


class Meeting:
    """Where all ranks of a program meet in one check. A rank waits so many seconds for others; with `waits` each
    collective waits for all of its ranks, which those need not that do not really run."""

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
        """Takes in that an operator of `torch.distributed` is about to run. Raises Parted where other ranks do not come
        to the same."""
        for one in collectives_of(op, args, kwargs, lines()):
            self.note(one)
            if self._waits and not one.message:
                self._together(one)

    def note(self, one: Collective) -> None:
        """Takes in what comes next."""
        self._steps.append(one._replace(call=self._call))
        self._store.set(f"at/{self.rank}", f"{one.told} at {one.location}")

    def _together(self, one: Collective) -> None:
        alike = (self._call, one.alike)
        if any(other != alike for other in self.exchange(alike, one.ranks, one.group).values()):
            self._stopped = True
            raise Parted

    def exchange(self, value: Any, ranks: Iterable[int], group: Any) -> dict[int, Any]:
        """What each rank of a group, in its order, has put there as this one puts `value`. Raises Parted where one has
        come to the end of its call instead."""
        self._counts[group] += 1
        name = f"{group}/{self._counts[group]}"
        self._store.set(f"{name}/{self.rank}", pickle.dumps(value))
        if not self._come(name, ranks):
            self._stopped = True
            raise Parted
        return dict(zip(ranks, self._read(name, ranks), strict=True))

    def finish(self, error: BaseException | None = None) -> list[Way]:
        """Ends this rank's part, with what its call has raised, and waits for the others. Returns what each rank did.
        Raises RanksMissing where some did not come."""
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
        here = f"{self._steps[-1].told} at {self._steps[-1].location}" if self._steps else "an exchange of objects"
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
