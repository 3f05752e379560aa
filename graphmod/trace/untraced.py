"""Lets code of this package run out of the sight of trace functions (`sys.settrace`, `sys.monitoring`), to which each
of its calls and lines would be told, at many times its own cost.
"""

import ctypes
from collections.abc import Callable
from typing import Any

_make = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
# C API of Python 3.11 and later; they count, so that pairs of them nest.
_suspend = _make(("PyThreadState_EnterTracing", ctypes.pythonapi))
_resume = _make(("PyThreadState_LeaveTracing", ctypes.pythonapi))


def untraced(function: Callable, *args: Any) -> Any:
    """Calls a function out of sight of this thread's trace functions."""
    state = _state()
    try:  # an interrupt comes after the C call, if not before `state` is there
        _suspend(state)
        return function(*args)
    finally:
        _resume(state)


def traced(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a function in their sight again, inside `untraced`."""
    state = _state()
    try:
        _resume(state)
        return function(*args, **kwargs)
    finally:
        _suspend(state)
