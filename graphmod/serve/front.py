"""The front of a server: HTTP, text and JSON, admission and metrics. Its engine is in another process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from graphmod.decode.text.codec import Codec
from graphmod.serve.app import make_app
from graphmod.serve.remote import Remote
from graphmod.serve.server import HttpServer
from graphmod.serve.service import Service
from graphmod.serve.settings import ServeSettings

_TURN = 0.02  # seconds between two looks how many requests are left


class Front:
    """Answers until the process of the engine ends it, or is gone.

    Args:
        settings: of the server.
        name: of the model.
        load: makes the codec, meanwhile requests are refused.
        listening: the socket to answer on.
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
        self.server = HttpServer(self.app, listening)
        self._load, self._lines = load, (work, control)
        self._began = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def _alive(self, _: FastAPI) -> AsyncIterator[None]:
        self.engine.open(*self._lines)
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
        self.server.stop()
