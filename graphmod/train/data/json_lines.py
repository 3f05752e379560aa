"""Where a file of JSON lines is not what its reader expects, which tells a place in its own buffer, or none."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from graphmod.train.data.encodings import not_utf8

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_LINES = (".jsonl", ".ndjson", ".json")


def first_odd_line(paths: Iterable[Path]) -> str | None:
    """The first line of all files that is no JSON object, or has a key that holds another kind of value than in lines
    before it or is in no file before, in words; None where there is none, or the files are no JSON lines."""
    kinds: dict[str, tuple[str, str]] = {}  # of each key: what it holds, and where it was first
    for path in paths:
        suffixes = [suffix for suffix in path.suffixes if suffix not in _OPEN]
        if not suffixes or suffixes[-1].lower() not in _LINES:
            return None
        whole = suffixes[-1].lower() == ".json"
        try:
            known = {*kinds} or None
            with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
                found = _odd(file, path, kinds, known, whole)
        except UnicodeDecodeError as error:
            return not_utf8(path) or f"{path}: {error}"
        except (OSError, EOFError, lzma.LZMAError) as error:
            return f"{path}: {error}"
        if found is not None:
            return found
    return None


def _odd(
    lines: Iterable[str], path: Path, kinds: dict[str, tuple[str, str]], known: set[str] | None, whole: bool
) -> str | None:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number:,} of {path}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if whole and number == 1:
                return None  # one document over many lines
            return f"{where} is not JSON: {error.msg}, at character {error.pos + 1} of {_shortened(line)}"
        if not isinstance(row, dict):
            if whole and number == 1:
                return None
            return f'{where} must be an object such as {{"text": "..."}}, got {_shortened(line)}'
        for key, value in row.items():
            if value is None:
                continue
            if known is not None and key not in known:
                return (
                    f"{where}: key {key!r} is in no file before; their keys are {', '.join(map(repr, sorted(known)))}"
                )
            kind = type(value).__name__
            was, first = kinds.setdefault(key, (kind, where))
            if kind != was and {kind, was} != {"int", "float"}:
                return f"{where}: key {key!r} holds {kind}, and {was} in {first}"
    return None


def _shortened(line: str) -> str:
    line = line.strip()
    return repr(line if len(line) <= 60 else f"{line[:57]}...")
