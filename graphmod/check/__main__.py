"""`python -m graphmod.check package.module:function`."""

import sys

from graphmod.check.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python -m graphmod.check"))
