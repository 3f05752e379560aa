"""Tells, in the thread that asks, of the frames that run: where each begins and ends, of its lines, and of single
instructions before they run.

Python 3.11 does so by `sys.settrace`. From 3.12 on each line of whatever runs would then go by way of the tracer, whose
own code would take twice as long. There `sys.monitoring` (PEP 669) is asked for beginnings, and for what lies between
these and the ends only in code of interest.

An exception in a trace function turns tracing off without a word. No tensor may be kept, because autograd takes another
way with one that somebody else holds; so variables are asked for one by one, where `f_locals` would be a copy that
holds them all. A coverage tool or debugger is set aside for the length of one call. `sys.monitoring` tells of all
frames of a code, in all threads, so it is kept here which of them are followed.
"""

import ctypes
import sys
import threading
from collections.abc import Callable
from inspect import CO_GENERATOR, CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any, Protocol

from graphmod.guards.values import MISSING
from graphmod.torch_private import beside_dynamo
from graphmod.trace.undo import is_interrupt
from graphmod.trace.untraced import identity

NEVER, NOTHING, END = range(3)
"""What is to be told of a frame: nothing, nor of any other frame of its code; nothing; its end."""
Plan = dict[int, Any]
"""What is to be told of a frame whose instructions matter, besides its end: those at these offsets, each with what is
kept here of it. It is the same for all frames of a code."""
_JUST_THE_END: Plan = {}


class Told(Protocol):
    """Who is told. What these raise would be raised in the code that runs."""

    def entered(self, frame: FrameType, code: CodeType) -> int | Plan:
        """A frame, of a piece of code, begins or goes on. Returns what is to be told of it."""

    def step(self, frame: FrameType, code: CodeType, planned: Any, /) -> None:
        """A frame is about to run an instruction of which the plan has `planned`."""

    def left(self, frame: FrameType) -> None:
        """A frame ends, or waits."""


class _OfThread(threading.local):
    watch: Any = None


_of_thread = _OfThread()


class _Watch:
    """Tells of the frames of one thread.

    Attributes:
        over: whether it has ended, maybe in another thread than the one it is of.
        late: an interrupt that came while somebody was told of a frame of a generator. One that is closed because
            nobody holds it keeps errors to itself, so it is raised where a frame begins that is of none, or at the end.
    """

    def __init__(self, told: Told) -> None:
        self.told = told
        self.over = False
        self.late: BaseException | None = None

    @beside_dynamo
    def left(self, frame: FrameType) -> None:
        try:
            self.told.left(frame)
        except BaseException as error:
            self.put_off(error, frame)

    def put_off(self, error: BaseException, frame: FrameType) -> int:
        """Keeps an interrupt for later, if it has to come later. Raises any other error."""
        if not (frame.f_code.co_flags & CO_GENERATOR and is_interrupt(error)):
            raise error
        self.late = error
        return NOTHING

    def raise_late(self) -> None:
        error, self.late = self.late, None
        try:
            if error is not None:
                raise error
        finally:
            error = None  # whose frames lead here


class _Traced(_Watch):
    """A watch by `sys.settrace`.

    Attributes:
        before: the tracer that it has set aside.
    """

    def __init__(self, told: Told) -> None:
        super().__init__(told)
        self.before = sys.gettrace()
        self._followers: dict[int, Callable | None] = {}  # by identity of the plan

    def begin(self) -> bool:
        sys.settrace(self._enter)
        return True

    def tells(self) -> bool:
        """Whether it is still told: not after an exception was raised in a trace function, or if code set another."""
        return sys.gettrace() == self._enter

    def end(self) -> None:
        self._followers.clear()  # which refer to it: only the garbage collector would free it

    @beside_dynamo
    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.over:
            sys.settrace(self.before)
            self.raise_late()
            return None
        if self.late is not None and not frame.f_code.co_flags & CO_GENERATOR:
            self.raise_late()
        try:  # in this frame: there are many
            wanted = self.told.entered(frame, frame.f_code)
        except BaseException as error:
            wanted = self.put_off(error, frame)
        if wanted is NOTHING or wanted is NEVER:
            return None
        plan = _JUST_THE_END if isinstance(wanted, int) else wanted
        frame.f_trace_lines, frame.f_trace_opcodes = False, bool(plan)
        follower = self._followers.get(identity(plan))
        if follower is None:
            follower = self._followers[identity(plan)] = self._follower(plan)
        return follower

    def _follower(self, plan: Plan) -> Callable:
        told, left, planned = self.told, self.left, plan.get

        @beside_dynamo
        def follow(frame: FrameType, event: str, value: Any) -> None:  # which stays: else it would refer to itself
            if event == "opcode":
                found = planned(frame.f_lasti)
                if found is not None:
                    told.step(frame, frame.f_code, found)
            elif event == "return":
                left(frame)

        return follow


_monitoring: Any = getattr(sys, "monitoring", None)
_get_variable: Any = None
if _monitoring is not None:
    _object = ctypes.py_object
    _get_variable = ctypes.PYFUNCTYPE(_object, _object, _object)(("PyFrame_GetVar", ctypes.pythonapi))
_NAME = "graphmod"
_lock = threading.Lock()
_users: set[Any] = set()
_tool: int | None = None
_asked: dict[int, tuple[CodeType, int]] = {}  # by identity: the hash of code takes microseconds


