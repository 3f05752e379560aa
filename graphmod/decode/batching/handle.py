"""A request on its way: what it has got so far, and how threads and coroutines wait for more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from graphmod.decode.errors import DecodeError
from graphmod.decode.results import Completion, Run

log = logging.getLogger("graphmod")

_SILENCE = 10.0  # seconds
_WHO_STEPS = "Whoever waits does not step the engine: an EngineLoop does, or engine.step() in another thread"


class Handle:
    """What `submit` gives: a request that waits, runs, or has ended.

    The engine fills it in, in the thread that steps it; any other may read it.

    Args:
        sequences: what it consists of, each a `batching.sequence.Sequence`, or what stands for one that another process
            has: with a `completion`, and a `handle`, which is set.

    Attributes:
        completions: one for each sample, in order. They grow while the request runs: until it is `done`, read what
            `wait`, `runs` or `on_run` gives.
        error: of the engine, which ended the request before it had finished; None if there was none.
    """

    def __init__(self, sequences: list[Any], on_run: Callable[[Run], None] | None = None) -> None:
        self.sequences = sequences
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

    async def runs(self) -> AsyncIterator[Run]:
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
    for loop, events in found.items():
        with contextlib.suppress(RuntimeError):  # it was closed, and its readers with it
            loop.call_soon_threadsafe(_set_all, events)


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
