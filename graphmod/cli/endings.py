"""How a command ends: the exit status for each error, and what is said of it.

Exit status: 0 all went well, 1 something failed, 2 the command line, a config, the model or the data cannot be used,
128 + N stopped by signal N (130 is Ctrl-C, 141 nobody reads the standard output any more, 143 SIGTERM).
"""

import atexit
import errno
import signal
import traceback
from pathlib import Path

from graphmod.cli.stdout import complain, say_plainly, unwritten
from graphmod.decode.errors import RequestError
from graphmod.errors import ConfigError, GraphmodError


def _of_system(error: OSError, folder: Path | None) -> str:
    """An error of the operating system; a full disk is reported without a name."""
    full = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full and folder is not None:
        return f"cannot write to {folder}: {error.strerror}; what was saved before is kept"
    return str(error)


def end_quietly() -> None:
    """From when Python begins to exit, Ctrl-C ends the process without a word: the exit takes a moment, in which
    impatient people press it again, and a KeyboardInterrupt would be shown as an error of some library."""
    # What is registered last is called first, so before the libraries that a command has loaded.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def conclude(error: BaseException, smaller: str, folder: Path | None = None) -> tuple[int, str]:
    """Says what ended a command, or one job of several; returns the exit status, and why it ended.

    Args:
        smaller: the settings to lower where memory is short.
        folder: where it wrote to.
    """
    if isinstance(error, KeyboardInterrupt):
        say_plainly("interrupted")
        return 128 + signal.SIGINT, "interrupted"
    if isinstance(error, BrokenPipeError):  # as with `| head`, where nothing is wrong
        unwritten()
        return 128 + signal.SIGPIPE, "nobody reads the standard output any more"
    if not isinstance(error, Exception):
        raise error
    first = str(error).partition("\n")[0]
    if isinstance(error, GraphmodError):
        reason = str(error)
    elif isinstance(error, OSError):
        reason = unwritten() or _of_system(error, folder)
    elif type(error).__name__ == "OutOfMemoryError":  # PyTorch's, which may not be loaded
        reason = f"out of GPU memory; lower {smaller}. {first}"
    elif isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)):
        reason = f"out of memory; lower {smaller}. {first}"
    else:  # all of it is shown, but the other jobs of a multirun go on
        traceback.print_exception(error)
        complain("this is a bug in graphmod or in a library it uses; the lines above show where")
        return 1, f"{type(error).__name__}: {error}"
    complain(reason)
    return 2 if isinstance(error, (ConfigError, RequestError)) else 1, reason
