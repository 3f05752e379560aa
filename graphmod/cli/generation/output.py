"""The file of completions that `generate.py` writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from graphmod.cli.stdout import OutputError
from graphmod.errors import ConfigError


def _same(one: Path, other: Path) -> bool:
    """Whether both are one file, links followed."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def _wrong(path: Path, error: OSError) -> str:
    return f"out={path} cannot be written: {error.strerror or error}"


def _not_opened(path: Path, error: OSError) -> str:
    return f"{_wrong(path, error)}; give out=FILE a file in a folder you may write to"


class OutputFile:
    """The file of completions, one line each. It is opened, but nothing in it replaced, until `begin`: what goes wrong
    before the first completion, such as a model that cannot be read, costs nobody their earlier results."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path, self._file = path, file

    def begin(self) -> None:
        """Removes what the file held."""
        if self.path.is_file():  # a device or a pipe cannot be cut, and holds nothing
            self._file.truncate(0)

    def line(self, text: str) -> None:
        """Writes a line, and passes it on at once. Raises OutputError."""
        regular = self.path.is_file()
        before = os.fstat(self._file.fileno()).st_size if regular else 0
        try:
            print(text, file=self._file, flush=True)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()  # which tries to write the rest of it once more
            if regular:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, before)  # half a line is no JSON
            raise OutputError(_wrong(self.path, error)) from error


def require_free(path: Path, prompts: Path, overwrite: bool) -> None:
    """Raises ConfigError where `path` is the file of the prompts, or holds something that is not to be overwritten, or
    may not be looked at."""
    try:
        if _same(path, prompts):
            raise ConfigError(f"out={path} is the file of the prompts and would replace them; give out another name")
        if not overwrite and path.is_file() and path.stat().st_size:
            raise ConfigError(
                f"out={path} exists and is not empty; give out=FILE another name, or overwrite=true to replace it"
            )
    except OSError as error:
        raise ConfigError(_not_opened(path, error)) from error


@contextlib.contextmanager
def open_output(path: Path, prompts: Path, overwrite: bool) -> Iterator[OutputFile]:
    """The file at `path`, opened for writing; folders above it are made.

    Raises:
        ConfigError: it is the file of the prompts, it holds something that is not to be overwritten, or it cannot be
            opened.
        OutputError: what was written did not reach it.
    """
    require_free(path, prompts, overwrite)
    try:
        new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(_not_opened(path, error)) from error
    try:
        yield OutputFile(path, file)
    except BaseException:
        with contextlib.suppress(OSError):  # of a line that could not be written; that is in flight already
            file.close()
        if new:
            with contextlib.suppress(OSError):  # an empty file would only tell that there was an error
                if path.is_file() and not path.stat().st_size:
                    path.unlink()
        raise
    try:
        file.close()
    except OSError as error:
        raise OutputError(_wrong(path, error)) from error
