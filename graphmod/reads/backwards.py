"""Watches the Python that a backward of the user's runs for single calls, each for itself.

A call marks its nodes in autograd's graph. The first hook of one of them that a backward meets begins a watch of the
thread, which ends with that backward; of each function that the engine calls it looks at the node which runs. So hooks
of the user's between two nodes are seen, and code that belongs to no marked node, or to another call, is not.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import types
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node

from graphmod.guards.notes import Notes
from graphmod.reads import events
from graphmod.reads.frames import NOT_TOLD, Frames
from graphmod.torch_private import beside_dynamo, current_backward, current_node, queue_callback
from graphmod.trace import dispatch
from graphmod.trace.garbage import Ages
from graphmod.trace.hazards import Hazard
from graphmod.trace.lines import CORE
from graphmod.trace.recorder import Recorder
from graphmod.trace.undo import let_through
from graphmod.trace.untraced import identity

_MARK = "graphmod: part of a call whose backward is watched"


class Watched(Protocol):
    """A call whose backward is watched.

    Attributes:
        beside: whether what runs now, at one of its nodes, is no part of it all the same.
        over: whether its backward has come.
        around: the code that gives its nodes what they saved, where somebody around the call keeps that: a checkpoint,
            which runs more again than the call.
        gpu: index of the GPU that it works on; None on the CPU.
    """

    beside: bool
    over: bool
    around: types.CodeType | None
    gpu: int | None

    def enter(self) -> None:
        """Takes in that its backward runs Python that is of interest."""

    def take(self, notes: Notes) -> None:
        """Takes in what a part of its backward read, when that part has just run."""

    def cannot_repeat(self, hazards: list[Hazard]) -> None:
        """Takes in what a function of its backward that has run did, and no graph can repeat."""

    def nested(self, frame: types.FrameType) -> None:
        """Takes in that its backward runs another one."""

    def finish(self) -> None:
        """Its backward is over."""

    def fail(self) -> None:
        """Its backward was ended by an error."""


def mark(node: Node, call: Watched) -> None:
    """Lets a node be one of a call. The call must not hold it: the node holds the call."""
    _metadata(node)[_MARK] = call


def _metadata(node: Any) -> dict[str, Any]:
    """What may be kept at a node, which PyTorch declares as a method."""
    return node.metadata


def end_left() -> None:
    """Ends what this thread still watches though its backward is over: an error has ended that where nobody could see,
    as by way of a debugger."""
    if watches and current_backward() < 0:
        for watch in [one for one in reversed(list(watches.values())) if one.is_of_this_thread()]:
            watch.stop()


def begin(call: Watched) -> None:
    """Takes in that a backward has come to a call. To be called in a hook that the engine calls itself."""
    task = current_backward()
    if call.over or task < 0:
        return
    watch = watches.get(task)
    if watch is None:
        watch = _Watch(task, sys._getframe(1).f_back)
        watch.begin()
        queue_callback(watch.end)
    watch.calls[id(call)] = call


class _Watch(Frames):
    """Watches one backward.

    Args:
        task: its number.
        engine: the frame from which autograd's engine calls Python; None in a thread of its own.
    """

    def __init__(self, task: int, engine: types.FrameType | None) -> None:
        self._nobody = Notes(Ages())
        super().__init__(self._nobody)
        self._task, self._engine = task, engine
        self.calls: dict[int, Watched] = {}
        self._call: Watched | None = None  # whose part runs
        self._other: types.FrameType | None = None  # which is no part of any
        self._function: types.FrameType | None = None  # of it, whose operations are recorded
        self._recorder = Recorder()
        self._thread = threading.get_ident()
        self._stopping = False

    def begin(self) -> None:
        watches[self._task] = self
        self.__enter__()
        self._told = events.watch_of_now()
        _is_anybody_told()
        self.missed = self.missed or ("" if self.heard else NOT_TOLD)

    def end(self) -> None:
        """The backward is over."""
        calls, self.calls = self.calls, {}
        self.stop()
        for call in calls.values():
            if self.missed:
                self._nobody.unseen = self.missed
                call.take(self._nobody)
            call.finish()

    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def stop(self) -> None:
        """Ends the watch, whatever became of the backward."""
        if self._stopping or self._task not in watches:
            return
        try:
            self._stopping = True  # what does it is told of, too
            self._stop()
        finally:  # what was interrupted is done once more
            self._stopping = False
            self._stop()
            watches.pop(self._task, None)

    def _stop(self) -> None:
        try:
            self._end_function()
            self._leave()
        finally:
            if self.is_of_this_thread():
                self.__exit__()
            else:
                events.abandon(self._told)
            self._engine = self._other = None
            for key, call in list(self.calls.items()):
                call.fail()
                del self.calls[key]

    # -- see `Frames` --------------------------------------------------------------------------------------------

    @beside_dynamo
    def _entered(self, frame: types.FrameType, code: types.CodeType) -> int | events.Plan:
        if self._other is not None:
            return events.NOTHING
        task = current_backward()
        if task < 0 or (frame.f_back is None and task != self._task):
            self.stop()  # an error has ended the backward, of which nobody tells
            return events.NOTHING
        if from_engine := frame.f_back is self._engine:
            ours = code.co_filename.startswith(CORE)  # hooks of this package, which change nothing that matters
            call = None if ours else self._runs_now()
            if call is None or code is call.around:
                self._other = frame
                if not ours:
                    self._leave()
                return events.END
            if call is not self._call:
                self._leave()
                self._come_to(call)
        if from_engine and self._call is not None:
            self.notes.ages.made |= _given_to(frame)
        if self._call is None:
            return events.NOTHING
        if code is _ACCUMULATES:
            self._call.nested(frame)
        told = super()._entered(frame, code)
        if isinstance(told, dict):
            self._call.enter()
        if from_engine and self._function is None and dispatch.current() is None:
            self._function, self._recorder = frame, Recorder(gpu=self._call.gpu, in_backward=True)
            self._recorder.__enter__()
            return told if isinstance(told, dict) else events.END
        return told

    @beside_dynamo
    def left(self, frame: types.FrameType) -> None:
        if frame is self._other:
            self._other = None
        if frame is self._function:
            self._end_function()
        super().left(frame)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _runs_now(self) -> Watched | None:
        node = current_node()
        call = None if node is None else _metadata(node).get(_MARK)
        return None if call is None or call.over or call.beside else call

    def _end_function(self) -> None:
        """A function that the engine called has run."""
        if self._function is not None:
            self._function = None
            self._recorder.__exit__(None, None, None)
            if self._call is not None and self._recorder.hazards:
                self._call.cannot_repeat(self._recorder.hazards)

    def _come_to(self, call: Watched) -> None:
        self.calls[id(call)] = self._call = call
        self.write_to(Notes(Ages().__enter__()))

    def _leave(self) -> None:
        """A part has run: compared at once, what it has changed is told from what others change."""
        call, self._call = self._call, None
        if call is None:
            return
        notes = self.notes
        self.write_to(self._nobody)
        notes.ages.__exit__()
        try:
            call.take(notes)
        except Exception as error:  # the user's backward goes on
            let_through(error)
            self.missed = self.missed or f"what its backward reads cannot be compared: {error}"


watches: dict[int, _Watch] = {}
_ACCUMULATES = torch.autograd.backward.__code__  # `torch.autograd.grad` leaves `.grad` alone


def _given_to(frame: types.FrameType) -> set[int]:
    """The identities of tensors that the engine calls a function with, and of lists and tuples of them, all of which it
    has made for that."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return {identity(one) for name in code.co_varnames[:count] for one in _of_tensors(events.variable(frame, name))}


def _of_tensors(value: Any) -> list[Any]:
    """A tensor; a list or tuple of tensors, of such lists and of None, with all but None in it; of others, nothing."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) not in (list, tuple):
        return []
    inside = [_of_tensors(one) for one in value if one is not None]
    return [value, *itertools.chain.from_iterable(inside)] if all(inside) else []


def _is_anybody_told() -> None:
    """Is called to see that calls are told of: not where a trace function of this thread runs."""
