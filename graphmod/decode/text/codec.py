"""Text to tokens and back: a saved tokenizer, or bytes as tokens, as `train.py` uses without one; and which special
tokens surround a text, in training and in prompts alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from graphmod.decode.text.chat import ChatError, chat_prompt
from graphmod.errors import ConfigError, reason


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of one tokenizer.

    A document is what the tokenizer by default puts before a text, the text, what the tokenizer by default puts after
    it, and EOS if that is not among these. A prompt is the beginning of a document: all that without anything after the
    text. What the text itself already begins or ends with is not added again.

    Attributes:
        before: ids that begin documents and prompts, such as BOS; often none.
        after: ids that end documents, such as EOS.
        end: the id at which generation stops, EOS or the last of `after`; None if nothing ends documents.
    """

    before: list[int]
    after: list[int]
    end: int | None

    @classmethod
    def of(cls, tokenizer: Any) -> SpecialTokens:
        """The special tokens of a transformers tokenizer, found by tokenizing a text with and without them."""
        before, after = _around(tokenizer)
        eos = tokenizer.eos_token_id
        if eos is not None and eos not in after:
            after = [*after, eos]
        return cls(before, after, eos if eos is not None else after[-1] if after else None)

    def prompt(self, ids: list[int]) -> list[int]:
        """The ids of a prompt, from those of its text alone."""
        return list(ids) if ids[: len(self.before)] == self.before else [*self.before, *ids]

    def document(self, ids: list[int]) -> list[int]:
        """The ids of a document, from those of its text alone."""
        begun = self.prompt(ids)
        return begun if not self.after or begun[-len(self.after) :] == self.after else [*begun, *self.after]


def special_ids(tokenizer: Any) -> dict[str, int]:
    """The special tokens of a transformers tokenizer, named ones and others: text -> id."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)) | added


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    special = set(special_ids(tokenizer).values())
    vocabulary = (tokenizer.decode([number]) for number in range(len(tokenizer)))
    for text in chain(["a"], vocabulary):
        inner = tokenizer(text, add_special_tokens=False)["input_ids"]
        # A special token could be mistaken for one of those around the text.
        if not inner or special & set(inner):
            continue
        whole = tokenizer(text)["input_ids"]
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return whole[:start], whole[start + len(inner) :]
    return [], []


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_TRAINING_STATE = "training_state.pt"  # beside the model in a checkpoint of train.py


class Codec(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteCodec:
    """Each byte of UTF-8 is a token, 0 to 255."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        """Ids from 256 on, which pad a vocabulary, stand for nothing."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class TokenizerCodec:
    """A transformers tokenizer.

    Args:
        tokenizer: fast or slow.

    Attributes:
        tokenizer: the same.
        around: the special tokens of documents and prompts.
        special: every special token: text -> id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.around = SpecialTokens.of(tokenizer)
        self.special = special_ids(tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt: the beginning of a document, without what ends one."""
        return self.around.prompt(self.encode_as_is(text))

    def document(self, text: str) -> list[int]:
        """The ids of a document to train on: `encode(text)` and what ends it."""
        return self.around.document(self.encode_as_is(text))

    def encode_as_is(self, text: str) -> list[int]:
        """The ids of a text that already has its special tokens, such as that of `chat`."""
        # A text may be longer than what the model sees in one go and is cut later: the warning about that is no use.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, tokens: list[int], special_tokens: bool = False) -> str:
        """The text of tokens; special ones show with `special_tokens` only."""
        return self.tokenizer.decode(tokens, skip_special_tokens=not special_tokens)

    def chat(self, messages: list[dict[str, Any]]) -> str:
        """The text of a prompt for an answer to `messages`, with all special tokens that the template puts there.

        Args:
            messages: as transformers and OpenAI's API take them: {"role": "user", "content": "..."}; a content may be
                a list of parts, whether or not the template reads such, and that of an assistant null.

        Raises:
            ChatError: the tokenizer has no chat template, or its template refuses the messages or leaves out what they
                say; `field` says where.
        """
        if not self.tokenizer.chat_template:
            raise ChatError(
                "the tokenizer has no chat template; put one in its folder (chat_template.jinja), use the tokenizer of "
                'a chat model (tokenizer=FOLDER), or give plain prompts (chat=false, {"prompt": ...})'
            )
        return chat_prompt(self.tokenizer, messages)


