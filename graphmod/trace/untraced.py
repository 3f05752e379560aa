"""Lets code of this package run out of the sight of trace functions (`sys.settrace`, `sys.monitoring`), to which each
of its calls and lines would be told, at many times its own cost.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

_make = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
thread_state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
# C API of Python 3.11 and later; they count, so that pairs of them nest.
suspend = _make(("PyThreadState_EnterTracing", ctypes.pythonapi))
resume = _make(("PyThreadState_LeaveTracing", ctypes.pythonapi))


def untraced(function: Callable, *args: Any) -> Any:
    """Calls a function out of sight of this thread's trace functions."""
    state = thread_state()
    try:  # an interrupt comes after the C call, if not before `state` is there
        suspend(state)
        return function(*args)
    finally:
        resume(state)


def traced(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a function in their sight again, inside `untraced`."""
    state = thread_state()
    try:
        resume(state)
        return function(*args, **kwargs)
    finally:
        suspend(state)


identity: Callable[[Any], int] = object.__hash__ if sys.version_info >= (3, 12) else id
"""Tells objects apart for as long as they live. So does `id`, but from Python 3.12 on each call of that is told to
audit hooks, of which filelock has one, and so has whatever imports transformers."""
