"""Trains a causal language model with CUDA graphs: `python train.py --help`. The same as `graphmod train`."""

import sys

from graphmod.cli.main import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
