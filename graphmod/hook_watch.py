"""Hooks on modules, parameters and optimizers: noticed where they come or go, refused where no replay would run them.

Imports `trace` and `tracer`.
"""

import contextlib
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as base_optimizer
from torch.utils.hooks import RemovableHandle

from graphmod.trace import address
from graphmod.tracer import is_recording

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_backward_hooks = operator.attrgetter("_backward_hooks")
_post_accumulate = operator.attrgetter("_post_accumulate_grad_hooks")


class HookWatch:
    """Notices hooks that come or go on the modules that ran inside a capture, and on the parameters it differentiates.

    Args:
        modules: the modules that ran.
        parameters: the leaf tensors whose gradients the graph computes.
        optimizers: those that stepped.
    """

    def __init__(
        self, modules: list[nn.Module], parameters: list[Tensor], optimizers: list[torch.optim.Optimizer]
    ) -> None:
        self._dicts = [getattr(module, kind) for module in modules for kind in HOOKS]
        self._dicts += [hooks for optimizer in optimizers for hooks in step_hooks(optimizer)]
        self._counts = list(map(len, self._dicts))
        self._none = not any(self._counts)
        self._free = [p for p in parameters if not has_gradient_hooks(p)]
        self._hooked = [p for p in parameters if has_gradient_hooks(p)]
        self._handles = RemovableHandle.next_id

    def changed(self) -> str | None:
        if any(self._dicts) if self._none else list(map(len, self._dicts)) != self._counts:
            return "hooks were added to or removed from a part of it"
        # Whoever registers a hook, anywhere, gets a handle with the next number. To look at every parameter takes as
        # long as the rest of the watch.
        handles = RemovableHandle.next_id
        if handles == self._handles and not self._hooked:
            return None
        reason = self._changed_on_parameters()
        if reason is None:
            self._handles = handles
        return reason

    def _changed_on_parameters(self) -> str | None:
        if any(map(_backward_hooks, self._free)) or any(map(_post_accumulate, self._free)):
            return "a gradient hook was added to a parameter"
        if self._hooked and not all(map(has_gradient_hooks, self._hooked)):
            return "a gradient hook was removed from a parameter"
        return None


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


def those_that_stepped(
    optimizers: list[torch.optim.Optimizer], written: Collection[int]
) -> list[torch.optim.Optimizer]:
    """The optimizers of which a parameter lies at one of the addresses `written`."""
    return [
        one for one in optimizers if any(address(p) in written for group in one.param_groups for p in group["params"])
    ]


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict, ...]:
    """The hooks that run around an optimizer's step: its own, and those of all optimizers. A class that only passes
    everything on to an optimizer may have none."""
    return (
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
        base_optimizer._global_optimizer_pre_hooks,
        base_optimizer._global_optimizer_post_hooks,
    )


def foreign_hook(modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> str | None:
    """A hook on one of these whose Python code would stop running in a replay, in words.

    Hooks that torch itself installs (weight norm, parametrizations) only compute tensors, which a capture takes in.
    """
    for module in modules:
        for kind in HOOKS:
            for hook in getattr(module, kind).values():
                if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith(_HARMLESS):
                    return f"a {kind.strip('_').removesuffix('s').replace('_', ' ')} on a {type(module).__name__}"
    for optimizer in optimizers:
        if any(step_hooks(optimizer)):
            return f"a step hook on its {type(optimizer).__name__}"
    return None


_HARMLESS = ("torch.nn.utils", "graphmod.")


@contextlib.contextmanager
def modules_called() -> Iterator[list[nn.Module]]:
    """Collects the modules that are called while it is active, each once."""
    called: dict[int, nn.Module] = {}

    def note(module: nn.Module, _: Any) -> None:
        if is_recording():  # this hook is seen by every thread
            called.setdefault(id(module), module)

    found: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()
        found += called.values()
