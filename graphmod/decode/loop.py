"""`EngineLoop`: steps an engine in a thread of its own, for as long as there is something to do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from graphmod.decode.batching.handle import Handle
from graphmod.decode.config import Sampling
from graphmod.decode.errors import DecodeError
from graphmod.decode.interrupts import Held
from graphmod.decode.results import Run

log = logging.getLogger("graphmod")


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
        inside = self._lock._is_owned()
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
