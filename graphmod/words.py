"""Small words of reports and errors."""

import difflib
import functools
import json
import logging
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any


def counted(number: int, noun: str) -> str:
    """`1 graph`, `2 graphs`, `2 launches`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def as_yaml(value: Any) -> str:
    """A setting as files and the command line have it: `null`, `true`, `0.1`, `[a, b]`."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_yaml(one)}' for key, one in value.items())}}}"
    plain = value.value if isinstance(value, Enum) else value
    return json.dumps(plain) if plain is None or isinstance(plain, bool) else str(plain)


@functools.cache
def warn_once(text: str) -> None:
    """Says in the log what is said once in a process."""
    logging.getLogger("graphmod").warning(text)


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
