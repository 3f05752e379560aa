"""Processes that form a process group, and run what a test asks for in all of them."""

import os
import socket
import time
import traceback

import torch

from tests.support.processes import CONTEXT


def serve(rank, count, device, port, inbox, outbox):
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
    torch.distributed.init_process_group(backend, rank=rank, world_size=count, **more)
    for function, arguments in iter(inbox.get, None):
        try:
            outbox.put((True, function(place, rank, *arguments)))
        except BaseException:
            outbox.put((False, f"rank {rank}: {traceback.format_exc()}"))
    torch.distributed.destroy_process_group()
    outbox.put((True, "ended"))


class Ranks:
    """`count` ranks on `device`; a context."""

    def __init__(self, device, count=2):
        self.device = device
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._boxes = [(CONTEXT.SimpleQueue(), CONTEXT.SimpleQueue()) for _ in range(count)]
        self._workers = [
            CONTEXT.Process(target=serve, args=(rank, count, device, port, *boxes), daemon=True)
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
