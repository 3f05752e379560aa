"""What a server serves: the engine as the front sees it, in whose process there is none; whether requests are taken
now; and what Prometheus is told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from graphmod.decode.streams import Handle, tell
from graphmod.decode.types import Completion, DecodeError, Run, Sampling
from graphmod.serve.api import ApiError
from graphmod.serve.engine_side import Unpacker, packed
from graphmod.serve.settings import ServeSettings
from graphmod.text import Codec
from graphmod.words import counted

log = logging.getLogger("graphmod")


_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server, in a registry of their own, for which it collects those of the engine."""

    _counters: dict[str, float] | None = None

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "graphmod_requests", "Requests, by what became of them", ["endpoint", "outcome"], registry=self._registry
        )
        self.first_token = self._seconds("time_to_first_token", "From a request to its first token", _LONG)
        self.between_tokens = self._seconds("time_between_tokens", "Between tokens of one completion", _SHORT)
        self.request_seconds = self._seconds("request", "From a request to the end of its answer", _LONG)
        self._registry.register(self)

    def _seconds(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"graphmod_{name}_seconds", words, buckets=buckets, registry=self._registry)

    def text(self, counters: dict[str, float] | None) -> bytes:
        """All of them, in the text format of Prometheus.

        Args:
            counters: of the engine; None while there is none.
        """
        self._counters = counters
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Those of the engine."""
        if (found := self._counters) is None:
            return
        tokens = CounterMetricFamily("graphmod_tokens", "Tokens, by kind", labels=["kind"])
        tokens.add_metric(["prompt"], found["prompt_tokens"])
        tokens.add_metric(["generated"], found["tokens"])
        yield tokens
        for family, counter, words in (
            (CounterMetricFamily, "replays", "Decode steps that were replays of a graph"),
            (CounterMetricFamily, "eager_steps", "Decode steps without a graph"),
            (CounterMetricFamily, "row_steps", "Rows of batches times decode steps"),
            (CounterMetricFamily, "padding_row_steps", "Those of them that made no token"),
            (GaugeMetricFamily, "waiting", "Samples that wait for a row"),
            (GaugeMetricFamily, "running", "Samples in the batch"),
            (GaugeMetricFamily, "blocks_used", "Blocks of the key-value cache in use"),
            (GaugeMetricFamily, "blocks_total", "Blocks of the key-value cache"),
            (CounterMetricFamily, "prefix_tokens", "Tokens of prompts found in the cache"),
        ):
            yield family(f"graphmod_{counter}", words, value=found[counter])


_COUNTERS_SECONDS = 5.0  # for the counters to come, before the metrics are told without them


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


class Refused(Exception):
    """What an engine does not take; the message says why."""


@dataclasses.dataclass
class EngineRequest:
    """A request that the engine was asked for.

    Attributes:
        number: of the request.
        handle: of all its prompts.
        taken: done once the engine has taken it; has `Refused` where it does not, and a DecodeError where it cannot.
    """

    number: int
    handle: Handle
    taken: Future[None]

    def fail(self, error: Exception) -> None:
        """Ends what has not ended of it."""
        self.handle.fail(error)
        if not self.taken.done():
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
        self._requests: dict[int, EngineRequest] = {}
        self._numbers = itertools.count()
        self._asked: deque[Future[dict[str, float] | None]] = deque()
        self._acts: dict[int, Future[str | None]] = {}
        self._work = Wire(self._heard_of_work, self._gone)
        self._control = Wire(self._heard_of_control, self._gone)

    async def open(self, work: socket.socket, control: socket.socket) -> None:
        """Connects.

        Args:
            work: to the thread that steps the engine.
            control: to the main thread there.
        """
        await self._work.open(work)
        await self._control.open(control)

    def close(self) -> None:
        """Neither asks for anything nor hears any more."""
        self._work.close()
        self._control.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, prompts: list[list[int]], n: int, sampling: list[Sampling]) -> EngineRequest:
        """Asks for `n` samples of each prompt. Does not wait for an answer."""
        completions = [Completion(at, sample, ids) for at, ids in enumerate(prompts) for sample in range(n)]
        handle = Handle([SimpleNamespace(completion=one) for one in completions])
        request = EngineRequest(next(self._numbers), handle, Future())
        if self._ended:
            request.fail(DecodeError(self.error))
        else:
            self._requests[request.number] = request
            self._work.send(("ask", request.number, prompts, n, [vars(own) for own in sampling]))
        return request

    def abort(self, request: EngineRequest) -> None:
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

    async def act(self, name: str, *given: Any) -> None:
        """Has something done there. Raises Refused where it cannot be done."""
        number, done = next(self._numbers), Future[str | None]()
        self._acts[number] = done
        self.tell_control("act", number, name, *given)
        if (said := await asyncio.wrap_future(done)) is not None:
            raise Refused(said)

    # -- what comes from the engine's process --------------------------------------------------------------------------

    def _heard_of_work(self, news: list[tuple[Any, ...]]) -> None:
        for kind, *given in news:
            getattr(self, f"_on_{kind}")(*given)

    def _on_runs(self, runs: list[tuple[Any, ...]]) -> None:
        touched: dict[int, Handle] = {}
        for number, index, (tokens, logprobs, top, of_prompt), reason, error in runs:
            if (request := self._requests.get(number)) is None:
                continue
            handle = touched[number] = request.handle
            done = handle.completions[index]
            done.tokens += tokens
            done.logprobs += logprobs
            if top is not None:
                done.top_logprobs = (done.top_logprobs or []) + top
            if of_prompt is not None:
                done.prompt_logprobs, done.prompt_top_logprobs = of_prompt
            if reason is not None:
                done.finish_reason, done.error = reason, error
            handle.take(Run(done, tokens, logprobs, reason is not None, handle, top))
            if handle.done:
                del self._requests[number]
        tell(touched.values())

    def _on_taken(self, number: int) -> None:
        if (request := self._requests.get(number)) is not None and not request.taken.done():
            request.taken.set_result(None)

    def _on_refused(self, number: int, said: str) -> None:
        self._end(number, Refused(said))

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
        elif kind == "acted":
            number, said = given
            self._acts.pop(number).set_result(said)
        else:
            self._told(kind, *given)

    def _gone(self) -> None:
        self._ended, self.error = True, self.error or "its process has ended"
        for number in [*self._requests]:
            self._end(number, DecodeError(self.error))
        while self._acts:
            self._acts.popitem()[1].set_result(self.error)
        self._lost()


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
            # There probably is room after about as long as a request took lately.
            mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
            raise ApiError(
                429,
                f"the queue is full: {counted(self.samples, 'completion')} of at most {most} run or wait",
                code="queue_full",
                retry_after=max(1, min(_LONGEST_WAIT, round(mean))),
            )
        self.samples, self.requests = self.samples + samples, self.requests + 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.samples, self.requests = self.samples - samples, self.requests - 1
            self._seconds.append(time.monotonic() - began)


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
        sleeping: whether the engine has no memory now.
        adapters: that requests may name as their model -> their folders.
    """

    def __init__(self, settings: ServeSettings, name: str, engine: Remote) -> None:
        self.settings, self.name, self.engine = settings, name, engine
        self.created = int(time.time())
        self.codec: Codec | None = None
        self.admission = Admission(0, settings.max_waiting)
        self.metrics = Metrics()
        self.adapters: dict[str, str] = {}
        self._draining = self.sleeping = False
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
        return "the engine sleeps; POST /wake_up" if self.sleeping else None

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
