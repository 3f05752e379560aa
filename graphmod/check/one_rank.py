"""One rank of `graphmod check --ranks N`: `python -m graphmod.check.one_rank FOLDER`, and what was given to that."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from torch import distributed

from graphmod.check.cli import checked_as_given, parser
from graphmod.check.meeting import Meeting
from graphmod.check.pretended import pretend
from graphmod.check.ranks import Unusable, outcome_of


def main(folder: Path, arguments: list[str]) -> int:
    """Leaves its outcome in the folder; returns the exit status."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    given = parser("graphmod check").parse_args(arguments)
    store = distributed.FileStore(str(folder / "store"), ranks)
    meeting = Meeting(store, rank, ranks, given.timeout, waits=False)
    pretend(store, meeting)
    outcome, status = None, 0
    try:
        outcome = checked_as_given(given, meeting)
    except Unusable as error:
        outcome, status = str(error), 2
    file = outcome_of(folder, rank)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.replace(file)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
