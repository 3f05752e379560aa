"""Small words of reports and errors."""

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """`1 graph`, `2 graphs`, `2 launches`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def nearest(word: str, allowed: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The one of `allowed` most like `word`, or None when nothing is."""
    return next(iter(difflib.get_close_matches(word, list(allowed), n=1, cutoff=cutoff)), None)
