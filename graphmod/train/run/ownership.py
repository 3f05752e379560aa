"""Which process may write into a folder of runs: the one that holds the lock in it. No torch.

The lock is the operating system's, so that it ends with the process, however that ends. What the file says only names
the process for others; nobody relies on it.
"""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from graphmod.errors import ConfigError, GraphmodError

LOCK_FILE = ".lock"
# Another process may hold it for a moment to look what the folder holds, and one that was killed is not gone at once.
_PATIENCE_S = 2.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class FolderInUse(ConfigError):
    """Another process writes into the folder; the message says which one, since when, and what to do."""


def _holder(folder: Path) -> str:
    try:
        told = json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))
        return f"process {told['pid']} on {told['host']} has been writing to it since {told['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process is writing to it"  # which has not said yet who it is


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Inside, this process alone owns `folder`, which is made if need be, and removed if nothing is written to it.

    Raises:
        FolderInUse: another process owns it, or another owner in this one.
        GraphmodError: it cannot be written to, or its file system has no locks.
    """
    # Without flock the library would take a file's existence for the lock, which outlives a process that is killed.
    lock = FileLock(folder / LOCK_FILE, timeout=_PATIENCE_S, fallback_to_soft=False)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise FolderInUse(
            f"{folder} is in use: {_holder(folder)}. Wait until it has ended, or stop it; or write elsewhere "
            "(hydra.run.dir=FOLDER; in a multirun hydra.sweep.dir=FOLDER)"
        ) from None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise GraphmodError(
                f"the file system of {folder} has no file locks ({error.strerror}), so nothing would keep other "
                "processes from writing to it; write to another one (hydra.run.dir=FOLDER)"
            ) from error
        raise GraphmodError(
            f"cannot write to {folder}: {error.strerror or error}; choose another folder with hydra.run.dir=FOLDER "
            "(of a multirun: hydra.sweep.dir=FOLDER)"
        ) from error
    try:
        since = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
        told = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        with suppress(OSError):  # of a full disk; the lock holds all the same
            (folder / LOCK_FILE).write_text(told, encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            if os.listdir(folder) == [LOCK_FILE]:
                (folder / LOCK_FILE).unlink()
            else:  # it stays where there is something to own: on some file systems its removal would let two in
                (folder / LOCK_FILE).write_text("")
        lock.release()
        if made:
            with suppress(OSError):  # it holds something
                folder.rmdir()
