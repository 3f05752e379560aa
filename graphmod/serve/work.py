"""One request on its way through the engine: submitted, read as it comes, aborted when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import NamedTuple

from graphmod.decode.streams import Handle
from graphmod.decode.types import Completion, Run
from graphmod.serve.asked import Asked
from graphmod.serve.errors import ApiError, refused
from graphmod.serve.remote import Refused, Request
from graphmod.serve.service import Service
from graphmod.serve.text import Answer, Piece, Scorer
from graphmod.text import Codec

_AHEAD = 4  # runs of other prompts that are read before they can be sent; the rest waits with its completion


class Gone(Exception):
    """The client has gone away."""


class Part(NamedTuple):
    """What came of one completion.

    Attributes:
        index: of the completion in the request.
        piece: of its text; the first one of a request with `echo` begins with the prompt.
        tokens: ids behind it, with those whose text is still kept back.
        finish_reason: None while it continues.
        first: whether it is the first of that completion.
    """

    index: int
    piece: Piece
    tokens: list[int]
    finish_reason: str | None
    first: bool


class Work:
    """A request in the engine.

    Args:
        service: that it is for.
        codec: of the model's tokens.
        read: makes what is asked for.
        aside: call it in the thread in which texts become tokens: that may take a while. To go there and back takes
            longer than to read token ids.

    Attributes:
        asked: what `read` made.
        prompt_tokens, tokens: how many there are so far.
    """

    def __init__(self, service: Service, codec: Codec, read: Callable[[], Asked], aside: bool) -> None:
        self._service, self._codec, self._read, self._aside = service, codec, read, aside
        self._began = time.perf_counter()
        self._request: Request | None = None
        self._answers: list[Answer] = []
        self._echoed: dict[int, int] = {}  # completions that have begun -> characters of their prompts
        self._latest: dict[int, float] = {}
        self.asked: Asked
        self.prompt_tokens = self.tokens = 0

    async def submit(self, unless_gone: Callable[[asyncio.Future], Awaitable[Asked]]) -> None:
        """Asks the engine for it. Raises ApiError.

        Args:
            unless_gone: waits for something for as long as there is somebody who wants it.
        """
        service = self._service
        with self._api_errors():
            if self._aside:  # begun at once, and not by a task, which would come after the reading of other requests
                asked = await unless_gone(asyncio.wrap_future(service.aside(self._read)))
            else:
                asked = self._read()
            self.asked = asked
            self._request = service.engine.submit(asked.prompts, asked.n, asked.sampling)
            self.prompt_tokens = sum(map(len, asked.prompts))
            self._scorer = Scorer(self._codec) if asked.score or asked.echo else None
            scorer = self._scorer if asked.score else None
            for ids in asked.prompts:
                self._answers += [Answer(self._codec, ids, asked.stops, scorer) for _ in range(asked.n)]

    async def taken(self) -> None:
        """Returns once the engine has taken it, which it does between two steps. Raises ApiError."""
        assert self._request is not None
        with self._api_errors():
            await asyncio.wrap_future(self._request.taken)

    @contextlib.contextmanager
    def _api_errors(self) -> Iterator[None]:
        """Errors within it are what a client is told."""
        try:
            yield
        except (ApiError, Gone):
            raise
        except Refused as error:
            said = _reworded(str(error), self.asked, error.prompt)
            raise refused(said, self.asked.field) from None
        except Exception as error:
            raise self._service.failed(error) from error

    def close(self) -> None:
        """Aborts what still runs of it."""
        if self._request is not None:
            self._service.engine.abort(self._request)

    async def parts(self) -> AsyncGenerator[Part]:
        """What comes of it, as it comes. Raises ApiError where a completion fails."""
        with self._api_errors():
            async with contextlib.aclosing(self._runs()) as runs:
                async for number, run in runs:
                    yield self._part(number * self.asked.n + run.completion.sample, run)

    def _part(self, index: int, run: Run) -> Part:
        answer, done, asked = self._answers[index], run.completion, self.asked
        self._time(index, len(run.tokens))
        tokens = list(run.tokens) if asked.most else []
        self.tokens += len(tokens)
        piece = answer.add(run.tokens, run.logprobs, run.top_logprobs)
        if run.ended:
            if done.finish_reason == "abort":
                raise ApiError(503, "the server is shutting down", code="shutting_down")
            if done.finish_reason == "error":
                raise ApiError(500, done.error or "the completion failed", code="completion_error")
            last = answer.end(done)
            piece = Piece(piece.text + last.text, piece.scored + last.scored)
        reason = done.finish_reason if run.ended else None
        if not asked.most:  # the engine makes one token at least
            piece, reason = Piece("", []), reason and "length"
        first = index not in self._echoed
        if first:
            self._echoed[index] = 0
        if asked.echo:
            piece = self._with_prompt(index, piece, done, first)
        return Part(index, piece, tokens, reason, first)

    def _with_prompt(self, index: int, piece: Piece, done: Completion, first: bool) -> Piece:
        """A piece as part of a text that begins with the prompt."""
        asked, before = self.asked, Piece("", [])
        if first:
            number = index // asked.n
            given = asked.texts[number] if asked.texts else None
            assert self._scorer is not None
            before = self._scorer.prompt(
                asked.prompts[number], given, done.prompt_logprobs or [], done.prompt_top_logprobs or []
            )
            self._echoed[index] = len(before.text)
        shift = self._echoed[index]
        moved = [one._replace(offset=one.offset + shift) for one in piece.scored]
        return Piece(before.text + piece.text, (before.scored if asked.score else []) + moved)

    def _time(self, index: int, tokens: int) -> None:
        if not tokens:
            return
        now, metrics = time.perf_counter(), self._service.metrics
        if not self._latest:
            metrics.first_token.observe(now - self._began)
        if index in self._latest:  # tokens come a few at a time, and each is taken to have needed the same
            for _ in range(tokens):
                metrics.between_tokens.observe((now - self._latest[index]) / tokens)
        self._latest[index] = now

    async def _runs(self) -> AsyncGenerator[tuple[int, Run]]:
        """The runs of all prompts, each with the number of its prompt."""
        assert self._request is not None
        handles = self._request.handles
        if len(handles) == 1:
            async for run in handles[0].runs():
                yield 0, run
            return
        queue: asyncio.Queue[tuple[int, Run] | Exception | None] = asyncio.Queue(_AHEAD)

        async def pass_on(number: int, handle: Handle) -> None:
            try:
                async for run in handle.runs():
                    await queue.put((number, run))
            except Exception as error:
                await queue.put(error)
            await queue.put(None)

        readers = [asyncio.create_task(pass_on(number, handle)) for number, handle in enumerate(handles)]
        try:
            left = len(readers)
            while left:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            for reader in readers:
                reader.cancel()


def _reworded(said: str, asked: Asked, number: int) -> str:
    """A refusal of the engine in the words of requests."""
    said = said.replace("max_new_tokens", "max_tokens")
    if asked.field == "messages":
        return said.replace("prompt 0", "prompt made of the messages", 1)
    return said.replace("prompt 0", f"prompt {number}", 1)
