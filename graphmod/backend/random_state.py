"""What happens to reads and writes of a generator's state inside a capture. May import `recorder` and `errors`."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.recorder import Recorder


@contextlib.contextmanager
def frozen_random_state(recorder: Recorder, modules: tuple[ModuleType, ...]) -> Iterator[None]:
    """Lets `get_rng_state` and `set_rng_state` of `modules` do nothing while active.

    `checkpoint` calls them by default, also where nothing random happens. Where the same capture does draw random
    numbers, a replay would draw others in the recomputation than in the forward pass, so the capture is refused.

    Raises:
        CaptureRefused: at the end, if the state was touched and `recorder` saw a random operation.
    """
    touched: list[str] = []

    def get_rng_state(*_: Any, **__: Any) -> Tensor:
        touched.append("read")
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(*_: Any, **__: Any) -> None:
        touched.append("set")

    originals = [(module, module.get_rng_state, module.set_rng_state) for module in modules]
    for module in modules:
        module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    try:
        yield
    finally:
        for module, read, write in originals:
            module.get_rng_state, module.set_rng_state = read, write
    if touched and recorder.random:
        raise CaptureRefused(
            "saves and restores the random state around random operations (checkpoint with preserve_rng_state=True and "
            "dropout inside), which a replay cannot repeat; take dropout out of the checkpointed part"
        )
