"""Reads the rows of files with the `datasets` library (the extra `data`), and says where in them something is wrong."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from graphmod.errors import ConfigError, reason
from graphmod.train.data.encodings import not_utf8
from graphmod.train.settings import DataConfig, Documents, require_library
from graphmod.words import counted

_LOADERS = {
    **{".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"},
    **{".txt": "text", ".md": "text", ".arrow": "arrow"},
}
# Files about the data, which lie beside it.
_ABOUT = ("README", "LICENSE", "CHANGELOG")
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4"}


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


def _datasets() -> Any:
    require_library("datasets", "data", "data=hf")
    import datasets

    return datasets


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _loader_of(path: Path) -> str:
    found = _LOADERS.get(_suffix(path))
    if found is None:
        raise ConfigError(
            f"data.path={path}: data=hf reads {', '.join(f'*{suffix}' for suffix in _LOADERS)}, and folders of them; "
            "rename the file, or use data=text"
        )
    return found


def row_files(path: Path) -> list[Path]:
    """A file, or all files in a folder, sorted; none hidden."""
    inside = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return sorted(file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _loader_of_folder(folder: Path, pattern: str) -> str | None:
    """What reads the files of a folder; None where the library finds out by itself. Files of several kinds are refused:
    the library would take the most frequent kind and leave out the others without a word."""
    kinds: dict[str, set[str]] = {}
    for file in row_files(folder):
        loader = _LOADERS.get(_suffix(file))
        about = file.stem.upper() in _ABOUT
        if loader is not None and not about and fnmatchcase(file.name, pattern):
            kinds.setdefault(loader, set()).add(f"*{_suffix(file)}")
    if len(kinds) > 1:
        found = sorted(suffix for suffixes in kinds.values() for suffix in suffixes)
        raise ConfigError(
            f"data.path={folder} holds files of several kinds ({', '.join(found)}); choose one: "
            f"data.pattern='{found[0]}'"
        )
    return next(iter(kinds), None)


def _load(data: DataConfig, path: Path) -> Any:
    """An iterable dataset of the rows; nothing is copied on the disk."""
    datasets = _datasets()
    lines = "document" if data.documents is Documents.file else "line"
    options: dict[str, Any] = {"streaming": True}
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return datasets.load_from_disk(str(path))
        if data.pattern != "*":
            options["data_files"] = f"**/{data.pattern}"
        if _loader_of_folder(path, data.pattern) == "text":
            options["sample_by"] = lines
        return datasets.load_dataset(str(path.resolve()), **options)
    loader = _loader_of(path)
    if loader == "text":
        options["sample_by"] = lines
    if ".tsv" in path.suffixes:
        options["sep"] = "\t"
    return datasets.load_dataset(loader, data_files=[str(path.resolve())], **options)


@contextmanager
def _silent() -> Iterator[None]:
    """Inside, the library shows no bars, nor logs the errors that it also raises."""
    datasets = _datasets()
    bars, level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    cards = logging.getLogger("huggingface_hub.repocard")  # complains of a README.md that is no card of a data set
    heard, cards.disabled = cards.disabled, True
    try:
        yield
    finally:
        cards.disabled = heard
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def open_rows(data: DataConfig, path: str) -> Any:
    """The rows of one of the paths of `data`, a file or the split of a folder, as a data set of the library. Each path
    is read by itself: several together, the library would make all columns those of the first.

    Raises:
        ConfigError: the library is not installed, a file cannot be read, or there is no such split.
    """
    try:
        with _silent():
            found = _load(data, Path(path))
    except ConfigError:
        raise
    except Exception as error:  # whatever the readers raise
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        return found
    if data.split not in found:
        raise ConfigError(
            f"data.path={path} has no split {data.split!r}; choose one with data.split: {', '.join(found)}"
        )
    return found[data.split]


def read(path: str, rows: Any, together: int) -> Iterator[dict[str, list[Any]]]:
    """The rows of `path`, so many together, each column a list. Raises ConfigError where a file cannot be read."""
    batches = rows.iter(batch_size=together)
    while True:
        try:
            with _silent():
                batch = next(batches, None)
        except Exception as error:  # whatever the readers of the many formats raise
            raise _unreadable(path, error) from error
        if batch is None:
            return
        yield batch


def _unreadable(path: str, error: Exception) -> ConfigError:
    files = row_files(Path(path))
    if not any(file.stat().st_size for file in files):
        return ConfigError(f"data.path={path} is empty: {counted(len(files), 'file')} without a row")
    if "codec can't decode" in str(error) and (odd := next(filter(None, map(not_utf8, files)), None)):
        return ConfigError(f"data.path={path} cannot be read: {odd}")
    why = first_odd_line(files) or reason(error)
    return ConfigError(f"data.path={path} cannot be read by the datasets library: {why}")