class _Monitored(_Watch):
    """A watch by `sys.monitoring`. Its events are told of all frames of a code, and to all threads.

    Attributes:
        frames: by identity of those that have not ended, what is to be told of them.
    """

    def __init__(self, told: Told) -> None:
        super().__init__(told)
        self.frames: dict[int, int | Plan] = {}

    def begin(self) -> bool:
        """Returns whether anything will be told: not if others hold all places of `sys.monitoring`."""
        sys.settrace(None)
        with _lock:
            first = not _users
            _users.add(self)
            if first:
                _take_place()
        return self.tells()

    def tells(self) -> bool:
        return _holds_place()

    def end(self) -> None:
        with _lock:
            if _users == {self}:
                _give_place_back()
            _users.discard(self)


def _take_place() -> None:
    global _tool
    _tool = next((tool for tool in (4, 3, 5, 2, 1) if _monitoring.get_tool(tool) is None), None)
    if _tool is not None:
        _monitoring.use_tool_id(_tool, _NAME)
        for event, callback in _callbacks.items():
            _monitoring.register_callback(_tool, event, callback)
        _monitoring.set_events(_tool, _EVERYWHERE)


def _holds_place() -> bool:
    return _tool is not None and _monitoring.get_tool(_tool) == _NAME


def _give_place_back() -> None:
    if _holds_place():
        _monitoring.set_events(_tool, 0)
        for code, _ in _asked.values():
            _monitoring.set_local_events(_tool, code, 0)
        _asked.clear()
        for event in _callbacks:
            _monitoring.register_callback(_tool, event, None)
        _monitoring.free_tool_id(_tool)


def _ask(code: CodeType, events: int) -> None:
    known = _asked.get(identity(code))
    if known is None or known[1] | events != known[1]:
        with _lock:
            events |= _asked.get(identity(code), (code, 0))[1]
            _asked[identity(code)] = code, events
            _monitoring.set_local_events(_tool, code, events)


@beside_dynamo
def _began(code: CodeType, _: int, *thrown: Any) -> Any:
    watch = _of_thread.watch
    if watch is None:
        return None
    if watch.over:
        watch.raise_late()
        return None
    frame = sys._getframe(1)
    if watch.late is not None and not code.co_flags & CO_GENERATOR:
        watch.raise_late()
    try:  # in this frame: there are many
        wanted = watch.told.entered(frame, code)
    except BaseException as error:
        wanted = watch.put_off(error, frame)
    if wanted is not NOTHING and wanted is not NEVER:
        watch.frames[identity(frame)] = wanted
        _ask(code, _ENDS if wanted is END else _ENDS | _on.INSTRUCTION)
    return _monitoring.DISABLE if wanted == NEVER and not thrown else None


@beside_dynamo
def _ended(_: CodeType, offset: int, value: Any) -> None:
    watch = _of_thread.watch
    if watch is not None and not watch.over:
        frame = sys._getframe(1)
        if watch.frames.pop(identity(frame), None) is not None:
            watch.left(frame)


@beside_dynamo
def _at_instruction(code: CodeType, offset: int) -> Any:
    watch = _of_thread.watch
    if watch is not None and not watch.over:
        frame = sys._getframe(1)
        plan = watch.frames.get(identity(frame), END)
        if plan is not END:
            planned = plan.get(offset)
            if planned is None:
                return _monitoring.DISABLE  # until somebody asks anew for the instructions of this code
            watch.told.step(frame, code, planned)
    return None


if _monitoring is not None:
    _on = _monitoring.events
    _callbacks = {
        **{_on.PY_START: _began, _on.PY_RESUME: _began, _on.PY_THROW: _began},
        **{_on.PY_RETURN: _ended, _on.PY_YIELD: _ended, _on.PY_UNWIND: _ended},
        **{_on.INSTRUCTION: _at_instruction},
    }
    _EVERYWHERE = _on.PY_START | _on.PY_RESUME | _on.PY_THROW | _on.PY_UNWIND
    _ENDS = _on.PY_RETURN | _on.PY_YIELD


def before() -> Any:
    """What `end` is to be given."""
    return sys.gettrace(), _of_thread.watch


def begin(told: Told) -> bool:
    """Begins to tell of what this thread runs; a tracer that was there is set aside.

    Returns:
        Whether anything will be told: not if other tools (debuggers, profilers) hold all places of `sys.monitoring`.
    """
    watch = _of_thread.watch = (_Traced if _monitoring is None else _Monitored)(told)
    return watch.begin()


def end(before: Any) -> bool:
    """Ends what began in this thread after `before()`.

    Returns:
        Whether it was told until now.
    """
    tracer, earlier = before
    watch = _of_thread.watch
    told = watch is not None and watch.tells()
    sys.settrace(tracer)
    if watch is not None and watch is not earlier:
        watch.over = True  # first: what ends it is told of, too
        watch.end()
    _of_thread.watch = earlier
    if watch is not None:
        watch.raise_late()
    return told


def abandon(watch: Any) -> None:
    """Ends a watch of another thread: nothing is told any more, and the thread itself puts back what was set aside."""
    watch.over = True
    watch.end()


def watch_of_now() -> Any:
    """The watch of this thread; None where nobody watches it."""
    return _of_thread.watch


def variable(frame: FrameType, name: str) -> Any:
    """The value of a local variable, or MISSING. `f_locals` of Python 3.12 is a copy that the frame keeps, and with it
    tensors that the code has let go of by then; that of 3.11 is made for each event anyway, and that of the body of a
    class is what the code works with."""
    if _get_variable is None or not frame.f_code.co_flags & CO_OPTIMIZED:
        return frame.f_locals.get(name, MISSING)
    try:
        return _get_variable(frame, name)
    except NameError:
        return MISSING
