"""Requests on their way: what they have got so far, how threads and coroutines wait for more, and the loop that steps
an engine for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any

from graphmod.decode.types import Completion, DecodeError, Run, Sampling, TokenEvent, events
from graphmod.interrupts import Held

log = logging.getLogger("graphmod")

_SILENCE = 10.0  # seconds
_WHO_STEPS = "Whoever waits does not step the engine: an EngineLoop does, or engine.step() in another thread"


class Handle:
    """What `submit` gives: a request that waits, runs, or has ended.

    The engine fills it in, in the thread that steps it; any other may read it.

    Args:
        sequences: what it consists of, each a `scheduler.Sequence`, or what stands for one that another
            process has: with a `completion`, and a `handle`, which is set.
        on_run, with_text: see `DecodeEngine.submit`.

    Attributes:
        completions: one for each sample, in order. They grow while the request runs: until it is `done`, read what
            `wait`, `runs` or `on_run` gives.
        error: of the engine, which ended the request before it had finished; None if there was none.
    """

    def __init__(
        self, sequences: list[Any], on_run: Callable[[Run], None] | None = None, with_text: bool = True
    ) -> None:
        self.sequences, self.with_text = sequences, with_text
        self.completions: list[Completion] = [sequence.completion for sequence in sequences]
        self.error: BaseException | None = None
        self._number = {id(done): number for number, done in enumerate(self.completions)}
        self._seen = [0] * len(sequences)  # tokens that were given out
        self._ended = [False] * len(sequences)
        self._on_run = on_run
        self._changed = threading.Condition()
        self._readers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        for sequence in sequences:
            sequence.handle = self

    @property
    def done(self) -> bool:
        """Whether all samples have ended."""
        return all(self._ended)

    def wait(self, timeout: float | None = None) -> list[Completion]:
        """Waits until all samples have ended, while another thread steps the engine.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: they have not ended by then; the request goes on.
            DecodeError: the engine failed; or its own error.
        """
        first = _SILENCE if timeout is None else min(timeout, _SILENCE)
        with self._changed:
            ended = self._changed.wait_for(lambda: self.done, first)
            if not ended and timeout != first:
                if not any(self._seen):
                    log.warning("a request has no token after %g s. %s", first, _WHO_STEPS)
                ended = self._changed.wait_for(lambda: self.done, None if timeout is None else timeout - first)
        if not ended:
            raise TimeoutError(f"the request has not ended after {timeout} s. {_WHO_STEPS}")
        self.check()
        return self.completions

    async def runs(self) -> AsyncGenerator[Run]:
        """What each sample gets, as it becomes known; while the reader is busy, runs of a sample are joined.

        Raises:
            DecodeError: the engine failed; or its own error.
        """
        woken, cursor = asyncio.Event(), Cursor(self)
        reader = asyncio.get_running_loop(), woken
        self._readers.append(reader)
        try:
            while True:
                woken.clear()
                ended = self.done
                for run in cursor.read():
                    yield run
                self.check()
                if ended:
                    return
                await woken.wait()
        finally:
            self._readers.remove(reader)

    def check(self) -> None:
        """Raises the error of the engine, if there was one."""
        if self.error is not None:
            raise self.error

    # -- for the engine ------------------------------------------------------------------------------------------

    def take(self, run: Run) -> None:
        """Takes in what steps found for a sample; `tell` wakes who waits for it."""
        number = self._number[id(run.completion)]
        if self._ended[number]:
            return
        self._seen[number] = len(run.completion.tokens)
        self._ended[number] = run.ended
        if self._on_run is not None:
            self._on_run(run)

    def fail(self, error: BaseException) -> None:
        """Ends the samples that have not ended with an error of the engine."""
        if self.done:
            return
        if isinstance(error, Exception):
            self.error = error
        else:
            self.error = DecodeError(f"the engine was stopped by {type(error).__name__} before this request had ended")
            self.error.__cause__ = error
        for number, done in enumerate(self.completions):
            if not self._ended[number]:
                for kept in filter(None, (done.tokens, done.logprobs, done.top_logprobs)):
                    del kept[self._seen[number] :]
                done.finish_reason, done.error = "error", str(self.error)
        self._ended = [True] * len(self._ended)
        tell([self])


def tell(handles: Iterable[Handle]) -> None:
    """Wakes whoever waits for these requests. An event loop is woken once, however many of them are read in it: waking
    one lets go of the interpreter, which the thread that steps the engine then has to wait for."""
    found: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for handle in handles:
        with handle._changed:
            handle._changed.notify_all()
        for loop, woken in [*handle._readers]:
            found.setdefault(loop, []).append(woken)
    for loop, readers in found.items():
        with contextlib.suppress(RuntimeError):  # it was closed, and its readers with it
            loop.call_soon_threadsafe(_set_all, readers)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


class Cursor:
    """How far somebody has read a request."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._read = [0] * len(handle.completions)
        self._told = [False] * len(handle.completions)

    def read(self) -> list[Run]:
        """What is new since the last time, a run for each sample that has something new."""
        handle, found = self._handle, []
        for number, done in enumerate(handle.completions):
            ended, before = handle._ended[number], self._read[number]
            until = handle._seen[number]
            if handle.error is not None or self._told[number] or (until == before and not ended):
                continue
            self._read[number], self._told[number] = until, ended
            top = done.top_logprobs and done.top_logprobs[before:until]
            found.append(Run(done, done.tokens[before:until], done.logprobs[before:until], ended, top_logprobs=top))
        return found


