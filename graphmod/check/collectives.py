"""What a rank communicates: each collective, and each message to or from another rank, in terms that ranks can compare.

What two ranks must do alike (`alike`) is less than what is told of each (`told`): NCCL and Gloo compare no shapes, only
elements, and in an all_to_all each rank may send other amounts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from graphmod.check.report import shortened
from graphmod.torch_private import ProcessGroup, group_named, groups_of_program
from graphmod.trace.lines import Lines
from graphmod.trace.operations import reduction_of
from graphmod.trace.tensors import tensors_in
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
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_OWN_AMOUNTS = ("all_to_all_single", "all_to_all")  # each rank may have its own
# Which argument has the same number of elements on all ranks; elsewhere it is the first.
_SAME_ON_ALL = {"gather": 1, "reduce_scatter": 1}


class Collective(NamedTuple):
    """One collective of one rank, or a message that it sends or receives.

    Attributes:
        name: as in `torch.distributed`: `all_reduce`, `send`.
        ranks: those of its group.
        nth: which group of these ranks it is, in the order in which they were made.
        alike: what has to be the same on the other side.
        told: the same and more, in words.
        place: the line it comes from.
        peer: the other rank of a message; None in a collective, and where it may come from any.
        tag: of a message.
        call: of the callable that is checked, counted from 1.
    """

    name: str
    ranks: tuple[int, ...]
    nth: int
    alike: tuple
    told: str
    place: str
    peer: int | None = None
    tag: int = 0
    call: int = 0

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
    place = _place(lines)
    if name == "batch_p2p_ops":
        messages = zip(given["op_list"], given["peer_list"], given["tag_list"], given["tensors"], strict=True)
        return [_message(_NAMES.get(kind, kind), ranks, nth, peer, tag, of, place) for kind, peer, tag, of in messages]
    name = _NAMES.get(name, name)
    if name in ("send", "recv"):
        first = next(value for value in given.values() if any(True for _ in tensors_in((value,))))
        peer = given.get("dst", given.get("src"))
        return [_message(name, ranks, nth, peer, given.get("tag", 0), first, place)]
    return [_collective(name, ranks, nth, args, given, place)]


def objects_exchanged(name: str, ranks: tuple[int, ...], root: int | None, lines: Lines) -> Collective:
    """A collective of Python objects."""
    told = name if root is None else f"{name} of rank {root}"
    return Collective(name, ranks, 0, (name, root), told + _over(ranks, 0), _place(lines))


def _collective(name: str, ranks: tuple, nth: int, args: tuple, given: dict, place: str) -> Collective:
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
    return Collective(name, ranks, nth, alike, told + _over(ranks, nth), place)


def _message(
    name: str, ranks: tuple, nth: int, peer: int | None, tag: int, tensors: Tensor | list[Tensor], place: str
) -> Collective:
    tensors = list(tensors_in((tensors,)))
    other = None if peer is None else ranks[peer]
    where = "from any rank" if other is None else f"{'to' if name == 'send' else 'from'} rank {other}"
    told = f"{name} {where} of {_described(tensors)}" + (f" with tag {tag}" if tag else "") + _over(ranks, nth)
    alike = (sum(one.numel() for one in tensors), sorted({str(one.dtype) for one in tensors}))
    return Collective(name, ranks, nth, alike, told, place, other, tag)


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
    return _REDUCTIONS[number] if number < len(_REDUCTIONS) else str(number)


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


def _place(lines: Lines) -> str:
    if lines.user is not None:
        return shortened(lines.user) + (" (in the backward pass)" if lines.backward else "")
    where = "the backward pass" if lines.backward else "the call"
    return where if lines.library is None else f"{where}, by way of {shortened(lines.library)}"
