"""Text that comes token by token and, joined, equals what decoding all tokens at once gives.

A token's text depends on its neighbours: decoders strip the first space, join bytes to characters and pieces to words.
So a completion is always decoded together with its prompt, and its text is what follows the prompt's.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream

from graphmod.decode.text.codec import ByteCodec, Codec, TokenizerCodec, token_bytes

_UNFINISHED = "\ufffd"  # what decoders put for bytes that are no character yet


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    if other.startswith(one):
        return len(one)
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def _without(before: str, whole: str) -> str:
    # If the tokens complete the last character of the prompt, that character counts as theirs.
    return whole[_common(before, whole) :]


class _Watched:
    def __init__(self, stream: TextStream, texts: list[str]) -> None:
        self._stream, self._texts = stream, texts
        self._kept = max(map(len, texts)) - 1
        self._tail = ""

    def met(self, token: int) -> bool:
        tail = self._tail + self._stream.add(token)
        text = tail + self._stream.pending
        self._tail = tail[-self._kept :] if self._kept else ""
        return any(stop in text for stop in self._texts)


class StopTexts:
    """Looks for texts in a completion. One that holds a special token is looked for in the text with special tokens,
    others in the text without.

    Args:
        codec: of the tokens.
        texts: none empty.
        prompt: what comes before the completion; nothing in it counts.
    """

    def __init__(self, codec: Codec, texts: list[str], prompt: Sequence[int]) -> None:
        names = getattr(codec, "special", {})
        special = [text for text in texts if any(name in text for name in names)]
        plain = [text for text in texts if text not in special]
        self._watched = [
            _Watched(TextStream(codec, prompt, special_tokens=shown), group)
            for shown, group in ((False, plain), (True, special))
            if group
        ]

    def met(self, token: int) -> bool:
        """Whether one of the texts is complete with `token`, the next one of the completion."""
        return any(watched.met(token) for watched in self._watched)


def completion_text(codec: Codec, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of `tokens` after `prompt`: the text of both together, without that of the prompt."""
    return _without(codec.decode(list(prompt)) if prompt else "", codec.decode([*prompt, *tokens]))


def _streamable(codec: Codec) -> Any | None:
    """The `tokenizers.Tokenizer` whose DecodeStream gives what the codec decodes; None where there is none."""
    if not isinstance(codec, TokenizerCodec):
        return None
    from transformers import PreTrainedTokenizerFast  # loads PyTorch; whoever has made such a codec has done so

    tokenizer = codec.tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    kind = type(tokenizer)
    if kind.decode is not PreTrainedTokenizerFast.decode or kind._decode is not PreTrainedTokenizerFast._decode:
        return None
    backend = tokenizer.backend_tokenizer
    if not tokenizer.clean_up_tokenization_spaces:
        return backend
    # transformers removes spaces from the text afterwards, but for BPE not unless it is told twice.
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return backend if type(backend.model).__name__ == "BPE" and not forced else None


def _bytes(backend: Any) -> set[int]:
    """The tokens that are a single byte, if the decoder takes a row of them as a whole: one wrong byte turns all of the
    row into U+FFFD. Empty for other decoders."""
    if backend.decoder is None or backend.decoder.decode(["<0x41>"]) != "A":
        return set()
    return {number for byte in range(256) if (number := backend.token_to_id(f"<0x{byte:02X}>")) is not None}


