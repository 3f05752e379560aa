"""What a check has found, for people and as JSON."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graphmod.check.order import Divergence
from graphmod.words import counted, ranks_in_words

_LINE = re.compile(r"(?P<file>.*):(?P<line>\d+) in (?P<function>.*)")
_BY_WAY = ", by way of "  # between the user's line and the library's
_WIDTH = 110
_FOLLOWS = (
    ("draws from a generator whose state was set inside", "seeds a random generator"),
    ("makes a sparse or nested tensor", "has a sparse gradient"),
)
_NO_OPERATIONS = ("Python", "the call", "the arguments", "the optimizer", "the result", "DistributedData")


@dataclass
class Finding:
    """One reason why a call cannot be captured.

    Attributes:
        what: the operation, function or kind of change.
        effect: what it does, and what a graph would make of that.
        remedy: what to do about it.
        user: `file:line in function` of the user's code; None where no line of the user's leads there.
        library: `file:line in function` of the library's code that the user's had called; None where there is none.
        backward: whether it happens in a backward.
        count: how often one call does it.
        parts: the layers that do it; empty where the callable was checked as a whole.
        ranks: the ranks that do it, where several were checked.
    """

    what: str
    effect: str
    remedy: str
    user: str | None = None
    library: str | None = None
    backward: bool = False
    count: int = 1
    parts: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    @property
    def cause(self) -> tuple:
        """What findings share that are one to the user."""
        return (self.effect, self.remedy, self.user, self.library, self.backward)

    def describe(self, of_ranks: int = 0) -> str:
        """In words, of a check of so many ranks."""
        where = "in the backward pass" if self.backward else "the call"
        if line := self.user or (None if self.backward else self.library):
            where = shortened(line)
        notes = []
        if self.backward and self.user:
            notes.append("in the backward")
        if self.count > 1:
            notes.append(f"{self.count} times")
        if self.parts:
            notes.append("in " + _ranges(self.parts))
        if self.ranks:
            every = len(self.ranks) == of_ranks
            notes.append("on all ranks" if every else f"on {ranks_in_words(self.ranks)} only")
        lines = [where + (f"  ({', '.join(notes)})" if notes else "")]
        lines += _wrapped(self.effect if self.what.startswith(_NO_OPERATIONS) else f"{self.effect} ({self.what})")
        if self.library and (self.user or self.backward):
            lines.append(f"    by way of {shortened(self.library)}")
        return "\n".join([*lines, *_wrapped(f"fix: {self.remedy}")])


@dataclass
class Guarded:
    """Values of one kind of object, which are compared before each replay.

    Attributes:
        what: whose values they are, in words.
        count: how many.
        values: `(name, value in words, who reads it)` of each.
        note: what its reader should know, or "".
        warns: whether a short report has the note, too.
    """

    what: str
    count: int
    values: list[tuple[str, str, str]] = field(default_factory=list)
    note: str = ""
    warns: bool = False

    def describe(self, verbose: bool = False) -> str:
        """How many there are of it, such as `4 parameters`; `verbose` says how they are compared, and lists each value
        with the line that reads it."""
        what = self.what if self.count != 1 else re.sub(r"^((class |global |other )?\w+)s\b", r"\1", self.what)
        text = f"{self.count} {what}"
        if not verbose:
            return text.partition(" (")[0]
        lines = [text, *(f"    {name} = {value}  read at {shortened(where)}" for name, value, where in self.values)]
        return "\n".join([*lines, *(_wrapped(self.note) if self.note else ())])


@dataclass
class Report:
    """What `graphmod.check` has found. `str(report)` is for people.

    Attributes:
        name: of what was checked.
        device: where it ran.
        hazards: why it cannot be captured, each once.
        on_gpu: of a check on the CPU, what a GPU would need besides; each once.
        guarded: what would be compared before each replay.
        eager_parts: the calls that would be made between its graphs.
        eager_for: what they do, that nobody marked, and a graph cannot repeat; each once.
        operations: how many the watched call did, those of its backward included.
        parts: the layers that were checked one by one; empty where the callable was checked as a whole.
        collectives: how many collectives and messages each rank did; empty where ranks were not compared.
        divergences: where ranks do not communicate in the same order.
        stopped: whether this rank was stopped there, so that hazards are not known.
    """

    name: str
    device: str = "cpu"
    hazards: list[Finding] = field(default_factory=list)
    guarded: list[Guarded] = field(default_factory=list)
    operations: int = 0
    parts: list[str] = field(default_factory=list)
    on_gpu: list[Finding] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    stopped: bool = False
    eager_parts: list[str] = field(default_factory=list)
    eager_for: list[Finding] = field(default_factory=list)

    @property
    def captured(self) -> bool:
        """Whether it would be captured, and ranks communicate in the same order."""
        return not self.hazards and not self.divergences

    def __bool__(self) -> bool:
        return self.captured

    def __str__(self) -> str:
        return self.describe()

    def describe(self, verbose: bool = False) -> str:
        """The report in words; `verbose` lists each guarded value with the line that reads it."""
        ranks = len(self.collectives)
        what = f"{self.name!r}" + (f" ({_ranges(self.parts)})" if self.parts else "")
        reasons = [counted(len(self.hazards), "hazard")] if self.hazards else []
        reasons += ["its ranks diverge"] if self.divergences else []
        verdict = f"would stay eager: {', and '.join(reasons)}"
        if not self.hazards:
            verdict = "would not be captured: its ranks diverge" if self.divergences else "would be captured"
        watched = f"{counted(self.operations, 'operation')} watched on {self.device}"
        if self.stopped:
            watched = "This rank was stopped where they do, so that hazards are not known"
        lines = [f"{what} {verdict}. {watched}."]
        if ranks > 1:
            lines += ["", *self._order()]
        for number, finding in enumerate(self.hazards, start=1):
            lines += ["", textwrap.indent(finding.describe(ranks), "   ").replace("  ", f"{number}.", 1)]
        if self.eager_parts:
            lines += ["", "Called between its graphs, at each replay:"]
            lines += [line for part in self.eager_parts for line in _wrapped(part)]
        for told, findings in (("No graph can repeat what these do:", self.eager_for), ("On a GPU also:", self.on_gpu)):
            if findings:
                lines += ["", told, *(textwrap.indent(finding.describe(ranks), "   ") for finding in findings)]
        if self.guarded:
            compared = "Compared before each replay" + ("" if self.captured else ", once it is captured")
            if verbose:
                lines += ["", f"{compared}:"]
                lines += [textwrap.indent(one.describe(verbose), "   ") for one in self.guarded]
            else:
                values = sum(one.count for one in self.guarded if one.values)
                told = [counted(values, "value")] if values else []
                told += [one.describe() for one in self.guarded if not one.values]
                text = f"{compared} (a verbose report lists them): {', '.join(told)}."
                lines += [*([""] if len(lines) > 1 else []), *textwrap.wrap(text, _WIDTH)]
                lines += [line for one in self.guarded if one.warns for line in _wrapped(f"{one.what}: {one.note}")]
        return "\n".join(lines)

    def _order(self) -> list[str]:
        """How the ranks communicate."""
        if not self.divergences:
            fewest, most = min(self.collectives), max(self.collectives)
            if not most:
                return [f"None of the {len(self.collectives)} ranks communicates."]
            number = counted(most, "collective") if fewest == most else f"{fewest:,} to {most:,} collectives"
            return [f"The {len(self.collectives)} ranks communicate in the same order: {number} on each."]
        lines = []
        for divergence in self.divergences:
            begins, *stands = divergence.describe()
            lines += [begins, *(line for stand in stands for line in _wrapped(stand))]
        return lines

    def to_json(self) -> str:
        """The report as JSON, with files and lines apart."""

        def location(line: str | None) -> dict | None:
            found = _LINE.fullmatch(line) if line else None
            return {**found.groupdict(), "line": int(found["line"])} if found else None

        told: dict[str, Any] = {"name": self.name, "captured": self.captured, **asdict(self)}
        for one in (*told["hazards"], *told["eager_for"], *told["on_gpu"]):
            one |= {"user": location(one["user"]), "library": location(one["library"])}
        for one in told["guarded"]:
            one["values"] = [
                {"name": name, "value": value, "read": location(at.partition(_BY_WAY)[0])}
                for name, value, at in one["values"]
            ]
        for stand in (stand for one in told["divergences"] for stand in one["stands"]):
            stand["location"] = location(stand["location"]) or stand["location"]
        return json.dumps(told, indent=2)


def merged(findings: list[Finding]) -> list[Finding]:
    """Each cause once, with how often and in which layers it was found; what only follows from another is left out."""
    effects = {one.effect for one in findings}
    written = {one.effect for one in findings if one.user is not None}
    found: dict[tuple, Finding] = {}
    for one in findings:
        derived = one.backward and one.user is None and one.effect in written
        if derived or any(
            one.effect.startswith(effect) and any(known.startswith(cause) for known in effects)
            for effect, cause in _FOLLOWS
        ):
            continue
        known = found.setdefault(one.cause, one)
        if known is not one:
            known.count += one.count
            known.parts += [part for part in one.parts if part not in known.parts]
    return list(found.values())


def of_all_ranks(reports: list[Report]) -> Report:
    """One report of those of all ranks, in their order: each cause once, with the ranks that have it.

    What else it tells (operations, what is guarded) is that of the first rank.
    """

    from graphmod.step.log import cause_of

    def joined(of_ranks: Iterable[list[Finding]]) -> list[Finding]:
        found: dict[tuple, Finding] = {}
        for rank, findings in enumerate(of_ranks):
            for one in findings:
                cause = (cause_of(one.effect), one.user, one.library, one.backward)  # values may be a rank's own
                known = found.setdefault(cause, one)
                known.ranks += [rank] if rank not in known.ranks else []
        return list(found.values())

    first = reports[0]
    first.hazards = joined(one.hazards for one in reports)
    first.on_gpu = joined(one.on_gpu for one in reports)
    return first


def _ranges(names: list[str]) -> str:
    from graphmod.step.log import ranges  # loads PyTorch, which whoever has a report to tell has done

    return ranges(names)


def shortened(line: str) -> str:
    """A line whose file is named from the current folder, or from where packages are installed; also with the library's
    line behind it."""
    if _BY_WAY in line:
        return _BY_WAY.join(map(shortened, line.split(_BY_WAY)))
    match = _LINE.fullmatch(line)
    if match is None:
        return line
    path = match["file"]
    if "site-packages" + os.sep in path:
        path = path.rpartition("site-packages" + os.sep)[2]
    elif Path(path).is_relative_to(Path.cwd()):
        path = str(Path(path).relative_to(Path.cwd()))
    return f"{path}:{match['line']} in {match['function']}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
