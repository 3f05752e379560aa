"""Watches a call, and notes what its code reads of what had been there before it."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from graphmod.guards.library import is_library
from graphmod.guards.notes import Notes
from graphmod.reads.events import variable
from graphmod.reads.frames import NOT_TOLD, Frames
from graphmod.reads.operand_stack import function_of
from graphmod.reads.reading import Reading
from graphmod.trace.garbage import Ages
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.undo import Undo, let_through


class noting:
    """Notes what the body reads. Afterwards the notes hold what was there before it, and nothing that it made.

    Args:
        roots: objects that were there before.
        host_draws: is told what the body draws from generators in Python.
    """

    def __init__(self, *roots: Any, host_draws: HostDraws | None = None) -> None:
        self._roots, self._host_draws, self._undo = roots, host_draws, Undo()

    def __enter__(self) -> Notes:
        notes = Notes(self._undo.enter(Ages()), self._host_draws)
        watcher = Noting(notes)
        for root in self._roots:
            watcher.take(notes.root, root)
        frames = Frames(watcher)
        self._undo.then(lambda _: setattr(notes, "unseen", frames.missed or ("" if frames.heard else NOT_TOLD)))
        self._undo.enter(frames)
        return notes

    def __exit__(self, *_: object) -> None:
        self._undo.run()


class Noting:
    """What `frames` tells of the code that runs goes to the notes."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.step = Reading(notes).step

    def take(self, note: Callable, *seen: Any) -> Any:
        """Notes something that was seen. It may be of any kind, so that this may fail; the user's call goes on."""
        try:
            return note(*seen)
        except Exception as error:
            let_through(error)
            notes = self._notes
            notes.unreadable = notes.unreadable or (f"{type(error).__name__}: {error}", notes.here())
            return None

    def entered(self, frame: FrameType) -> None:
        """Takes in that a function is about to run, whoever called it."""
        code = frame.f_code
        if not code.co_freevars and is_library(code.co_filename):  # of such a function nothing is noted
            return
        self._notes.where, self._notes.frame = (code, frame.f_lineno), frame
        try:
            function = function_of(frame)
            if function is not None:
                self.take(self._notes.function, function)
                if code.co_name.startswith("__") and code.co_argcount:  # which Python may have found by itself
                    self.take(self._notes.special, variable(frame, code.co_varnames[0]), function)
        finally:
            self._notes.frame = None

    def called(self, module: nn.Module) -> None:
        """Takes in that a module is called."""
        self.take(self._notes.called, module)

    def walked(self, module: nn.Module) -> None:
        """Takes in that code goes through a module and all that is in it."""
        self.take(self._notes.walked, module)

    def exchanges(self, *tensors: Tensor) -> None:
        """Takes in that tensors are about to be exchanged with each other."""
        self.take(self._notes.exchanged, *tensors)

    def leaves(self, frame: FrameType) -> None:
        """Takes in that code is sent to another thread."""
        self._notes.elsewhere = self._notes.elsewhere or (frame.f_code, frame.f_lineno)

    def compiled(self, frame: FrameType) -> None:
        """Takes in that code which dynamo has written is about to run."""
        self._notes.where = (frame.f_code, frame.f_lineno)
        self.take(self._notes.compiled, frame)
