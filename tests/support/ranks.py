"""Processes that form a process group: run once, or kept and given one function after another."""

import functools
import os
import socket
import tempfile
import time
import traceback

import torch
from torch import distributed

from tests.support.processes import CONTEXT


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def in_group(program):
    """`program(rank)` with a process group (gloo, on the CPU) around it."""
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


def _serve(rank, count, device, port, inbox, outbox):
    """Runs what comes, until None does."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    torch.set_num_threads(1)
    place, more = torch.device(device), {}
    if device == "cuda":
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
        torch.use_deterministic_algorithms(True)
        more = {"device_id": place}
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=rank, world_size=count, **more)
    for function, arguments in iter(inbox.get, None):
        try:
            outbox.put((True, function(place, rank, *arguments)))
        except BaseException:
            outbox.put((False, f"rank {rank}: {traceback.format_exc()}"))
    distributed.destroy_process_group()
    outbox.put((True, "ended"))


class Ranks:
    """So many ranks on `device` that stay; a context."""

    def __init__(self, device, count=2):
        self.device = device
        port = free_port()
        self._boxes = [(CONTEXT.SimpleQueue(), CONTEXT.SimpleQueue()) for _ in range(count)]
        self._workers = [
            CONTEXT.Process(target=_serve, args=(rank, count, device, port, *boxes), daemon=True)
            for rank, boxes in enumerate(self._boxes)
        ]

    def __enter__(self):
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *_):
        for worker in self._workers:
            worker.kill()
            worker.join()

    def run(self, function, *arguments, timeout=120):
        """What `function(device, rank, *arguments)`, which a module has, returns on each rank."""
        for inbox, _ in self._boxes:
            inbox.put((function, arguments))
        return self._answers(timeout)

    def run_on_first(self, function, *arguments, timeout=120):
        """What `function(device, rank, *arguments)` returns on the first rank; others may end meanwhile."""
        for inbox, _ in self._boxes:
            inbox.put((function, arguments))
        deadline, (_, outbox) = time.monotonic() + timeout, self._boxes[0]
        while outbox.empty():
            assert time.monotonic() < deadline, f"no answer in {timeout} s"
            time.sleep(0.005)
        return outbox.get()[1]

    def end(self, timeout=60):
        """Has all ranks destroy their process group and end; whether they did."""
        for inbox, _ in self._boxes:
            inbox.put(None)
        answers = self._answers(timeout)
        for worker in self._workers:
            worker.join(timeout)
        return answers, [worker.exitcode for worker in self._workers]

    def _answers(self, timeout):
        deadline, answers = time.monotonic() + timeout, []
        for rank, (_, outbox) in enumerate(self._boxes):
            while outbox.empty():
                dead = [i for i, worker in enumerate(self._workers) if not worker.is_alive()]
                assert time.monotonic() < deadline, f"rank {rank} gave no answer in {timeout} s; ended: {dead}"
                assert rank not in dead, f"rank {rank} ended with {self._workers[rank].exitcode}"
                time.sleep(0.005)
            answers.append(outbox.get())
        failed = [text for fine, text in answers if not fine]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]
