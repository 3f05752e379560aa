"""Gradient hooks on parameters: noticed where they come or go. Those on modules are code that ran, as all other."""

import contextlib
import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import optimizer as base_optimizer
from torch.utils.hooks import RemovableHandle

_backward_hooks = operator.attrgetter("_backward_hooks")
_post_accumulate = operator.attrgetter("_post_accumulate_grad_hooks")


class HookWatch:
    """Notices gradient hooks that come or go.

    Args:
        parameters: the leaf tensors whose gradients a graph computes.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._free = [p for p in parameters if not has_gradient_hooks(p)]
        self._hooked = [p for p in parameters if has_gradient_hooks(p)]
        self._before = [_those_of(p) for p in self._hooked]
        self._handles = RemovableHandle.next_id

    def changed(self) -> str | None:
        # Whoever registers a hook, anywhere, gets a handle with the next number. To look at every parameter takes as
        # long as the rest of the watch.
        handles = RemovableHandle.next_id
        if handles == self._handles and not self._hooked:
            return None
        if any(map(_backward_hooks, self._free)) or any(map(_post_accumulate, self._free)):
            return "a gradient hook was added to a parameter"
        if self._hooked and list(map(_those_of, self._hooked)) != self._before:
            return "a gradient hook of a parameter was removed or exchanged"
        self._handles = handles
        return None


def _those_of(parameter: Tensor) -> tuple:
    return (*(parameter._backward_hooks or {}), *(parameter._post_accumulate_grad_hooks or {}))


def has_gradient_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


@contextlib.contextmanager
def without_gradient_hooks(parameters: list[Tensor]) -> Iterator[None]:
    """Takes the tensor hooks off `parameters` for as long as it is active."""
    hooks = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in hooks:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, found in hooks:
            parameter._backward_hooks = found


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict, ...]:
    """The hooks that run around an optimizer's step: its own, and those of all optimizers. A class that only passes
    everything on to an optimizer may have none."""
    return (
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
        base_optimizer._global_optimizer_pre_hooks,
        base_optimizer._global_optimizer_post_hooks,
    )
