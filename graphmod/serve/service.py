"""What a server serves: an engine, once it is there, and whether requests are taken now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from graphmod.decode.errors import DecodeError
from graphmod.decode.text.codec import Codec, TokenizerCodec
from graphmod.serve.admission import Admission
from graphmod.serve.errors import ApiError
from graphmod.serve.metrics import Metrics
from graphmod.serve.remote import Remote
from graphmod.serve.settings import ServeSettings

log = logging.getLogger("graphmod")
T = TypeVar("T")


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

    def require_ready(self) -> None:
        """Raises ApiError where requests are not taken."""
        if (trouble := self.trouble) is None:
            return
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
