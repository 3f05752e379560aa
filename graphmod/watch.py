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

_requires_grad = operator.attrgetter("requires_grad")
_grad = operator.attrgetter("grad")
_SETTINGS = (int, float, bool, str, type(None))
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
        self._addresses = list(map(Tensor.data_ptr, everything))
        self._flags = list(map(_requires_grad, everything))
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
        self._setting_name: list[str] = []
        for module in found.modules:
            for name, value in module.__dict__.items():
                if type(value) in _SETTINGS and name not in _NOT_SETTINGS:
                    self._setting_of.append(module.__dict__)
                    self._setting_name.append(name)
        for optimizer in found.optimizers:
            for group in optimizer.param_groups:
                for name, value in group.items():
                    if name != "params" and not isinstance(value, Tensor):
                        self._setting_of.append(group)
                        self._setting_name.append(name)
        self._settings = list(map(operator.getitem, self._setting_of, self._setting_name))

    def moved(self) -> str | None:
        """What is no longer as it was, in words; None when nothing changed."""
        try:
            now = list(map(operator.getitem, self._containers, self._keys))
            if not all(map(operator.is_, now, self._tensors)):
                index = next(i for i, t in enumerate(now) if t is not self._tensors[i])
                return f"{self._keys[index]!r} is another tensor than when it was captured"
            settings = list(map(operator.getitem, self._setting_of, self._setting_name))
        except (KeyError, IndexError):
            return "a tensor or setting it reads is no longer where it was"
        if settings != self._settings:
            index = next(i for i, s in enumerate(settings) if s != self._settings[i])
            name = self._setting_name[index]
            return f"{name!r} was {self._settings[index]!r} when it was captured and is {settings[index]!r}"
        for cell, tensor in self._cells:
            if _contents(cell) is not tensor:
                return "a variable it closes over is another tensor than when it was captured"
        if list(map(Tensor.data_ptr, self._everything)) != self._addresses:
            return "a tensor it reads has moved to another address"
        if list(map(_requires_grad, self._everything)) != self._flags:
            return "requires_grad of a parameter changed"
        return self._moved_grads()

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
_hooks = operator.attrgetter("_forward_hooks", "_forward_pre_hooks")


def hook_counts(modules: list[nn.Module]) -> list[tuple]:
    """How many forward hooks and forward pre-hooks each module has."""
    return [(len(after), len(before)) for after, before in map(_hooks, modules)]


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
