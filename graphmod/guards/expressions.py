"""Expressions: how code gets at a value, told apart from what the value is; and which of them a piece of code reads."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Expression = tuple
"""("local", name), ("global", name), ("name", name) for what may be either, ("const", value), ("module", name),
("attr", base, expression of the name), ("item", base, expression of the key), ("key", base, expression of the key) for
whether it is there, ("call", function, expressions of the positional arguments), ("either", expressions),
("made", expressions) for a container of them, or UNTOLD."""

UNTOLD = ("untold",)
"""A value of which code tells nothing."""
BY_KEY = "get"
"""The method that reads one item of a dict, and not all that is in it."""
MOST = 8
"""Parts of an expression that are followed."""
Stack = list[Expression | None]


class Read(NamedTuple):
    """One thing an instruction reads or writes.

    Attributes:
        of: the expression.
        content: whether the items of the value are read too, should it be a container.
    """

    of: Expression
    content: bool


@dataclass
class Reads:
    """What a piece of code reads.

    Attributes:
        by_line: line -> what is to be looked at before it runs.
        by_offset: offset of an instruction -> likewise.
        exact: whether lines are too coarse, because one assigns a variable and reads through it, or is a loop, of which
            Python 3.12 tells as of one line.
        spans: whether something is read on one line of what code gave on another.
    """

    by_line: dict[int, list[Read]] = field(default_factory=lambda: defaultdict(list))
    by_offset: dict[int, list[Read]] = field(default_factory=lambda: defaultdict(list))
    exact: bool = False
    spans: bool = False


def either(expressions: list[Expression | None]) -> Expression | None:
    """One expression for a value that is the value of one of several; None where nothing is told of any."""
    known: list[Expression] = []
    for one in expressions:
        for part in one[1] if one is not None and one[0] == "either" else (one,):
            if part is not None and part not in known:
                known.append(part)
    if len(known) <= 1:
        return known[0] if known else None
    return ("either", tuple(known[:MOST]))


def joined(stacks: list[Stack]) -> Stack:
    """What may lie on the stack where ways meet, as far down as all of them tell."""
    depth = min(map(len, stacks), default=0)
    return [either([stack[at] for stack in stacks]) for at in range(-depth, 0)]


def variables(of: Expression) -> Iterator[str]:
    """The local variables in an expression."""
    if of[0] in ("local", "name"):
        yield of[1]
    elif of[0] in ("attr", "item", "key"):
        yield from variables(of[1])
        yield from variables(of[2])
    elif of[0] == "call":
        yield from variables(of[1])
        for one in of[2]:
            yield from variables(one)
    elif of[0] in ("either", "made"):
        for one in of[1]:
            yield from variables(one)


def inner(of: Expression) -> Iterator[Expression]:
    """The calls and items, and the attributes of such, of which something is read in an expression."""
    base = of[1] if of[0] in ("attr", "item", "key", "call") else None
    while base is not None:
        if base[0] in ("call", "item") or (base[0] == "attr" and base[1][0] in ("call", "item")):
            yield base
        base = base[1] if base[0] in ("attr", "item", "call") else None
