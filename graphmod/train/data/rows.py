"""What the rows of JSON lines, Parquet, CSV and other files are trained as."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphmod.decode.text.codec import TokenizerCodec
from graphmod.errors import ConfigError
from graphmod.train.data.chats import Chat, chat_encoder, chat_pair_encoder, messages_of
from graphmod.train.data.encode import (
    Encoder,
    bytes_of_pairs,
    bytes_of_pieces,
    encode_pairs,
    encode_pieces,
    flattened,
    pieces,
)
from graphmod.train.data.reading import open_rows, read
from graphmod.train.settings import DataConfig, TrainOn
from graphmod.words import counted

log = logging.getLogger("graphmod")

_READ_TOGETHER = 1000
_CHATS, _PROMPT, _COMPLETION, _TEXT = "messages", "prompt", "completion", "text"


class _Kind(NamedTuple):
    """What the rows hold.

    Attributes:
        columns: those that are read.
        document: what one row is, from its value in each of these columns and what says where it was read.
        documents: what is encoded, from those.
        encode: from that to tokens.
    """

    columns: list[str]
    document: Callable[[dict[str, Any], Callable[[], str]], Any]
    documents: Callable[[Iterator[Any]], Iterator[Any]]
    encode: Encoder


def _kind(data: DataConfig, path: str, codec: TokenizerCodec | None, names: list[str]) -> _Kind:
    """What rows with columns of these names are trained as."""
    everything = data.train_on is TrainOn.all
    if data.column is None and _CHATS in names:
        return _Kind([_CHATS], _chat, iter, chat_encoder(codec, everything))
    texts = bytes_of_pieces if codec is None else partial(encode_pieces, codec)
    if data.column is None and {_PROMPT, _COMPLETION} <= {*names}:
        columns = [_PROMPT, _COMPLETION]
        if everything:
            return _Kind(
                columns, _pair, partial(_whole_pairs, codec), _of_both(texts, lambda: chat_encoder(codec, everything))
            )
        pairs = bytes_of_pairs if codec is None else partial(encode_pairs, codec)
        return _Kind(columns, _pair, iter, _of_both(pairs, lambda: chat_pair_encoder(codec)))
    column = data.column or _TEXT
    if column in names:
        return _Kind([column], _text, partial(pieces, codec), texts)
    if data.column is None and _PROMPT in names:
        raise ConfigError(
            f"data.path={path} has prompts, and no column {_COMPLETION!r} to train on; it has "
            f"{', '.join(sorted(names))}. Add that column, or train on the prompts as texts: data.column={_PROMPT}"
        )
    wanted = f"data.column={column}" if data.column else "'messages', 'prompt' and 'completion', or 'text'"
    raise ConfigError(
        f"data.path={path} has no column {wanted}; it has {', '.join(sorted(names))}. "
        "Name the one with the text: data.column=NAME"
    )


def _text(values: dict[str, Any], place: Callable[[], str]) -> str:
    ((name, value),) = values.items()
    if not isinstance(value, str):
        chats = f"; chats are read from a column {_CHATS!r}" if isinstance(value, list) else ""
        raise ConfigError(f"{place()}: column {name!r} must be text, got {type(value).__name__}{chats}")
    return value


def _chat(values: dict[str, Any], place: Callable[[], str]) -> Chat:
    return Chat(messages_of(values[_CHATS], lambda: f"{place()}: column {_CHATS!r}"), 0, place)


def _pair(values: dict[str, Any], place: Callable[[], str]) -> tuple[str, str] | Chat:
    if all(isinstance(value, str) for value in values.values()):
        return values[_PROMPT], values[_COMPLETION]
    kinds = {name: type(value).__name__ for name, value in values.items()}
    if set(kinds.values()) != {"list"}:
        found = " and ".join(f"{name!r} is {kind}" for name, kind in kinds.items())
        raise ConfigError(f"{place()}: both columns must be text, or both lists of messages; {found}")
    parts = [messages_of(value, lambda name=name: f"{place()}: column {name!r}") for name, value in values.items()]
    return Chat([*parts[0], *parts[1]], len(parts[0]), place)


def _whole_pairs(codec: TokenizerCodec | None, found: Iterator[Any]) -> Iterator[Any]:
    for one in found:
        if isinstance(one, Chat):
            yield one
        else:
            yield from pieces(codec, ["".join(one)])


def _of_both(others: Encoder, make_chats: Callable[[], Encoder]) -> Encoder:
    """Encodes chats, which need a template, with the one, and what is no chat with the other."""
    make_chats = functools.cache(make_chats)

    def encode(documents: Sequence[Any]) -> list[np.ndarray]:
        chats = [one for one in documents if isinstance(one, Chat)]
        rest = [one for one in documents if not isinstance(one, Chat)]
        of_chats = iter(make_chats()(chats) if chats else ())
        of_rest = iter(others(rest) if rest else ())
        return [next(of_chats if isinstance(one, Chat) else of_rest) for one in documents]

    return encode


def _documents(path: str, rows: Any, kind: _Kind) -> Iterator[Any]:
    def place(number: int) -> str:
        return f"row {number:,} of data.path={path}"

    number, skipped = 0, []
    for batch in read(path, rows, _READ_TOGETHER):
        for found in zip(*(batch[name] for name in kind.columns), strict=True):
            number += 1
            values = dict(zip(kind.columns, found, strict=True))
            empty = next((name for name, value in values.items() if value is None or value in ("", [])), None)
            if empty is None:
                yield kind.document(values, partial(place, number))
            else:
                skipped.append((number, empty))
    if skipped:
        first, name = skipped[0]
        if len(skipped) == number:
            raise ConfigError(
                f"the data is empty: {name!r} has no value in {place(first)}, and no row has all of "
                f"{', '.join(map(repr, kind.columns))}"
            )
        log.warning(
            f"skipped {len(skipped):,} of {counted(number, 'row')} of data.path={path}, in which a column is null or "
            f"empty, such as {name!r} in row {first:,}"
        )


def load_rows(data: DataConfig, codec: TokenizerCodec | None) -> tuple[Tensor, Tensor]:
    """The tokens of all rows and where each begins, as `flattened` returns them.

    A row is a text, a pair of prompt and completion, of which the completion alone is trained on, or a chat, of which
    what the assistant says is; prompt and completion may be chats too. Rows in which one of these is empty or null are
    skipped, and the log says how many.

    Args:
        data: checked settings, with `source=hf`.
        codec: of the tokenizer, or None for bytes.

    Raises:
        ConfigError: the library is not installed, the files cannot be read, or have no such column or nothing in it, a
            row holds something else, or the tokenizer has no chat template for chats.
    """
    found = [_load(data, path, codec) for path in data.path]
    tokens, starts = zip(*found, strict=True)
    ends = list(itertools.accumulate(map(len, tokens)))
    begun = [begins + end - len(part) for part, begins, end in zip(tokens, starts, ends, strict=True) if len(part)]
    return torch.cat(tokens), torch.cat(begun) if begun else torch.zeros(1, dtype=torch.int64)


def _load(data: DataConfig, path: str, codec: TokenizerCodec | None) -> tuple[Tensor, Tensor]:
    rows = open_rows(data, path)
    first = next(read(path, rows, 1), None)
    if first is None:
        return torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    kind = _kind(data, path, codec, list(first))
    return flattened(kind.documents(_documents(path, rows, kind)), kind.encode)
