"""What layers of transformers do beside giving their result: they collect, and fill mappings.

Forward hooks append router logits or attention weights to lists that a model keeps around the calls of its layers, and
layers of Gemma 3n and Gemma 4 put the keys and values that they share into a mapping that they are given. No replay
would do either. So a wrapped layer collects for itself, and fills a mapping of its own; both are among its results, and
are handed on after the call. Plain dicts are left alone: they are arguments whose change is refused.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from graphmod.signature.call import Call

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

    def extend(self, items: list) -> None:
        self.items += items

    def __len__(self) -> int:
        return self.before + len(self.items)


class Collector(dict[str, Any]):
    """Stands in for a model's collector while one of its layers runs, the same in each call, so that code which reads
    it reads the same.

    Args:
        counts: each kind with how many there are before; layers: those that are wanted, None for all.
    """

    def __init__(self, counts: tuple, layers: tuple | None) -> None:
        super().__init__({kind: _Found(count) for kind, count in counts})
        if layers is not None:
            self[_LAYERS] = frozenset(layers)

    def take(self) -> dict[str, list]:
        """What was collected since it was asked last, of each kind."""
        taken = {kind: found.items for kind, found in self.items() if kind != _LAYERS}
        for kind in taken:
            self[kind].items = []
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


def asked_of(layer: nn.Module, kwargs: dict[str, Any]) -> tuple | None:
    """What is asked of a layer beside its result, in constants: what to collect, as `Collector` takes it, or None, and
    the names of the arguments to fill. None if it is nothing."""
    variable = _variable()
    collector, collects = None if variable is None else variable.get(), None
    hooks = (hook for module in layer.modules() if module is not layer for hook in module._forward_hooks.values())
    if collector and any(getattr(hook, "__qualname__", "").startswith(_HOOK) for hook in hooks):
        layers = collector.get(_LAYERS)
        counts = tuple((kind, len(found)) for kind, found in collector.items() if kind != _LAYERS)
        collects = counts, None if layers is None else tuple(sorted(layers))
    fills = tuple([name for name, value in kwargs.items() if value.__class__ is UserDict])
    return None if collects is None and not fills else (collects, fills)


class WithMore:
    """Calls a layer's own code, and gives beside its result what it did beside giving that. One and the same where the
    same is asked.

    Args:
        layer: calls its code.
        asked: see `asked_of`.
    """

    def __init__(self, layer: Callable, asked: tuple) -> None:
        collects, self._fills = asked
        self._layer = layer
        self._collector = None if collects is None else Collector(*collects)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._layer)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple:
        """The layer's result, what it has collected, and of each mapping the items that are new or others, and the keys
        that are gone."""
        if self._collector is not None and _variable().get() is not self._collector:  # a backward runs it again
            with self._collector.active():
                return self(*args, **kwargs)
        filled = {name: UserDict(kwargs[name]) for name in self._fills}
        result = self._layer(*args, **{**kwargs, **filled})
        found = None if self._collector is None else _variable().get().take()
        changes = []
        for name, now in filled.items():
            before = kwargs[name]
            other = {key: value for key, value in now.items() if key not in before or before[key] is not value}
            changes.append((other, tuple(key for key in before if key not in now)))
        return result, found, changes

    def hand_on(self, run: Callable[[Call], tuple], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the layer and does to the caller's lists and mappings what its code would have done; returns its result.

        Args:
            run: makes a call in some way, from a graph for one.
        """
        items = {name: dict(kwargs[name]) for name in self._fills}
        with contextlib.nullcontext() if self._collector is None else self._collector.active():
            result, found, changes = run(Call(self, args, {**kwargs, **items}))
        for kind, more in (found or {}).items():
            _variable().get()[kind].extend(more)
        for name, (other, gone) in zip(self._fills, changes, strict=True):
            for key in gone:
                del kwargs[name][key]
            kwargs[name].update(other)
        return result
