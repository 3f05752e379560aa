"""The engine as the front sees it, in whose process there is none: requests go there, and what they get comes back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from graphmod.decode.streams import Handle, tell
from graphmod.decode.types import Completion, DecodeError, Run, Sampling
from graphmod.serve.link import Unpacker, packed

_AT_ONCE = 1 << 16  # bytes that are read
_COUNTERS_SECONDS = 5.0  # for the counters to come, before the metrics are told without them


class Wire:
    """One end of a pair of sockets, for an event loop; any thread may send.

    Args:
        heard: called with each message.
        ended: called once nobody is at the other end any more.
    """

    def __init__(self, heard: Callable[[Any], None], ended: Callable[[], None]) -> None:
        self._heard, self._ended = heard, ended
        self._unpacker = Unpacker()
        self._unsent: deque[memoryview] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._thread = 0
        self._full = False

    def open(self, end: socket.socket) -> None:
        """Begins to send and to listen, in the event loop that runs."""
        end.setblocking(False)
        self._loop, self._socket, self._thread = asyncio.get_running_loop(), end, threading.get_ident()
        self._loop.add_reader(end, self._read)

    def send(self, message: Any) -> None:
        """Sends it: at once, unless much is on its way."""
        self._unsent.append(memoryview(packed(message)))
        if threading.get_ident() == self._thread:
            self._flush()
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so has who would read it
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        if self._loop is None or self._socket is None:
            return
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except BlockingIOError:
            if not self._full:
                self._loop.add_writer(self._socket, self._flush)
            self._full = True
            return
        except OSError:  # nobody is there, which reading tells
            self._unsent.clear()
        if self._full:
            self._loop.remove_writer(self._socket)
            self._full = False

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for message in self._unpacker.add(data):
            self._heard(message)
        if not data:
            self.close()
            self._ended()

    def close(self) -> None:
        """Neither sends nor hears any more."""
        if self._loop is not None and self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None


class Refused(Exception):
    """What an engine does not take: the number of the prompt, and why."""

    def __init__(self, prompt: int, said: str) -> None:
        super().__init__(said)
        self.prompt = prompt


@dataclasses.dataclass
class Request:
    """A request that the engine was asked for.

    Attributes:
        number: of the request.
        handles: one for each prompt.
        taken: done once the engine has taken it; has `Refused` where it does not, and a DecodeError where it cannot.
    """

    number: int
    handles: list[Handle]
    taken: Future[None]

    @property
    def done(self) -> bool:
        """Whether all of it has ended."""
        return all(handle.done for handle in self.handles)

    def fail(self, error: Exception) -> None:
        """Ends what has not ended of it."""
        for handle in self.handles:
            handle.fail(error)
        self.settle(error)

    def settle(self, error: Exception | None = None) -> None:
        """The engine has answered."""
        if not self.taken.done():
            if error is None:
                self.taken.set_result(None)
            else:
                self.taken.set_exception(error)


class Remote:
    """An engine in another process.

    Args:
        lost: called once it is gone.
        told: called with what the main thread there says.

    Attributes:
        error: of the engine, the last one.
        rows: sequences that it runs at the same time.
        max_seq_len: tokens of a sequence.
    """

    def __init__(self, lost: Callable[[], None], told: Callable[..., None]) -> None:
        self.error: str | None = None
        self.rows = self.max_seq_len = 0
        self._lost, self._told = lost, told
        self._ended = False
        self._requests: dict[int, Request] = {}
        self._numbers = itertools.count()
        self._asked: deque[Future[dict[str, float] | None]] = deque()
        self._work = Wire(self._heard_of_work, self._gone)
        self._control = Wire(self._heard_of_control, self._gone)

    def open(self, work: socket.socket, control: socket.socket) -> None:
        """Connects, in the event loop that runs.

        Args:
            work: to the thread that steps the engine.
            control: to the main thread there.
        """
        self._work.open(work)
        self._control.open(control)

    def close(self) -> None:
        """Neither asks for anything nor hears any more."""
        self._work.close()
        self._control.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, prompts: list[list[int]], n: int, sampling: list[Sampling]) -> Request:
        """Asks for `n` samples of each prompt. Does not wait for an answer."""
        each = ([Completion(number, sample, ids) for sample in range(n)] for number, ids in enumerate(prompts))
        handles = [Handle([SimpleNamespace(completion=one) for one in completions]) for completions in each]
        request = Request(next(self._numbers), handles, Future())
        if self._ended:
            request.fail(DecodeError(self.error))
        else:
            self._requests[request.number] = request
            self._work.send(("ask", request.number, prompts, n, [vars(own) for own in sampling]))
        return request

    def abort(self, request: Request) -> None:
        """Ends a request, unless it has ended."""
        if self._requests.pop(request.number, None) is not None:
            self._work.send(("abort", request.number))

    def tell_control(self, *message: Any) -> None:
        """Says something to the main thread there."""
        self._control.send(message)

    async def counters(self) -> dict[str, float] | None:
        """The counters of the engine for the metrics; None where they do not come."""
        if not self.rows:
            return None
        asked: Future[dict[str, float] | None] = Future()
        self._asked.append(asked)
        self.tell_control("counters")
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.wrap_future(asked), _COUNTERS_SECONDS)
        return None

    # -- what comes from the engine's process --------------------------------------------------------------------------

    def _heard_of_work(self, news: list[tuple[Any, ...]]) -> None:
        for kind, *given in news:
            getattr(self, f"_on_{kind}")(*given)

    def _on_runs(self, runs: list[tuple[Any, ...]]) -> None:
        touched: dict[int, Handle] = {}
        for number, index, (tokens, logprobs, top, of_prompt), reason, error in runs:
            if (request := self._requests.get(number)) is None:
                continue
            prompt, sample = divmod(index, len(request.handles[0].completions))
            handle = request.handles[prompt]
            done = handle.completions[sample]
            done.tokens += tokens
            done.logprobs += logprobs
            if top is not None:
                done.top_logprobs = (done.top_logprobs or []) + top
            if of_prompt is not None:
                done.prompt_logprobs, done.prompt_top_logprobs = of_prompt
            if reason is not None:
                done.finish_reason, done.error = reason, error
            handle.take(Run(done, tokens, logprobs, reason is not None, handle, top))
            touched[id(handle)] = handle
            if reason is not None and request.done:
                del self._requests[number]
        tell(touched.values())

    def _on_taken(self, number: int) -> None:
        if (request := self._requests.get(number)) is not None:
            request.settle()

    def _on_refused(self, number: int, prompt: int, said: str) -> None:
        self._end(number, Refused(prompt, said))

    def _on_lost(self, number: int, said: str) -> None:
        self._end(number, DecodeError(said))

    def _on_failed(self, said: str) -> None:
        self.error = said

    def _end(self, number: int, error: Exception) -> None:
        if (request := self._requests.pop(number, None)) is not None:
            request.fail(error)

    def _heard_of_control(self, message: tuple[Any, ...]) -> None:
        kind, *given = message
        if kind == "counters":
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_result(*given)
        else:
            self._told(kind, *given)

    def _gone(self) -> None:
        self._ended, self.error = True, self.error or "its process has ended"
        for number in [*self._requests]:
            self._end(number, DecodeError(self.error))
        self._lost()
