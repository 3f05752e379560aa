"""`TokenStream`: the tokens of requests, one by one, for a loop or a coroutine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from graphmod.decode.batching.handle import Cursor, Handle
from graphmod.decode.results import TokenEvent, events


def _stepped(engine: Any, handle: Handle) -> Iterator[TokenEvent]:
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
        """The same, for a coroutine that leaves the stream early."""
        self.close()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.handle.done and not ends():  # at the end of the interpreter modules have nothing in them any more
            self.close()
