"""Samples from a causal language model: `python generate.py --help`. The same as `graphmod generate`."""

import sys  # completion in a fish shell wants to find @hydra.main in this file

from graphmod.cli.main import generate

if __name__ == "__main__":
    sys.exit(generate(sys.argv[1:]))
