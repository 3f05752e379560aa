"""What the process of the engine does for its front: it says when requests may come, counts, and ends them."""

from __future__ import annotations

import logging
import socket

from graphmod.decode.engine import DecodeEngine
from graphmod.decode.types import DecodeStats
from graphmod.errors import ConfigError, GraphmodError
from graphmod.serve.engine_thread import EngineThread
from graphmod.serve.link import Line

log = logging.getLogger("graphmod")


class FrontLost(GraphmodError):
    """The front has ended by itself, or was killed."""

    def __init__(self, said: str = "the process that answers HTTP has ended") -> None:
        super().__init__(said)


def _counters(engine: DecodeEngine) -> dict[str, float] | None:
    """What metrics are made of; None if it cannot be read, for which no request is cut off."""
    try:
        return _counted(engine.stats)
    except Exception:
        log.exception("the engine's counters cannot be read, and metrics are told without them")
        return None


def _counted(stats: DecodeStats) -> dict[str, float]:
    summed = {"replays": "launches"} | {name: name for name in ("eager_steps", "row_steps", "padding_row_steps")}
    found = {name: stats.total(counter) for name, counter in summed.items()}
    own = ("prompt_tokens", "prefix_tokens", "tokens", "waiting", "running", "blocks_used", "blocks_total")
    return found | {name: getattr(stats, name) for name in own}


class Host:
    """The engine's side of a server. One thread calls it.

    Args:
        work, control: to the front.

    Attributes:
        ready: whether the front lets requests in.
        left: requests that have not ended; None before the front has told it, which it does from `drain` on.
    """

    def __init__(self, work: socket.socket, control: socket.socket) -> None:
        self._work, self._control = Line(work), Line(control)
        self._engine: DecodeEngine | None = None
        self._thread: EngineThread | None = None
        self.ready = False
        self.left: int | None = None

    def begin(self, engine: DecodeEngine) -> None:
        """Steps this engine for the front from now on."""
        self._engine, self._thread = engine, EngineThread(engine, self._work)
        self._thread.start()
        self._control.send(("begin", engine.config.max_batch_size, engine.max_seq_len))

    def tend(self, seconds: float) -> None:
        """Does what the front asks for, and waits so long for it.

        Raises:
            ConfigError: the tokenizer cannot be read.
            FrontLost: the front is gone.
        """
        for kind, *given in self._control.receive(seconds):
            if kind == "counters":
                assert self._engine is not None
                self._control.send(("counters", _counters(self._engine)))
            elif kind == "ready":
                self.ready = True
            elif kind == "left":
                (self.left,) = given
            elif kind == "unusable":
                raise ConfigError(given[0])
        if self._control.ended:
            raise FrontLost

    def drain(self) -> None:
        """Has the front refuse requests from now on; those that run go on."""
        self._control.send(("drain",))

    def end(self, timeout: float) -> None:
        """Ends what runs, and the front.

        Args:
            timeout: seconds for the engine to end it, and to tell who waits.
        """
        if self._thread is not None:
            self._thread.close(timeout)
        self._work.close()
        self._control.close()
