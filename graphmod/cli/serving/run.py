"""One run of `serve.py`: listens, loads the model, serves until a signal says to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from graphmod.cli.generation.loading import cache_of, load_model
from graphmod.cli.serving.schema import ServeConfig
from graphmod.cli.stdout import end_at_once, say_plainly, show
from graphmod.decode.engine import DecodeEngine
from graphmod.decode.step.sampling import FILTERED, GREEDY, PLAIN
from graphmod.decode.text.codec import codec_for
from graphmod.serve.host import FrontLost, Host
from graphmod.serve.process import FrontProcess
from graphmod.trace.garbage import frozen_heap
from graphmod.words import counted

_TURN = 0.05  # seconds between two looks whether there is something to do
_TO_COUNT = 2  # seconds for the front to say how many requests run
_TO_ABORT = 10  # seconds for the engine to end what it runs


class _Signals:
    """SIGTERM and Ctrl-C: the first is noted, the second ends the process at once.

    Args:
        last: called before that.

    Attributes:
        number: of the first; None before it.
    """

    def __init__(self, last: Callable[[], None]) -> None:
        self.number: int | None = None
        self._last = last
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._came)

    def _came(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            os.write(2, b"stopped; what still ran was cut off\n")  # printing may be what was interrupted
            self._last()
            end_at_once(128 + number)
        self.number = number


class _FrontEnded(BaseException):
    """Told by a signal. No `Exception`, which whoever loads a model would take for what is wrong with it."""


@contextlib.contextmanager
def _needs(front: FrontProcess) -> Iterator[None]:
    """Ends what this thread does where the front ends meanwhile: to load a model may take minutes.

    Raises:
        FrontLost: it has.
    """

    def child_ended(*_: object) -> None:
        if front.has_ended:
            raise _FrontEnded

    try:
        before = signal.signal(signal.SIGCHLD, child_ended)
        try:
            child_ended()
            yield
        finally:
            signal.signal(signal.SIGCHLD, before)
    except _FrontEnded:
        raise FrontLost from None


def _engine(config: ServeConfig, folder: Path) -> DecodeEngine:
    codec = codec_for(folder, config.tokenizer)
    engine = DecodeEngine(load_model(folder, config.model, codec), config.engine(), codec=codec)
    held = engine.stats.blocks_total * engine.memory.block_size
    if held < engine.max_seq_len:
        say_plainly(f"note: the cache holds {held} tokens; a request for as many runs alone (decode.cache_tokens)")
    if engine.stats.host_cache_bytes:
        say_plainly(cache_of(engine))
    if config.graph.ahead and engine.config.graphs:
        # An emulated graph of prefill is no faster than what it would stand for.
        engine.warm_up(kinds=(GREEDY, PLAIN, FILTERED), prefill=engine.device.type == "cuda")
    return engine


def serve(config: ServeConfig, folder: Path, address: str, front: FrontProcess) -> int:
    """Serves the model in `folder` at an address; returns the exit status.

    Args:
        front: that answers there.

    Raises:
        GraphmodError: the model cannot be used, or the front has ended.
    """
    host = Host(front.work, front.control)
    try:
        say_plainly(f"loading; {address}/health shows when it is ready")
        if config.serve.api_key is None and not ip_address(str(urlsplit(address).hostname)).is_loopback:
            say_plainly("note: anyone who reaches this address can use it; set serve.api_key=KEY to require a key")
        with _needs(front):
            engine = _engine(config, folder)
        signals = _Signals(front.kill)
        with frozen_heap():
            host.begin(engine)
            while not host.ready and signals.number is None:
                host.tend(_TURN)
            if host.ready:
                show(f"serving {config.name} at {address}")
            while signals.number is None:
                host.tend(_TURN)
            return _drained(host, config.serve.drain_seconds, signals.number)
    except FrontLost as error:
        raise FrontLost(f"{error} {front.status}, and so does this one; start the server again") from None
    finally:
        host.end(0 if isinstance(sys.exception(), KeyboardInterrupt) else _TO_ABORT)


def _drained(host: Host, seconds: float, number: int) -> int:
    """Lets running requests finish, for so many seconds; returns the exit status."""
    host.drain()
    until = time.monotonic() + _TO_COUNT
    while host.left is None and time.monotonic() < until:
        host.tend(_TURN)
    if host.left is None:  # it was stopped, or has no time
        say_plainly("stopped; the process that answers HTTP does not say what was cut off")
        return 128 + number
    if host.left:
        say_plainly(
            f"shutting down; waiting up to {seconds:g} s for {counted(host.left, 'request')}; Ctrl-C ends at once"
        )
    until = time.monotonic() + seconds
    while host.left and time.monotonic() < until:
        host.tend(_TURN)
    if not (left := host.left):
        say_plainly("stopped")
        return 0
    say_plainly(f"stopped; {counted(left, 'request')} cut off")
    return 128 + number
