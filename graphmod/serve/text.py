"""What is sent of a completion: its text up to a stop, of which nothing is sent while it could still complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from graphmod.decode.results import Completion
from graphmod.decode.text.codec import ByteCodec, Codec
from graphmod.decode.text.stream import TextStream


class Scored(NamedTuple):
    """A token and its log-probability.

    Attributes:
        token: its id.
        text: what it adds to the text; all joined are the text. Of a special token, its name.
        logprob: nats, under the model's own distribution.
        offset: where its text begins, in characters of the completion.
    """

    token: int
    text: str
    logprob: float
    offset: int

    @property
    def bytes(self) -> list[int]:
        """The text in UTF-8."""
        return list(self.text.encode("utf-8", errors="replace"))


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

    def __init__(self, stops: Sequence[str], ends: Sequence[str] = ()) -> None:
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
        score: tell tokens and log-probabilities too.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], stops: Sequence[str] = (), score: bool = False) -> None:
        self._codec, self._score = codec, score
        self._names = {number: name for name, number in getattr(codec, "special", {}).items()}
        # The text has no special tokens: of a stop with some, only what is around them can be seen in it.
        self._special = {stop: plain for stop in stops if (plain := self._plain(stop)) != stop}
        self._stream = TextStream(codec, prompt)
        self._cut = StopCut([stop for stop in stops if stop not in self._special], [*self._special.values()])
        self._length = self._sent = 0
        self._scored: deque[Scored] = deque()

    def _plain(self, stop: str) -> str:
        for name in self._names.values():
            stop = stop.replace(name, "")
        return stop

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Piece:
        """What may be sent once these tokens have come."""
        if self._score:
            sent = ""
            for token, logprob in zip(tokens, logprobs, strict=True):
                piece = self._stream.add(token)
                self._scored.append(Scored(token, piece, logprob, self._length))
                self._length += len(piece)
                sent += self._cut.add(piece)
        else:
            piece = self._stream.add_all(tokens)
            self._length += len(piece)
            sent = self._cut.add(piece)
        self._sent += len(sent)
        return Piece(sent, self._ready())

    def end(self, completion: Completion) -> Piece:
        """What is left to send of a completion that has ended."""
        left = self._stream.rest()
        if left and self._scored:
            self._scored[-1] = self._scored[-1]._replace(text=self._scored[-1].text + left)
        self._length += len(left)
        sent = self._cut.add(left)
        if not self._cut.met:
            sent += self._cut.rest(self._special_end(completion))
        self._sent += len(sent)
        return Piece(sent, self._ready(last=True))

    def _special_end(self, completion: Completion) -> str:
        if not self._special or completion.finish_reason != "stop" or isinstance(self._codec, ByteCodec):
            return ""
        shown = self._codec.decode(completion.tokens, special_tokens=True)
        return max((plain for stop, plain in self._special.items() if shown.endswith(stop)), key=len, default="")

    def _ready(self, last: bool = False) -> list[Scored]:
        everything = self._sent == self._length or (last and not self._cut.met)
        ready = []
        while self._scored and (everything or self._scored[0].offset < self._sent):
            first = self._scored[0]
            if not (last or first.text or len(self._scored) > 1):
                break  # what is left at the end will be its text
            self._scored.popleft()
            ready.append(first if first.text else first._replace(text=self._names.get(first.token, "")))
        return ready
