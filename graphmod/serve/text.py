"""What is sent of a completion: its text up to a stop, of which nothing is sent while it could still complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from graphmod.decode.types import Completion
from graphmod.text import Codec, TextStream, TokenizerCodec, TokenText, TokenTexts, token_bytes

_LEAST = -9999.0  # of log-probabilities, since JSON has no infinity


class Scored(NamedTuple):
    """A token and its log-probability.

    Attributes:
        token: its id.
        text: what it adds to the text; all joined are the text. Of a special token, its name.
        bytes: what it stands for in UTF-8, which may be a part of a character; all joined are the text.
        logprob: nats, under the model's own distribution; None of the first token of a prompt.
        offset: where its text begins, in characters of the text.
        top: the most likely tokens at its place, the likeliest first.
    """

    token: int
    text: str
    bytes: bytes
    logprob: float | None
    offset: int
    top: list[Likely]


class Likely(NamedTuple):
    """One of the most likely tokens at a place: its id, its text alone, its bytes, and its log-probability."""

    token: int
    text: str
    bytes: bytes
    logprob: float


class Scorer:
    """Makes `Scored` of the tokens of one codec.

    Args:
        codec: of the tokens.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec, self._bytes = codec, token_bytes(codec)
        self._names = {number: name for name, number in getattr(codec, "special", {}).items()}
        self._known: dict[int, tuple[str, bytes]] = {}

    def scored(self, own: TokenText, logprob: float | None, top: list[tuple[int, float]]) -> Scored:
        """A token with what is known of its place."""
        text = own.text or self._names.get(own.token, "")
        likely = [
            Likely(token, *((text, own.bytes) if token == own.token else self._alone(token)), max(value, _LEAST))
            for token, value in top
        ]
        value = None if logprob is None else max(logprob, _LEAST)
        return Scored(own.token, text, own.bytes, value, own.offset, likely)

    def _alone(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            raw, name = self._bytes(token), self._names.get(token)
            if name is not None or raw is None:
                text = name or self._codec.decode([token])
                self._known[token] = text, b"" if name else text.encode("utf-8", "replace")
            else:  # of a part of a character, its bytes, as OpenAI writes them
                written = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
                self._known[token] = (raw.decode() if _is_text(raw) else written), raw
        return self._known[token]

    def prompt(
        self, tokens: Sequence[int], given: str | None, logprobs: Sequence[float], top: list[list[tuple[int, float]]]
    ) -> Piece:
        """A prompt that is told with its completion.

        Args:
            given: its text, which is told as it is where the tokens' texts make it; None for ids.
            logprobs, top: of all its tokens but the first; empty where they are not asked for.
        """
        texts = TokenTexts(self._codec)
        parts = [texts.add(token) for token in tokens] + [texts.rest()]
        owns = [own for _, found in parts for own in found]
        values = [None, *logprobs] if logprobs or len(tokens) == 1 else [None] * len(owns)
        scored = [
            self.scored(own, value, likely)
            for own, value, likely in zip(owns, values, [[], *top] if top else [[]] * len(owns), strict=True)
        ]
        said = Piece("".join(piece for piece, _ in parts), scored)
        if given is None:
            return said
        at, placed = 0, []
        for one in scored:
            placed.append(one._replace(offset=at))
            # A special token may be one that the tokenizer has put around the text.
            at += len(one.text) if given.startswith(one.text, at) else 0 if one.token in self._names else len(given) + 1
        return Piece(given, placed) if at == len(given) else said


def _is_text(raw: bytes) -> bool:
    try:
        return bool(raw.decode() or not raw)
    except UnicodeDecodeError:
        return False


class Piece(NamedTuple):
    """What may be sent now: a text, and the tokens it comes from as far as they are asked for."""

    text: str
    scored: list[Scored]


class StopCut:
    """Ends a text that comes in pieces before the first of some stops.

    Args:
        stops: none empty.
        ends: are no stops by themselves, but kept back while the text ends with a part of one.

    Attributes:
        met: whether a stop has come.
    """

    def __init__(self, stops: Sequence[str], ends: Sequence[str]) -> None:
        self._stops, self._ends = list(stops), [end for end in ends if end]
        self._longest = max(map(len, [*self._stops, *self._ends]), default=0)
        self._held = ""
        self.met = False

    def add(self, piece: str) -> str:
        """What is safe to send with this piece."""
        if self.met or not self._longest:
            return "" if self.met else piece
        self._held += piece
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.met = True
            sent, self._held = self._held[: min(found)], ""
            return sent
        first = max(0, len(self._held) - self._longest)
        safe = next((at for at in range(first, len(self._held)) if self._could_begin_at(at)), len(self._held))
        sent, self._held = self._held[:safe], self._held[safe:]
        return sent

    def _could_begin_at(self, place: int) -> bool:
        tail = self._held[place:]
        return any(stop.startswith(tail) for stop in (*self._stops, *self._ends))

    def rest(self, end: str = "") -> str:
        """What is left when nothing follows, without `end`, which it ends with."""
        sent, self._held = self._held.removesuffix(end), ""
        self.met = self.met or bool(end)
        return sent


class Answer:
    """The text of one completion, token by token.

    Args:
        codec: of the tokens.
        prompt: ids before the completion.
        stops: texts that end it and are not part of it.
        scorer: of log-probabilities, if they are told too.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], stops: Sequence[str], scorer: Scorer | None) -> None:
        self._codec, self._scorer = codec, scorer
        self._names = {number: name for name, number in getattr(codec, "special", {}).items()}
        # The text has no special tokens: of a stop with some, only what is around them can be seen in it.
        self._special = {stop: plain for stop in stops if (plain := self._plain(stop)) != stop}
        self._stream = TextStream(codec, prompt) if scorer is None else TokenTexts(codec, prompt)
        self._values: deque[tuple[float, list[tuple[int, float]]]] = deque()  # of tokens whose text is to come
        self._cut = StopCut([stop for stop in stops if stop not in self._special], [*self._special.values()])
        self._length = self._sent = 0
        self._scored: deque[tuple[Scored, int]] = deque()  # with how many characters of the text each is

    def _plain(self, stop: str) -> str:
        for name in self._names.values():
            stop = stop.replace(name, "")
        return stop

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: list[list[tuple[int, float]]] | None = None
    ) -> Piece:
        """What may be sent once these tokens have come."""
        stream = self._stream
        if isinstance(stream, TokenTexts):
            sent = ""
            for token, logprob, likely in zip(tokens, logprobs, top or [[]] * len(tokens), strict=True):
                self._values.append((logprob, likely))
                sent += self._cut.add(self._scored_piece(*stream.add(token)))
        else:
            piece = stream.add_all(tokens)
            self._length += len(piece)
            sent = self._cut.add(piece)
        self._sent += len(sent)
        return Piece(sent, self._ready())

    def _scored_piece(self, piece: str, owns: list[TokenText]) -> str:
        assert self._scorer is not None
        self._scored += [(self._scorer.scored(own, *self._values.popleft()), len(own.text)) for own in owns]
        self._length += len(piece)
        return piece

    def end(self, completion: Completion) -> Piece:
        """What is left to send of a completion that has ended."""
        if isinstance(self._stream, TokenTexts):
            left = self._scored_piece(*self._stream.rest())
        else:
            left = self._stream.rest()
            self._length += len(left)
        sent = self._cut.add(left)
        if not self._cut.met:
            sent += self._cut.rest(self._special_end(completion))
        self._sent += len(sent)
        return Piece(sent, self._ready(last=True))

    def _special_end(self, completion: Completion) -> str:
        if not self._special or completion.finish_reason != "stop" or not isinstance(self._codec, TokenizerCodec):
            return ""
        shown = self._codec.decode(completion.tokens, special_tokens=True)
        return max((plain for stop, plain in self._special.items() if shown.endswith(stop)), key=len, default="")

    def _ready(self, last: bool = False) -> list[Scored]:
        everything = self._sent == self._length or (last and not self._cut.met)
        over, ready = last or self._cut.met, []
        while self._scored:
            first, length = self._scored[0]
            left = length if everything else self._sent - first.offset
            if not everything and (left <= 0 or (left < length and not over)):
                break
            self._scored.popleft()
            if left < length:  # a stop begins in the middle of it
                text = first.text[:left]
                first = first._replace(text=text, bytes=text.encode("utf-8", "replace"))
            ready.append(first)
        return ready
