"""Trains a causal language model with CUDA graphs: `python train.py --help`. The same as `graphmod train`."""

import sys  # completion in a fish shell wants to find @hydra.main in this file

from graphmod.cli.main import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
