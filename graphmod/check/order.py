"""Compares what ranks communicate, and finds where they diverge.

Collectives are followed as they would run: one is over when all ranks of its group have come to it, and each of them
then goes on to its next. Where nobody can go on, or ranks have come to different collectives of one group, they
diverge. Messages between two ranks may wait for each other in any order; each needs its counterpart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from graphmod.words import counted, ranks_in_words


@dataclass
class Way:
    """What one rank communicated, in order."""

    rank: int  # of the program
    steps: list  # its collectives and messages, of class `Collective`
    stopped: bool = False  # whether it was stopped before the last of them
    error: str = ""  # what its call raised; "" where that came to its end
    calls: int = 1  # how often it made its call, the last of which counts for the report

    @property
    def count(self) -> int:
        """How many collectives and messages its last call had."""
        return sum(one.call == self.calls for one in self.steps)


@dataclass
class Stand:
    """What some ranks do where they diverge from others.

    Attributes:
        ranks: of the program; all of them do the same.
        does: in words.
        location: the line that does it; "" where nothing is done.
        follow: how many collectives and messages come after it in the same call, on the first of these ranks; None
            where it was stopped.
    """

    ranks: list[int]
    does: str
    location: str = ""
    follow: int | None = None

    def describe(self) -> str:
        text = f"{ranks_in_words(self.ranks)}: {self.does}" + (f" at {self.location}" if self.location else "")
        return text + (f"; {self.follow:,} more {'follows' if self.follow == 1 else 'follow'}" if self.follow else "")


@dataclass
class Divergence:
    """A point where ranks would wait for each other for ever, or mistake each other's data.

    Attributes:
        after: how many collectives the first of the ranks did before, in the same call; None of a message.
        stands: what the ranks do there.
    """

    after: int | None
    stands: list[Stand]

    def describe(self) -> list[str]:
        """A line to begin with, and one for each stand."""
        begins = "A message has no counterpart" if self.after is None else "The ranks diverge"
        if self.after:
            begins += f" after {counted(self.after, 'collective')} in the same order"
        return [begins + ":", *(one.describe() for one in self.stands)]


def divergences(ways: Iterable[Way]) -> list[Divergence]:
    """Where ranks diverge in the first call in which they do: the first such point of their collectives, and each
    message without a counterpart."""
    ways = sorted(ways, key=lambda way: way.rank)
    for call in sorted({one.call for way in ways for one in way.steps}):
        # Apart for each call: what one rank does more at its end could pass for the beginning of the next.
        there = [
            replace(way, steps=[one for one in way.steps if one.call == call], error=way.error * (way.calls == call))
            for way in ways
        ]
        found = _of_collectives(there)
        # What a rank that was stopped would have sent is not known.
        stopped = any(way.stopped and way.calls == call for way in ways)
        found = ([] if found is None else [found]) + ([] if stopped else _of_messages(there))
        if found:
            return found
    return []


def _of_collectives(ways: list[Way]) -> Divergence | None:
    together = {way.rank: [one for one in way.steps if not one.message] for way in ways}
    done = dict.fromkeys(together, 0)

    def head(rank: int) -> Any:
        """The collective that a rank has come to; None where it has none left."""
        left = together.get(rank, ())
        return left[done[rank]] if done.get(rank, 0) < len(left) else None

    moving = True
    while moving:
        moving = False
        for rank in together:
            one = head(rank)
            there = [] if one is None else [head(member) for member in one.ranks]
            if not there or any(other is None or other.group != one.group for other in there):
                continue
            if any(other.alike != one.alike for other in there):
                return _divergence(ways, [*one.ranks], head, done)
            for member in one.ranks:
                done[member] += 1
            moving = True
    waits = next((rank for rank in together if head(rank) is not None), None)
    if waits is None:
        return None
    involved, new = set(), {waits}
    while new:  # those that it waits for, those that they wait for, ...
        involved |= new
        new = {member for rank in new if (one := head(rank)) is not None for member in one.ranks} - involved
    return _divergence(ways, sorted(involved), head, done)


def _divergence(ways: list[Way], ranks: list[int], head: Callable[[int], Any], done: dict[int, int]) -> Divergence:
    known = {way.rank: way for way in ways}
    stands: dict[tuple, Stand] = {}
    for rank in ranks:
        way, one = known.get(rank), head(rank)
        if way is None or one is None:
            stand = Stand([], _nothing(way))
        else:
            index = next(i for i, step in enumerate(way.steps) if step is one)
            stand = Stand([], one.told, one.location, None if way.stopped else len(way.steps) - index - 1)
        stands.setdefault((stand.does, stand.location), stand).ranks.append(rank)
    return Divergence(done[ranks[0]], list(stands.values()))


def _nothing(way: Way | None) -> str:
    if way is None:
        return "did not take part"
    if way.error:
        return f"raised {way.error}"
    return "ends here" if way.steps else "communicates nothing"


def _of_messages(ways: list[Way]) -> list[Divergence]:
    """Each first message of two ranks that has no counterpart."""
    sent, expected = defaultdict(list), defaultdict(list)
    for way in ways:
        for one in filter(lambda one: one.message, way.steps):
            if one.name == "send":
                sent[way.rank, one.peer, one.group, one.tag].append(one)
            elif one.peer is not None:
                expected[one.peer, way.rank, one.group, one.tag].append(one)
    for way in ways:  # those from any rank take what is left
        for one in (one for one in way.steps if one.message and one.peer is None):
            for rank in one.ranks:
                key = (rank, way.rank, one.group, one.tag)
                if len(sent[key]) > len(expected[key]):
                    expected[key].append(one)
                    break
            else:
                expected[None, way.rank, one.group, one.tag].append(one)
    found = []
    for key in sorted({*sent, *expected}, key=str):
        gone, come = sent.get(key, []), expected.get(key, [])
        pairs = zip(gone, come, strict=False)
        index = next((i for i, (a, b) in enumerate(pairs) if a.alike != b.alike), min(len(gone), len(come)))
        if index < max(len(gone), len(come)):
            there = (gone[index : index + 1], come[index : index + 1])
            found.append(Divergence(None, _stands(key[0], key[1], *there, len(gone) - index, len(come) - index)))
    return found


def _stands(source: int | None, target: int, gone: list, come: list, sends: int, receives: int) -> list[Stand]:
    def stand(rank: int | None, there: list, count: int, missing: str) -> Stand | None:
        if rank is None:
            return None
        return Stand([rank], there[0].told, there[0].location, count - 1) if there else Stand([rank], missing)

    sender = stand(source, gone, sends, f"sends rank {target} nothing more")
    receiver = stand(target, come, receives, f"receives nothing more from rank {source}")
    return [one for one in (sender, receiver) if one is not None]
