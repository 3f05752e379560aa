"""The front of a server, whose engine is in another process: from an HTTP request to its answer, whole or streamed; the
paths; and the thread that answers. A client that goes away ends what it asked for."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import graphmod
from graphmod.decode.types import NO_TOKEN_LEFT, TOO_COMPLEX, Completion, DecodeError, Run
from graphmod.serve.api import (
    Answer,
    ApiError,
    Asked,
    ChatForm,
    CompletionForm,
    Form,
    Piece,
    Scorer,
    asked_of,
    chat_tokens,
    refused,
    usage,
    wrong_field,
)
from graphmod.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    ManageRequest,
    Object,
    SleepRequest,
    StreamOptions,
    TokenizeRequest,
    UnloadAdapterRequest,
    UpdateRequest,
)
from graphmod.serve.service import EngineRequest, Refused, Remote, Service
from graphmod.serve.settings import ServeSettings
from graphmod.serve.tools import refuse_constant
from graphmod.text import Codec, TokenizerCodec

# -- parts of an answer, and how a request is read ---------------------------------------------------------------------


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


async def _read(request: Request, kind: type[R], most: int, query: Mapping[str, str] | None = None) -> R:
    """The request in a body of at most `most` bytes, which may be empty where there may be a `query`, too. Raises
    ApiError."""
    try:
        raw = await _bytes(request, most) or (b"" if query is None else b"{}")
        given = json.loads(raw.decode("utf-8-sig"), parse_constant=refuse_constant)
        if _SURROGATE.search(raw):
            json.dumps(given, ensure_ascii=False).encode()  # raises for half of a pair, which no tokenizer takes
        return kind.model_validate({**given, **query} if query and isinstance(given, dict) else given)
    except ValidationError as error:
        raise wrong_field(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON that can be read: {error}") from None


def require_key(service: Service, request: Request) -> None:
    """Raises ApiError where the request lacks the key that the server asks for."""
    key = service.settings.api_key
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if key is None or (scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())):
        return
    raise ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key")


def adapter_of(service: Service, name: str | None) -> str | None:
    """The adapter that a request names as its model; None for the model itself. Raises ApiError where there is
    neither."""
    if name in (None, service.name):
        return None
    if name in service.adapters:
        return name
    known = ", ".join(map(repr, (service.name, *service.adapters)))
    raise ApiError(404, f"there is no model {name!r}; this server has {known}", "model", "model_not_found")


class Exchange:
    """One request and its answer.

    Args:
        service: that answers.
        form: of the request.
        http: the request as it came.
    """

    _asked: Asked
    _model: str
    _scorer: Scorer | None

    def __init__(self, service: Service, form: Form, http: Request) -> None:
        self._service, self._form, self._http = service, form, http
        self._began = self._submitted = time.perf_counter()
        self._let_in = contextlib.ExitStack()
        self._request: EngineRequest | None = None
        self._answers: list[Answer] = []
        self._echoed: dict[int, int] = {}  # completions that have begun -> characters of their prompts
        self._latest: dict[int, float] = {}
        self._prompt_tokens = self._tokens = 0
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
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError) or self._service.trouble is None:
                self.end("error")
                raise
            failed = self._service.failed(DecodeError("it was cut off"))
            self.end(failed.outcome)
            return failed.response()

    async def _answer(self) -> Response:
        service, http = self._service, self._http
        require_key(service, http)
        service.require_ready()
        body = await _read(http, self._form.request, service.settings.max_body_bytes)
        adapter = adapter_of(service, body.model)
        self._model = adapter or service.name
        codec = service.require_ready()
        self._let_in.enter_context(service.admission.let_in(body.samples))
        await self._submit(body, codec, adapter)
        if body.stream:
            await _unless_gone(http.receive, self._taken())
            return EventStream(self, self._events())
        whole = await _unless_gone(http.receive, self._whole())
        self.end("ok")
        return Response(json.dumps(whole), media_type="application/json")

    def end(self, outcome: str) -> None:
        """Books what became of the request, and ends what still runs of it."""
        if self._ended:
            return
        self._ended = True
        if self._request is not None:
            self._service.engine.abort(self._request)
        self._let_in.close()
        metrics = self._service.metrics
        metrics.requests.labels(self._form.endpoint, outcome).inc()
        if outcome == "ok":
            metrics.request_seconds.observe(time.perf_counter() - self._began)

    # -- in the engine ---------------------------------------------------------------------------------------------

    async def _submit(self, body: ChatRequest | CompletionRequest, codec: Codec, adapter: str | None) -> None:
        """Asks the engine for it. Raises ApiError, and Gone as soon as the client goes away."""
        service, self._submitted = self._service, time.perf_counter()
        with self._api_errors():
            read = partial(asked_of, body, codec, service.settings.default_max_tokens, adapter)
            # Texts become tokens in a thread, since that may take a while; to read token ids takes less than to go
            # there. Begun at once, and not by a task, which would come after the reading of other requests.
            if body.has_text:
                asked = await _unless_gone(self._http.receive, asyncio.wrap_future(service.aside(read)))
            else:
                asked = read()
            self._asked = asked
            self._request = service.engine.submit(asked.prompts, asked.n, asked.sampling)
            self._prompt_tokens = sum(map(len, asked.prompts))
            self._scorer = Scorer(codec) if asked.score or asked.echo else None
            scorer, stops = self._scorer if asked.score else None, body.stop or []
            for ids in asked.prompts:
                readers = [asked.reader() if asked.reader else None for _ in range(asked.n)]
                self._answers += [Answer(codec, ids, stops, scorer, reader, body.min_tokens or 0) for reader in readers]

    async def _taken(self) -> None:
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
            said, source = str(error).replace("max_new_tokens", "max_tokens"), self._form.source
            if said.startswith("structured_outputs"):
                said = said.replace("structured_outputs", self._asked.request.structure[0], 1)
            if source == "messages":
                said = said.replace("prompt 0", "prompt made of the messages", 1)
            raise refused(said, source) from None
        except RecursionError:  # schemas are gone through, and templates go through what they are given
            raise ApiError(400, "the body is nested too deeply") from None
        except Exception as error:
            raise self._service.failed(error) from error

    async def _parts(self) -> AsyncGenerator[Part]:
        """What comes of it, as it comes. Raises ApiError where a completion fails."""
        assert self._request is not None
        with self._api_errors():
            async with contextlib.aclosing(self._request.handle.runs()) as runs:
                async for run in runs:
                    yield self._part(run)

    def _part(self, run: Run) -> Part:
        done, asked = run.completion, self._asked
        index = done.request * asked.n + done.sample
        answer = self._answers[index]
        self._time(index, len(run.tokens))
        tokens = list(run.tokens) if asked.most else []
        self._tokens += len(tokens)
        piece = answer.add(run.tokens, run.logprobs, run.top_logprobs)
        if run.ended:
            if done.finish_reason == "abort":
                raise ApiError(503, "the server is shutting down", code="shutting_down")
            if done.finish_reason == "error":
                said = done.error or "the completion failed"
                status = 400 if said.startswith((NO_TOKEN_LEFT, TOO_COMPLEX)) else 500
                raise ApiError(status, said, code="completion_error")
            last = answer.end(done)
            piece = Piece(piece.text + last.text, piece.scored + last.scored, [*piece.calls, *last.calls])
        reason = done.finish_reason if run.ended else None
        if reason == "stop" and answer.reader is not None and answer.reader.count:
            reason = "tool_calls"
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
        asked, before = self._asked, Piece("", [])
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
            metrics.first_token.observe(now - self._submitted)
        if index in self._latest:  # tokens come a few at a time, and each is taken to have needed the same
            for _ in range(tokens):
                metrics.between_tokens.observe((now - self._latest[index]) / tokens)
        self._latest[index] = now

    # -- as one answer, or in pieces -------------------------------------------------------------------------------

    async def _whole(self) -> dict[str, Any]:
        await self._taken()
        form, asked = self._form, self._asked
        found: list[list[Part]] = [[] for _ in self._answers]
        async with contextlib.aclosing(self._parts()) as parts:
            async for part in parts:
                found[part.index].append(part)
        choices = []
        for index, own in enumerate(found):
            piece = Piece(
                "".join(one.piece.text for one in own),
                [scored for one in own for scored in one.piece.scored],
                [call for one in own for call in one.piece.calls],
            )
            tokens = [token for one in own for token in one.tokens]
            part = Part(index, piece, tokens, own[-1].finish_reason, True)
            choices.append(self._choice(part, form.whole(piece, asked)))
        head = form.head(self._model, streamed=False) | form.head_ids(asked)
        return {**head, "choices": choices, "usage": usage(self._prompt_tokens, self._tokens)}

    async def _events(self) -> AsyncGenerator[dict[str, Any]]:
        form, asked = self._form, self._asked
        options = asked.request.stream_options or StreamOptions()
        head = form.head(self._model, streamed=True)

        def event(
            choices: list[dict[str, Any]], counts: bool | None = options.continuous_usage_stats
        ) -> dict[str, Any]:
            told = usage(self._prompt_tokens, self._tokens) if counts else None
            return {**head, "choices": choices} | ({"usage": told} if options.include_usage or counts else {})

        if (first := form.first()) is not None:
            for index in range(len(self._answers)):
                yield event([{"index": index, **first, "finish_reason": None}]) | form.head_ids(asked)
        async with contextlib.aclosing(self._parts()) as parts:
            async for part in parts:
                if any(part.piece) or part.finish_reason or asked.request.return_token_ids:
                    yield event([self._choice(part, form.chunk(part.piece, asked))])
        if options.include_usage:
            yield event([], counts=True)

    def _choice(self, part: Part, made: dict[str, Any]) -> dict[str, Any]:
        ids = self._form.ids(self._asked, part.index, part.tokens, part.first)
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


# -- the paths ---------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parent / "page.html"
_POLICY = {"content-security-policy": "default-src 'self' 'unsafe-inline'; img-src data:"}


def make_app(service: Service, alive: Lifespan[Starlette]) -> Starlette:
    """The application that answers for `service`, within the context `alive` in a server."""
    page = PAGE.read_text(encoding="utf-8")

    async def post(form: Form, request: Request) -> Response:
        return await Exchange(service, form, request).answer()

    async def get_models(request: Request) -> Response:
        require_key(service, request)
        service.require_ready()
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [_model(service, one) for one in (None, *service.adapters)]})
        return JSONResponse(_model(service, adapter_of(service, name)))

    async def get_health(_: Request) -> Response:
        trouble = service.trouble
        return JSONResponse({"status": trouble or "ready"}, 200 if trouble is None else 503)

    async def get_metrics(_: Request) -> Response:
        text = service.metrics.text(await service.engine.counters())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(request: Request) -> Response:
        require_key(service, request)
        body = await _read(request, TokenizeRequest, service.settings.max_body_bytes)
        adapter_of(service, body.model)
        found = await asyncio.wrap_future(service.aside(partial(_tokenized, body, service.require_ready())))
        return JSONResponse({**found, "max_model_len": service.engine.max_seq_len})

    async def detokenize(request: Request) -> Response:
        require_key(service, request)
        body = await _read(request, DetokenizeRequest, service.settings.max_body_bytes)
        adapter_of(service, body.model)
        act = partial(_detokenized, body.tokens, service.require_ready())
        return JSONResponse({"prompt": await asyncio.wrap_future(service.aside(act))})

    async def asked_by_manager(request: Request, kind: type[R]) -> R:
        require_key(service, request)
        if not service.settings.manage:
            raise ApiError(403, f"{request.url.path} is for servers with serve.manage=true", code="not_managed")
        return await _read(request, kind, service.settings.max_body_bytes, request.query_params)

    async def manage(name: str, *given: Any) -> Response:
        if not service.sleeping:
            service.require_ready()
        try:
            await service.engine.act(name, *given)
        except Refused as error:
            raise ApiError(409, str(error), code="not_done") from None
        return JSONResponse({"status": "done"})

    async def sleep(request: Request) -> Response:
        body = await asked_by_manager(request, SleepRequest)
        if not (before := service.sleeping):
            service.require_ready()
        service.sleeping = True  # from now on nobody is let in
        try:
            return await manage("sleep", body.level == "1")
        except ApiError:
            service.sleeping = before
            raise

    async def wake_up(request: Request) -> Response:
        await asked_by_manager(request, ManageRequest)
        answer = await manage("wake_up")
        service.sleeping = False
        return answer

    async def is_sleeping(request: Request) -> Response:
        require_key(service, request)
        return JSONResponse({"is_sleeping": service.sleeping})

    async def reset_prefix_cache(request: Request) -> Response:
        await asked_by_manager(request, ManageRequest)
        return await manage("reset_prefix_cache")

    async def update_weights(request: Request) -> Response:
        body = await asked_by_manager(request, UpdateRequest)
        if adapter_of(service, body.model) is not None:
            raise ApiError(400, "an adapter has no weights to change; unload it, and load another", "model")
        return await manage("update_weights", body.path)

    async def load_adapter(request: Request) -> Response:
        body = await asked_by_manager(request, LoadAdapterRequest)
        name = body.lora_name
        if name in (service.name, *service.adapters):
            raise ApiError(400, f"there is a model {name!r} already; unload it, or give another name", "lora_name")
        try:
            answer = await manage("load_adapter", name, body.lora_path)
        except ApiError as error:
            raise ApiError(400, error.message, "lora_path") if error.code == "not_done" else error from None
        service.adapters[name] = body.lora_path
        return answer

    async def unload_adapter(request: Request) -> Response:
        name = (await asked_by_manager(request, UnloadAdapterRequest)).lora_name
        if (folder := service.adapters.pop(name, None)) is None:  # from now on nobody asks for it
            raise ApiError(404, f"there is no adapter {name!r}", "lora_name", "adapter_not_found")
        try:
            return await manage("unload_adapter", name)
        except ApiError:
            service.adapters[name] = folder
            raise

    async def get_version(_: Request) -> Response:
        return JSONResponse({"version": graphmod.__version__})

    async def get_docs(_: Request) -> Response:
        return HTMLResponse(docs, headers=_POLICY)

    async def get_page(_: Request) -> Response:
        return HTMLResponse(page, headers=_POLICY)

    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if request.method == "OPTIONS" and error.status_code == 405:
            if "access-control-request-method" in request.headers:
                return _not_from(request.headers.get("origin", ""))
            return Response(status_code=204, headers={"allow": f"{dict(error.headers or {})['Allow']}, OPTIONS"})
        said = f"{request.method} {request.url.path} is not served; there are {known}, and a page to try it at GET /"
        answer = ApiError(error.status_code, said).response()
        answer.headers.update(error.headers or {})
        return answer

    async def on_error(_: Request, error: Exception) -> Response:
        return ApiError(
            500, f"the server has failed: {type(error).__name__}: {error}", code="internal_error"
        ).response()

    served: list[tuple[str, Any, type[Object] | None]] = [  # with what a request may say, where it is a POST
        ("/v1/chat/completions", partial(post, ChatForm()), ChatRequest),
        ("/v1/completions", partial(post, CompletionForm()), CompletionRequest),
        ("/v1/models", get_models, None),
        ("/v1/models/{name:path}", get_models, None),
        ("/tokenize", tokenize, TokenizeRequest),
        ("/detokenize", detokenize, DetokenizeRequest),
        ("/health", get_health, None),
        ("/metrics", get_metrics, None),
        ("/version", get_version, None),
        ("/docs", get_docs, None),
        ("/sleep", sleep, SleepRequest),
        ("/wake_up", wake_up, ManageRequest),
        ("/is_sleeping", is_sleeping, None),
        ("/reset_prefix_cache", reset_prefix_cache, ManageRequest),
        ("/update_weights", update_weights, UpdateRequest),
        ("/v1/load_lora_adapter", load_adapter, LoadAdapterRequest),
        ("/v1/unload_lora_adapter", unload_adapter, UnloadAdapterRequest),
    ]
    known, docs = ", ".join(_shown(path, kind) for path, _, kind in served), docs_page(served)
    routes = [Route(path, act, methods=None if kind is None else ["POST"]) for path, act, kind in served]
    routes.append(Route("/", get_page))
    handlers: dict[Any, Any] = {ApiError: on_api_error, HTTPException: on_http_error, Exception: on_error}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=alive)
    if origins := service.settings.cors_origins:
        app.add_middleware(
            _Cors,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    return app


def _shown(path: str, kind: type[Object] | None) -> str:
    return f"{'GET' if kind is None else 'POST'} {path.replace('{name:path}', 'NAME')}"


def docs_page(served: list[tuple[str, Any, type[Object] | None]]) -> str:
    """The paths, and the fields of their requests, as a page."""
    found = ["<!doctype html><meta charset=utf-8><title>graphmod</title><h1>Paths</h1>"]
    for path, _, kind in served:
        found.append(f"<h2>{_shown(path, kind)}</h2>")
        if kind is not None:
            fields = [(name, escape(field.description or "")) for name, field in kind.fields().items()]
            found.append(f"<table>{''.join(f'<tr><td>{name}<td>{said}' for name, said in fields)}</table>")
    return "".join(found)


def _tokenized(body: TokenizeRequest, codec: Codec) -> dict[str, Any]:
    if body.messages is not None:
        tokens = chat_tokens(codec, body.messages, body.tools)
    else:
        as_is = getattr(codec, "encode_as_is", codec.encode)
        tokens = (as_is if body.add_special_tokens is False else codec.encode)(body.prompt or "")
    names = None
    if body.return_token_strs:
        names = codec.tokenizer.convert_ids_to_tokens(tokens) if isinstance(codec, TokenizerCodec) else None
        names = names or [codec.decode([token]) for token in tokens]
    return {"count": len(tokens), "tokens": tokens, "token_strs": names}


def _detokenized(tokens: list[int], codec: Codec) -> str:
    try:
        if not isinstance(codec, TokenizerCodec):
            return bytes(tokens).decode(errors="replace")
        if None not in (names := codec.tokenizer.convert_ids_to_tokens(tokens)):
            return codec.decode(tokens, special_tokens=True)
        error: Any = tokens[names.index(None)]
    except (IndexError, OverflowError, TypeError, ValueError) as raised:
        error = raised
    raise ApiError(400, f"tokens hold an id that the tokenizer does not have: {error}", "tokens")


class _Cors(CORSMiddleware):
    """Lets pages of some origins read answers."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """What a browser is told that asks whether a page may send a request."""
        if not self.is_allowed_origin(request_headers["origin"]):
            return _not_from(request_headers["origin"])
        return super().preflight_response(request_headers)


def _not_from(origin: str) -> Response:
    said = f"pages of {origin} may not use this server; start it with serve.cors_origins=['{origin}']"
    return ApiError(403, said, code="origin_not_allowed").response()


def _model(service: Service, adapter: str | None) -> dict[str, Any]:
    own = {} if adapter is None else {"root": service.adapters[adapter], "parent": service.name}
    codec = service.codec
    return {
        "id": adapter or service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "graphmod",
        "max_model_len": service.engine.max_seq_len,
        "chat": isinstance(codec, TokenizerCodec) and bool(codec.tokenizer.chat_template),
        **own,
    }


# -- the thread that answers -------------------------------------------------------------------------------------------

_TURN = 0.02  # seconds between two looks how many requests are left
_LAST_WORDS = 2  # seconds that answers may still take to be sent once the server stops
_MOST_HEADERS = 2**16  # bytes
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_BODY = (
    b'{"error": {"message": "the headers are larger than 65,536 bytes", "type": "invalid_request_error", '
    b'"param": null, "code": "headers_too_large"}}'
)


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection that goes on to send what is kept and leads to nothing: headers, or trailers after a body, that
    do not end."""

    _kept = 0  # bytes since the last of a body, or the last end of headers or of a request

    def on_headers_complete(self) -> None:
        """Of a request."""
        self._kept = -1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of it."""
        self._kept = -1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Of a request and its body."""
        self._kept = -1
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """What the client has sent."""
        super().data_received(data)
        # What came together with an end may be the beginning of what is next: of that one read no account is taken.
        self._kept = 0 if self._kept < 0 else self._kept + len(data)
        if self._kept > _MOST_HEADERS and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:  # else it would stand in the middle of an answer
                self.transport.write(_REFUSAL % (len(_BODY), _BODY))
            self.transport.close()


