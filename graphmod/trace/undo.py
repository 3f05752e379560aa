"""Puts back what a call changes in its thread and in the process, whatever interrupts it.

A signal handler, or another thread, may raise an exception after any call, at the beginning of any function and at each
turn of a loop: when a context manager has changed something and `with` does not know of it yet, or before one that is
left has put anything back. So what is to be undone is known before it is done, and undoing can be done twice.
"""

from __future__ import annotations

import dis
import sys
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from graphmod.torch_private import KeysForced, is_grad_enabled, keys_excluded, keys_included, set_grad_enabled
from graphmod.trace.lines import CORE, TORCH

T = TypeVar("T")
_RAISES = [dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE")]


_for_good: list[Any] = []  # guards that are not left


class Undo:
    """What is to be left, in reverse order. What is interrupted is done once more, and then the rest.

    The context managers that are entered must bear to be left when they were entered in part only, and to be left
    twice. One made by `contextlib.contextmanager` bears neither.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[..., Any]] = []

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enters a context manager; returns what that gives."""
        self._steps.append(context.__exit__)
        return context.__enter__()

    def then(self, step: Callable[[BaseException | None], Any]) -> None:
        """Takes in a function to be called with the error that the call ended with."""
        self._steps.append(lambda kind, error, trace: step(error))

    def keep_modes(self) -> None:
        """Has an interrupt leave autograd and the dispatcher of this thread as they are now. To be called last.

        `torch.inference_mode` that is interrupted as it is left keeps its guard, and the error keeps that: it would put
        back what it once found, in the middle of a recorded operation, whenever the error dies.
        """
        grad, keys = is_grad_enabled(), KeysForced(keys_included(), keys_excluded())

        def put_back(error: BaseException | None) -> None:
            if not is_interrupt(error):
                return
            clear_frames(error, (CORE, TORCH))
            if keys not in _for_good:
                _for_good.append(keys)
                keys.__enter__()
            set_grad_enabled(grad)

        self.then(put_back)

    def run(self, error: BaseException | None = None) -> None:
        """Leaves everything; does nothing where that was done.

        Args:
            error: with which the call ended.
        """
        steps, kind, raised, tried = self._steps, None if error is None else type(error), None, None
        while steps:
            step = steps[-1]
            try:
                step(kind, error, None)
            except BaseException as failed:
                raised = failed
                if tried is not step:
                    tried = step
                    continue
            steps.pop()
        try:
            if raised is not None:
                raise raised
        finally:
            raised = error = None  # whose frames lead here


class OpenInThread(threading.local):
    """What the present thread has begun and not ended, the last one last."""

    def __init__(self) -> None:
        self.open: list[Any] = []


_of_thread = OpenInThread()


class _UnderWay(threading.local):
    """How many calls of a kind are under way in the present thread. Who counts one knows what was before, and puts that
    back in a `finally`, which nothing can interrupt half-way.

    Attributes:
        eager: of what wrappers call, without a graph.
        agreed: those of them that all ranks make eagerly.
        again: forwards that run again for a backward without a graph.
        plain: of a body whose wrapped layers run as plain modules.
    """

    eager = agreed = again = plain = 0


under_way = _UnderWay()


def clear_frames(error: BaseException | None, files: str | tuple[str, ...] = "") -> None:
    """Closes what the frames that an error left hold open, and so what the error would keep open while it lives.

    Args:
        error: with those that it came in the course of.
        files: what the paths of the frames' files begin with.
    """
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename.startswith(files):
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        error = error.__context__


def undoing(body: Callable[[Undo], T]) -> T:
    """Calls `body` with what it may enter contexts through, and leaves these whatever comes; returns what it gives."""
    undo_left()
    undo, under_way = Undo(), _of_thread.open
    error = None
    try:
        under_way.append(undo)
        return body(undo)
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            undo.run(error)
        finally:
            undo.run(error)
            error = None  # which leads here
            under_way[:] = [one for one in under_way if one is not undo]


def within(*contexts: AbstractContextManager, call: Callable[[], T]) -> T:
    """Makes a call inside contexts, which are left whatever comes; returns what it gives."""

    def body(undo: Undo) -> T:
        for context in contexts:
            undo.enter(context)
        return call()

    return undoing(body)


def undo_left() -> None:
    """Undoes what this thread was interrupted in undoing. To be called where a call begins."""
    under_way = _of_thread.open
    if not under_way:
        return
    running, caller = 0, sys._getframe(1).f_back  # whoever calls this has nothing open yet, `undoing` neither
    while caller is not None:
        running += caller.f_code is undoing.__code__
        caller = caller.f_back
    while len(under_way) > running:
        under_way[-1].run()
        under_way.pop()


def let_through(error: BaseException) -> None:
    """Raises an error that interrupts a call. To be called where errors are kept from the code that runs."""
    if is_interrupt(error):
        raise error


class Unwinding(BaseException):
    """Leaves code that a capture runs, past those who catch every exception; `reason` is to be raised then."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error was raised by no code that ran, but by a signal handler, or by another thread in this one.

    A handler is called with the frame that it interrupts, which is its caller. What another thread raises comes at an
    instruction that raises no such error.
    """
    if not isinstance(error, Exception):
        return not isinstance(error, (Unwinding, types.NoneType))
    last = trace = error.__traceback__
    while trace is not None:
        last, frame, trace = trace, trace.tb_frame, trace.tb_next
        # Of these frames not: that would be kept with them, and lead to the error.
        known = frame.f_code.co_filename.startswith((CORE, TORCH))
        if not known and any(value is frame.f_back for value in frame.f_locals.values() if value is not None):
            return True
    library = type(error).__module__.partition(".")[0]
    of_libraries = library in ("torch", "graphmod") or library in sys.stdlib_module_names
    if last is None or (of_libraries and not isinstance(error, TimeoutError)):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] not in _RAISES
