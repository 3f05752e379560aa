"""Samples from a causal language model, decode steps in CUDA graphs: `python generate.py --help`."""

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

    # As in train.py, and likewise before torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")

    from graphmod.cli.generation.main import main

    signal.signal(signal.SIGINT, before)
    sys.exit(main(Path(__file__).parent / "configs_generate"))
