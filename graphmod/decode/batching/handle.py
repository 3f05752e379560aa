"""A request on its way: what it has got so far, and how threads and coroutines wait for more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

from graphmod.decode.batching.sequence import Sequence
from graphmod.decode.errors import DecodeError
from graphmod.decode.results import Completion, Run


class Handle:
    """What `submit` gives: a request that waits, runs, or has ended.

    The engine fills it in, in the thread that steps it; any other may read it.

    Attributes:
        completions: one for each sample, in order. They grow while the request runs: until it is `done`, read what
            `wait`, `runs` or `on_run` gives.
        error: of the engine, which ended the request before it had finished; None if there was none.
    """

    def __init__(self, sequences: list[Sequence], on_run: Callable[[Run], None] | None = None) -> None:
        self.sequences = sequences
        self.completions: list[Completion] = [sequence.completion for sequence in sequences]
        self.error: BaseException | None = None
        self._number = {id(done): number for number, done in enumerate(self.completions)}
        self._seen = [0] * len(sequences)  # tokens that were given out
        self._ended = [False] * len(sequences)
        self._on_run = on_run
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], None]] = []
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
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request has not ended after {timeout} s")
        self.check()
        return self.completions

    async def runs(self) -> AsyncIterator[Run]:
        """What each sample gets, as it becomes known; while the reader is busy, runs of a sample are joined.

        Raises:
            DecodeError: the engine failed; or its own error.
        """
        woken, cursor = asyncio.Event(), Cursor(self)
        wake, loop = woken.set, asyncio.get_running_loop()

        def waker() -> None:
            with contextlib.suppress(RuntimeError):  # it was closed, and the reader with it
                loop.call_soon_threadsafe(wake)

        self._wakers.append(waker)
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
            self._wakers.remove(waker)

    def check(self) -> None:
        """Raises the error of the engine, if there was one."""
        if self.error is not None:
            raise self.error

    # -- for the engine ------------------------------------------------------------------------------------------

    def take(self, run: Run) -> None:
        """Gives out what steps found for a sample."""
        number = self._number[id(run.completion)]
        if self._ended[number]:
            return
        self._seen[number] = len(run.completion.tokens)
        self._ended[number] = run.ended
        self._tell()
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
                del done.tokens[self._seen[number] :], done.logprobs[self._seen[number] :]
                done.finish_reason, done.error = "error", str(self.error)
        self._ended = [True] * len(self._ended)
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for wake in [*self._wakers]:
            wake()


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
            found.append(Run(done, done.tokens[before:until], done.logprobs[before:until], ended))
        return found
