"""The process of the engine in a server: the front in a process of its own, for one process has one Python: while HTTP
has it, the engine cannot launch; the thread that steps the engine, and between two steps takes in all that was asked
for meanwhile; what goes between the two processes; and the address that the server listens on.

No PyTorch and no web library, so that a wrong address is told, and the front starts, before either is loaded, and says
that the model is. What a step finds goes to the front in one message, because the GPU waits for whatever the thread
does besides.
"""

from __future__ import annotations

import contextlib
import json
import logging
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmod.decode.streams import Handle
from graphmod.decode.types import RequestError, Run, Sampling
from graphmod.errors import ConfigError, GraphmodError
from graphmod.serve.settings import ServeSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from graphmod.decode.engine import DecodeEngine

log = logging.getLogger("graphmod")

# -- messages over pairs of connected sockets --------------------------------------------------------------------------
# A message is made of lists, words and numbers, and is written by `marshal`, which is the fastest there is for those.
# Both processes run the same Python, and nothing that comes from a network is read in this way.

_LENGTH = struct.Struct("<Q")
_AT_ONCE = 1 << 18  # bytes


def packed(message: Any) -> bytes:
    """A message as it is sent."""
    body = marshal.dumps(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Makes messages of bytes, which come in pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[Any]:
        """The messages that are complete with these."""
        self._bytes += data
        found, start = [], 0
        while (body := start + _LENGTH.size) <= len(self._bytes):
            end = body + _LENGTH.unpack_from(self._bytes, start)[0]
            if end > len(self._bytes):
                break
            found.append(marshal.loads(memoryview(self._bytes)[body:end]))
            start = end
        del self._bytes[:start]
        return found


class Line:
    """One end of a pair of sockets, for a thread that waits for what comes.

    Args:
        end: the socket.

    Attributes:
        ended: whether the other end is closed, or nobody holds it any more.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._unpacker, self._ready = end, Unpacker(), select.poll()
        self._ready.register(end, select.POLLIN)
        self.ended = False

    def send(self, message: Any) -> None:
        """Sends it. Where nobody is at the other end any more it is lost, which `receive` notices."""
        with contextlib.suppress(OSError):
            self._socket.sendall(packed(message))

    def receive(self, seconds: float | None = None) -> list[Any]:
        """All messages that have come.

        Args:
            seconds: to wait for the first; None waits for as long as it takes.
        """
        found: list[Any] = []
        while not self.ended and self._ready.poll(None if seconds is None else 1000 * seconds):
            data = b""
            with contextlib.suppress(OSError):  # reset, or closed by another thread
                data = self._socket.recv(_AT_ONCE)
            self.ended = not data
            found += self._unpacker.add(data)
            seconds = 0 if found else seconds
        return found

    def hear_no_more(self) -> None:
        """Whoever waits for a message here finds that it is over; what is sent still arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Lets go of it, and of whoever waits here."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# -- the address, and the process of the front -------------------------------------------------------------------------

_TO_END = 5.0  # seconds for a front to send what is left and end


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error  # a UnicodeError where a name is too long
        raise ConfigError(
            f"serve.host={host} serve.port={port} cannot be listened on: {why}; give an address or a name of this "
            "machine, such as 127.0.0.1, or 0.0.0.0 for all of its addresses, and serve.port=0 for any free one"
        ) from error


def url(listening: socket.socket) -> str:
    """Where a server on this socket is reached."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class FrontProcess:
    """The front of a server as a process; as a context, it has ended afterwards.

    Args:
        settings: of the server.
        name: of the model.
        folder: with the model.
        tokenizer: folder of another tokenizer, or `bytes`; None for that in `folder`.
        listening: the socket to answer on, which this process closes.

    Attributes:
        work, control: to it, for a `Host`.
    """

    def __init__(
        self, settings: ServeSettings, name: str, folder: Path, tokenizer: str | None, listening: socket.socket
    ) -> None:
        self.work, work = socket.socketpair()
        self.control, control = socket.socketpair()
        numbers = [end.fileno() for end in (work, control, listening)]
        # As this process finds its modules, and not those that lie where it was started.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with contextlib.ExitStack() as stack:
            for end in (work, control, listening):
                stack.callback(end.close)
            with _without_signals():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "graphmod.serve", *map(str, numbers)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=numbers,
                    env=environment,
                )
        # Not as arguments, which everybody on this machine can read: there may be a key among them.
        given = {"settings": vars(settings), "name": name, "folder": str(folder), "tokenizer": tokenizer}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as told:  # it has ended, which is noticed later
            told.write(json.dumps(given).encode())

    def __enter__(self) -> FrontProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> str:
        """How it has ended, in words."""
        code = self._waited()
        return f"with status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Ends it at once; also for handlers of signals."""
        self._process.kill()

    def end(self) -> None:
        """Waits for it to end, which it does once nobody holds the other ends of its sockets."""
        self.work.close()
        self.control.close()
        self._waited()

    def _waited(self) -> int:
        try:
            return self._process.wait(_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """A process that is started meanwhile does not hear SIGINT and SIGTERM, not even before it can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- the engine, for the front -----------------------------------------------------------------------------------------


class EngineThread:
    """Steps an engine for a front, which `Remote` is in.

    Args:
        engine: to step. Others may use it beside.
        line: to the front.
    """

    def __init__(self, engine: DecodeEngine, line: Line) -> None:
        self._engine, self._line = engine, line
        self._requests: dict[int, Handle] = {}
        self._news: list[Any] = []  # to be told
        self._runs: list[Any] = []
        self._thread = threading.Thread(target=self._work, name="graphmod-engine")

    def start(self) -> None:
        """Goes to work; it ends with the line."""
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Ends all requests, which are told so, and the thread.

        Args:
            timeout: seconds after which nobody is told any more.
        """
        self._line.hear_no_more()
        with contextlib.suppress(Exception):  # of an engine that has failed, which its thread tells
            self._engine.abort_all()  # by the next step, where one is under way
        self._thread.join(timeout)
        self._line.close()
        self._thread.join()

    def _work(self) -> None:
        engine, line = self._engine, self._line
        try:
            while True:
                for kind, *given in line.receive(0 if engine.unfinished else None):
                    self._guarded(self._ask if kind == "ask" else self._abort, *given)
                self._tell()
                if line.ended:
                    break
                if engine.unfinished:
                    self._guarded(engine.step)
                    self._tell()
            self._guarded(engine.abort_all)
            self._tell()
        finally:
            line.close()

    def _guarded(self, act: Any, *given: Any) -> None:
        """Does it. An error of the engine has ended all requests, and they are told."""
        try:
            act(*given)
        except BaseException as error:
            log.error("decoding failed, and the requests that ran or waited have ended: %s", error)
            self._news.append(("failed", str(error)))
            for number, handle in [*self._requests.items()]:
                if handle.error is not None:
                    del self._requests[number]
                    self._news.append(("lost", number, str(handle.error)))

    def _tell(self) -> None:
        if self._runs or self._news:
            self._line.send([("runs", self._runs), *self._news])  # what was got before an error comes before it
            self._runs, self._news = [], []

    # -- what the front asks for -----------------------------------------------------------------------------------

    def _ask(self, number: int, prompts: list[list[int]], n: int, sampling: list[dict[str, Any]]) -> None:
        for own in sampling:
            if own["temperature"] is None:  # as in OpenAI's API, tokens are drawn
                own["temperature"] = self._engine.requests.defaults.temperature
        given, take = [Sampling(**own) for own in sampling], partial(self._take, number, n)
        try:
            self._requests[number] = self._engine.submit_all(prompts, n, given, on_run=take, text=False)
            self._news.append(("taken", number))
        except RequestError as error:
            self._news.append(("refused", number, str(error)))
        except Exception as error:
            log.error("a request could not be served", exc_info=error)
            self._news.append(("lost", number, str(error)))

    def _abort(self, number: int) -> None:
        if (handle := self._requests.pop(number, None)) is not None:
            self._engine.abort(handle)

    def _take(self, number: int, n: int, run: Run) -> None:
        """Called by the engine with what a sample has got."""
        done, handle = run.completion, self._requests.get(number)
        if handle is None:  # it was aborted
            return
        reason = done.finish_reason if run.ended else None
        of_prompt = None
        if done.prompt_logprobs is not None and len(run.tokens) == len(done.tokens):  # with the first tokens
            of_prompt = done.prompt_logprobs, done.prompt_top_logprobs
        got = run.tokens, run.logprobs, run.top_logprobs, of_prompt
        self._runs.append((number, done.request * n + done.sample, got, reason, done.error))
        if handle.done:
            del self._requests[number]


class FrontLost(GraphmodError):
    """The front has ended by itself, or was killed."""

    def __init__(self, said: str = "the process that answers HTTP has ended") -> None:
        super().__init__(said)


def _counters(engine: DecodeEngine) -> dict[str, float] | None:
    """What metrics are made of; None if it cannot be read, for which no request is cut off."""
    own = ("prompt_tokens", "prefix_tokens", "tokens", "waiting", "running", "blocks_used", "blocks_total")
    summed = {"replays": "launches"} | {name: name for name in ("eager_steps", "row_steps", "padding_row_steps")}
    try:
        stats = engine.stats
        return {name: stats.total(counter) for name, counter in summed.items()} | {
            name: getattr(stats, name) for name in own
        }
    except Exception:
        log.exception("the engine's counters cannot be read, and metrics are told without them")
        return None


def _reset_prefix_cache(engine: DecodeEngine) -> None:
    with engine.pause():  # what is in the cache is forgotten by its end
        pass


def _update_weights(engine: DecodeEngine, load: Callable[[Path], PreTrainedModel], folder: str) -> None:
    own, new = engine.model.state_dict(), load(Path(folder)).state_dict()
    for name in own.keys() | new.keys():
        shapes = [tuple(one[name].shape) if name in one else None for one in (own, new)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{folder} has other weights than the model that is served: {name} has shape {shapes[1]} there and "
                f"{shapes[0]} here; give the folder of the same model with other weights"
            )
    ready = [(weight, new[name].to(weight.dtype)) for name, weight in own.items()]  # what fails does so before
    with engine.pause():
        for weight, other in ready:
            weight.copy_(other)


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
        self._thread: EngineThread | None = None
        self._counters: Callable[[], Any] = lambda: None
        self._known: dict[str, Callable[..., None]] = {}  # what clients may ask for that may manage the server
        self._worker = ThreadPoolExecutor(1, "graphmod-manage")
        self._acts: dict[int, Future[None]] = {}
        self.ready = False
        self.left: int | None = None

    def begin(self, engine: DecodeEngine, load: Callable[[Path], PreTrainedModel]) -> None:
        """Steps this engine for the front from now on.

        Args:
            load: reads a model from a folder, for its weights.
        """
        self._counters = partial(_counters, engine)
        self._known = {
            "sleep": lambda keeps_graphs: engine.suspend("graphs" if keeps_graphs else "none"),
            "wake_up": engine.resume,
            "reset_prefix_cache": partial(_reset_prefix_cache, engine),
            "update_weights": partial(_update_weights, engine, load),
            "load_adapter": engine.load_adapter,
            "unload_adapter": engine.unload_adapter,
        }
        thread = EngineThread(engine, self._work)
        thread.start()
        self._thread = thread  # which `end` joins
        self._control.send(("begin", engine.config.max_batch_size, engine.max_seq_len))

    def tend(self, seconds: float) -> None:
        """Does what the front asks for, and waits so long for it.

        Raises:
            ConfigError: the tokenizer cannot be read.
            FrontLost: the front is gone.
        """
        for kind, *given in self._control.receive(seconds):
            if kind == "counters":
                self._control.send(("counters", self._counters()))
            elif kind == "act":
                number, name, *more = given
                self._acts[number] = self._worker.submit(self._known[name], *more)  # in a thread: it may take long
            elif kind == "ready":
                self.ready = True
            elif kind == "left":
                (self.left,) = given
            elif kind == "unusable":
                raise ConfigError(given[0])
        for number in [number for number, act in self._acts.items() if act.done()]:
            error = self._acts.pop(number).exception()
            if error is not None and not isinstance(error, GraphmodError):
                log.error("what a client asked for could not be done", exc_info=error)
            self._control.send(("acted", number, None if error is None else str(error)))
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
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.close(timeout)
        self._work.close()
        self._control.close()
