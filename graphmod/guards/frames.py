"""Watches the frames of a call as they run, and says at each line what its code is about to read.

Stands on `sys.settrace`, which Python 3.11 to 3.13 have alike; a tracer that was there before is put back. Imports
`reads` and `torch_private`.
"""

import os
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from graphmod.guards.reads import Reads, reads
from graphmod.torch_private import beside_dynamo

_TORCH = str(Path(torch.__file__).parent) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_CORE = str(Path(__file__).parent.parent) + os.sep
# Of torch, what keeps settings and state in Python that a step depends on. The rest passes arguments on.
_OF_TORCH = tuple(
    _TORCH + part.replace("/", os.sep)
    for part in (
        *("nn/modules/", "nn/utils/", "nn/parallel/", "nn/parameter.py", "nn/attention/", "optim/", "amp/"),
        *("distributions/", "autograd/function.py", "autograd/grad_mode.py", "testing/"),
    )
)
# Of the standard library, what leads to no setting of a program's.
_NOT_OF_STDLIB = tuple(
    part.replace("/", os.sep)
    for part in (
        *("abc.py", "ast.py", "codecs.py", "contextlib.py", "dis.py", "encodings/", "enum.py", "functools.py"),
        *("importlib/", "inspect.py", "linecache.py", "locale.py", "logging/", "re/", "string.py", "sysconfig.py"),
        *("textwrap.py", "threading.py", "tokenize.py", "traceback.py", "typing.py", "unittest/", "warnings.py"),
        *("weakref.py", "_weakrefset.py", "multiprocessing/", "asyncio/", "gettext.py"),
    )
)
_OF_CORE = (_CORE + "train" + os.sep, _CORE + "decode" + os.sep)
_NOT_OF_CORE = (_CORE + "train" + os.sep + "draws.py",)  # what a forward keeps for its own backward
_FROZEN = ("<frozen os>", "<frozen _collections_abc>")
_CALL = nn.Module._call_impl.__code__
# How modules find their parts: `lookup` knows, and what is found is noted where it is read.
_MACHINERY = {
    *(nn.Module._wrapped_call_impl.__code__, nn.Module.__getattr__.__code__, nn.Module.__setattr__.__code__),
    *(nn.Module.__delattr__.__code__, _CALL),
}

_MOST_RESULTS = 8
_MOST_KNOWN = 20_000
_known: dict[int, tuple[CodeType, Reads | None]] = {}  # by identity: the hash of code takes microseconds


def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed library."""
    return filename.startswith((_TORCH, _STDLIB, "<frozen")) or f"{os.sep}site-packages{os.sep}" in filename


@cache
def is_users(filename: str) -> bool:
    """Whether a file is neither a library's nor part of this package."""
    return not is_library(filename) and not filename.startswith(_CORE)


@cache
def _mutes(filename: str) -> bool:
    """Whether neither a file's code is of interest nor what that calls: it says something, or imports, or compiles, or
    is compiled."""
    parts = (f"{os.sep}triton{os.sep}", f"{os.sep}torch{os.sep}_inductor{os.sep}", "torchinductor")
    aside = filename.startswith((_STDLIB + "logging" + os.sep, _STDLIB + "warnings.py", "<frozen importlib"))
    return aside or any(part in filename for part in parts)


@cache
def _watched(filename: str) -> bool:
    if filename.startswith(_TORCH):
        return filename.startswith(_OF_TORCH)
    if filename.startswith(_CORE):
        return filename.startswith(_OF_CORE) and not filename.startswith(_NOT_OF_CORE)
    if filename.startswith("<frozen"):
        return filename in _FROZEN
    if filename.startswith(_STDLIB) and "-packages" not in filename:
        return not filename[len(_STDLIB) :].startswith(_NOT_OF_STDLIB)
    return True


def _reads_of(code: CodeType) -> Reads | None:
    known = _known.get(id(code))
    if known is None or known[0] is not code:
        found = None if code in _MACHINERY or not _watched(code.co_filename) else reads(code)
        known = _known[id(code)] = code, found if found is not None and found.by_line else None
    return known[1]


class Frames:
    """While it is active, calls `see(frame, reads)` before each line, or instruction, that reads something, and
    `called(module)` when a module is called.

    Args:
        see: called with the frame, what is read, and the results of calls that returned to it since.
        called: called with the module.
    """

    def __init__(self, see: Callable, called: Callable[[nn.Module], None]) -> None:
        self._see, self._called = see, called
        self._returned: dict[int, list[Any]] = {}  # identity of a frame -> what calls gave it on the present line
        self._last: dict[int, list] = {}  # likewise -> what it read there
        self._muted = 0  # frames that run now, and in which nothing is looked at
        self._before: Any = None

    def __enter__(self) -> "Frames":
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)
        self._returned.clear()
        self._last.clear()
        if len(_known) > _MOST_KNOWN:  # code that programs make as they run
            _known.clear()

    @beside_dynamo
    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable | None:
        code = frame.f_code
        if code is _CALL:
            self._called(frame.f_locals["self"])
        if _mutes(code.co_filename) or code.co_name == "<module>":
            self._muted += 1
            frame.f_trace_lines = False
            return self._leave_muted
        found = None if self._muted else _reads_of(code)
        if found is None:
            frame.f_trace_lines = False
        elif found.exact:
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._step

    @beside_dynamo
    def _leave_muted(self, frame: FrameType, event: str, _: Any) -> Callable:
        if event == "return":
            self._muted -= 1
        return self._leave_muted

    @beside_dynamo
    def _step(self, frame: FrameType, event: str, value: Any) -> Callable:
        found = None if self._muted else _reads_of(frame.f_code)
        if event == "line" or event == "opcode":
            if found is not None:
                now = found.by_line.get(frame.f_lineno) if event == "line" else found.by_offset.get(frame.f_lasti)
                if found.follows_results:
                    self._follow(frame, now, found.exact)
                if now:
                    self._see(frame, now, ())
        elif event == "return":
            if found is not None and found.follows_results:
                self._follow(frame, None, False)
            back = frame.f_back
            # Never a tensor: autograd takes another way with one that somebody else holds.
            if value is not None and back is not None and not isinstance(value, (torch.Tensor, tuple, list)):
                caller = _reads_of(back.f_code)
                if caller is not None and caller.follows_results:
                    self._returned.setdefault(id(back), []).append(value)
        return self._step

    def _follow(self, frame: FrameType, now: list | None, lasting: bool) -> None:
        """Lets what is read of the results of calls be looked at: on the line before, which has run by now, or at this
        instruction."""
        results = self._returned.pop(id(frame), None)
        before = self._last.pop(id(frame), None)
        if results:
            self._see(frame, [*(before or ()), *(now or ())], results)
        if lasting and results:
            self._returned[id(frame)] = results[-_MOST_RESULTS:]
        elif now:
            self._last[id(frame)] = now
