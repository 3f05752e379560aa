"""What a server serves: an engine, once it is there, and whether requests are taken now."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from graphmod.decode.types import DecodeError
from graphmod.serve.errors import ApiError
from graphmod.serve.metrics import Metrics
from graphmod.serve.remote import Remote
from graphmod.serve.settings import ServeSettings
from graphmod.text import Codec, TokenizerCodec
from graphmod.words import counted

log = logging.getLogger("graphmod")
T = TypeVar("T")


_LONGEST_WAIT = 60  # seconds that anybody is told to wait


class Admission:
    """Counts what has been let in. Used by one thread, the one that answers.

    Args:
        rows: samples that run at the same time.
        max_waiting: samples that may wait for a row.

    Attributes:
        samples, requests: let in and not finished.
    """

    def __init__(self, rows: int, max_waiting: int) -> None:
        self.rows, self.max_waiting = rows, max_waiting
        self.samples = self.requests = 0
        self._seconds: deque[float] = deque(maxlen=32)

    @contextmanager
    def let_in(self, samples: int) -> Iterator[None]:
        """Around a request of so many samples.

        Raises:
            ApiError: the queue is full (429), or could never hold them (400).
        """
        most = self.rows + self.max_waiting
        if samples > most:
            raise ApiError(
                400,
                f"the request asks for {counted(samples, 'completion')} and this server takes {most} at a time; "
                "ask for fewer",
                "n",
            )
        if self.samples + samples > most:
            raise ApiError(
                429,
                f"the queue is full: {counted(self.samples, 'completion')} of at most {most} run or wait",
                code="queue_full",
                retry_after=self.retry_after(),
            )
        self.samples, self.requests = self.samples + samples, self.requests + 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.samples, self.requests = self.samples - samples, self.requests - 1
            self._seconds.append(time.monotonic() - began)

    def retry_after(self) -> int:
        """Seconds after which there probably is room: about as long as a request took lately."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return max(1, min(_LONGEST_WAIT, round(mean)))


class Service:
    """An engine behind HTTP. Requests are refused until `begin`, and again from `drain` on.

    Args:
        settings: of the server.
        name: of the model.
        engine: that is to answer.

    Attributes:
        codec: of the model's tokens; None before `begin`.
        admission: what has been let in.
        metrics: for Prometheus.
        created: when the server began, in seconds since 1970.
    """

    def __init__(self, settings: ServeSettings, name: str, engine: Remote) -> None:
        self.settings, self.name, self.engine = settings, name, engine
        self.created = int(time.time())
        self.codec: Codec | None = None
        self.admission = Admission(0, settings.max_waiting)
        self.metrics = Metrics()
        self._draining = False
        # One thread, as tokenizers may not be used by several at a time.
        self._worker = ThreadPoolExecutor(1, "graphmod-serve")

    def begin(self, codec: Codec) -> None:
        """Takes requests from now on."""
        self.admission.rows = self.engine.rows
        self.codec = codec

    def drain(self) -> None:
        """Takes no more requests; those that run go on."""
        self._draining = True

    def end(self) -> None:
        """Lets go of its thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    @property
    def trouble(self) -> str | None:
        """Why requests are not taken; None where they are."""
        if self._draining:
            return "the server is shutting down"
        if self.engine.error is not None:
            return f"the engine has failed: {self.engine.error}"
        if self.codec is None:
            return "the model is being loaded"
        return None

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return isinstance(self.codec, TokenizerCodec) and bool(self.codec.tokenizer.chat_template)

    def require_ready(self) -> Codec:
        """The codec. Raises ApiError where requests are not taken."""
        if (trouble := self.trouble) is None:
            assert self.codec is not None
            return self.codec
        if self.engine.error is not None and not self._draining:
            raise ApiError(500, trouble, code="engine_error")
        raise ApiError(503, trouble, code="not_ready", retry_after=5)

    def failed(self, error: Exception) -> ApiError:
        """What a request is told that an error has ended which is not its own."""
        if self._draining:
            return ApiError(503, "the server is shutting down", code="shutting_down")
        if self.engine.error is not None:
            return ApiError(500, f"the engine has failed: {self.engine.error}", code="engine_error")
        if not isinstance(error, DecodeError):  # of which the engine's process has said more
            log.error("a request could not be served", exc_info=error)
        return ApiError(500, f"the request could not be served: {error}", code="internal_error")

    def aside(self, act: Callable[[], T]) -> Future[T]:
        """Does it in a thread of its own, after all that was to be done there before."""
        return self._worker.submit(act)
