"""The signatures that one module knows."""

from __future__ import annotations

from collections.abc import Iterator

from graphmod.signature.flattening import Opaque, opaque_parts
from graphmod.signature.signature import Signature, difference, remedy
from graphmod.step.entry import Entry

_MOST_OPAQUE = 4
_MOST_STRANGERS = 16  # objects that are known by identity, one after the other, before the next is turned away
_MOST_UNCAPTURED = 64  # signatures without a graph that are remembered; more means that one of them changes each call


def _gone(signature: Signature) -> bool:
    """Whether no call can have this signature any more, because an object in it is gone."""
    return any(part.value is None for part in opaque_parts(signature.structure))


class Registry:
    """Finds the entry of a signature, and forgets those that lead nowhere.

    Args:
        ordinary: warm-up calls of a signature before one is recorded.

    Attributes:
        usual: the entry of the last replay, because most calls are like the one before; None at first.
    """

    def __init__(self, ordinary: int) -> None:
        self._ordinary = ordinary
        self._known: dict[Signature, Entry] = {}
        self.clock = 0  # calls so far
        self.usual: Entry | None = None
        self._strangers = 0
        self._turned_away: Opaque | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._known.values()))

    def touch(self, entry: Entry) -> None:
        """Notes that an entry was used now."""
        self.clock += 1
        entry.last_used = self.clock

    def get(self, signature: Signature) -> Entry | None:
        entry = self._known.get(signature)
        if entry is not None:
            self.touch(entry)
        return entry

    def stranger(self, signature: Signature) -> Opaque | None:
        """An object in a new signature that makes it one of many that came once: known by identity, another in each
        call, of which none was ever captured. None where there is none, or where the last of them has come again."""
        known = [part for entry in self for part in opaque_parts(entry.signature.structure)]
        part = next((part for part in opaque_parts(signature.structure) if part not in known), None)
        if part is None:
            return None
        captured = any(entry.graphs and any(True for _ in opaque_parts(entry.signature.structure)) for entry in self)
        self._strangers = 0 if captured or part == self._turned_away else self._strangers + 1
        if self._strangers <= _MOST_STRANGERS:
            return None
        part.let_go()
        self._turned_away = part
        return part

    def add(self, signature: Signature) -> Entry:
        """A new entry. Beyond a number, the least recently used of those that have no graph goes."""
        for known in [one for one in self if one.disabled and _gone(one.signature)]:
            del self._known[known.signature]
        uncaptured = [entry for entry in self if not entry.graphs and not entry.disabled]
        opaque = any(True for _ in opaque_parts(signature.structure))  # such a signature keeps an object alive
        if len(uncaptured) >= (_MOST_OPAQUE if opaque else _MOST_UNCAPTURED):
            del self._known[min(uncaptured, key=lambda entry: entry.last_used).signature]
            self.usual = None
        entry = self._known[signature] = Entry(signature, self._ordinary)
        self.touch(entry)
        return entry

    def nearest(self, signature: Signature, names: list[str]) -> list[str]:
        """In which arguments a new signature differs from the most similar one in the same modes, a line for each, and
        what helps; [] where there is none. `names` are those of the callable's positional parameters."""
        asked = signature.modes, signature.function
        others = [one for one in self if (one.signature.modes, one.signature.function) == asked]
        if not others:
            return []
        nearest = min(others, key=lambda entry: len(difference(entry.signature, signature, [])))
        helps = remedy(nearest.signature, signature)
        each = "Each kind of call is recorded and captured on its own, up to max_graphs" + (
            f": {helps}" if helps else ""
        )
        return [*difference(nearest.signature, signature, names), each]

    def holding(self, but: Entry) -> list[Entry]:
        """The other entries that have graphs, the least recently used first."""
        return sorted((e for e in self if e.graphs and e is not but), key=lambda entry: entry.last_used)

    def restart(self) -> None:
        """Forgets everything but which signatures are disabled."""
        disabled = [entry for entry in self if entry.disabled]
        self.__init__(self._ordinary)
        for entry in disabled:
            kept = self.add(entry.signature)
            kept.disable(entry.reason)
            kept.out_of_date = entry.out_of_date

    @property
    def state(self) -> str:
        """`captured` if any entry has a graph, `disabled` if all are, `warm-up` else; `eager` before the first call."""
        if any(entry.graphs for entry in self):
            return "captured"
        if self._known and all(entry.disabled for entry in self):
            return "disabled"
        return "warm-up" if self._known else "eager"
