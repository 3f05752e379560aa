"""From files to one long row of tokens, for which `train/batches.py` has the batches.

Everything a tokenizer sees goes through here in batches of some megabytes, which fast tokenizers divide among the
cores. Memory is that of the tokens and of one batch, however long a document is.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import ArrayLike
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import BatchEncoding

from graphmod.errors import ConfigError, reason
from graphmod.text import TokenizerCodec, has_tokenizer, load_tokenizer, not_utf8, wide_encoding
from graphmod.train.loss import masked
from graphmod.train.settings import LOCAL, DataConfig, Documents, ModelConfig, Source, TrainOn, require_library
from graphmod.words import counted

# -- texts, and pairs of prompt and completion, as tokens --------------------------------------------------------------

_BATCH, _MOST_TOGETHER = 1 << 21, 4096  # characters, documents
_LONG, _CONTEXT, _MOST_TRIES = 1 << 16, 256, 64
# Between words: where tokenizers that split at spaces begin a token, whether spaces begin words or follow them.
_BETWEEN = re.compile(r"(?<=\S)(?=[ \n]\S)")
_SECONDS_WITHOUT_BAR, _SECONDS_BETWEEN_LINES = 2.0, 10.0

log = logging.getLogger("graphmod")

Encoder = Callable[[Sequence[Any]], list[np.ndarray]]


@dataclass
class Piece:
    """A part of a text: `text` is the part after `before` characters of the text before it, for context; it is the
    `last` part, or not."""

    text: str
    before: int
    last: bool


def _size(document: Any) -> int:
    """About how many characters it has."""
    if isinstance(document, Chat):
        return sum(len(str(message.get("content"))) for message in document.messages)
    return sum(map(len, document)) if isinstance(document, tuple) else len(document.text)


def flattened(documents: Iterable[Any], encode: Encoder) -> tuple[Tensor, Tensor]:
    """All documents (pieces of texts, pairs or chats, in their order) in one row of tokens, encoded one batch at a
    time. Where that takes longer than a moment, a terminal shows a bar, and a log file gets a line now and then.

    Returns:
        (N,) int32 tokens, those only read as their complement; (documents,) int64, where each begins. Documents
        without a token are left out.
    """
    parts, starts, count, begins = [np.empty(0, dtype=np.int32)], [0], 0, True
    said, read = time.monotonic(), 0
    with tqdm(desc="tokenizing", unit=" characters", unit_scale=True, delay=_SECONDS_WITHOUT_BAR, disable=None) as bar:
        for batch, size in _batches(documents):
            found = encode(batch)
            for document, tokens in zip(batch, found, strict=True):
                if begins and len(tokens) and count:
                    starts.append(count)
                count += len(tokens)
                begins = not isinstance(document, Piece) or document.last
            parts.append(np.concatenate(found))
            bar.update(size)
            read += size
            if bar.disable and time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                log.info(f"tokenizing: {read:,} characters so far")
                said = time.monotonic()
    return torch.from_numpy(np.concatenate(parts)), torch.tensor(starts, dtype=torch.int64)


def _batches(documents: Iterable[Any]) -> Iterator[tuple[list[Any], int]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += _size(document)
        if size >= _BATCH or len(batch) >= _MOST_TOGETHER:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size


def _encoding(tokenizer: Any, texts: Sequence[str]) -> BatchEncoding:
    # What is longer than a model sees in one go is cut later: the warning about that is no use.
    return tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )


def array(tokens: list[int]) -> np.ndarray:
    """Tokens as an int32 array."""
    return np.asarray(tokens, dtype=np.int32)


def _token_at(encoding: BatchEncoding, row: int, place: int, text: str) -> int | None:
    """Which token begins at the character `place`, or at the first after it that has one; None where one spans it."""
    for here in range(place, len(text)):
        index = encoding.char_to_token(row, here)
        if index is not None:
            chars = encoding.token_to_chars(row, index)
            return index if chars is not None and chars.start >= place else None
    return len(encoding["input_ids"][row])


def pieces(codec: TokenizerCodec | None, documents: Iterable[Any]) -> Iterator[Any]:
    """Each text, a long one in pieces that give the same tokens one by one; None, for bytes, cuts none. What is no text
    stays as it is."""
    tokenizer = None if codec is None else codec.tokenizer
    for text in documents:
        if not isinstance(text, str):
            yield text
            continue
        begin = before = 0
        while tokenizer is not None and tokenizer.is_fast and len(text) - begin > _LONG:
            for found in itertools.islice(_BETWEEN.finditer(text, begin + _LONG), _MOST_TRIES):
                cut = found.start()
                around = text[cut - _CONTEXT : cut + _CONTEXT]
                if _token_at(_encoding(tokenizer, [around]), 0, _CONTEXT, around) is not None:
                    break
            else:
                break
            yield Piece(text[begin - before : cut], before, last=False)
            begin, before = cut, _CONTEXT
        yield Piece(text[begin - before :], before, last=True)


def encode_pieces(codec: TokenizerCodec, texts: Sequence[Piece]) -> list[np.ndarray]:
    """The tokens of each piece, int32, with the special tokens of documents around each text."""
    tokenizer, found = codec.tokenizer, []
    encoding = _encoding(tokenizer, [piece.text for piece in texts])
    for row, piece in enumerate(texts):
        tokens = encoding["input_ids"][row]
        if not piece.before:
            tokens = codec.around.prompt(tokens)
        elif (first := _token_at(encoding, row, piece.before, piece.text)) is not None:
            tokens = tokens[first:]
        else:  # with more of the text after it, the cut is within a token: keep the characters
            tokens = _encoding(tokenizer, [piece.text[piece.before :]])["input_ids"][0]
        found.append(array(codec.around.ended(tokens) if piece.last else tokens))
    return found


def encode_pairs(codec: TokenizerCodec, pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
    """The tokens of each prompt and its completion, int32, of which only the completion's are trained on.

    The prompt has the tokens it has alone, and the completion those it has after the prompt, where both can be.
    """
    return [
        masked_before(array(codec.around.prompt(before)), array(codec.around.ended(after)))
        for before, after in halves(codec.tokenizer, pairs)
    ]


def halves(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens of both texts of each pair, without special ones: those that the two have together, unless one of
    them would span both."""
    whole = [prompt + completion for prompt, completion in pairs]
    encoding = _encoding(tokenizer, whole)
    for row, pair in enumerate(pairs):
        first = _token_at(encoding, row, len(pair[0]), whole[row]) if tokenizer.is_fast else None
        if first is None:
            before, after = _encoding(tokenizer, pair)["input_ids"]
            yield before, after
        else:
            yield encoding["input_ids"][row][:first], encoding["input_ids"][row][first:]


