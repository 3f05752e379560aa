"""Trains a causal language model with CUDA graphs: `python train.py --help`."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # On a CPU that other programs use too, OpenMP's threads wait for each other in busy loops of milliseconds, at each
    # of thousands of operations a step. Giving up the core sooner costs nothing measurable when it is free.
    # It must be set before torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")

    from graphmod.train.cli import main

    sys.exit(main(Path(__file__).parent / "configs"))
