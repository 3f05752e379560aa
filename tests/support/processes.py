"""Processes that start at once: copies of one that has imported what all of them need, where each would take seconds.

Those of `CONTEXT` begin anew where there is a GPU, which only a process that was not copied may use.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import tests.support.without_waits  # noqa: F401 in the processes, too
from tests.support.settings import ROOT

PRELOADED = ["graphmod.cli.job", "graphmod.cli.decode", "graphmod.decode", "graphmod.check.cli"]
PRELOADED += ["transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"]
PRELOADED += ["torch.distributed.fsdp", "torch.utils.tensorboard", "graphmod.train.run"]
# Else modules that ask for a GPU as they are imported would start CUDA in what is copied, and no copy could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
COPIES = multiprocessing.get_context("forkserver")
COPIES.set_forkserver_preload(PRELOADED)
CONTEXT = multiprocessing.get_context("spawn") if torch.cuda.is_available() else COPIES


def _run(words: list[str], folder: str, environment: dict[str, str], *outputs) -> None:
    """What `python *words` does, in this process."""
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output.fileno(), number)
        output.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1 if number == 2 else -1) for number in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.current_process()._config["daemon"] = False  # else it could have no processes of its own
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], folder
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def search_first(folder: object) -> dict[str, str]:
    """The environment, with a folder in which modules are looked for first."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


class Python:
    """`python *words` in `folder`, with what `subprocess.Popen` gives of it."""

    def __init__(self, words: Iterable[object], folder: object, environment: dict[str, str] | None = None) -> None:
        self.args = [*map(str, words)]
        readers, writers = zip(*(CONTEXT.Pipe(duplex=False) for _ in range(2)), strict=True)
        given = (self.args, str(folder), {**os.environ} if environment is None else environment)
        self._process = CONTEXT.Process(target=_run, args=(*given, *writers), daemon=True)
        self._process.start()
        for writer in writers:
            writer.close()
        self.pid = self._process.pid
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno())) for reader in readers)
        for reader in readers:
            reader.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        until = None if timeout is None else time.monotonic() + timeout
        with ThreadPoolExecutor(2) as pool:
            said = [pool.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            self._process.join(timeout)
            if self.poll() is None:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout)
            return tuple(one.result(until and max(1.0, until - time.monotonic())) for one in said)


def finished(words: Iterable[object], folder: object, environment: dict[str, str] | None = None, timeout: float = 300):
    """What `subprocess.run` returns of `python *words` in `folder`."""
    process = Python(words, folder, environment)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def shell(folder: Path, *arguments: str, script: str = "train.py", **variables: str) -> Python:
    """`python train.py ARGUMENTS`, started in `folder`; `variables` are added to the environment."""
    # One thread, as in this process: several divide sums differently.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return Python([ROOT / script, *arguments], folder, environment)