class Front:
    """Answers until the process of the engine ends it, or is gone.

    Args:
        settings: of the server.
        name: of the model.
        load: makes the codec, meanwhile requests are refused.
        listening: the socket to answer on, which it closes in the end.
        work, control: to the thread that steps the engine, and to the main thread there: to `Host`.
    """

    def __init__(
        self,
        settings: ServeSettings,
        name: str,
        load: Callable[[], Codec],
        listening: socket.socket,
        work: socket.socket,
        control: socket.socket,
    ) -> None:
        self.engine = Remote(self._lost, self._told)
        self.service = Service(settings, name, self.engine)
        self.app = make_app(self.service, self._alive)
        config = uvicorn.Config(
            self.app,
            http=BoundedProtocol,
            lifespan="on",
            access_log=False,
            log_config=None,
            log_level="error",
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS,
        )
        self._server = uvicorn.Server(config)
        run = partial(self._server.run, sockets=[listening])
        self._thread = threading.Thread(target=run, name="graphmod-http", daemon=True)
        self._load, self._lines = load, (work, control)
        self._began = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Returns once it answers."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has stopped."""
        self._thread.join(timeout)

    @contextlib.asynccontextmanager
    async def _alive(self, _: Starlette) -> AsyncIterator[None]:
        await self.engine.open(*self._lines)
        self._do(self._begin())
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            self.engine.close()
            self.service.end()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _begin(self) -> None:
        try:
            codec = await asyncio.wrap_future(self.service.aside(self._usable))
        except Exception as error:
            self.engine.tell_control("unusable", str(error))
            return
        await self._began.wait()
        self.service.begin(codec)
        self.engine.tell_control("ready")

    def _usable(self) -> Codec:
        codec = self._load()
        codec.encode("a")  # the first use of some tokenizers changes them
        return codec

    async def _count(self) -> None:
        told = None
        while True:
            if (left := self.service.admission.requests) != told:
                told = left
                self.engine.tell_control("left", left)
            await asyncio.sleep(_TURN)

    def _told(self, kind: str, *given: Any) -> None:
        if kind == "begin":
            self.engine.rows, self.engine.max_seq_len = given
            self._began.set()
        elif kind == "drain":
            self.service.drain()
            self._do(self._count())

    def _lost(self) -> None:
        """Listens no more, at once, so that another server may; what is ready to be sent is sent."""
        for listener in getattr(self._server, "servers", ()):
            listener.close()
        self._server.should_exit = True
