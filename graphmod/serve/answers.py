"""From an HTTP request to its answer, whole or streamed; a client that goes away ends what it asked for."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphmod.decode.types import DecodeError
from graphmod.serve.asked import Asked
from graphmod.serve.errors import ApiError, wrong_field
from graphmod.serve.forms import Form, usage
from graphmod.serve.service import Service
from graphmod.serve.text import Piece, Scored
from graphmod.serve.work import Gone, Part, Work

log = logging.getLogger("graphmod")

PATIENCE = 120  # seconds that a client may read nothing of a stream
_SECONDS = 60  # for a body to arrive
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
R = TypeVar("R", bound=BaseModel)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """What `work` returns. Raises Gone as soon as the client goes away, and ends `work`."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _bytes(request: Request, most: int) -> bytes:
    found = bytearray()
    too_large = ApiError(413, f"the body is larger than {most:,} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise too_large
    try:
        async with asyncio.timeout(_SECONDS):
            async for part in request.stream():
                found += part
                if len(found) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_SECONDS} seconds") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early") from None
    return bytes(found)


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def _read(request: Request, kind: type[R], most: int) -> R:
    """The request in a body of at most `most` bytes. Raises ApiError."""
    try:
        raw = await _bytes(request, most)
        given = json.loads(raw.decode("utf-8-sig"), parse_constant=_constant)
        if _SURROGATE.search(raw):
            json.dumps(given, ensure_ascii=False).encode()  # raises for half of a pair, which no tokenizer takes
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "a text in the body has half of a surrogate pair (\\ud800 to \\udfff)") from None
    except ValueError as error:
        digits = "digits" in str(error)  # Python reads no more than some thousand
        raise ApiError(400, "a number has too many digits" if digits else f"the body is not JSON: {error}") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise wrong_field(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


def require_key(service: Service, request: Request) -> None:
    """Raises ApiError where the request lacks the key that the server asks for."""
    key = service.settings.api_key
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if key is None or (scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())):
        return
    raise ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key")


def require_model(service: Service, name: str | None) -> None:
    """Raises ApiError where it is not the name of the model that is served."""
    if name is not None and name != service.name:
        raise ApiError(404, f"there is no model {name!r}; this server has {service.name!r}", "model", "model_not_found")


