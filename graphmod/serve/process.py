"""The front in a process of its own, for one process has one Python: while HTTP has it, the engine cannot launch. And
the address that it listens on.

No PyTorch and no web library, so that a wrong address is told, and the front starts, before either is loaded, and says
that the model is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from graphmod.errors import ConfigError
from graphmod.serve.settings import ServeSettings

_TO_END = 5.0  # seconds for a front to send what is left and end
_ANOTHER_PORT = (errno.EADDRINUSE, errno.EACCES)
_WAYS_OUT = {
    True: "give another port, or serve.port=0 for any free one",
    False: "give an address or a name of this machine, such as 127.0.0.1, or 0.0.0.0 for all of its addresses",
}


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except socket.gaierror as error:
        raise _refused(host, port, str(error.strerror), False) from error
    except UnicodeError as error:  # a label of the name is too long, or empty
        raise _refused(host, port, "it is no name of a machine", False) from error
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise _refused(host, port, why, error.errno in _ANOTHER_PORT) from error


def url(listening: socket.socket) -> str:
    """Where a server on this socket is reached."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refused(host: str, port: int, why: str, port_is_wrong: bool) -> ConfigError:
    return ConfigError(f"serve.host={host} serve.port={port} cannot be listened on: {why}; {_WAYS_OUT[port_is_wrong]}")


class FrontProcess:
    """The front of a server as a process; as a context, it has ended afterwards.

    Args:
        settings: of the server.
        name: of the model.
        folder: with the model.
        tokenizer: folder of another tokenizer, or `bytes`; None for that in `folder`.
        listening: the socket to answer on, which this process closes.

    Attributes:
        work, control: to it, for a `Host`.
    """

    def __init__(
        self, settings: ServeSettings, name: str, folder: Path, tokenizer: str | None, listening: socket.socket
    ) -> None:
        self.work, work = socket.socketpair()
        self.control, control = socket.socketpair()
        numbers = [end.fileno() for end in (work, control, listening)]
        # As this process finds its modules, and not those that lie where it was started.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with contextlib.ExitStack() as stack:
            for end in (work, control, listening):
                stack.callback(end.close)
            with _without_signals():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "graphmod.serve", *map(str, numbers)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=numbers,
                    env=environment,
                )
        # Not as arguments, which everybody on this machine can read: there may be a key among them.
        given = {"settings": vars(settings), "name": name, "folder": str(folder), "tokenizer": tokenizer}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as told:  # it has ended, which is noticed later
            told.write(json.dumps(given).encode())

    def __enter__(self) -> FrontProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> str:
        """How it has ended, in words."""
        code = self._waited()
        return f"with status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Ends it at once; also for handlers of signals."""
        self._process.kill()

    def end(self) -> None:
        """Waits for it to end, which it does once nobody holds the other ends of its sockets."""
        self.work.close()
        self.control.close()
        self._waited()

    def _waited(self) -> int:
        try:
            return self._process.wait(_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """A process that is started meanwhile does not hear SIGINT and SIGTERM, not even before it can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
