"""Samples from a causal language model, decode steps in CUDA graphs: `python generate.py --help`."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # As in train.py, and likewise before torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")

    from graphmod.decode.cli import main

    sys.exit(main(Path(__file__).parent / "configs_generate"))
