"""What transformers collects from inside a layer: router logits, attention weights.

Forward hooks append it to lists that a model keeps around the calls of its layers, which no replay would do. So a
wrapped layer collects for itself, what it found is among its results, and it is appended after the call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, KeysView
from typing import Any

from torch import nn

ARGUMENT = "graphmod_collects"  # in which a wrapped layer is told what to collect
_LAYERS = "_hidden_states_layers"  # in the collector, beside what is collected: which layers are wanted
_HOOK = "install_output_capuring_hook."


def _variable() -> Any:
    """Holds the collector of the model that runs; None without such a library."""
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


class _Found:
    """Stands in for the list of one kind: `before` lie in it already."""

    __slots__ = ("before", "items")

    def __init__(self, before: int) -> None:
        self.before = before
        self.items: list[Any] = []

    def append(self, item: Any) -> None:
        self.items.append(item)

    def __len__(self) -> int:
        return self.before + len(self.items)


class Collector:
    """Stands in for a model's collector while one of its layers runs, the same in each call, so that code which reads
    it reads the same.

    Args:
        asked: as `asked_of` gives it.
    """

    __slots__ = ("_found", "_layers")

    def __init__(self, asked: tuple) -> None:
        counts, layers = asked
        self._found = {kind: _Found(count) for kind, count in counts}
        self._layers = None if layers is None else frozenset(layers)

    def keys(self) -> KeysView[str]:
        return self._found.keys()

    def __getitem__(self, kind: str) -> _Found:
        return self._found[kind]

    def get(self, name: str) -> frozenset | None:
        return self._layers if name == _LAYERS else None

    def take(self) -> tuple[list, ...]:
        """What was collected since it was asked last, of each kind."""
        taken = tuple(found.items for found in self._found.values())
        for found in self._found.values():
            found.items = []
        return taken

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Hooks append to this one. Afterwards what they appended is gone, if nobody has taken it."""
        variable = _variable()
        token = variable.set(self)
        try:
            yield
        finally:
            variable.reset(token)
            self.take()


def asked_of(layer: nn.Module) -> tuple | None:
    """What is to be collected inside a layer, in constants: each kind with how many there are before, and which layers
    are wanted. None if nothing is."""
    variable = _variable()
    collector = None if variable is None else variable.get()
    if not collector or not any(_collects(module) for module in layer.modules() if module is not layer):
        return None
    counts = tuple((kind, len(found)) for kind, found in collector.items() if kind != _LAYERS)
    layers = collector.get(_LAYERS)
    return counts, None if layers is None else tuple(sorted(layers))


def _collects(module: nn.Module) -> bool:
    return any(getattr(hook, "__qualname__", "").startswith(_HOOK) for hook in module._forward_hooks.values())


def take() -> tuple[list, ...]:
    """What the layer that runs has collected."""
    return _variable().get().take()


def hand_on(asked: tuple, found: tuple[list, ...]) -> None:
    """Appends what a layer collected to the lists around it."""
    collector = _variable().get()
    for (kind, _), items in zip(asked[0], found, strict=True):
        collector[kind].extend(items)
