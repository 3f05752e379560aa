"""The HTTP server, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LAST_WORDS = 2  # seconds that answers may still take to be sent once the server stops


_MOST = 2**16  # bytes
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
        if self._kept > _MOST and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:  # else it would stand in the middle of an answer
                self.transport.write(_REFUSAL % (len(_BODY), _BODY))
            self.transport.close()


class HttpServer:
    """Answers on a socket until it is stopped.

    Args:
        app: that answers.
        listening: the socket, which it closes in the end.
    """

    def __init__(self, app: FastAPI, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
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
