"""One request on its way through the engine: submitted, read as it comes, aborted when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from graphmod.decode.batching.handle import Handle
from graphmod.decode.errors import RequestError
from graphmod.decode.results import Completion, Run
from graphmod.serve.asked import Asked
from graphmod.serve.errors import ApiError, refused
from graphmod.serve.service import Service
from graphmod.serve.text import Answer, Piece

log = logging.getLogger("graphmod")

_AHEAD = 4  # runs of other prompts that are read before they can be sent; the rest waits with its completion


class Part(NamedTuple):
    """What came of one completion.

    Attributes:
        index: of the completion in the request.
        piece: of its text.
        tokens: ids behind it, with those whose text is still kept back.
        finish_reason: None while it continues.
    """

    index: int
    piece: Piece
    tokens: list[int]
    finish_reason: str | None


class Work:
    """A request in the engine.

    Args:
        service: that it is for.
        read: makes what is asked for; called in the thread in which tokenizers are used.

    Attributes:
        asked: what `read` made.
        prompt_tokens, tokens: how many there are so far.
    """

    def __init__(self, service: Service, read: Callable[[], Asked]) -> None:
        self._service, self._read = service, read
        self._began = time.perf_counter()
        self._handles: list[Handle] = []
        self._answers: list[Answer] = []
        self._latest: dict[int, float] = {}
        self._closed = False
        self.asked: Asked | None = None
        self.prompt_tokens = self.tokens = 0

    async def submit(self) -> None:
        """Hands it to the engine. Raises ApiError."""
        await asyncio.wrap_future(self._service.aside(self._submit))

    def _submit(self) -> None:
        if self._closed:
            return
        asked = self.asked = self._read()
        for number, (prompt, sampling) in enumerate(zip(asked.prompts, asked.sampling, strict=True)):
            try:
                handle = self._service.loop.submit(prompt, asked.n, sampling)
            except RequestError as error:
                self._abort()
                raise refused(RequestError(_reworded(str(error), asked, number)), asked.field) from None
            except Exception as error:
                self._abort()
                raise self._service.failed(error) from error
            self._handles.append(handle)
            self.prompt_tokens += len(handle.completions[0].prompt)
            for done in handle.completions:
                self._answers.append(Answer(self._service.codec, done.prompt, asked.stops, asked.score))

    def close(self) -> None:
        """Aborts what still runs of it."""
        self._closed = True
        whole = self.asked is not None and len(self._handles) == len(self.asked.prompts)
        if whole and all(handle.done for handle in self._handles):
            return  # as most do, and the thread need not be woken
        with contextlib.suppress(RuntimeError):  # the server has ended, and all requests with it
            self._service.aside(self._abort)

    def _abort(self) -> None:
        for handle in self._handles:
            if not handle.done:
                try:
                    self._service.loop.abort(handle)
                except Exception as error:  # the engine has failed; `/health` tells it
                    log.debug(f"a request could not be aborted: {error}")

    async def parts(self) -> AsyncIterator[Part]:
        """What comes of it, as it comes. Raises ApiError where a completion fails."""
        try:
            async with contextlib.aclosing(self._runs()) as runs:
                async for number, run in runs:
                    yield self._part(number * self.asked.n + run.completion.sample, run)
        except (ApiError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            raise self._service.failed(error) from error

    def _part(self, index: int, run: Run) -> Part:
        answer, done = self._answers[index], run.completion
        self._time(index, len(run.tokens))
        self.tokens += len(run.tokens)
        piece = answer.add(run.tokens, run.logprobs)
        if run.ended:
            self._require_good(done)
            last = answer.end(done)
            piece = Piece(piece.text + last.text, piece.scored + last.scored)
        return Part(index, piece, list(run.tokens), done.finish_reason if run.ended else None)

    def _require_good(self, done: Completion) -> None:
        if done.finish_reason == "abort":
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if done.finish_reason == "error":
            raise ApiError(500, done.error or "the completion failed", code="completion_error")

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

    async def _runs(self) -> AsyncIterator[tuple[int, Run]]:
        """The runs of all prompts, each with the number of its prompt."""
        if len(self._handles) == 1:
            async for run in self._handles[0].runs():
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

        readers = [asyncio.create_task(pass_on(number, handle)) for number, handle in enumerate(self._handles)]
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
