"""Small words of reports and errors."""

import difflib
from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """`1 graph`, `2 graphs`, `2 launches`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def nearest(word: str, allowed: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The one of `allowed` most like `word`, or None when nothing is."""
    return next(iter(difflib.get_close_matches(word, list(allowed), n=1, cutoff=cutoff)), None)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0 and 2`, `ranks 0 to 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and [*ranks] == [*range(ranks[0], ranks[0] + len(ranks))]:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
