"""The ranks of one job: starts a process for each, and lets each of them know of the others' ends."""

import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from graphmod.check.cli import environment, free_port
from graphmod.cli.errors import JobFailed
from graphmod.train.ranks import Ranks
from graphmod.train.run import stop_signals

# -- `parallel=ddp` without a launcher ---------------------------------------------------------------------------------
# Each rank runs `cli/rank.py`, is told the settings on its standard input, and finds its number in the
# environment, as torchrun would have put it there.

_LAUNCHER_GRACE = 15.0  # seconds for the other ranks, which know by themselves that one is gone
_LAST_GRACE = 5.0


@contextmanager
def _forwarding(processes: list[subprocess.Popen]) -> Iterator[None]:
    """Hands signals that stop a run on to all ranks: these have a session of their own, so that they come only here."""

    def forward(number: int, frame: Any) -> None:
        for process in processes:
            with suppress(OSError):
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: list[subprocess.Popen]) -> bool:
    """Waits until all have ended; whether they did by themselves, after one had failed."""
    deadline, by_themselves = None, True
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.poll() for process in processes):
            deadline = time.monotonic() + _LAUNCHER_GRACE
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                process.kill() if not by_themselves else process.terminate()
            deadline, by_themselves = time.monotonic() + _LAST_GRACE, False
        time.sleep(0.05)
    return by_themselves


def launch(told: Any, count: int) -> None:
    """Runs a job on so many ranks of this machine, each of which is told where it starts, and which it is. Raises
    JobFailed where they have failed, and said why, and SystemExit where they were stopped."""
    with tempfile.TemporaryDirectory(prefix="graphmod-") as folder:
        answer, port = Path(folder) / "answer", free_port()
        given = pickle.dumps((sys.argv, answer, *told))
        processes: list[subprocess.Popen] = []
        with _forwarding(processes):
            for rank in range(count):
                command = [sys.executable, "-m", "graphmod.cli.rank"]
                own = environment(rank, count, port, threads=max(1, len(os.sched_getaffinity(0)) // count))
                process = subprocess.Popen(command, stdin=subprocess.PIPE, env=own, start_new_session=True)
                processes.append(process)
            for process in processes:
                assert process.stdin is not None
                with suppress(OSError):  # it has ended
                    process.stdin.write(given)
                    process.stdin.flush()
            by_themselves = _wait(processes)
        codes = [process.returncode for process in processes]
        if answer.exists():
            raise JobFailed(answer.read_text(encoding="utf-8"), codes[0] if by_themselves and codes[0] > 0 else 1)
    killed = [f"rank {rank} with signal {-code}" for rank, code in enumerate(codes) if code < 0]
    if killed:
        raise JobFailed(f"ended: {', '.join(killed)}")
    if any(codes):
        raise SystemExit(codes[0]) if codes[0] >= 128 else JobFailed("see above", codes[0] or 1)


# -- what ranks know of each other's end -------------------------------------------------------------------------------
# Each holds a connection to the first one, which breaks when a process is gone, however it went; a collective would
# wait for it for minutes. The first one says, once, what went wrong.

# Seconds for the main thread, which tidies up: where another rank is gone, and where it may find the same error itself.
_GRACE_ALONE, _GRACE = 1.5, 4.0
_PATIENCE = 60.0
_GREETING = 200


class Peers:
    """The other ranks of this one; while it is open, threads listen to them. What went wrong with another rank is said
    by `speak`.

    Attributes:
        way_on: what there is to say of the run that was lost.
        lost: what went wrong with another rank; None while nothing did.
        status: the exit status that this has.
    """

    def __init__(self, ranks: Ranks, speak: Callable[[str], None]) -> None:
        self._ranks, self.speak = ranks, speak
        self.lost: str | None = None
        self.status = 0
        self.way_on: Callable[[], str] = lambda: ""
        self._noticed, self._ended, self._ending = threading.Event(), threading.Event(), threading.Lock()
        self._said = ""
        self._links: dict[int, socket.socket] = self._connect()
        self._threads = [threading.Thread(target=self._listen, args=one, daemon=True) for one in self._links.items()]
        for thread in self._threads:
            thread.start()

    def _connect(self) -> dict[int, socket.socket]:
        ranks, address = self._ranks, os.environ.get("MASTER_ADDR", "127.0.0.1")
        if not ranks.first:
            port, token = ranks.told((0, ""))
            link = socket.create_connection((address, port), timeout=_PATIENCE)
            link.sendall(f"{token} {ranks.rank}".encode().ljust(_GREETING))
            link.settimeout(None)
            return {0: link}
        links: dict[int, socket.socket] = {}
        with _server(address) as server:
            token = secrets.token_hex(16)
            ranks.told((server.getsockname()[1], token))
            server.settimeout(_PATIENCE)
            while len(links) + 1 < ranks.count:
                link, _ = server.accept()
                link.settimeout(_PATIENCE)
                greeting = link.recv(_GREETING, socket.MSG_WAITALL).decode(errors="replace").split()
                if len(greeting) != 2 or not secrets.compare_digest(greeting[0], token):
                    link.close()  # somebody else
                    continue
                link.settimeout(None)
                links[int(greeting[1])] = link
        return links

    def _tell(self, rank: int, **message: Any) -> None:
        with suppress(OSError):  # it is gone, which the listener notices
            self._links[rank].sendall(json.dumps(message).encode() + b"\n")

    def say(self, text: str) -> None:
        """Has the first rank say what went wrong here, unless it says so itself."""
        self._said = self._said or text

    def noticed(self, seconds: float) -> str | None:
        """What went wrong with another rank, if that is known within so many seconds."""
        self._noticed.wait(seconds)
        return self.lost

    def close(self, status: int, failed: bool) -> None:
        """Ends: the last thing that a rank does before it exits with that status; if it has failed, not all ranks come
        to this end by themselves."""
        self._ended.set()
        if self._ranks.first:
            for rank in self._links:
                self._tell(rank, **({"end": status} if failed else {"left": True}))
        elif self.lost is None:
            self._tell(0, **({"failed": self._said, "status": status} if failed else {"left": True}))
            self._threads[0].join(_PATIENCE)  # the first one, which may still write, should not be ended by a launcher
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_GRACE)

    def _listen(self, rank: int, link: socket.socket) -> None:
        with suppress(OSError, ValueError), link.makefile() as lines:  # of which the last one may be half
            for line in lines:
                message = json.loads(line)
                if "left" in message:
                    return
                self._end(rank, message)
        self._end(rank, {})

    def _end(self, rank: int, message: dict[str, Any]) -> None:
        """Another rank has failed, or is gone, or the first one ends all."""
        with self._ending:
            if self._ended.is_set():
                return
            if "end" in message:
                os._exit(message["end"])
            status = self.status = message.get("status", 1)
            said, gone = message.get("failed"), "ended without an error message: it was killed, or it crashed"
            self.lost = f"rank {rank}: {said}" if said else f"rank {rank} {gone}{self.way_on()}"
            for other in self._links:
                if other != rank:
                    self._tell(other, end=status)
            self._noticed.set()
            if self._ranks.rank == 1:  # the first one is gone, and one of the others speaks
                self.speak(self.lost)
            if self._ended.wait(_GRACE if message else _GRACE_ALONE):
                return
            if self._ranks.first:
                self.speak(self.lost)
            os._exit(status)


def _server(address: str) -> socket.socket:
    try:
        return socket.create_server((address, 0))
    except OSError:  # a name of this machine that is not one of its addresses
        return socket.create_server(("", 0))
