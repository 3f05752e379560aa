"""One rank that `launch.py` started: `python -m graphmod.cli.rank`, told on its standard input what to do."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from hydra.core.utils import configure_log
from omegaconf import OmegaConf

from graphmod.cli.errors import JobFailed
from graphmod.cli.start import end_at_once, loading, own_rank, prepare, stay_silent


def _end_with_the_launcher() -> None:
    """The standard input ends when the launcher does; then this stops as if it had been told to."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Runs the job; returns the exit status."""
    prepare()
    with open(0, "rb", buffering=0, closefd=False) as given:  # a buffer is locked while a thread waits for more
        told = json.loads(given.readline())
    threading.Thread(target=_end_with_the_launcher, name="launcher", daemon=True).start()
    sys.argv = told["command"]
    configure_log(OmegaConf.create(told["job"]["logging"]["job_logging"]), told["job"]["logging"]["verbose"])
    if own_rank():
        stay_silent(lambda text: None)
    with loading(silent=bool(own_rank())):
        from graphmod.cli.job import Job, among_ranks, given_to_ranks
        from graphmod.train.settings import DeviceName
    job = Job(**told["job"])
    job.folder, job.sweep = Path(job.folder), job.sweep and Path(job.sweep)
    device = DeviceName(told["settings"]["train"]["device"])
    try:
        among_ranks(lambda: device, job, lambda ranks: given_to_ranks(told, ranks))
    except JobFailed as error:
        if not own_rank():
            Path(told["answer"]).write_text(str(error), encoding="utf-8")
        end_at_once(error.status)  # a process group whose ranks are gone may wait for them
    return 0


if __name__ == "__main__":
    sys.exit(main())
