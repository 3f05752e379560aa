"""Runs a program in several processes that form a process group (gloo, on the CPU)."""

import os
import socket
import tempfile

import torch
import torch.multiprocessing as processes
from torch import distributed


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _rank(rank, ranks, port, program, folder):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    found = program(rank)
    distributed.barrier()
    distributed.destroy_process_group()
    torch.save(found, f"{folder}/{rank}")


def on_ranks(program, ranks=2):
    """What `program(rank)`, a function of a module, returns in each of so many ranks; plain values only."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, free_port(), program, folder)
        context = processes.get_context("spawn")
        started = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        for one in started:
            one.start()
        for one in started:
            one.join(240)
        codes = [one.exitcode for one in started]
        for one in started:
            one.kill()
        assert codes == [0] * ranks
        return [torch.load(f"{folder}/{rank}") for rank in range(ranks)]
