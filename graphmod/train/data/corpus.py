"""Turns files into one long row of tokens.

How batches are cut from that row is `train/data/windows.py`'s business.
"""

import functools
import logging
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphmod.decode.text.codec import TokenizerCodec, has_tokenizer
from graphmod.errors import ConfigError
from graphmod.train.data.cache import cached, files_key, tokenizer_key
from graphmod.train.data.encode import encode_pieces, flattened, pieces
from graphmod.train.data.encodings import not_utf8, unmarked, wide_encoding
from graphmod.train.data.reading import row_files
from graphmod.train.data.rows import load_rows
from graphmod.train.settings import LOCAL, DataConfig, Documents, ModelConfig, Source
from graphmod.words import counted

log = logging.getLogger("graphmod")

_BYTE_VOCABULARY = 256
_SYNTHETIC_TOKENS = 1 << 20
_ROWS = (".jsonl", ".ndjson", ".parquet", ".arrow")
_DECIDES_TOKENS = ("source", "path", "pattern", "max_bytes", "documents", "column", "train_on", "split")
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass
class Corpus:
    """The tokens of a run.

    Attributes:
        tokens: (N,) uint8 for bytes of files, else int32. Those that are only read, and not trained on, stand there as
            their complement (`train/loss.py`).
        vocab_size: every token is from 0 to below it.
        tokenizer: the transformers tokenizer, or None for bytes and random tokens.
        description: what it is, for people.
        starts: (documents,) int64, where each document begins; ascending from 0.
        length: tokens of a sequence that is cut from it; 0 where that is left open.
    """

    tokens: Tensor
    vocab_size: int
    tokenizer: Any
    description: str
    starts: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    length: int = 0

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


def _visible(folder: Path, pattern: str) -> list[Path]:
    inside = [file for file in folder.rglob(pattern) if file.is_file()]
    return sorted(f for f in inside if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def text_files(paths: list[str], pattern: str) -> list[Path]:
    """The files named by `paths`, and those of folders (recursively, sorted, none hidden) that match `pattern`."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += _visible(path, pattern)
        else:
            found.append(path)
    if rows := next((path for path in found if path.suffix.lower() in _ROWS), None):
        log.warning(f"{rows} is read as plain text, brackets and all; data=hf reads the texts or chats in its rows")
    if not found:
        shown = paths[0] if len(paths) == 1 else f"[{','.join(paths)}]"
        there = [file for path in map(Path, paths) for file in _visible(path, "*")]
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
        if not _is_text(piece, cut=left == 0):
            odd.append(path)
            if wide_encoding(piece):
                raise ConfigError(f"data.path: {not_utf8(path)}, or leave it out with data.pattern")
        if piece := unmarked(piece):
            yield piece
    if odd:
        log.warning(
            f"not UTF-8 text: {len(odd):,} of {counted(len(files), 'file')} of the data, such as {odd[0]}; a tokenizer "
            "gets replacement characters for invalid bytes. Exclude such files (data.pattern='*.txt'), or convert them "
            "(iconv -f latin1 -t UTF-8 OLD > NEW)"
        )


def _is_text(piece: bytes, cut: bool) -> bool:
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError as error:
        return cut and error.start >= len(piece) - 3  # in the middle of a character
    return True


def load_tokenizer(folder: str) -> Any:
    """The tokenizer saved in `folder`; nothing is downloaded. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever its file readers raise
        # All lines: the first may end in a colon, with the reasons below it.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"data.tokenizer={folder} holds no tokenizer that transformers can read; give a folder with a "
            f"tokenizer.json or similar, as written by save_pretrained of a tokenizer. transformers reports: {reason}"
        ) from error


def _tokenizer_folder(data: DataConfig, model: ModelConfig) -> str | None:
    if data.tokenizer is not None:
        return None if data.tokenizer == "bytes" else data.tokenizer
    return model.path if model.architecture == LOCAL and has_tokenizer(Path(str(model.path))) else None


def _documents(files: list[Path], data: DataConfig) -> Iterator[bytes]:
    pieces = read_pieces(files, data.max_bytes)
    return _lines(pieces) if data.documents is Documents.line else pieces


def _tokenized(files: list[Path], data: DataConfig, tokenizer: Any) -> tuple[Tensor, Tensor]:
    texts = (piece.decode("utf-8", errors="replace") for piece in _documents(files, data))
    codec = TokenizerCodec(tokenizer)
    return flattened(pieces(codec, texts), partial(encode_pieces, codec))


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    return (line for piece in pieces for line in piece.splitlines() if line.strip())


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths[:-1]], dtype=torch.int64).cumsum(0)


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
    lengths = rng.integers(2, data.seq_len + 2, count // 2).tolist()
    starts = _starts(lengths)
    description = f"{count:,} random tokens of {vocab:,}"
    return Corpus(torch.from_numpy(tokens), vocab, None, description, starts[starts < count - 1], data.seq_len)


def load_corpus(data: DataConfig, model: ModelConfig, seed: int) -> Corpus:
    """Reads the tokens that `data` describes, on the host.

    Args:
        data, model: checked settings; the model's are looked at for its vocabulary and its tokenizer.
        seed: of synthetic tokens.

    Raises:
        ConfigError: nothing to read, an unreadable file, a broken tokenizer.
    """
    if data.source is Source.synthetic:
        return _synthetic(data, model, seed)
    stdlib, rows = data.source is Source.stdlib, data.source is Source.hf
    if stdlib:
        files = standard_library_files()
    elif rows:
        files = [file for path in data.path for file in row_files(Path(path))]
    else:
        files = text_files(data.path, data.pattern)
    folder = _tokenizer_folder(data, model)
    tokenizer = None if folder is None else load_tokenizer(folder)
    name = "Python's standard library" if stdlib else ", ".join(data.path)
    key = {
        "files": files_key(files),
        "tokenizer": tokenizer_key(tokenizer),
        "settings": [str(getattr(data, setting)) for setting in _DECIDES_TOKENS],
    }
    if rows:
        tokens, starts = cached(
            data.cache, key, lambda: load_rows(data, None if tokenizer is None else TokenizerCodec(tokenizer))
        )
    elif tokenizer is None:
        tokens, starts = _as_bytes(_documents(files, data))
    else:
        tokens, starts = cached(data.cache, key, lambda: _tokenized(files, data, tokenizer))
    if len(tokens) == 0:
        raise ConfigError(f"the data is empty: {name} ({counted(len(files), 'file')}) holds no text")
    vocab, unit = (_BYTE_VOCABULARY, "tokens (bytes)") if tokenizer is None else (len(tokenizer), "tokens")
    return Corpus(tokens, vocab, tokenizer, f"{len(tokens):,} {unit} of {name}", starts, data.seq_len)
