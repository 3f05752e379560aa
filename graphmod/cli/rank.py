"""One rank that `launch.py` started: `python -m graphmod.cli.rank`, told on its standard input what to do."""

import os
import pickle
import signal
import sys
import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path

from hydra.core.utils import configure_log
from omegaconf import OmegaConf

from graphmod.cli.errors import JobFailed
from graphmod.cli.start import end_at_once, loading, own_rank, prepare, stay_silent
from graphmod.errors import GraphmodError
from graphmod.train.folders import owned

_held = ExitStack()  # the lock of the folder, once the launcher is gone


def _end_with_the_launcher(folder: Path) -> None:
    """The standard input ends when the launcher does, which owned the folder; then this stops as if it had been told
    to, and saves if no other process has got the folder."""
    while os.read(0, 1024):
        pass
    try:
        _held.enter_context(nullcontext() if own_rank() else owned(folder))
        os.kill(os.getpid(), signal.SIGTERM)
    except GraphmodError:
        end_at_once(1)


def main() -> int:
    """Runs the job; returns the exit status."""
    prepare()
    with loading(silent=bool(own_rank())), open(0, "rb", closefd=False) as given:
        from graphmod.cli.job import among_ranks

        sys.argv, answer, start, job = pickle.load(given)
    threading.Thread(target=_end_with_the_launcher, args=[start.folder], name="launcher", daemon=True).start()
    configure_log(OmegaConf.create(job.logging["job_logging"]), job.logging["verbose"])
    if own_rank():
        stay_silent(lambda text: None)
    sys.path[:0] = [] if job.cwd is None else [job.cwd]
    try:
        among_ranks(lambda: start.config.train.device, job, lambda ranks: start)
    except JobFailed as error:
        if not own_rank():
            answer.write_text(str(error), encoding="utf-8")
        end_at_once(error.status)  # a process group whose ranks are gone may wait for them
    return 0


if __name__ == "__main__":
    sys.exit(main())
