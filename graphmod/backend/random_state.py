"""The random states of Python and numpy, which captured code may draw from."""

import random
import sys
from typing import Any


def python_random_state() -> tuple[Any, Any]:
    """The random states of Python and, if it is in use, numpy, which captured code may draw from."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def restore_python_random_state(state: tuple[Any, Any]) -> None:
    """Puts back what `python_random_state` gave."""
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
