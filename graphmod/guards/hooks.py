"""Gradient hooks on parameters: noticed where they come or go. Those on modules are code that ran, as all other."""

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from graphmod.torch_private import AccumulateGrad
from graphmod.trace.lines import CORE

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
        self._before = [list(_hooks_of(p)) for p in self._hooked]
        self._handles = RemovableHandle.next_id

    def changed(self) -> str | None:
        """Which hooks came or went, in words."""
        handles = RemovableHandle.next_id
        reason = self.added()
        if reason is None and [list(_hooks_of(p)) for p in self._hooked] != self._before:
            reason = "a gradient hook of a parameter was removed or exchanged"
        if reason is None:
            self._handles = handles
        return reason

    def added(self) -> str | None:
        """Whether a parameter that had no hooks has some."""
        # Whoever registers a hook, anywhere, gets a handle with the next number. To look at every parameter takes as
        # long as the rest of the watch.
        if RemovableHandle.next_id == self._handles:
            return None
        if any(map(_backward_hooks, self._free)) or any(map(_post_accumulate, self._free)):
            return "a gradient hook was added to a parameter"
        return None


def _hooks_of(parameter: Tensor) -> dict[int, Any]:
    """The gradient hooks of a parameter, by the numbers of their handles."""
    return {**(parameter._backward_hooks or {}), **(parameter._post_accumulate_grad_hooks or {})}


def has_gradient_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def has_hooks_of_others(parameter: Tensor) -> bool:
    """Whether a parameter has gradient hooks that are not this package's own, whose order matters to nobody."""
    return not all(map(is_ours, _hooks_of(parameter).values()))


def several_hooks(parameters: list[Tensor]) -> bool:
    """Whether more than one of some parameters have gradient hooks whose order matters."""
    return sum(map(has_hooks_of_others, parameters)) > 1


def on_accumulator(parameter: Tensor) -> bool:
    """Whether somebody has put hooks on the node that accumulates the gradient of a parameter, and keeps that alive."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)  # which comes to know of the others
        hooks = handle.hooks_dict_ref() or {}
        handle.remove()
        if not all(map(is_ours, hooks.values())):
            return True
    return False


def keeps_accumulators(parameter: Tensor) -> bool:
    """Whether a gradient hook of a parameter keeps nodes that accumulate gradients: `register_multi_grad_hook` asks
    which of its nodes run, and a capture of a backward makes others in their place."""
    hooks = [hook for hook in (parameter._backward_hooks or {}).values() if isinstance(hook, types.FunctionType)]
    kept = [value for hook in hooks for value in inspect.getclosurevars(hook).nonlocals.values()]
    return any(isinstance(node, AccumulateGrad) for value in kept if isinstance(value, list) for node in value)


def is_ours(hook: Any) -> bool:
    """Whether a hook is a function of this package."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(getattr(hook, "__code__", None), "co_filename", "").startswith(CORE)


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