def masked_before(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Both, of which only what comes after is trained on."""
    return masked(np.concatenate([before, after]), np.arange(len(before) + len(after)) >= len(before))


def bytes_of_pieces(texts: Sequence[Piece]) -> list[np.ndarray]:
    """The bytes of each text and a line break, int32."""
    return [np.frombuffer(f"{piece.text}\n".encode(), dtype=np.uint8).astype(np.int32) for piece in texts]


def bytes_of_pairs(pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
    """As `encode_pairs`, with bytes as tokens and a line break at the end."""
    both = [(prompt.encode(), f"{completion}\n".encode()) for prompt, completion in pairs]
    return [masked_before(array([*before]), array([*after])) for before, after in both]


# -- chats as tokens, through the tokenizer's own chat template: whole ones, and a prompt with its completion ----------

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SAYS = ("content", "tool_calls", "function_call", "reasoning_content", "thinking")


@dataclass
class Chat:
    """A list of messages."""

    messages: list[dict[str, Any]]  # each with `role` and `content`, or what else its template knows
    prompted: int  # how many of them are the prompt, where the others are its completion; 0 where the chat is whole
    place: Callable[[], str]  # says where it was read, for errors


def messages_of(value: Any, where: Callable[[], str]) -> list[dict[str, Any]]:
    """The messages in a column, without the keys that are null: readers of tables give each message those of all.
    Raises ConfigError, which says `where` that is, for what is no list of messages."""
    if not isinstance(value, list):
        raise ConfigError(f"{where()} must be a list of messages, got {type(value).__name__}")
    found = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise ConfigError(
                f"{where()}: message {number} must have the keys 'role' and 'content', got {type(message).__name__}"
            )
        had = {key: inner for key, inner in message.items() if inner is not None}
        for wanted, keys in (("role", ("role",)), ("content", _SAYS)):
            if not had.keys() & set(keys):
                raise ConfigError(
                    f"{where()}: message {number} has no {wanted!r}; a message has 'role' and 'content', and this one "
                    f"{', '.join(map(repr, had)) or 'nothing'}"
                )
        found.append({**had, "content": had.get("content")})
    return found


def _tokenizer_of(codec: TokenizerCodec | None) -> Any:
    """That of a codec. Raises ConfigError where there is no chat template."""
    tokenizer = None if codec is None else codec.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            "the data has chats (lists of messages), and bytes, or this tokenizer, have no chat template; give the "
            "tokenizer of a chat model (data.tokenizer=FOLDER), or set its chat_template and save it again"
        )
    return tokenizer


def _applied(tokenizer: Any, chats: Sequence[Chat], messages: Sequence[list[dict[str, Any]]], **options: Any) -> Any:
    """What the template makes of `messages`, which are those of `chats` or their prompts."""
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # whatever the template raises about the messages
        place, cause = "a chat of the data", error
        for chat, alone in zip(chats, messages, strict=True):
            try:
                tokenizer.apply_chat_template([alone], **options)
            except Exception as its:
                place, cause = chat.place(), its
                break
        raise ConfigError(
            f"the tokenizer's chat template cannot be applied to {place}: {reason(cause)}; it takes a list of messages "
            "with 'role' and 'content', in the order that the template allows"
        ) from cause


def chat_encoder(codec: TokenizerCodec | None, everything: bool) -> Encoder:
    """Encodes whole chats, of which what the assistant says is trained on, or `everything`. Raises ConfigError where
    there is no template, or it does not mark what the assistant says."""
    tokenizer = _tokenizer_of(codec)
    if not everything and not _GENERATION.search(tokenizer.get_chat_template()):
        raise ConfigError(
            "the tokenizer's chat template does not mark what the assistant says; put {% generation %} and "
            "{% endgeneration %} around it in chat_template.jinja, train on all tokens (data.train_on=all), or give "
            "each chat as 'prompt' and 'completion', which need no marks"
        )

    def encode(chats: Sequence[Chat]) -> list[np.ndarray]:
        encoding = _applied(
            tokenizer,
            chats,
            [chat.messages for chat in chats],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=not everything,
            tokenizer_kwargs={"verbose": False},
        )
        rows = [array(tokens) for tokens in encoding["input_ids"]]
        if everything:
            return rows
        marks = [np.asarray(mask, dtype=bool) for mask in encoding["assistant_masks"]]
        return [masked(tokens, mask) for tokens, mask in zip(rows, marks, strict=True)]

    return encode


def chat_pair_encoder(codec: TokenizerCodec | None) -> Encoder:
    """Encodes chats whose first messages are a prompt, of which only the completion is trained on: what the template
    writes after the prompt and its invitation to answer (`add_generation_prompt`), which the model is sampled from.
    Raises ConfigError where there is no template."""
    tokenizer = _tokenizer_of(codec)

    def encode(chats: Sequence[Chat]) -> list[np.ndarray]:
        wholes = _applied(tokenizer, chats, [chat.messages for chat in chats], tokenize=False)
        given = [chat.messages[: chat.prompted] for chat in chats]
        prompts = _applied(tokenizer, chats, given, tokenize=False, add_generation_prompt=True)
        pairs = []
        for chat, prompt, whole in zip(chats, prompts, wholes, strict=True):
            if not whole.startswith(prompt):
                raise ConfigError(
                    f"{chat.place()}: the chat template writes the prompt otherwise where the completion follows, so "
                    f"that it is not known where that begins: {prompt[-40:]!r} is not in {whole[-120:]!r}. Train on "
                    "all of it (data.train_on=all), or on whole chats in a column 'messages'"
                )
            pairs.append((prompt, whole[len(prompt) :]))
        return [masked_before(array(before), array(after)) for before, after in halves(tokenizer, pairs)]

    return encode


# -- rows of files, read with the `datasets` library (the extra `data`) ------------------------------------------------

_LOADERS = {
    **{".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"},
    **{".txt": "text", ".md": "text", ".arrow": "arrow"},
}
# Files about the data, which lie beside it.
_ABOUT = ("README", "LICENSE", "CHANGELOG")
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4"}


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


def visible_files(path: Path, pattern: str = "*") -> list[Path]:
    """A file, or all files in a folder that match `pattern`, sorted; none hidden."""
    inside = [file for file in path.rglob(pattern) if file.is_file()] if path.is_dir() else [path]
    return sorted(file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _loader_of_folder(folder: Path, pattern: str) -> str | None:
    """What reads the files of a folder; None where the library finds out by itself. Files of several kinds are refused:
    the library would take the most frequent kind and leave out the others without a word."""
    kinds: dict[str, set[str]] = {}
    for file in visible_files(folder):
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


def _load_dataset(data: DataConfig, path: Path) -> Any:
    """An iterable dataset of the rows; nothing is copied on the disk."""
    datasets = _datasets()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return datasets.load_from_disk(str(path))
    options: dict[str, Any] = {"streaming": True}
    loader = _loader_of_folder(path, data.pattern) if path.is_dir() else _loader_of(path)
    if loader == "text":
        options["sample_by"] = "document" if data.documents is Documents.file else "line"
    if path.is_dir():
        if data.pattern != "*":
            options["data_files"] = f"**/{data.pattern}"
        return datasets.load_dataset(str(path.resolve()), **options)
    if ".tsv" in path.suffixes:
        options["sep"] = "\t"
    return datasets.load_dataset(loader, data_files=[str(path.resolve())], **options)


@contextmanager
def _silent() -> Iterator[None]:
    """Inside, the library shows no bars. It logs which file it cannot read."""
    datasets = _datasets()
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    cards = logging.getLogger("huggingface_hub.repocard")  # complains of a README.md that is no card of a data set
    heard, cards.disabled = cards.disabled, True
    try:
        yield
    finally:
        cards.disabled = heard
        if bars:
            datasets.enable_progress_bars()


def open_rows(data: DataConfig, path: str) -> Any:
    """The rows of one of the paths of `data`, a file or the split of a folder, as a data set of the library. Each path
    is read by itself: several together, the library would make all columns those of the first. Raises ConfigError where
    the library is not installed, a file cannot be read, or there is no such split."""
    try:
        with _silent():
            found = _load_dataset(data, Path(path))
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


def read_rows(path: str, rows: Any, together: int) -> Iterator[dict[str, list[Any]]]:
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
    files = visible_files(Path(path))
    if not any(file.stat().st_size for file in files):
        return ConfigError(f"data.path={path} is empty: {counted(len(files), 'file')} without a row")
    if odd := next(filter(None, map(not_utf8, files)), None):
        return ConfigError(f"data.path={path} cannot be read: {odd}")
    return ConfigError(
        f"data.path={path} cannot be read by the datasets library: {' '.join(str(error).split()):.500}. A line of JSON "
        'is an object such as {"text": "..."}, and all files of a folder have the same columns'
    )


# -- what the rows of JSON lines, Parquet, CSV and other files are trained as ------------------------------------------

_READ_TOGETHER = 1000
_CHATS, _PROMPT, _COMPLETION, _TEXT = "messages", "prompt", "completion", "text"

Document = str | tuple[str, str] | Chat  # a text, a prompt with its completion, messages


def _columns(data: DataConfig, path: str, names: list[str]) -> list[str]:
    """Those of the columns `names` that are read. Raises ConfigError where there is none to train on."""
    if data.column is None:
        for wanted in ([_CHATS], [_PROMPT, _COMPLETION]):
            if {*wanted} <= {*names}:
                return wanted
    column = data.column or _TEXT
    if column in names:
        return [column]
    wanted = f"data.column={column}" if data.column else "'messages', 'prompt' and 'completion', or 'text'"
    raise ConfigError(
        f"data.path={path} has no column {wanted}; it has {', '.join(sorted(names))}. "
        "Name the one with the text: data.column=NAME"
    )


def document(data: DataConfig, values: dict[str, Any], place: Callable[[], str]) -> Document:
    """What one row, its values by column, is trained as. Raises ConfigError, which says its `place`, for a value of
    another kind."""
    everything = data.train_on is TrainOn.all
    kinds = {name: type(value).__name__ for name, value in values.items()}
    if data.column is None and _CHATS in values:
        return Chat(messages_of(values[_CHATS], lambda: f"{place()}: column {_CHATS!r}"), 0, place)
    if len(values) == 1:
        ((name, value),) = values.items()
        if isinstance(value, str):
            return value
        chats = f"; chats are read from a column {_CHATS!r}" if isinstance(value, list) else ""
        raise ConfigError(f"{place()}: column {name!r} must be text, got {kinds[name]}{chats}")
    if all(isinstance(value, str) for value in values.values()):
        prompt, completion = values[_PROMPT], values[_COMPLETION]
        return prompt + completion if everything else (prompt, completion)
    if set(kinds.values()) != {"list"}:
        found = " and ".join(f"{name!r} is {kind}" for name, kind in kinds.items())
        raise ConfigError(f"{place()}: both columns must be text, or both lists of messages; {found}")
    parts = [messages_of(value, lambda name=name: f"{place()}: column {name!r}") for name, value in values.items()]
    return Chat([*parts[0], *parts[1]], 0 if everything else len(parts[0]), place)


def row_encoder(codec: TokenizerCodec | None, everything: bool) -> Encoder:
    """Encodes pieces of texts, pairs and chats (all tokens of which are trained on with `everything`), which may stand
    in one batch; chats alone need a template."""

    @functools.cache
    def encoder(kind: type, prompted: bool) -> Encoder:
        if kind is Chat:
            return chat_pair_encoder(codec) if prompted else chat_encoder(codec, everything)
        if codec is None:
            return bytes_of_pieces if kind is Piece else bytes_of_pairs
        return partial(encode_pieces if kind is Piece else encode_pairs, codec)

    def encode(documents: Sequence[Any]) -> list[np.ndarray]:
        alike: dict[Any, list[Any]] = {}
        kinds = [(type(one), isinstance(one, Chat) and one.prompted > 0) for one in documents]
        for kind, one in zip(kinds, documents, strict=True):
            alike.setdefault(kind, []).append(one)
        encoded = {kind: iter(encoder(*kind)(some)) for kind, some in alike.items()}
        return [next(encoded[kind]) for kind in kinds]

    return encode


def _row_documents(data: DataConfig, path: str) -> Iterator[Document]:
    def place(number: int) -> str:
        return f"row {number:,} of data.path={path}"

    rows, number, skipped = open_rows(data, path), 0, []
    first = next(read_rows(path, rows, 1), None)
    if first is None:
        return
    columns = _columns(data, path, list(first))
    for batch in read_rows(path, rows, _READ_TOGETHER):
        for found in zip(*(batch[name] for name in columns), strict=True):
            number += 1
            values = dict(zip(columns, found, strict=True))
            empty = next((name for name, value in values.items() if value is None or value in ("", [])), None)
            if empty is None:
                yield document(data, values, partial(place, number))
            else:
                skipped.append((number, empty))
    if skipped:
        first, name = skipped[0]
        if len(skipped) == number:
            raise ConfigError(
                f"the data is empty: {name!r} has no value in {place(first)}, and no row has all of "
                f"{', '.join(map(repr, columns))}"
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

    Raises:
        ConfigError: the library is not installed, the files cannot be read, or have no such column or nothing in it, a
            row holds something else, or the tokenizer has no chat template for chats.
    """
    documents = itertools.chain.from_iterable(_row_documents(data, path) for path in data.path)
    return flattened(pieces(codec, documents), row_encoder(codec, data.train_on is TrainOn.all))


# -- tokens on the disk, so that the next run on the same data reads them and tokenizes nothing ------------------------
# A file of tokens is written under another name and renamed: processes that make the same one at once do no harm.

_FORMAT = 1  # to be raised when the same text and tokenizer give other tokens than before


def files_key(files: list[Path]) -> list[list[Any]]:
    """What tells whether any of `files` has changed: the path, size and time of each."""
    found = []
    for path in files:
        with suppress(OSError):  # whoever reads it says so, and better
            stat = path.stat()
            found.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return found


def tokenizer_key(tokenizer: Any) -> str | None:
    """A checksum of all that decides what `tokenizer` makes of a text or chat; None of None."""
    if tokenizer is None:
        return None
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    said = [type(tokenizer).__name__, rules, tokenizer.chat_template, tokenizer.special_tokens_map]
    versions = [transformers.__version__, tokenizers.__version__]
    return hashlib.sha256(json.dumps([said, versions], default=str).encode()).hexdigest()


def cached(folder: str, key: dict[str, Any], make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The tokens and where documents begin, from the file of `key` (plain values, all that the tokens depend on) in
    `folder`, or else from `make`, and kept there."""
    name = hashlib.sha256(json.dumps({"format": _FORMAT, **key}, sort_keys=True).encode()).hexdigest()[:32]
    path = Path(folder).expanduser() / f"{name}.safetensors"
    if path.is_file():
        try:
            kept = load_file(path)
            os.utime(path)  # so that what is no longer used can be told by its age
            return kept["tokens"], kept["starts"]
        except (OSError, SafetensorError, KeyError) as error:
            log.warning(f"{path} cannot be read ({error}); tokenizing again")
    tokens, starts = make()
    _write(path, {"tokens": tokens, "starts": starts}, key)
    return tokens, starts


def _write(path: Path, tensors: dict[str, Tensor], key: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial") as folder:
            save_file(tensors, whole := Path(folder, path.name), metadata={"key": json.dumps(key)[:4096]})
            os.replace(whole, path)
    except (OSError, SafetensorError) as error:
        log.warning(
            f"cannot keep the tokens in {path.parent} ({error}); the next run tokenizes again. Choose another "
            "folder with data.cache=FOLDER, or data.cache=null"
        )


# -- the row of tokens -------------------------------------------------------------------------------------------------

_BYTE_VOCABULARY = 256
_SYNTHETIC_TOKENS = 1 << 20
_ROWS = (".jsonl", ".ndjson", ".parquet", ".arrow")
_DECIDES_TOKENS = ("source", "path", "pattern", "max_bytes", "documents", "column", "train_on", "split")
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass
class Corpus:
    """The tokens of a run."""

    # (N,) uint8 for bytes of files, else int32. Those that are only read, and not trained on, stand there as their
    # complement (`train/loss.py`).
    tokens: Tensor
    vocab_size: int  # every token is from 0 to below it
    tokenizer: Any  # the transformers tokenizer, or None for bytes and random tokens
    description: str  # what it is, for people
    # (documents,) int64, where each document begins; ascending from 0.
    starts: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    length: int = 0  # tokens of a sequence that is cut from it; 0 where that is left open

    @functools.cached_property
    def fingerprint(self) -> str:
        """Length and checksum of the tokens."""
        kind = str(self.tokens.dtype).replace("torch.", "")
        return f"{len(self.tokens)}-{kind}-{zlib.crc32(self.tokens.contiguous().numpy().data):08x}"

    def summary(self) -> str:
        """What it is and how much of it is trained on, in words."""
        documents = f"{self.description} in {counted(len(self.starts), 'document')}"
        if not self.tokens.is_signed():
            return documents
        only_read = int((self.tokens < 0).sum())  # a token that is not trained on is a complement
        trained = f", {len(self.tokens) - only_read:,} of the tokens trained on"
        return documents + (trained if only_read else "")


def standard_library_files() -> list[Path]:
    """The running interpreter's standard library, `.py` files without tests, in sorted order."""
    root, files = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _NOT_SOURCES]  # site-packages alone has ten times as many
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ConfigError(
            f"{root} holds no sources of Python's standard library; use data=text data.path=FILE_OR_FOLDER instead"
        )
    return sorted(files)


def text_files(paths: list[str], pattern: str) -> list[Path]:
    """The files named by `paths`, and those of folders (recursively, sorted, none hidden) that match `pattern`."""
    found = [file for path in paths for file in visible_files(Path(path), pattern)]
    if rows := next((path for path in found if path.suffix.lower() in _ROWS), None):
        log.warning(f"{rows} is read as plain text, brackets and all; data=hf reads the texts or chats in its rows")
    if not found:
        shown = paths[0] if len(paths) == 1 else f"[{','.join(paths)}]"
        there = [file for path in paths for file in visible_files(Path(path))]
        kinds = sorted({f"*{file.suffix}" if file.suffix else file.name for file in there})[:6]
        what = f"give another pattern: it holds {', '.join(kinds)}" if there else "it is empty, or all in it is hidden"
        raise ConfigError(f"data.path={shown} holds no file that matches data.pattern={pattern!r}; {what}")
    return found


def read_pieces(files: list[Path], max_bytes: int | None) -> Iterator[bytes]:
    """The content of each file, in order, until `max_bytes` have been read in all; the last one is cut. The log says at
    the end which were no text."""
    left, odd = max_bytes, []
    for path in files:
        if left is not None and left <= 0:
            break
        try:
            with path.open("rb") as file:
                piece = file.read() if left is None else file.read(left)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        if left is not None:
            left -= len(piece)
        try:
            codecs.utf_8_decode(piece, "strict", left != 0)  # what is cut may end in the middle of a character
        except UnicodeDecodeError:
            odd.append(path)
            if wide_encoding(piece):
                raise ConfigError(f"data.path: {not_utf8(path)}, or leave it out with data.pattern") from None
        if piece := piece.removeprefix(codecs.BOM_UTF8):  # with which some editors say that a text is UTF-8
            yield piece
    if odd:
        log.warning(
            f"not UTF-8 text: {len(odd):,} of {counted(len(files), 'file')} of the data, such as {odd[0]}; a tokenizer "
            "gets replacement characters for invalid bytes. Exclude such files (data.pattern='*.txt'), or convert them "
            "(iconv -f latin1 -t UTF-8 OLD > NEW)"
        )


def _tokenizer_folder(data: DataConfig, model: ModelConfig) -> str | None:
    if data.tokenizer is not None:
        return None if data.tokenizer == "bytes" else data.tokenizer
    return model.path if model.architecture == LOCAL and has_tokenizer(Path(str(model.path))) else None


def _text_documents(files: list[Path], data: DataConfig) -> Iterator[bytes]:
    contents = read_pieces(files, data.max_bytes)
    if data.documents is not Documents.line:
        return contents
    return (line for content in contents for line in content.splitlines() if line.strip())


def _tokenized(files: list[Path], data: DataConfig, codec: TokenizerCodec) -> tuple[Tensor, Tensor]:
    texts = (content.decode("utf-8", errors="replace") for content in _text_documents(files, data))
    return flattened(pieces(codec, texts), partial(encode_pieces, codec))


def _starts(lengths: ArrayLike) -> Tensor:
    ends = np.cumsum(lengths, dtype=np.int64)
    return torch.from_numpy(np.concatenate(([0], ends[:-1])))


def _as_bytes(pieces: Iterator[bytes]) -> tuple[Tensor, Tensor]:
    kept = list(pieces)
    content = b"\n".join(kept)
    # A bytearray, because torch wants memory it may write to.
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).to(torch.uint8)
    return tokens, _starts([len(piece) + 1 for piece in kept])


