"""Which function a frame runs: Python does not tell, but its frames hold it.

The variables that a function closes over could otherwise be found only where code was seen to look the function up;
it is not where the function is what was wrapped, or where PyTorch or code in C calls it (a property, `__enter__`).
"""

import gc
import sys
from collections.abc import Mapping
from ctypes import c_void_p, cast, py_object, sizeof
from types import FrameType, FunctionType
from typing import Any

from graphmod.guards.lookup import MISSING, Cell, get

_WORD = sizeof(c_void_p)
_BODY = object.__basicsize__ + _WORD  # in a frame: where its body is, after the frame before
_FUNCTION = {(3, 11): 0, (3, 12): 2 * _WORD, (3, 13): 2 * _WORD}.get(sys.version_info[:2])  # in the body


def _address(frame: FrameType) -> int | None:
    body = c_void_p.from_address(id(frame) + _BODY).value
    return c_void_p.from_address(body + _FUNCTION).value


def _is_told() -> bool:
    def asked() -> int | None:
        return _address(sys._getframe())

    return sys.implementation.name == "cpython" and _FUNCTION is not None and asked() == id(asked)


_TOLD = _is_told()


def those_there() -> dict[int, list[FunctionType]]:
    """The functions there are that close over variables, by identity of their code; none where frames tell theirs."""
    there: dict[int, list[FunctionType]] = {}
    for one in () if _TOLD else gc.get_objects():
        if type(one) is FunctionType and one.__closure__:
            there.setdefault(id(one.__code__), []).append(one)
    return there


def functions_of(frame: FrameType, there: dict[int, list[FunctionType]]) -> list[FunctionType]:
    """The function that a frame runs; where frames do not tell, all that it may be: `there` are with equal variables.

    Args:
        there: what `those_there` gave before the call.
    """
    if _TOLD:
        found = cast(_address(frame), py_object).value
        return [found] if isinstance(found, FunctionType) and found.__code__ is frame.f_code else []
    candidates = there.get(id(frame.f_code), ())
    if len(candidates) < 2:
        return list(candidates)
    values = frame.f_locals
    return [one for one in candidates if _closes_over(one, values)]


def _closes_over(function: FunctionType, values: Mapping[str, Any]) -> bool:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return all(get(Cell(cell), None) is values.get(name, MISSING) for name, cell in cells)
