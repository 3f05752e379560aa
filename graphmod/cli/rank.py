"""One rank that `launch.py` started: `python -m graphmod.cli.rank`, told on its standard input what to do."""

import os
import pickle
import signal
import sys
import threading

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
    with open(0, "rb", closefd=False) as given:
        sys.argv, logging, answer, told = pickle.load(given)
    threading.Thread(target=_end_with_the_launcher, name="launcher", daemon=True).start()
    configure_log(OmegaConf.create(logging["job_logging"]), logging["verbose"])
    if own_rank():
        stay_silent(lambda text: None)
    with loading(silent=bool(own_rank())):
        from graphmod.cli.job import among_ranks, given_to_ranks

        config, point, job = pickle.loads(told)
    try:
        among_ranks(lambda: config.train.device, job, lambda ranks: given_to_ranks(config, point, job, ranks))
    except JobFailed as error:
        if not own_rank():
            answer.write_text(str(error), encoding="utf-8")
        end_at_once(error.status)  # a process group whose ranks are gone may wait for them
    return 0


if __name__ == "__main__":
    sys.exit(main())
