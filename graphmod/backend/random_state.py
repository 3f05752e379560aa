"""What happens to random states in a capture: reads and writes of a generator's, and those of Python and numpy. May
import `recorder`, `tracer` and `errors`."""

import contextlib
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.recorder import Recorder
from graphmod.tracer import is_recording

_NO_STATE = torch.empty(0, dtype=torch.uint8)


@contextlib.contextmanager
def _frozen_random_state(modules: tuple[ModuleType, ...]) -> Iterator[list[str]]:
    """Lets `get_rng_state` and `set_rng_state` of `modules` do nothing in recorded code; yields a list of such calls.

    `checkpoint` calls them by default, also where nothing random happens.
    """
    touched: list[str] = []
    originals = [(module, module.get_rng_state, module.set_rng_state) for module in modules]

    def get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
        if not is_recording():
            return originals[0][1](*args, **kwargs)
        touched.append("get")
        return _NO_STATE

    def set_rng_state(*args: Any, **kwargs: Any) -> None:
        if not is_recording():
            originals[0][2](*args, **kwargs)
        touched.append("set")

    for module in modules:
        module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    try:
        yield touched
    finally:
        for module, read, write in originals:
            module.get_rng_state, module.set_rng_state = read, write


@contextlib.contextmanager
def refuse_random_state(recorder: Recorder, modules: tuple[ModuleType, ...]) -> Iterator[None]:
    """Lets code that `recorder` records neither read nor set the random state.

    Where that code does draw random numbers, a replay would draw others in a recomputation than in the forward pass.

    Raises:
        CaptureRefused: at the end, if the state was touched and `recorder` saw a random operation.
    """
    with _frozen_random_state(modules) as touched:
        yield
    if touched and recorder.random:
        raise CaptureRefused(
            "saves and restores the random state around random operations (checkpoint with preserve_rng_state=True and "
            "dropout inside), which a replay cannot repeat; take dropout out of the checkpointed part"
        )


def python_random_state() -> tuple[Any, Any]:
    """The random states of Python and, if it is in use, numpy, which captured code may draw from."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def restore_python_random_state(state: tuple[Any, Any]) -> None:
    """Puts back what `python_random_state` gave."""
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
