"""Trains a causal language model with CUDA graphs: `python train.py --help`."""

import os
import signal
import sys
from pathlib import Path


def _interrupted(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    # Imports take seconds, and a KeyboardInterrupt in the middle of one is a page of traceback, or another error.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)

    # On a CPU that other programs use too, OpenMP's threads wait for each other in busy loops of milliseconds, at each
    # of thousands of operations a step. Giving up the core sooner costs nothing measurable when it is free.
    # It must be set before torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")

    from graphmod.cli.training.main import main

    signal.signal(signal.SIGINT, before)
    sys.exit(main(Path(__file__).parent / "configs"))
