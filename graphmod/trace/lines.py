"""Whose a file is, and which lines of code an operation comes from: the user's, and a library's that lies between."""

import functools
import logging
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from graphmod.torch_private import current_node

CORE, TORCH = str(Path(__file__).parent.parent) + os.sep, str(Path(torch.__file__).parent) + os.sep
STDLIB = sysconfig.get_path("stdlib") + os.sep
_LOGGING = str(Path(logging.__file__).parent)  # which formats what it is given: what matters is the line that logs
# How torch gets from a call to an operation: of these no line tells anything.
_PLUMBING = (f"{TORCH}_", f"{TORCH}nn/modules/module.py", f"{TORCH}utils/_", f"{TORCH}autograd/", CORE, _LOGGING)
_COMMANDS = (f"{CORE}cli{os.sep}", f"{CORE}check{os.sep}cli.py")  # beyond which no code is the user's
_TOLD = ("library", "user")  # kinds of files whose lines say where something was
ENGINE = "_engine_run_backward"
"""The name of the function by which Python code of torch's runs a backward."""
_WRAPPED = (f"{TORCH}optim/optimizer.py", f"{TORCH}optim/lr_scheduler.py")


class Lines(NamedTuple):
    """Where an operation was called.

    Attributes:
        user: file:line and function of the user's code; None in a backward, unless a function of the user's runs there.
        library: file:line and function of the library's code that the user's had called; None where the user's code
            called the operation itself. Of a backward without Python, the node of autograd that runs.
        backward: whether a backward pass runs.
        optimizer: the optimizer in whose `step` it was called.
    """

    user: str | None
    library: str | None
    backward: bool
    optimizer: Any = None

    @property
    def location(self) -> str:
        if self.user is None and not self.backward:
            return self.library or "the call"
        if self.user is None:
            where = "the backward pass"
        else:
            where = f"{self.user} (in the backward pass)" if self.backward else self.user
        return f"{where}, by way of {self.library}" if self.library else where


def location(code: CodeType, line: int) -> str:
    """A line, in words."""
    return f"{code.co_filename}:{line} in {code.co_name}"


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed library."""
    filename = os.path.normpath(filename)
    installed = any(f"{os.sep}{folder}{os.sep}" in filename for folder in ("site-packages", "dist-packages"))
    return installed or filename.startswith((TORCH, STDLIB, "<frozen"))


@functools.cache
def _kind(path: str) -> str:
    if path.startswith(_COMMANDS):
        return "command"
    if path.startswith(_PLUMBING) or path.startswith(("<frozen", "<eval_with_key>")):
        return "plumbing"
    if path.startswith(TORCH):
        return "torch"
    return "library" if is_library(path) else "user"


def is_users(filename: str) -> bool:
    """Whether a file is neither a library's nor part of this package."""
    return _kind(os.path.normpath(filename)) == "user"


def users(frame: FrameType | None) -> FrameType | None:
    """The nearest frame of the user's code, from `frame` outwards; None where no code of the user's leads there."""
    while frame is not None and (kind := _kind(frame.f_code.co_filename)) != "user":
        frame = None if kind == "command" else frame.f_back
    return frame


def user_frame() -> tuple[CodeType | None, int]:
    """The code and line outside of torch that a recorder was called from; not to be asked in a backward."""
    frame: FrameType | None = sys._getframe(3)  # what is nearer belongs to recorders
    while frame is not None:
        code = frame.f_code
        if _kind(code.co_filename) in _TOLD:
            return code, frame.f_lineno
        frame = frame.f_back
    return None, 0


def location_of(error: BaseException) -> str | None:
    """The line of the user's code in which an error arose; None where none was involved."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if _kind(trace.tb_frame.f_code.co_filename) in _TOLD:
            found = location(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def lines() -> Lines:
    """Where the operation that is under way was called."""
    node = current_node()
    backward = node is not None
    user = library = optimizer = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if backward and code.co_name == ENGINE:
            break  # beyond it is who called backward()
        kind = _kind(code.co_filename)
        if kind == "command":
            break
        if kind in ("torch", "library") and library is None and code.co_filename not in _WRAPPED:
            library = location(code, frame.f_lineno)
        if optimizer is None and kind != "plumbing" and "self" in code.co_varnames[:1]:
            owner = frame.f_locals.get("self")
            optimizer = owner if isinstance(owner, torch.optim.Optimizer) else None
        if kind == "user":
            user = location(code, frame.f_lineno)
            break
        frame = frame.f_back
    if node is not None and user is None:
        library = library or node.name()
    return Lines(user, library, backward, optimizer)
