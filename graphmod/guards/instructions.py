"""Tells, in the thread that asks, of single instructions before they run.

Python 3.11 does so by `f_trace_opcodes`. That of 3.12 and 3.13 comes late or not at all, and 3.12 crashes where two
threads ask for it; they have `sys.monitoring` (PEP 669), which is asked for the code of interest only.
"""

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

from graphmod.torch_private import beside_dynamo

Told = Callable[[FrameType, int], None]  # a frame, and the offset of the instruction that it is about to run
_monitoring = getattr(sys, "monitoring", None)
_lock = threading.Lock()
_of_thread = threading.local()
_users = 0
_tool: int | None = None
_codes: dict[int, CodeType] = {}  # by identity: the hash of code takes microseconds


def begin(told: Told) -> Told | None:
    """Lets this thread's instructions be told to `told`.

    Returns:
        Who was told before, for `end`.
    """
    global _users
    if _monitoring is not None:
        with _lock:
            if not _users:
                _take_place()
            _users += 1
    before = getattr(_of_thread, "told", None)
    _of_thread.told = told
    return before


def end(before: Told | None) -> None:
    """Ends what `begin` began."""
    global _users
    _of_thread.told = before
    if _monitoring is not None:
        with _lock:
            _users -= 1
            if not _users:
                _give_place_back()


def ask(frame: FrameType) -> bool:
    """Asks for the instructions of a frame that is about to run its first. Returns whether they will be told: not if
    other tools (debuggers, profilers) hold all places of `sys.monitoring`."""
    if _monitoring is None:
        frame.f_trace_opcodes = True
        return True
    if _tool is None:
        return False
    with _lock:
        if id(frame.f_code) not in _codes:
            _codes[id(frame.f_code)] = frame.f_code
            _monitoring.set_local_events(_tool, frame.f_code, _monitoring.events.INSTRUCTION)
    return True


def _take_place() -> None:
    global _tool
    _tool = next((tool for tool in (4, 3, 5, 2, 1) if _monitoring.get_tool(tool) is None), None)
    if _tool is None:
        return
    _monitoring.use_tool_id(_tool, "graphmod")
    _monitoring.register_callback(_tool, _monitoring.events.INSTRUCTION, _seen)


def _give_place_back() -> None:
    if _tool is None:
        return
    for code in _codes.values():
        _monitoring.set_local_events(_tool, code, 0)
    _codes.clear()
    _monitoring.register_callback(_tool, _monitoring.events.INSTRUCTION, None)
    _monitoring.free_tool_id(_tool)


@beside_dynamo
def _seen(_: CodeType, offset: int) -> None:
    told = getattr(_of_thread, "told", None)
    if told is not None:
        told(sys._getframe(1), offset)
