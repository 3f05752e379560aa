"""The HTTP server, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from importlib.util import find_spec
from typing import Any

import uvicorn
from fastapi import FastAPI

LAST_WORDS = 2  # seconds that answers may still take to be sent once the server stops


def _protocol() -> Any:
    """How HTTP is read: by httptools, where it is installed; else by h11, which bounds headers by itself."""
    if find_spec("httptools") is None:
        return "h11"
    from graphmod.serve.protocol import BoundedProtocol

    return BoundedProtocol


class HttpServer:
    """Answers on a socket until it is stopped.

    Args:
        app: that answers.
        listening: the socket, which it closes in the end.
    """

    def __init__(self, app: FastAPI, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=_protocol(),
            lifespan="on",
            access_log=False,
            log_config=None,
            log_level="error",
            server_header=False,
            timeout_graceful_shutdown=LAST_WORDS,
        )
        self._server, self._socket = uvicorn.Server(config), listening
        self._thread = threading.Thread(target=self._work, name="graphmod-http", daemon=True)

    def start(self) -> None:
        """Returns once it answers."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        """Listens no more, at once, so that another server may; what is ready to be sent is sent. Called by its own
        thread."""
        for listener in getattr(self._server, "servers", ()):
            listener.close()
        self._server.should_exit = True

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has stopped."""
        self._thread.join(timeout)

    def _work(self) -> None:
        self._server.run(sockets=[self._socket])
