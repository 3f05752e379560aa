"""Text to tokens and back: a saved tokenizer, or bytes as tokens, as `train.py` uses without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphmod.decode.batching.requests import Codec
from graphmod.errors import ConfigError, reason

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_TRAINING_STATE = "training_state.pt"  # beside the model in a checkpoint of train.py
_UNFINISHED = "\ufffd"  # what decoders put for bytes that are no character yet


class ByteCodec:
    """Each byte of UTF-8 is a token, 0 to 255."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        """Ids from 256 on, which pad a vocabulary, stand for nothing."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class TokenizerCodec:
    """A transformers tokenizer; special tokens are left out of the text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, verbose=False)["input_ids"]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def codec_for(folder: Path, tokenizer: str | None) -> Codec:
    """The codec of a model.

    Args:
        folder: of the model.
        tokenizer: folder of a tokenizer, `bytes`, or None to find out: the tokenizer saved with the model, or bytes
            for a checkpoint of `train.py` without one.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if tokenizer == "bytes":
        return ByteCodec()
    if tokenizer is None and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        if (folder / _TRAINING_STATE).is_file():
            return ByteCodec()
        raise ConfigError(f"{folder} holds no tokenizer; set tokenizer=FOLDER, or tokenizer=bytes")
    source = folder if tokenizer is None else Path(tokenizer)
    if not source.is_dir():  # transformers would look for a repository of that name, and complain of the network
        raise ConfigError(
            f"tokenizer={tokenizer} is not a folder; give the folder of a saved tokenizer, or tokenizer=bytes"
        )
    from transformers import AutoTokenizer

    try:
        return TokenizerCodec(AutoTokenizer.from_pretrained(source, local_files_only=True))
    except Exception as error:  # whatever the readers of the many formats raise
        raise ConfigError(f"tokenizer={source} is not a tokenizer that transformers reads: {reason(error)}") from error


class TextStream:
    """Turns tokens that come one by one into pieces of text, each as soon as its characters are complete."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """The text that `token` completes, "" if none."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        if text.endswith(_UNFINISHED):
            return ""
        return self._advance(text)

    def rest(self) -> str:
        """What is left at the end, incomplete characters included."""
        return self._advance(self._codec.decode(self._tokens))

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._shown = text
        if "\n" in new:  # nothing before a line break changes what comes after, so the work per token stays small
            self._tokens, self._shown = [], ""
        return new
