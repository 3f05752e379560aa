"""`graphmod check --ranks N`: starts a process for each rank, and makes one report of what they report."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from graphmod.check.report import Report, of_all_ranks
from graphmod.words import ranks_in_words

_OTHERS = 5.0  # seconds in which ranks may fail after the first, to be told of with it


class Unusable(Exception):
    """What was asked for cannot be checked; the text is one sentence."""


def check_as_ranks(count: int, arguments: list[str]) -> Report:
    """The report of so many ranks.

    Args:
        arguments: of the command.

    Raises:
        Unusable: a rank could not check it.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stopping:
        command = [sys.executable, "-m", "graphmod.check.one_rank", folder, *arguments]
        port = free_port()
        processes = []
        for rank in range(count):
            # Its standard output is no part of the report.
            process = subprocess.Popen(command, env=environment(rank, count, port), stdout=sys.stderr)
            stopping.callback(process.wait)
            stopping.callback(process.kill)
            processes.append(process)
        return _gathered(Path(folder), processes)


def outcome_of(folder: Path, rank: int) -> Path:
    """The file in which a rank leaves its report, or in one sentence why there is none."""
    return folder / f"rank{rank}"


def _gathered(folder: Path, processes: list[subprocess.Popen]) -> Report:
    until = None
    while None in (ended := [one.poll() for one in processes]) and (until is None or time.monotonic() < until):
        if until is None and any(ended):
            until = time.monotonic() + _OTHERS  # the others may wait for one that failed
        time.sleep(0.02)
    reports, errors = [], {}
    for rank, process in enumerate(processes):
        file = outcome_of(folder, rank)
        outcome = pickle.loads(file.read_bytes()) if file.exists() else f"ended with status {process.returncode}"
        if isinstance(outcome, Report):
            reports.append(outcome)
        elif file.exists() or process.returncode is not None:  # and not one that waits for those
            errors.setdefault(outcome, []).append(rank)
    if errors:
        whole = len(processes)
        said = [text if len(ranks) == whole else f"{ranks_in_words(ranks)}: {text}" for text, ranks in errors.items()]
        raise Unusable("; ".join(said))
    return of_all_ranks(reports)


def environment(rank: int, count: int, port: int, threads: int = 1) -> dict[str, str]:
    """What torchrun sets, on one machine; each rank may use so many threads, where nothing else is said."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "ROLE_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **{name: str(value) for name, value in names.items()}}


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
