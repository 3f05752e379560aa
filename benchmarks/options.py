"""What the scripts that measure check before they begin."""

import argparse
import sys
from collections.abc import Iterable


def chosen(parser: argparse.ArgumentParser, text: str, known: Iterable[str], flag: str) -> list[str]:
    """The names in `text`, which commas part; one that is not known ends the script."""
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{flag}: {', '.join(unknown)} is none of {', '.join(known)}")
    return names


def gpu_is_there() -> bool:
    """Whether there is one; if not, says so. Results of earlier runs are then left alone."""
    import torch

    if not torch.cuda.is_available():
        print("error: needs a GPU, and torch sees none", file=sys.stderr)
        return False
    return True
