"""Code compiled with torch.compile inside a capture.

Two things stand between compiled code and a capture. Dynamo compiles anew for the keys under which the recorder sees
operations, and steps aside for every dispatch mode, so that the eager code would run, and be captured. And the kernels
that inductor generates are launched past the dispatcher, so that the recorder would see half of what happens: buffers
that come from nowhere, and arguments nobody seems to read. So compiled code runs out of the recorder's sight, and the
recorder is shown what that code reads by a `detach` of each tensor, which launches nothing.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatch

from graphmod.trace.dispatch import hidden, through_a_mode
from graphmod.trace.tracer import Tracer, current_tracer

# What dynamo looks at to see whether a dispatch mode is active; which of them depends on the release.
_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


_one_at_a_time = threading.RLock()  # these flags belong to the process


@contextlib.contextmanager
def _dynamo_unaware_of_modes() -> Iterator[None]:
    """Lets compiled code run although a dispatch mode is active, and without the hooks that watch a capture."""
    with _one_at_a_time:
        yield from _set_aside()


def _set_aside() -> Iterator[None]:
    hooks = nn.modules.module._global_forward_pre_hooks
    set_aside = dict(hooks)
    flags = {name: getattr(dispatch, name) for name in _MODE_FLAGS if hasattr(dispatch, name)}
    tell_dynamo = getattr(torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals", None)

    def set_flags(values: dict[str, bool]) -> None:
        for name, value in values.items():
            setattr(dispatch, name, value)
        if tell_dynamo is not None:
            tell_dynamo(values.get(_MODE_FLAGS[-1], False))

    hooks.clear()
    set_flags(dict.fromkeys(flags, False))
    try:
        yield
    finally:
        set_flags(flags)
        hooks.update(set_aside)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


# The recorder out of whose sight code runs now.
_out_of_sight_of: ContextVar[Tracer | None] = ContextVar("out_of_sight_of", default=None)


def note_random() -> None:
    """To be called by compiled code that draws random numbers, before it does."""
    recorder = current_tracer() or _out_of_sight_of.get()
    if recorder is not None:
        recorder.random = True


@contextlib.contextmanager
def shown(tensors: Iterable[Any], hide: bool = True) -> Iterator[None]:
    """Runs compiled code in a call that is captured, or recorded before that. Does nothing elsewhere.

    Args:
        tensors: what it reads; others than tensors are left out. The recorder is shown these.
        hide: whether the recorder is kept from seeing the code itself.
    """
    recorder = current_tracer()
    if recorder is None:
        yield
        return
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    for tensor in given:
        tensor.detach()
    recorder.note_compiled()
    before = list(map(_version, given))
    token = _out_of_sight_of.set(recorder if hide else None)
    try:
        with hidden() if hide else through_a_mode(), _dynamo_unaware_of_modes():
            yield
    finally:
        _out_of_sight_of.reset(token)
    if hide:
        changed = (t for t, version in zip(given, before, strict=True) if version is None or _version(t) != version)
        recorder.note_unseen(changed)