def _stepped(engine: Any, handle: Handle) -> Generator[TokenEvent]:
    # Knows nothing of the stream, which so ends as soon as nobody holds it.
    cursor = Cursor(handle)
    while True:
        ended = handle.done
        yield from events(cursor.read())
        handle.check()
        if ended:
            return
        engine._step(among_others=False)


class TokenStream(Iterator[TokenEvent]):
    """Yields tokens as they become known, up to `steps_per_sync` of each sample at a time, one with
    `offload=layers`.

    `for` steps the engine itself; `async for` lets the engine's own thread do it. Closing the stream, or leaving it,
    ends its requests.

    Args:
        engine: a `DecodeEngine`.
        handle: of the requests.
    """

    def __init__(self, engine: Any, handle: Handle) -> None:
        self._engine, self.handle = engine, handle
        self._events = _stepped(engine, handle)

    def __next__(self) -> TokenEvent:
        try:
            return next(self._events)
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        try:
            self._engine.loop.start()
            async for run in self.handle.runs():
                for event in events([run]):
                    yield event
        finally:
            self.close()

    def close(self) -> None:
        """Ends the requests that have not ended. Any thread may call it."""
        self._engine.abort(self.handle)
        with contextlib.suppress(ValueError):  # another thread is in the middle of it, and finds the end by itself
            self._events.close()

    async def aclose(self) -> None:
        """Ends the requests that have not ended; for a coroutine that leaves the stream early."""
        self.close()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.handle.done and not ends():  # at the end of the interpreter modules have nothing in them any more
            self.close()


class EngineLoop:
    """Requests may come from any thread; a thread that ends when there is nothing left to do steps the engine.

    Args:
        engine: a `DecodeEngine`, which may be used beside it.

    Attributes:
        error: of the engine, the last one; the requests that it ended have it as well, and later ones are tried again.
        closed: whether it takes no more requests.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._lock = threading.RLock()  # garbage collection and signals may call into it anywhere
        self._thread: threading.Thread | None = None
        self.closed = False

    def start(self) -> None:
        """Goes to work on whatever the engine was given. `submit` does that by itself.

        Raises:
            DecodeError: it was closed.
        """
        thread = threading.Thread(target=self._run, name="graphmod-engine")
        with Held(), self._lock:
            if self.closed:
                raise DecodeError("this loop was closed and takes no more requests; make another EngineLoop(engine)")
            if self.engine.unfinished and self._thread is None:
                self._thread = thread  # before anything else, which may call into this
                try:
                    thread.start()
                except BaseException:  # as when the interpreter ends
                    self._thread = None
                    raise

    def submit(
        self,
        prompt: Any,
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        on_run: Callable[[Run], None] | None = None,
        **settings: Any,
    ) -> Handle:
        """As `DecodeEngine.submit`; the request is worked on at once.

        Raises:
            RequestError: the prompt or a setting cannot be used.
            DecodeError: the loop was closed.
        """
        if self.closed:
            self.start()
        handle = self.engine.submit(prompt, n, sampling, on_run=on_run, **settings)
        try:
            self.start()
        except BaseException:
            self.engine.abort(handle)
            raise
        return handle

    def abort(self, handle: Handle) -> None:
        """Ends a request; see `DecodeEngine.abort`."""
        self.engine.abort(handle)

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Takes no more requests, and waits for the thread to end, unless it is that thread which calls, or a signal
        has met the caller in the middle of `start`.

        Args:
            drain: finish what waits and runs, else end it now.
            timeout: seconds for that, after which the rest is ended; None waits for as long as it takes.
        """
        lock: Any = self._lock
        inside = lock._is_owned()
        with self._lock:
            self.closed, thread = True, self._thread
        if not drain:
            self.engine.abort_all()
        if thread is not None and thread is not threading.current_thread() and not inside:
            thread.join(timeout if drain else None)
            if thread.is_alive():
                self.engine.abort_all()
                thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self.engine.unfinished:
                    self._thread = None
                    return
            try:
                self.engine.step()
            except BaseException as error:
                # All requests that it ended have it; a thread has nobody else to tell.
                self.error = error
                log.error("decoding failed, and the requests that ran or waited have ended: %s", error)
