"""The standard output and the standard error of a command."""

from __future__ import annotations

import contextlib
import os
import sys

from graphmod.errors import GraphmodError


class OutputError(GraphmodError, OSError):
    """What a command has to say or has generated cannot be written: a full disk, a device that takes nothing."""


def show(text: str, end: str = "\n") -> None:
    """Prints to the standard output, at once.

    Raises:
        BrokenPipeError: nobody reads it any more.
        OutputError: it cannot be written.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        _drop_stdout()
        raise
    except OSError as error:
        _drop_stdout()
        raise OutputError(f"the standard output cannot be written: {error.strerror or error}") from error


def unwritten() -> str | None:
    """Why what was printed before cannot be written; None where all of it was, or nobody reads it any more."""
    try:
        show("", end="")
    except BrokenPipeError:
        return None
    except OutputError as error:
        return str(error)
    return None


def _drop_stdout() -> None:
    """Sends what is left of the standard output nowhere, so that Python does not complain about it on its way out."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def complain(message: object) -> None:
    """Prints an error to the standard error output."""
    print(f"error: {message}", file=sys.stderr, flush=True)
