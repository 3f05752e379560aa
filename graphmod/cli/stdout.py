"""The standard output and the standard error of a command."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable

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


def end_at_once(status: int) -> None:
    """Ends this process without what Python and libraries do at exit; what was printed is printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


_listener: Callable[[str], None] | None = None


def stay_silent(listener: Callable[[str], None]) -> None:
    """From now on nothing is printed, and errors go to `listener`: another process speaks for this one."""
    global _listener
    _listener = listener
    logging.root.handlers = [logging.NullHandler()]
    _drop_stdout()


def complain(message: object) -> None:
    """Prints an error to the standard error output."""
    if _listener is None:
        complain_for_all(message)
    else:
        _listener(str(message))


def complain_for_all(message: object) -> None:
    """Likewise, also where another process speaks for this one."""
    print(f"error: {message}", file=sys.stderr, flush=True)


def say_plainly(text: str) -> None:
    """Prints to the standard error output, unless another process speaks for this one."""
    if _listener is None:
        print(text, file=sys.stderr, flush=True)
