"""Serves a causal language model over HTTP: `python serve.py --help`. The same as `graphmod serve`."""

import sys  # completion in a fish shell wants to find @hydra.main in this file

from graphmod.cli.main import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
