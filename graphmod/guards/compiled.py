"""Guards of code that torch.compile made: those that dynamo compares itself before it runs that code.

They are compared with the variables of the recorded call, because a replay has none. What is in those and was there
before the call is the very object; of tensors only what kind they are matters, so that none is kept alive but those in
objects of classes of one's own. Gradients that the call made or cleared before are part of what such code finds: an
update that is compiled looks at them, and before the next call they are not there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from graphmod.guards.values import is_plain
from graphmod.torch_private import dynamo_guards, set_grad_enabled, without_modes, written_by_dynamo
from graphmod.trace.dispatch import hidden
from graphmod.trace.lines import CORE

_DEVICES = ("cpu", "cuda")
_COPIED = (tuple, list, dict)


def is_arithmetic(frame: FrameType) -> bool:
    """Whether code of this package works on tensors and numbers alone, such as the update of an optimizer: then there
    is nothing that could change, and on hundreds of tensors the guards would take milliseconds."""
    return frame.f_code.co_filename.startswith(CORE) and all(map(_is_data, frame.f_locals.values()))


def _is_data(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_data, value))
    if type(value) is dict:
        return all(map(_is_data, value.values()))
    return isinstance(value, Tensor) or is_plain(value)


class CompiledFrame:
    """One run of code that dynamo has written.

    Args:
        frame: of that code, which is about to run.
        leaves: the tensors whose gradient has come or gone since the call began.

    Raises:
        LookupError: dynamo keeps no guards of it, or such as do not hold as the code runs.
    """

    def __init__(self, frame: FrameType, leaves: Iterable[Tensor] = ()) -> None:
        self.code: CodeType = written_by_dynamo()[frame.f_code]
        self._guards = dynamo_guards(frame.f_code)
        self._modes = modes()
        if self._guards is None:
            raise LookupError(f"dynamo keeps no guards of {self.code.co_name}")
        made: dict[int, Tensor] = {}
        given = dict(frame.f_locals)
        closed_over = {name: given[name] for name in frame.f_code.co_freevars if type(given.get(name)) in _COPIED}
        with hidden(), without_modes():
            self._variables = {name: _without_memory(value, made) for name, value in given.items()} | closed_over
            gradients = [(leaf, leaf.grad, _without_memory(leaf.grad, made)) for leaf in leaves]
        # Of one of a class of its own only the very object would do, which is not to be kept.
        self._gradients = [(leaf, kind) for leaf, grad, kind in gradients if grad is None or kind is not grad]
        if not self._guards.check(self._variables):
            self._variables = given
            if not self._guards.check(given):
                raise LookupError(f"the guards of {self.code.co_name} do not hold: {self._difference()}")

    def changed(self, now: tuple) -> str | None:
        """What dynamo would compile anew for, in words; None where it would run the same code.

        Args:
            now: the `modes` of the present.
        """
        if now == self._modes:
            return self._compare()
        _set(self._modes)
        try:
            return self._compare()
        finally:
            _set(now)

    def _compare(self) -> str | None:
        if self._guards.check(self._variables):
            return None
        before = [(leaf, leaf.grad) for leaf, _ in self._gradients]
        try:
            _give(self._gradients)
            return None if self._guards.check(self._variables) else self._difference()
        finally:
            _give(before)

    def _difference(self) -> str:
        parts = getattr(self._guards.check_verbose(self._variables), "verbose_code_parts", [])
        why = parts[0].split("#")[0].strip() if parts else "its guards"
        return f"torch.compile made {self.code.co_name!r} for other values ({why})"


def _without_memory(value: Any, made: dict[int, Tensor]) -> Any:
    """The value, with each tensor that is no parameter or buffer replaced by one of its kind without memory. What holds
    none is the very object, whose items may change."""
    if type(value) in _COPIED:
        items = list(value.values()) if type(value) is dict else list(value)
        parts = [_without_memory(one, made) for one in items]
        if all(map(operator.is_, parts, items)):
            return value
        return dict(zip(value, parts, strict=True)) if type(value) is dict else type(value)(parts)
    if type(value) is not Tensor or value.layout is not torch.strided:
        return value
    if id(value) not in made:
        with torch.no_grad(), torch.inference_mode(value.is_inference()):
            twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
            twin.untyped_storage().resize_(0)
            twin.__dict__.update(value.__dict__)
        made[id(value)] = twin.requires_grad_(value.requires_grad)
    return made[id(value)]


def _give(gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    for leaf, grad in gradients:
        leaf.grad = grad


def modes() -> tuple:
    """The modes that code turns on and off around a part of a call, and that dynamo compares."""
    casts = [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in _DEVICES]
    return torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), *casts


def _set(modes: tuple) -> None:
    grad, cached, *casts = modes
    set_grad_enabled(grad)
    torch.set_autocast_cache_enabled(cached)
    for device, (enabled, dtype) in zip(_DEVICES, casts, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
