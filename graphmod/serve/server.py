"""The HTTP server in a thread of its own, so that the main thread may load the model and hear signals."""

from __future__ import annotations

import socket
import sys
import threading
import time

import uvicorn
from fastapi import FastAPI

# Seconds that a thread keeps the interpreter while another waits for it. The one that steps an engine lets go of it
# with each launch, and with Python's 0.005 the GPU is idle until it has it again.
_SWITCH = 0.0002
_LAST_WORDS = 2  # seconds that answers may still take to be sent once the server stops


class HttpServer:
    """Answers on a socket until it is stopped.

    Args:
        app: that answers.
        listening: the socket.
    """

    def __init__(self, app: FastAPI, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS,
        )
        self._server, self._socket = uvicorn.Server(config), listening
        self._thread = threading.Thread(target=self._work, name="graphmod-http", daemon=True)

    def start(self) -> None:
        """Returns once it answers."""
        self._switched = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH, self._switched))
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        """Sends what is ready to be sent, and closes all connections."""
        self._server.should_exit = True
        self._thread.join(2 * _LAST_WORDS + 1)
        sys.setswitchinterval(self._switched)

    def _work(self) -> None:
        self._server.run(sockets=[self._socket])

    @property
    def host(self) -> str:
        """The address that it listens on."""
        return self._socket.getsockname()[0]

    @property
    def url(self) -> str:
        """Where it is reached."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._socket.getsockname()[1]}"
