"""Serves a causal language model over HTTP: `python serve.py --help`. The same as `graphmod serve`."""

import sys

from graphmod.cli.main import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