def token_bytes(codec: Codec) -> Callable[[int], bytes | None]:
    """What finds the bytes that a token stands for, which may be a part of a character; None where only its text is
    known. A special token stands for none."""
    if not isinstance(codec, TokenizerCodec):
        return lambda token: bytes([token] if token < 256 else [])
    special, read, tokenizer = {*codec.special.values()}, _reader(codec.tokenizer), codec.tokenizer

    def found(token: int) -> bytes | None:
        if token in special:
            return b""
        name = tokenizer.convert_ids_to_tokens(token)
        return name if isinstance(name, bytes) else None if name is None or read is None else read(name)

    return found


def _reader(tokenizer: Any) -> Callable[[str], bytes | None] | None:
    """What makes bytes of a token as the vocabulary writes it; None where those write characters."""

    def shown(*tokens: str) -> str | None:
        try:
            return tokenizer.convert_tokens_to_string([*tokens])
        except Exception:  # of a tokenizer that has not these tokens: anything
            return None

    if shown("Ã", "©", "Ġ") == "é ":  # the bytes of a character, each written as a character: as GPT-2 does
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        table = {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
        return lambda name: bytes(table[one] for one in name) if table.keys() >= {*name} else None
    if (shown("<0xC3>", "<0xA9>") or "").strip() == "é":  # what is no word of the vocabulary
        digits = re.compile("<0x([0-9A-F]{2})>")
        return lambda name: bytes.fromhex(of[1]) if (of := digits.fullmatch(name)) else name.replace("▁", " ").encode()
    if shown("Ã", "©") == "é":
        return lambda name: bytes(map(ord, name)) if max(map(ord, name)) < 256 else None
    return None


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was saved in a folder."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def tokenizer_folder(folder: Path, tokenizer: str | None) -> Path | None:
    """Where the tokenizer of a model is; None for bytes.

    Args:
        folder: of the model, such as a checkpoint of `train.py` or the averaged weights in it.
        tokenizer: folder of a tokenizer, `bytes`, or None to find out: the tokenizer saved with the model, or bytes
            for a checkpoint of `train.py` without one.

    Raises:
        ConfigError: there is none.
    """
    if tokenizer == "bytes":
        return None
    if tokenizer is not None:
        if not Path(tokenizer).is_dir():  # transformers would look for a repository of that name
            raise ConfigError(
                f"tokenizer={tokenizer} is not a folder; give the folder of a saved tokenizer, or tokenizer=bytes"
            )
        if not any(Path(tokenizer).iterdir()):
            raise ConfigError(
                f"tokenizer={tokenizer} is empty; give the folder of a saved tokenizer, or tokenizer=bytes"
            )
        return Path(tokenizer)
    if has_tokenizer(folder):
        return folder
    checkpoint = next((path for path in (folder, folder.parent) if (path / _TRAINING_STATE).is_file()), None)
    if checkpoint is None:
        raise ConfigError(f"{folder} holds no tokenizer; set tokenizer=FOLDER, or tokenizer=bytes")
    return checkpoint if has_tokenizer(checkpoint) else None


def codec_for(folder: Path, tokenizer: str | None) -> Codec:
    """The codec of a model; arguments as of `tokenizer_folder`.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    source = tokenizer_folder(folder, tokenizer)
    if source is None:
        return ByteCodec()
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as error:  # whatever the readers of the many formats raise
        why = reason(error).rstrip(" ,")
        raise ConfigError(f"tokenizer={source} is not a tokenizer that transformers reads: {why}") from error
    return TokenizerCodec(loaded)
