"""Runs a program in several processes that can form a process group (gloo, on the CPU)."""

import functools
import os
import socket
import tempfile

import torch
from torch import distributed

from tests.support.processes import CONTEXT


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def in_group(program):
    """`program(rank)` with a process group around it."""
    return functools.partial(_in_group, program)


def _in_group(program, rank):
    distributed.init_process_group("gloo")
    found = program(rank)
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def _rank(rank, ranks, port, program, folder, arguments):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    found = program(rank, *arguments)
    torch.save(found, f"{folder}/{rank}")


def on_ranks(program, ranks, *arguments):
    """What `program(rank, *arguments)`, a function of a module, returns in each of so many processes, which find in
    their environment what a launcher puts there; plain values only."""
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, free_port(), program, folder, arguments)
        started = [CONTEXT.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(ranks)]
        for one in started:
            one.start()
        for one in started:
            one.join(240)
        codes = [one.exitcode for one in started]
        for one in started:
            one.kill()
        assert codes == [0] * ranks
        return [torch.load(f"{folder}/{rank}") for rank in range(ranks)]