class Exchange:
    """One request and its answer.

    Args:
        service: that answers.
        form: of the request.
        request: of HTTP.
    """

    def __init__(self, service: Service, form: Form, request: Request) -> None:
        self._service, self._form, self._request = service, form, request
        self._began = time.perf_counter()
        self._let_in = contextlib.ExitStack()
        self._work: Work | None = None
        self._ended = False

    async def answer(self) -> Response:
        """The answer; of a stream, what sends it."""
        try:
            return await self._answer()
        except ApiError as error:
            self.end(error.outcome)
            return error.response()
        except Gone:
            self.end("gone")
            return Response(status_code=499)  # which nobody gets
        except asyncio.CancelledError:
            if self._service.trouble is None:
                self.end("error")
                raise
            failed = self._service.failed(DecodeError("it was cut off"))
            self.end(failed.outcome)
            return failed.response()
        except BaseException:
            self.end("error")
            raise

    async def _answer(self) -> Response:
        service, form = self._service, self._form
        require_key(service, self._request)
        service.require_ready()
        body = await _read(self._request, form.request, service.settings.max_body_bytes)
        require_model(service, body.model)
        codec = service.require_ready()
        self._let_in.enter_context(service.admission.let_in(form.samples(body)))
        read = form.reader(body, codec, service.settings.default_max_tokens)
        self._work = work = Work(service, codec, read, form.has_text(body))
        await work.submit(partial(_unless_gone, self._request.receive))
        if body.stream:
            await _unless_gone(self._request.receive, work.taken())
            return EventStream(self, self._events(work))
        whole = await _unless_gone(self._request.receive, self._whole(work))
        self.end("ok")
        return Response(json.dumps(whole), media_type="application/json")

    def end(self, outcome: str) -> None:
        """Books what became of the request, and ends what still runs of it."""
        if self._ended:
            return
        self._ended = True
        if self._work is not None:
            self._work.close()
        self._let_in.close()
        metrics = self._service.metrics
        metrics.requests.labels(self._form.endpoint, outcome).inc()
        if outcome == "ok":
            metrics.request_seconds.observe(time.perf_counter() - self._began)

    async def _whole(self, work: Work) -> dict[str, Any]:
        form, asked = self._form, work.asked
        await work.taken()
        texts: list[list[str]] = [[] for _ in range(asked.samples)]
        scored: list[list[Scored]] = [[] for _ in texts]
        tokens: list[list[int]] = [[] for _ in texts]
        reasons: list[str | None] = [None for _ in texts]
        async with contextlib.aclosing(work.parts()) as parts:
            async for part in parts:
                texts[part.index].append(part.piece.text)
                scored[part.index] += part.piece.scored
                tokens[part.index] += part.tokens
                reasons[part.index] = part.finish_reason
        choices = []
        for index, text in enumerate(texts):
            made = form.whole(Piece("".join(text), scored[index]), asked)
            ids = form.ids(asked, index, tokens[index], first=True)
            choices.append({"index": index, **made, "finish_reason": reasons[index], **ids})
        head = form.head(self._service.name, streamed=False) | form.head_ids(asked)
        return {**head, "choices": choices, "usage": usage(work.prompt_tokens, work.tokens)}

    async def _events(self, work: Work) -> AsyncGenerator[dict[str, Any]]:
        form, asked = self._form, work.asked
        head = form.head(self._service.name, streamed=True)

        def event(choices: list[dict[str, Any]], counts: bool = asked.usage_each) -> dict[str, Any]:
            told = usage(work.prompt_tokens, work.tokens) if counts else None
            return {**head, "choices": choices} | ({"usage": told} if asked.usage or counts else {})

        if (first := form.first()) is not None:
            for index in range(asked.samples):
                yield event([{"index": index, **first, "finish_reason": None}]) | form.head_ids(asked)
        async with contextlib.aclosing(work.parts()) as parts:
            async for part in parts:
                if part.piece.text or part.piece.scored or part.finish_reason or asked.token_ids:
                    yield event([self._choice(part, asked)])
        if asked.usage:
            yield event([], counts=True)

    def _choice(self, part: Part, asked: Asked) -> dict[str, Any]:
        made = self._form.chunk(part.piece, asked)
        ids = self._form.ids(asked, part.index, part.tokens, part.first)
        return {"index": part.index, **made, "finish_reason": part.finish_reason, **ids}


class EventStream(Response):
    """Sends an answer in pieces, as server-sent events. A client that reads slowly makes `send` wait, and so the next
    piece: tokens then stay with their completions.

    Args:
        exchange: that it belongs to.
        events: the pieces.
    """

    def __init__(self, exchange: Exchange, events: AsyncGenerator[dict[str, Any]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._exchange, self._events = exchange, events
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "gone"
        try:
            outcome = await _unless_gone(receive, self._send(send))
        except (Gone, OSError):  # TimeoutError is one of these
            pass
        finally:
            self._exchange.end(outcome)

    async def _send(self, send: Send) -> str:
        """Sends it all; returns the word for it in the metrics."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        outcome = "ok"

        async def write(text: str, more: bool = True) -> None:
            async with asyncio.timeout(PATIENCE):  # else who never reads keeps a place in the queue
                await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    # Escaped: some clients take other characters than \n for the end of a line.
                    await write(json.dumps(event, separators=(",", ":")))
        except ApiError as error:
            outcome = error.outcome
            await write(json.dumps(error.body))
        await write("[DONE]", more=False)
        return outcome