class TextStream:
    """Turns tokens that come one by one into pieces of text, each as soon as no later token can change it.

    All pieces and `rest()` joined are `completion_text` of the tokens. Fast tokenizers are streamed by `DecodeStream`
    of `tokenizers`. With other codecs a token may change the text before it: each token decodes everything again, and a
    piece is returned once two different decodings in a row begin with it.

    Args:
        codec: decodes the tokens.
        prompt: ids of the prompt, which come before the tokens.
        special_tokens: show special tokens; only with a `TokenizerCodec`.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int] = (), special_tokens: bool = False) -> None:
        self._codec, self._special = codec, special_tokens
        self._prompt, self._tokens = list(prompt), []
        self._before: str | None = None
        self._given = self._latest = ""
        self._complete = True
        self._backend = _streamable(codec)
        self._stream: DecodeStream | None = None
        self._held: list[int] = []
        self._last: list[int] = []
        self._since: list[int] = []
        self._open: set[int] = set()
        if self._backend is not None and isinstance(codec, TokenizerCodec) and (found := _bytes(self._backend)):
            self._open = found if special_tokens else found | set(codec.special.values())

    def add(self, token: int) -> str:
        """The text that is final with this token, "" if none."""
        self._tokens.append(token)
        self._held.append(token)
        self._since.append(token)
        self._complete = False
        backend = self._backend
        if self._open and backend is not None and (token in self._open or backend.id_to_token(token) is None):
            return ""
        piece = self._decoded_again() if self._stream is None else self._streamed(self._stream)
        self._held = []
        if piece:
            self._given += piece
            self._last, self._since = self._since, []
        self._complete = bool(piece) and (self._stream is not None or self._given == self._latest)
        if self._complete and isinstance(self._codec, ByteCodec):  # text of bytes depends on nothing before a character
            self._prompt, self._tokens, self._before, self._given, self._latest = [], [], "", "", ""
        return piece

    def add_all(self, tokens: Sequence[int]) -> str:
        """As `add` of each, joined. Where the last one ends within a character, their text may come with what follows:
        a stream takes about half the time where it is given a run of tokens at once."""
        pieces, left = [], list(tokens)
        while left and (self._stream is None or self._open):
            pieces.append(self.add(left.pop(0)))
        if left:
            self._tokens += left[:-1]
            self._held += left[:-1]
            self._since += left[:-1]
            pieces.append(self.add(left[-1]))
        return "".join(pieces)

    @property
    def complete(self) -> bool:
        """Whether the text of all tokens was given out."""
        return self._complete

    @property
    def ahead(self) -> int:
        """How many more characters the tokens so far stand for, unless the next one changes that."""
        return max(0, len(self._latest.rstrip(_UNFINISHED)) - len(self._given)) if self._stream is None else 0

    @property
    def pending(self) -> str:
        """The text of the tokens whose piece is still to come, as it would be if no other came."""
        if self._complete:
            return ""
        if self._stream is None:
            return self._left()
        # As the stream does it: the tokens of the last piece are all that this text depends on.
        return _without(self._decode(self._last), self._decode([*self._last, *self._since]))

    def rest(self) -> str:
        """What is left at the end, incomplete characters included."""
        piece = "" if self._complete else self._left()
        self._given += piece
        self._complete = True
        return piece

    def _left(self) -> str:
        text = self._text()
        return text[len(self._given) :] if text.startswith(self._given) else ""

    def _decode(self, tokens: list[int]) -> str:
        if self._backend is not None:
            return self._backend.decode(tokens, skip_special_tokens=not self._special)
        if self._special and isinstance(self._codec, TokenizerCodec):
            return self._codec.decode(tokens, special_tokens=True)
        return self._codec.decode(tokens)

    def _text(self) -> str:
        if self._before is None:
            self._before = self._decode(self._prompt) if self._prompt else ""
        return _without(self._before, self._decode([*self._prompt, *self._tokens]))

    def _streamed(self, stream: DecodeStream) -> str:
        assert self._backend is not None
        try:
            return stream.step(self._backend, self._held) or ""
        except Exception:  # the text before has changed; tokenizers has no class of its own for that
            self._stream = None
            return self._decoded_again()

    def _decoded_again(self) -> str:
        """What is new when everything is decoded; if it ends in a whole character, a new stream begins after it."""
        text, before = self._text(), self._latest
        if text == before:  # after a special token, for example; that the two agree proves nothing
            return ""
        settled = text.rstrip(_UNFINISHED)
        if self._backend is None and not isinstance(self._codec, ByteCodec):
            settled = settled[: _common(settled, before)]
        self._latest = text
        if self._backend is not None and text and settled == text:
            self._stream = DecodeStream([*self._prompt, *self._tokens], skip_special_tokens=not self._special)
        return settled[len(self._given) :] if settled.startswith(self._given) else ""


class TokenText(NamedTuple):
    """What one token adds to a text.

    Attributes:
        token: its id.
        text: the characters that it completes; all joined are the text.
        bytes: what it stands for in UTF-8, which may be a part of a character; all joined are the text. Where they are
            not known, or a decoder left some out, those of `text`.
        offset: where its text begins, in characters.
    """

    token: int
    text: str
    bytes: bytes
    offset: int


class TokenTexts:
    """The text of tokens that come one by one, and what each of them adds to it.

    Args:
        codec: of the tokens.
        prompt: ids that come before them.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int] = ()) -> None:
        self._stream, self._bytes = TextStream(codec, prompt), token_bytes(codec)
        self._open: list[tuple[int, int]] = []  # tokens whose text may still change, and where it ends by now
        self._text, self._start = "", 0  # of these, as far as it is final

    def add(self, token: int) -> tuple[str, list[TokenText]]:
        """The text that is final with this token, and the tokens whose texts are."""
        piece = self._stream.add(token)
        self._text += piece
        self._open.append((token, self._start + len(self._text) + self._stream.ahead))
        return piece, self._settle(len(self._open) - (not self._stream.complete)) if piece else []

    def rest(self) -> tuple[str, list[TokenText]]:
        """What is left of both at the end."""
        piece = self._stream.rest()
        self._text += piece
        return piece, self._settle(len(self._open))

    def _settle(self, count: int) -> list[TokenText]:
        found: list[TokenText] = []
        done = 0
        begin, at, end = self._start, self._start, self._start + len(self._text)
        for number, (_, reach) in enumerate(self._open[:count], start=1):
            last = number == len(self._open)
            to = end if last else max(at, min(reach, end))
            if to > at or last:  # what has no text may be the beginning of the next token's character
                tokens = [token for token, _ in self._open[done:number]]
                found += self._parted(tokens, self._text[at - begin : to - begin], at)
                done, at = number, to
        held = [(token, min(reach, end)) for token, reach in self._open[done:count]]
        self._text, self._start, self._open = self._text[at - begin :], at, [*held, *self._open[count:]]
        return found

    def _parted(self, tokens: list[int], text: str, offset: int) -> list[TokenText]:
        """Each token with its part of the text of all: with the characters that its bytes complete."""
        raw = [self._bytes(token) for token in tokens]
        whole = [one for one in raw if one is not None]
        known = len(whole) == len(raw) and _alike(b"".join(whole).decode("utf-8", "replace"), text)
        texts = ["" for _ in tokens[1:]] + [text]
        if known:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            parts = [decoder.decode(one, number == len(raw)) for number, one in enumerate(whole, start=1)]
            texts = parts if "".join(parts) == text else texts
        found = []
        for token, own, given in zip(tokens, texts, raw, strict=True):
            found.append(
                TokenText(token, own, given if known and given is not None else own.encode("utf-8", "replace"), offset)
            )
            offset += len(own)
        return found


def _alike(one: str, other: str) -> bool:
    """Whether two texts are the same, whatever number of signs they have for bytes that are no character."""
    return one == other or re.sub(f"{_UNFINISHED}+", _UNFINISHED, one) == re.sub(f"{_UNFINISHED}+", _UNFINISHED, other)
