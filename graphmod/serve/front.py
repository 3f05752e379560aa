"""The front of a server: HTTP, text and JSON, admission and metrics. Its engine is in another process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from graphmod.serve.app import make_app
from graphmod.serve.service import Remote, Service
from graphmod.serve.settings import ServeSettings
from graphmod.text import Codec

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

    @asynccontextmanager
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
