"""One run of `serve.py`: listens, loads the model, serves until a signal says to stop."""

from __future__ import annotations

import signal
import socket
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

from graphmod.cli.generation.loading import load_model
from graphmod.cli.generation.provenance import trained
from graphmod.cli.serving.schema import ServeConfig
from graphmod.cli.stdout import end_at_once, say_plainly, show
from graphmod.config import CompileMode
from graphmod.decode.engine import DecodeEngine
from graphmod.decode.step.sampling import FILTERED, GREEDY, PLAIN
from graphmod.decode.text.codec import TokenizerCodec, codec_for
from graphmod.serve.app import make_app
from graphmod.serve.server import HttpServer
from graphmod.serve.service import Service
from graphmod.trace.garbage import frozen_heap
from graphmod.train.lora import is_adapter
from graphmod.train.special_tokens import set_special_tokens
from graphmod.words import counted

_TURN = 0.05  # seconds between two looks whether there is something to do
_TO_ABORT = 10  # seconds for the engine to end what it runs


class _Signals:
    """SIGTERM and Ctrl-C: the first is noted, the second ends the process at once.

    Attributes:
        number: of the first; None before it.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._came)

    def _came(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            end_at_once(128 + number)
        self.number = number


def _engine(config: ServeConfig, folder: Path) -> DecodeEngine:
    codec = codec_for(folder, config.tokenizer)
    model = load_model(folder, config.model)
    if is_adapter(folder) and isinstance(codec, TokenizerCodec):  # the base they were loaded on has its own ends
        set_special_tokens(model, codec.tokenizer)
    say_plainly(f"model: {folder}" + (f", {known}" if (known := trained(folder)) else ""))
    if config.graph.compile is not CompileMode.none and model.device.type != "cuda":
        said = f"graph.compile={config.graph.compile.value} is for a GPU and is ignored on this {model.device.type}"
        say_plainly(f"note: {said}")
    engine = DecodeEngine(model, config.engine(), codec=codec)
    if config.graph.ahead and engine.config.graphs:
        # An emulated graph of prefill is no faster than what it would stand for.
        engine.warm_up(kinds=(GREEDY, PLAIN, FILTERED), prefill=engine.device.type == "cuda")
    return engine


def serve(config: ServeConfig, folder: Path, listening: socket.socket) -> int:
    """Serves the model in `folder` on a socket; returns the exit status. Raises GraphmodError."""
    service = Service(config.serve, config.name)
    server = HttpServer(make_app(service), listening)
    url = server.url
    server.start()
    try:
        say_plainly(f"loading; {url}/health shows when it is ready")
        if config.serve.api_key is None and not ip_address(server.host).is_loopback:
            say_plainly("note: anyone who reaches this address can use it; set serve.api_key=KEY to require a key")
        engine = _engine(config, folder)
        signals = _Signals()
        with frozen_heap():
            service.begin(engine, engine.requests.codec)
            show(f"serving {config.name} at {url}")
            while signals.number is None:
                time.sleep(_TURN)
            return _drained(service, signals.number)
    finally:
        service.end(0 if isinstance(sys.exception(), KeyboardInterrupt) else _TO_ABORT)
        server.stop()


def _drained(service: Service, number: int) -> int:
    """Lets running requests finish, for as long as the settings say; returns the exit status."""
    service.drain()
    admission, seconds = service.admission, service.settings.drain_seconds
    if admission.requests:
        say_plainly(f"shutting down; waiting up to {seconds:g} s for {counted(admission.requests, 'request')}")
    until = time.monotonic() + seconds
    while admission.requests and time.monotonic() < until:
        time.sleep(_TURN)
    if not (left := admission.requests):
        say_plainly("stopped")
        return 0
    say_plainly(f"stopped; {counted(left, 'request')} cut off")
    return 128 + number
