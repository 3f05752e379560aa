"""What goes between the two processes of a server: messages, over pairs of connected sockets. Standard library only.

A message is made of lists, words and numbers, and is written by `marshal`, which is the fastest there is for those.
Both processes run the same Python, and nothing that comes from a network is read in this way.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<Q")
_AT_ONCE = 1 << 18  # bytes


def packed(message: Any) -> bytes:
    """A message as it is sent."""
    body = marshal.dumps(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Makes messages of bytes, which come in pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[Any]:
        """The messages that are complete with these."""
        self._bytes += data
        found, start = [], 0
        while (body := start + _LENGTH.size) <= len(self._bytes):
            end = body + _LENGTH.unpack_from(self._bytes, start)[0]
            if end > len(self._bytes):
                break
            found.append(marshal.loads(memoryview(self._bytes)[body:end]))
            start = end
        del self._bytes[:start]
        return found


class Line:
    """One end of a pair of sockets, for a thread that waits for what comes.

    Args:
        end: the socket.

    Attributes:
        ended: whether the other end is closed, or nobody holds it any more.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._unpacker = end, Unpacker()
        self._socket.settimeout(None)
        self.ended = False

    def send(self, message: Any) -> None:
        """Sends it. Where nobody is at the other end any more it is lost, which `receive` notices."""
        with contextlib.suppress(OSError):
            self._socket.sendall(packed(message))

    def receive(self, seconds: float | None = None) -> list[Any]:
        """All messages that have come.

        Args:
            seconds: to wait for the first; None waits for as long as it takes.
        """
        found: list[Any] = []
        while (data := self._read(seconds if not found else 0)) is not None:
            if not data:
                self.ended = True
                break
            found += self._unpacker.add(data)
            seconds = 0 if found else seconds
        return found

    def _read(self, seconds: float | None) -> bytes | None:
        """Some bytes; none of them at the end, and None where there is nothing now."""
        try:
            if seconds is None or seconds <= 0:
                return self._socket.recv(_AT_ONCE, 0 if seconds is None else socket.MSG_DONTWAIT)
            self._socket.settimeout(seconds)
            try:
                return self._socket.recv(_AT_ONCE)
            finally:
                self._socket.settimeout(None)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError:  # reset, or closed by another thread
            return b""

    def hear_no_more(self) -> None:
        """Whoever waits for a message here finds that it is over; what is sent still arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Lets go of it, and of whoever waits here."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Wire(asyncio.Protocol):
    """One end of a pair of sockets, for an event loop, whose thread alone uses it.

    Args:
        heard: called with each message.
        ended: called once nobody is at the other end any more.
    """

    def __init__(self, heard: Callable[[Any], None], ended: Callable[[], None]) -> None:
        self._heard, self._ended = heard, ended
        self._unpacker = Unpacker()
        self._transport: Any = None

    async def open(self, end: socket.socket) -> None:
        """Begins to send and to listen, in the event loop that runs."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Some of what the other end has sent."""
        for message in self._unpacker.add(data):
            self._heard(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed, by this end or by the other one."""
        if self._transport is not None:
            self._transport = None
            self._ended()

    def send(self, message: Any) -> None:
        """Sends it: at once, unless much is on its way. Where nobody is at the other end any more it is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(message))

    def close(self) -> None:
        """Neither sends nor hears any more."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.abort()
