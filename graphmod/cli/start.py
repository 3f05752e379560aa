"""What every command does before it loads PyTorch, which takes seconds: how its own name is written, where its settings
lie, whether a launcher started it as one of several processes; and where what it says goes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import graphmod
from graphmod.errors import CLONE, ConfigError, GraphmodError
from graphmod.train.folders import from_here

# -- the standard output and the standard error of a command -----------------------------------------------------------


class OutputError(GraphmodError, OSError):
    """What a command has to say or has generated cannot be written: a full disk, a device that takes nothing."""


def show(text: str, end: str = "\n") -> None:
    """Prints to the standard output, at once. Raises BrokenPipeError where nobody reads it any more, and OutputError
    where it cannot be written."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        _drop(sys.stdout)
        raise
    except OSError as error:
        _drop(sys.stdout)
        raise OutputError(f"the standard output cannot be written: {error.strerror or error}") from error


def tell(text: str) -> None:
    """Prints to the standard output what a command has to say beside its work, which goes on where nobody reads it.
    Raises OutputError."""
    with contextlib.suppress(BrokenPipeError):
        show(text)


def answer(text: str) -> int:
    """Prints all that a command was asked for; returns its exit status."""
    try:
        show(text)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except OutputError as error:
        complain(error)
        return 1
    return 0


def require_stdout(what: str) -> None:
    """Raises OutputError where the standard output was closed when this process began, so that `what` would be lost."""
    if _closed:
        raise OutputError(f"the standard output is closed, and {what} would be lost; give it a place, such as > FILE")


def unwritten() -> str | None:
    """Why what was printed before cannot be written; None where all of it was, or nobody reads it any more."""
    try:
        show("", end="")
    except BrokenPipeError:
        return None
    except OutputError as error:
        return str(error)
    return None


def _drop(stream: TextIO) -> None:
    """Sends what is left of an output nowhere, so that Python does not complain about it on its way out."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def end_at_once(status: int) -> None:
    """Ends this process without what Python and libraries do at exit; what was printed is printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


_closed = False  # whether the standard output was when this process began
_listener: Callable[[str], None] | None = None


def stay_silent(listener: Callable[[str], None]) -> None:
    """From now on nothing is printed, and errors go to `listener`: another process speaks for this one."""
    global _listener
    _listener = listener
    logging.root.handlers = [logging.NullHandler()]
    _drop(sys.stdout)


def complain(message: object) -> None:
    """Prints an error to the standard error output."""
    if _listener is None:
        complain_for_all(message)
    else:
        _listener(str(message))


def complain_for_all(message: object) -> None:
    """Prints an error to the standard error output, also where another process speaks for this one."""
    _print_error(f"error: {message}")


def say_plainly(text: str) -> None:
    """Prints to the standard error output, unless another process speaks for this one."""
    if _listener is None:
        _print_error(text)


def _print_error(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # there is nowhere to say it; the exit status stays what it is
        _drop(sys.stderr)


# -- the start ---------------------------------------------------------------------------------------------------------

# In a clone the folder that people edit; a wheel has its content.
CONFIGS = (CLONE or Path(graphmod.__file__).parent.absolute()) / "configs"
_SILENCE = 3.0  # seconds, within which libraries that were read before are there


def version() -> str:
    """The line that `--version` prints."""
    return f"graphmod {graphmod.__version__}"


def words(name: str) -> list[str]:
    """The words that start the command `name` again, the way this process was started: those of `python train.py`, or
    of `graphmod train`."""
    program = Path(sys.argv[0])
    if program.name == f"{name}.py":
        return [from_here(sys.executable), from_here(program)]
    if program.name == "__main__.py":
        return [from_here(sys.executable), "-m", "graphmod", name]
    if program.name != "graphmod" or shutil.which("graphmod") == str(program):
        return ["graphmod", name]
    return [from_here(program), name]


def shown(name: str) -> str:
    """The command `name` as help shows it."""
    return " ".join(Path(word).name for word in words(name))


def _interrupted(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


@contextmanager
def loading(silent: bool = False) -> Iterator[None]:
    """Around imports of large libraries: Ctrl-C ends the process with one line, because a KeyboardInterrupt in the
    middle of an import is a page of traceback, or another error. A missing library is one line too. The garbage
    collector, which would look through all that was imported so far again and again, waits. After some seconds a
    terminal is told what takes so long, unless it is to stay `silent`."""
    telling = threading.Timer(_SILENCE, print, ["loading PyTorch and transformers"], {"file": sys.stderr})
    telling.daemon = True
    if sys.stderr.isatty() and not silent:
        telling.start()
    collects = gc.isenabled()
    gc.disable()
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler  # else it is somebody else's, or another thread's affair
    if ours:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "graphmod").partition(".")[0] == "graphmod":
            raise
        print(
            f"error: this Python ({from_here(sys.executable)}) has no {error.name}; install graphmod for it with "
            "`pip install -e .` in the clone, or run `make setup` and use .venv/bin/python",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    finally:
        telling.cancel()
        if collects:
            gc.enable()
        if ours:
            signal.signal(signal.SIGINT, before)


def prepare() -> None:
    """Settings of the process that must be made before PyTorch is imported. Streams that were closed lead nowhere: else
    the next file that is opened would get their number, and what is meant for them."""
    global _closed
    atexit.register(gc.freeze)  # Python looks for garbage on its way out, which takes a second after such imports
    _closed = _closed or sys.stdout is None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if not number else "w", closefd=False))
    # On a CPU that other programs use too, OpenMP's threads wait for each other in busy loops of milliseconds, at each
    # of thousands of operations a step. Giving up the core sooner costs nothing measurable when it is free.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdigit() else default


def ranks_started() -> int:
    """How many processes a launcher, such as torchrun, has started to work together; 1 without one."""
    return _number("WORLD_SIZE", 1)


def own_rank() -> int:
    """Which of them this is, from 0."""
    return _number("RANK", 0)


def require_one_process(why: str) -> None:
    """Raises ConfigError when a launcher has started this as one of several processes; `why` says what is against it,
    and what else could be done."""
    if (count := ranks_started()) > 1:
        raise ConfigError(
            f"WORLD_SIZE={count} asks for {count} processes that work together, and {why}, start it without a "
            "launcher, or unset WORLD_SIZE"
        )
