"""`python -m graphmod` is the command `graphmod`."""

import sys

from graphmod.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
