"""Trains a causal language model with CUDA graphs: `python train.py --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    from graphmod.train.cli import main

    sys.exit(main(Path(__file__).parent / "configs"))
