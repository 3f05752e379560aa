"""Texts, and pairs of prompt and completion, as tokens; `train/data/chats.py` has chats.

Everything a tokenizer sees goes through here in batches of some megabytes, which fast tokenizers divide among the
cores. Memory is that of the tokens and of one batch, however long a document is.
"""

import itertools
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import BatchEncoding

from graphmod.decode.text.codec import TokenizerCodec
from graphmod.train.loss import masked

_BATCH, _MOST_TOGETHER = 1 << 21, 4096  # characters, documents
_LONG, _CONTEXT, _MOST_TRIES = 1 << 16, 256, 64
# Between words: where tokenizers that split at spaces begin a token, whether spaces begin words or follow them.
_BETWEEN = re.compile(r"(?<=\S)(?=[ \n]\S)")
_SECONDS_WITHOUT_BAR, _SECONDS_BETWEEN_LINES = 2.0, 10.0

log = logging.getLogger("graphmod")

Encoder = Callable[[Sequence[Any]], list[np.ndarray]]


@dataclass
class Piece:
    """A part of a text.

    Attributes:
        text: the part, after some of the text before it, for context.
        before: how many characters that is.
        last: the text ends with it.
    """

    text: str
    before: int
    last: bool

    @property
    def characters(self) -> int:
        """How long it is."""
        return len(self.text)


def _size(document: Any) -> int:
    return sum(map(len, document)) if isinstance(document, tuple) else document.characters


def flattened(documents: Iterable[Any], encode: Encoder) -> tuple[Tensor, Tensor]:
    """All documents in one row of tokens. Where that takes longer than a moment, a terminal shows a bar, and a log
    file gets a line now and then.

    Args:
        documents: in their order, pieces of texts, pairs or chats, read one batch at a time.
        encode: from a batch of them to the tokens of each.

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
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )


def _ended(codec: TokenizerCodec, tokens: list[int]) -> list[int]:
    after = codec.around.after
    return tokens if not after or tokens[-len(after) :] == after else [*tokens, *after]


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


def pieces(codec: TokenizerCodec | None, texts: Iterable[str]) -> Iterator[Piece]:
    """Each text, a long one in pieces that give the same tokens one by one; None, for bytes, cuts none."""
    tokenizer = None if codec is None else codec.tokenizer
    for text in texts:
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
        if piece.before:
            first = _token_at(encoding, row, piece.before, piece.text)
            if first is None:  # with more of the text after it, the cut is within a token: keep the characters
                tokens = _encoding(tokenizer, [piece.text[piece.before :]])["input_ids"][0]
            else:
                tokens = tokens[first:]
        if not piece.before:
            tokens = codec.around.prompt(tokens)
        found.append(array(_ended(codec, tokens) if piece.last else tokens))
    return found


def encode_pairs(codec: TokenizerCodec, pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
    """The tokens of each prompt and its completion, int32, of which only the completion's are trained on.

    The prompt has the tokens it has alone, and the completion those it has after the prompt, where both can be.
    """
    return [
        masked_before(array(codec.around.prompt(before)), array(_ended(codec, after)))
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
    found = []
    for prompt, completion in pairs:
        before, after = (np.frombuffer(part.encode(), dtype=np.uint8) for part in (prompt, f"{completion}\n"))
        found.append(masked_before(before.astype(np.int32), after.astype(np.int32)))
    return found
