"""The address that a server listens on. Standard library only, so that a wrong one is told before PyTorch is loaded."""

import errno
import os
import socket

from graphmod.errors import ConfigError

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
        raise _refused(host, port, error.strerror, False) from error
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
