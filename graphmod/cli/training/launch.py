"""`parallel=ddp` without a launcher: starts a process for each rank and waits for them.

Each rank runs `cli/training/rank.py`, is told the settings on its standard input, and finds its number in the
environment, as torchrun would have put it there.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import graphmod
from graphmod.check.ranks import environment, free_port
from graphmod.cli.errors import JobFailed
from graphmod.train.run import stop_signals

_GRACE = 15.0  # seconds for the other ranks, which know by themselves that one is gone
_LAST_GRACE = 5.0


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    found = environment(rank, count, port, threads=max(1, len(os.sched_getaffinity(0)) // count))
    # Where this process has the package from, which need not be installed.
    home = str(Path(graphmod.__file__).parent.parent)
    return found | {"PYTHONPATH": os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])}


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
            deadline = time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                process.kill() if not by_themselves else process.terminate()
            deadline, by_themselves = time.monotonic() + _LAST_GRACE, False
        time.sleep(0.05)
    return by_themselves


def launch(told: dict[str, Any], count: int) -> None:
    """Runs a job on so many ranks of this machine.

    Args:
        told: what each rank is told, as plain values.

    Raises:
        JobFailed: they have failed, and said why.
        SystemExit: they were stopped.
    """
    with tempfile.TemporaryDirectory(prefix="graphmod-") as folder:
        answer, port = Path(folder) / "answer.json", free_port()
        line = json.dumps({**told, "answer": str(answer)}).encode() + b"\n"
        processes: list[subprocess.Popen] = []
        with _forwarding(processes):
            for rank in range(count):
                command = [sys.executable, "-m", "graphmod.cli.training.rank"]
                environment = _environment(rank, count, port)
                process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
                processes.append(process)
            for process in processes:
                assert process.stdin is not None
                with suppress(OSError):  # it has ended
                    process.stdin.write(line)
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