def _synthetic(data: DataConfig, model: ModelConfig, seed: int) -> Corpus:
    vocab = data.vocab_size or model.vocab_size or _BYTE_VOCABULARY
    count = max(_SYNTHETIC_TOKENS, 64 * (data.seq_len + 1))
    rng = np.random.default_rng([seed, vocab])
    tokens = rng.integers(0, vocab, count, dtype=np.int32)
    # Documents of all lengths up to that of a window, so that buckets and packing have something to do.
    starts = _starts(rng.integers(2, data.seq_len + 2, count // 2))
    description = f"{count:,} random tokens of {vocab:,}"
    return Corpus(torch.from_numpy(tokens), vocab, None, description, starts[starts < count - 1], data.seq_len)


def load_corpus(data: DataConfig, model: ModelConfig, seed: int) -> Corpus:
    """Reads the tokens that `data` describes, on the host; the model's settings say its vocabulary and its tokenizer.
    Raises ConfigError where there is nothing to read, for an unreadable file, or a broken tokenizer."""
    if data.source is Source.synthetic:
        return _synthetic(data, model, seed)
    stdlib, rows = data.source is Source.stdlib, data.source is Source.hf
    if stdlib:
        files = standard_library_files()
    elif rows:
        files = [file for path in data.path for file in visible_files(Path(path))]
    else:
        files = text_files(data.path, data.pattern)
    folder = _tokenizer_folder(data, model)
    tokenizer = None if folder is None else load_tokenizer(folder, "data.tokenizer")
    name = "Python's standard library" if stdlib else ", ".join(data.path)

    def kept(make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if data.cache is None:
            return make()
        key = {
            "files": files_key(files),
            "tokenizer": tokenizer_key(tokenizer),
            "settings": [str(getattr(data, setting)) for setting in _DECIDES_TOKENS],
        }
        return cached(data.cache, key, make)

    codec = None if tokenizer is None else TokenizerCodec(tokenizer)
    if rows:
        tokens, starts = kept(lambda: load_rows(data, codec))
    elif codec is None:
        tokens, starts = _as_bytes(_text_documents(files, data))
    else:
        tokens, starts = kept(lambda: _tokenized(files, data, codec))
    if len(tokens) == 0:
        raise ConfigError(f"the data is empty: {name} ({counted(len(files), 'file')}) holds no text")
    vocab, unit = (_BYTE_VOCABULARY, "tokens (bytes)") if tokenizer is None else (len(tokenizer), "tokens")
    return Corpus(tokens, vocab, tokenizer, f"{len(tokens):,} {unit} of {name}", starts, data.seq_len)
