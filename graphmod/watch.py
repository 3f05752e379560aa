"""The address watch (rule R8): is everything a graph reads by address still where it was, and still the same?

Owns holding the tensors that a graph reads without being given them, and a check that costs about 0.1 us a tensor.
May import `recorder` and `reach`.
"""

import contextlib
import operator
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from graphmod.reach import Reach
from graphmod.recorder import address

_data_ptr = Tensor.data_ptr
_requires_grad = operator.attrgetter("requires_grad")
_grad = operator.attrgetter("grad")
_SETTINGS = (int, float, bool, str, type(None))
_FIXED = {nn.Linear, nn.Embedding, nn.ModuleList, nn.ModuleDict, nn.Sequential}  # nothing to change after they are made
_NOT_SETTINGS = {"training", "_is_full_backward_hook", "call_super_init"}


class Watch:
    """Compares the present with the moment of a capture.

    Args:
        found: what the captured callable reaches.
        outside: address -> tensor, what the capture read without being given it; held from now on.
        parameters: leaf tensors whose `.grad` the capture may have read or set.
        grads: their gradients before the capture.
        backward: whether a backward pass ran inside the capture.
    """

    def __init__(
        self,
        found: Reach,
        outside: dict[int, Tensor],
        parameters: list[Tensor],
        grads: list[Tensor | None],
        backward: bool,
    ) -> None:
        self.held = list(outside.values())
        slots = [slot for slot in found.slots if address(slot[2]) in outside]
        named = {id(tensor) for container, _, tensor in slots if not isinstance(container, list)}
        slots = [s for s in slots if not (isinstance(s[0], list) and id(s[2]) in named)]
        plain = [slot for slot in slots if not isinstance(slot[0], types.CellType)]
        self._cells = [(cell, tensor) for cell, _, tensor in slots if isinstance(cell, types.CellType)]
        self._containers = [slot[0] for slot in plain]
        self._keys = [slot[1] for slot in plain]
        self._tensors = [slot[2] for slot in plain]
        everything = self._tensors + [tensor for _, tensor in self._cells]
        self._everything = everything
        self._addresses = list(map(_data_ptr, everything))
        self._parameters = [tensor for tensor in everything if isinstance(tensor, nn.Parameter) or tensor.requires_grad]
        self._flags = list(map(_requires_grad, self._parameters))
        self._watch_grads(parameters, grads, outside, backward)
        self._watch_settings(found)

    def _watch_grads(
        self, parameters: list[Tensor], grads: list[Tensor | None], outside: dict[int, Tensor], backward: bool
    ) -> None:
        """A gradient that was read must be the same. One that was absent must be absent again if a backward ran, and
        one that was there but never read had been cleared inside, and may be anything."""
        watched = [
            (p, g)
            for p, g in zip(parameters, grads, strict=True)
            if (backward if g is None else address(g) in outside)
        ]
        self._with_grads = [p for p, _ in watched]
        self._grads = [g for _, g in watched]
        self._grad_addresses = [0 if g is None else g.data_ptr() for g in self._grads]

    def _watch_settings(self, found: Reach) -> None:
        """Numbers and flags that live in modules and optimizers, which a graph froze."""
        self._setting_of: list[dict] = []
        self._names_of: list[tuple[str, ...]] = []
        for module in found.modules:
            names = [n for n, v in module.__dict__.items() if type(v) in _SETTINGS and n not in _NOT_SETTINGS]
            self._add_settings(module.__dict__, [] if type(module) in _FIXED else names)
        for optimizer in found.optimizers:
            for group in optimizer.param_groups:
                self._add_settings(group, [n for n, v in group.items() if n != "params" and not isinstance(v, Tensor)])
        self._getters = [operator.itemgetter(*names) for names in self._names_of]
        self._settings = list(map(operator.call, self._getters, self._setting_of))

    def _add_settings(self, owner: dict, names: list[str]) -> None:
        if names:
            self._setting_of.append(owner)
            self._names_of.append(tuple(names))

    def moved(self) -> str | None:
        """What is no longer as it was, in words; None when nothing changed."""
        try:
            if not all(map(operator.is_, map(operator.getitem, self._containers, self._keys), self._tensors)):
                return "a parameter, buffer or state tensor is another tensor than when it was captured"
            if list(map(operator.call, self._getters, self._setting_of)) != self._settings:
                return self._changed_setting()
        except (KeyError, IndexError):
            return "a tensor or setting it reads is no longer where it was"
        if list(map(_data_ptr, self._everything)) != self._addresses:
            return "a tensor it reads has moved to another address"
        if list(map(_requires_grad, self._parameters)) != self._flags:
            return "requires_grad of a parameter changed"
        for cell, tensor in self._cells:
            if _contents(cell) is not tensor:
                return "a variable it closes over is another tensor than when it was captured"
        return self._moved_grads() if self._with_grads else None

    def _changed_setting(self) -> str:
        for names, owner, before in zip(self._names_of, self._setting_of, self._settings, strict=True):
            olds = before if len(names) > 1 else (before,)
            for name, old in zip(names, olds, strict=True):
                if owner[name] != old:
                    return f"{name!r} was {old!r} when it was captured and is {owner[name]!r}"
        return "a setting it reads changed"

    def _moved_grads(self) -> str | None:
        now = list(map(_grad, self._with_grads))
        if all(map(operator.is_, now, self._grads)):
            return None
        if [0 if g is None else g.data_ptr() for g in now] != self._grad_addresses:
            return "the gradients it accumulates into or reads are others than when it was captured"
        return None


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_backward_hooks = operator.attrgetter("_backward_hooks")
_post_accumulate = operator.attrgetter("_post_accumulate_grad_hooks")


class HookWatch:
    """Notices hooks that come or go on the modules that ran inside a capture, and on the parameters it differentiates.

    Args:
        modules: the modules that ran.
        parameters: the leaf tensors whose gradients the graph computes.
    """

    def __init__(self, modules: list[nn.Module], parameters: list[Tensor]) -> None:
        self._dicts = [getattr(module, kind) for module in modules for kind in _HOOKS]
        self._counts = list(map(len, self._dicts))
        self._none = not any(self._counts)
        self._free = [p for p in parameters if not has_gradient_hooks(p)]
        self._hooked = [p for p in parameters if has_gradient_hooks(p)]

    def changed(self) -> str | None:
        if any(self._dicts) if self._none else list(map(len, self._dicts)) != self._counts:
            return "hooks were added to or removed from a part of it"
        if any(map(_backward_hooks, self._free)) or any(map(_post_accumulate, self._free)):
            return "a gradient hook was added to a parameter"
        if self._hooked and not all(map(has_gradient_hooks, self._hooked)):
            return "a gradient hook was removed from a parameter"
        return None


def has_gradient_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def foreign_hook(modules: list[nn.Module]) -> str | None:
    """A hook on one of these modules whose Python code would stop running in a replay, in words.

    Hooks that torch itself installs (weight norm, parametrizations) only compute tensors, which a capture takes in.
    """
    for module in modules:
        for kind in _HOOKS:
            for hook in getattr(module, kind).values():
                if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith(_HARMLESS):
                    return f"a {kind.strip('_').removesuffix('s').replace('_', ' ')} on a {type(module).__name__}"
    return None


_HARMLESS = ("torch.nn.utils", "graphmod.")


@contextlib.contextmanager
def modules_called() -> Iterator[list[nn.Module]]:
    """Collects the modules that are called while it is active, each once."""
    called: dict[int, nn.Module] = {}

    def note(module: nn.Module, _: Any) -> None:
        called.setdefault(id(module), module)

    found: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()
        found += called.values()
