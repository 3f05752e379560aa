"""Rows of JSON lines, Parquet, CSV and other files, read with the `datasets` library (the extra `data`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.decode.text.codec import TokenizerCodec
from graphmod.errors import ConfigError, reason
from graphmod.train.data.encode import (
    Encoder,
    bytes_of_pairs,
    bytes_of_pieces,
    chat_encoder,
    encode_pairs,
    encode_pieces,
    flattened,
    pieces,
)
from graphmod.train.schema import DataConfig, Documents, TrainOn

_LOADERS = {
    **{".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"},
    **{".txt": "text", ".md": "text", ".arrow": "arrow"},
}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4"}
_READ_TOGETHER = 1000
_CHATS, _PROMPT, _COMPLETION, _TEXT = "messages", "prompt", "completion", "text"


class _Kind(NamedTuple):
    """What the rows hold.

    Attributes:
        columns: those that are read.
        documents: from rows, a tuple of those columns each, or the column alone, to documents.
        encode: from documents to tokens.
    """

    columns: list[str]
    documents: Callable[[Iterator[Any]], Iterator[Any]]
    encode: Encoder


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data=hf needs the datasets library: pip install 'graphmod[data]'") from error
    return datasets


def _loader_of(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    found = _LOADERS.get(suffixes[-1] if suffixes else "")
    if found is None:
        raise ConfigError(
            f"data.path={path}: data=hf reads {', '.join(f'*{suffix}' for suffix in _LOADERS)}, and folders of them; "
            "rename the file, or use data=text"
        )
    return found


def row_files(data: DataConfig) -> list[Path]:
    """The files that `data.path` names, and all files in its folders, sorted; none hidden."""
    found: list[Path] = []
    for path in map(Path, data.path):
        inside = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        found += sorted(file for file in inside if not any(p.startswith(".") for p in file.relative_to(path).parts))
    return found


def _load(data: DataConfig) -> Any:
    """An iterable dataset of the rows; nothing is copied on the disk."""
    datasets = _datasets()
    paths = [Path(path) for path in data.path]
    lines = "document" if data.documents is Documents.file else "line"
    options: dict[str, Any] = {"streaming": True}
    if len(paths) == 1 and paths[0].is_dir():
        if (paths[0] / "dataset_dict.json").exists() or (paths[0] / "state.json").exists():
            return datasets.load_from_disk(str(paths[0]))
        if data.pattern != "*":
            options["data_files"] = f"**/{data.pattern}"
        if any(file.suffix.lower() == ".txt" for file in row_files(data)):
            options["sample_by"] = lines
        return datasets.load_dataset(str(paths[0].resolve()), **options)
    folders = [str(path) for path in paths if path.is_dir()]
    if folders:
        raise ConfigError(f"data.path={folders[0]} is one folder of several paths; data=hf takes one folder, or files")
    loaders = {_loader_of(path) for path in paths}
    if len(loaders) > 1:
        raise ConfigError(
            f"data.path has files of several kinds ({', '.join(sorted(loaders))}); give those of one kind"
        )
    (loader,) = loaders
    if loader == "text":
        options["sample_by"] = lines
    if any(".tsv" in path.suffixes for path in paths):
        options["sep"] = "\t"
    return datasets.load_dataset(loader, data_files=[str(path.resolve()) for path in paths], **options)


def _rows(data: DataConfig) -> Any:
    datasets = _datasets()
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        found = _load(data)
    except ConfigError:
        raise
    except Exception as error:  # whatever the readers raise
        raise _unreadable(data, error) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    if not isinstance(found, dict):
        return found
    if data.split not in found:
        raise ConfigError(
            f"data.path={_shown(data)} has no split {data.split!r}; choose one with data.split: {', '.join(found)}"
        )
    return found[data.split]


def _shown(data: DataConfig) -> str:
    return data.path[0] if len(data.path) == 1 else f"[{','.join(data.path)}]"


def _kind(data: DataConfig, codec: TokenizerCodec | None, names: list[str]) -> _Kind:
    """What rows with columns of these names are trained as."""
    everything = data.train_on is TrainOn.all
    if data.column is None and _CHATS in names:
        return _Kind([_CHATS], iter, chat_encoder(codec, everything))
    pairs = data.column is None and {_PROMPT, _COMPLETION} <= {*names}
    if pairs and not everything:
        encode = bytes_of_pairs if codec is None else partial(encode_pairs, codec)
        return _Kind([_PROMPT, _COMPLETION], iter, encode)
    encode = bytes_of_pieces if codec is None else partial(encode_pieces, codec)
    if pairs:
        return _Kind([_PROMPT, _COMPLETION], lambda found: pieces(codec, map("".join, found)), encode)
    column = data.column or _TEXT
    if column not in names:
        wanted = f"data.column={column}" if data.column else "'messages', 'prompt' and 'completion', or 'text'"
        raise ConfigError(
            f"data.path={_shown(data)} has no column {wanted}; it has {', '.join(sorted(names))}. "
            "Name the one with the text: data.column=NAME"
        )
    return _Kind([column], partial(pieces, codec), encode)


def _read(data: DataConfig, rows: Any, together: int) -> Iterator[dict[str, list[Any]]]:
    batches = rows.iter(batch_size=together)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # whatever the readers of the many formats raise
            raise _unreadable(data, error) from error
        if batch is None:
            return
        yield batch


def _unreadable(data: DataConfig, error: Exception) -> ConfigError:
    return ConfigError(f"data.path={_shown(data)} cannot be read by the datasets library: {reason(error)}")


def _documents(data: DataConfig, rows: Any, columns: list[str]) -> Iterator[Any]:
    expected, number = list if columns == [_CHATS] else str, 0
    for batch in _read(data, rows, _READ_TOGETHER):
        for values in zip(*(batch[name] for name in columns), strict=True):
            number += 1
            if any(value is None for value in values):
                continue
            for name, value in zip(columns, values, strict=True):
                if not isinstance(value, expected):
                    what = "a list of messages" if expected is list else "text"
                    raise ConfigError(
                        f"row {number:,} of data.path={_shown(data)}: column {name!r} must be {what}, got "
                        f"{type(value).__name__}"
                    )
            if all(values):
                yield values if len(values) > 1 else values[0]


def load_rows(data: DataConfig, codec: TokenizerCodec | None) -> tuple[Tensor, Tensor]:
    """The tokens of all rows and where each begins, as `flattened` returns them.

    A row is a text, a pair of prompt and completion, of which the completion alone is trained on, or a chat, of which
    what the assistant says is. Rows in which one of these is empty or null are skipped.

    Args:
        data: checked settings, with `source=hf`.
        codec: of the tokenizer, or None for bytes.

    Raises:
        ConfigError: the library is not installed, the files cannot be read, or have no such column, or the tokenizer
            has no chat template for chats.
    """
    rows = _rows(data)
    first = next(_read(data, rows, 1), None)
    if first is None:
        return torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    kind = _kind(data, codec, list(first))
    return flattened(kind.documents(_documents(data, rows, kind.columns)), kind.encode)
