"""Finds what a callable can reach: modules, parameters, optimizers, and the places that hold its tensors.

The address watch asks it where the tensors that a graph reads by address live, so that a tensor put in their place is
noticed. Imports nothing of graphmod.
"""

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_STOP = (type, types.ModuleType, torch.dtype, torch.device, torch.Generator, str, bytes, int, float, bool, complex)
_MOST = 200_000  # objects looked at; beyond it a callable holds a data set, not a model


@dataclass
class Reach:
    """What was found. `slots` are `(container, key, tensor)` with `container[key] is tensor`."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    slots: list[tuple[Any, Any, Tensor]] = field(default_factory=list)

    def in_place(self) -> bool:
        """Whether every tensor is still where it was found."""
        return all(_get(container, key) is tensor for container, key, tensor in self.slots)

    def parameters(self) -> list[Tensor]:
        """The distinct leaf tensors that may collect a gradient."""
        found = {id(t): t for _, _, t in self.slots if t.is_leaf and (t.requires_grad or isinstance(t, nn.Parameter))}
        return list(found.values())


def _globals_of(function: types.FunctionType) -> Iterator[tuple[Any, Any]]:
    names = set(function.__code__.co_names)
    for constant in function.__code__.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(constant.co_names)
    for name in sorted(names):
        if name in function.__globals__:
            yield function.__globals__, name


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """The `(container, key)` pairs through which an object holds others. A class that holds machinery of its own
    besides what it wraps says with `_reach_through` which attributes lead on."""
    through = getattr(type(value), "_reach_through", None)
    if through is not None:
        yield from ((value.__dict__, name) for name in through)
    elif isinstance(value, nn.Module):
        yield from ((value._parameters, key) for key in value._parameters)
        yield from ((value._buffers, key) for key in value._buffers)
        yield from ((value._modules, key) for key in value._modules)
        skip = {"_parameters", "_buffers", "_modules"}
        yield from ((value.__dict__, key) for key in list(value.__dict__) if key not in skip)
    elif isinstance(value, types.FunctionType):
        yield from ((cell, None) for cell in value.__closure__ or ())
        yield from _globals_of(value)
        if value.__defaults__:
            yield from ((value.__defaults__, index) for index in range(len(value.__defaults__)))
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            yield value.__dict__, "__wrapped__"
    elif isinstance(value, types.MethodType):
        yield (value.__self__, value.__func__), 0
        yield (value.__self__, value.__func__), 1
    elif isinstance(value, functools.partial):
        yield (value.func,), 0
        yield from ((value.args, index) for index in range(len(value.args)))
        yield from ((value.keywords, key) for key in value.keywords)
    elif isinstance(value, dict):
        yield from ((value, key) for key in list(value))
    elif isinstance(value, (list, tuple)):
        yield from ((value, index) for index in range(len(value)))
    elif hasattr(value, "__dict__"):
        yield from ((value.__dict__, key) for key in list(value.__dict__))


def _get(container: Any, key: Any) -> Any:
    try:
        return container.cell_contents if isinstance(container, types.CellType) else container[key]
    except (KeyError, IndexError, ValueError):
        return None


def _holds_nothing(value: Any) -> bool:
    """Library functions, and the configuration objects of transformers, which every layer points to."""
    if isinstance(value, types.FunctionType):
        return (value.__module__ or "").partition(".")[0] in ("torch", "transformers", "graphmod")
    return any(base.__name__ in ("PreTrainedConfig", "PretrainedConfig") for base in type(value).__mro__)


def reach(*roots: Any) -> Reach:
    """Walks everything that `roots` hold: closures, the globals a function names, attributes, containers."""
    found = Reach()
    seen: set[int] = set()
    keep: list[Any] = []  # `seen` holds identities, so nothing may die during the walk
    queue: list[Any] = list(roots)
    while queue and len(seen) < _MOST:
        value = queue.pop()
        if value is None or isinstance(value, _STOP) or isinstance(value, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        if isinstance(value, nn.Module) and not hasattr(type(value), "_reach_through"):
            found.modules.append(value)
        elif isinstance(value, torch.optim.Optimizer):
            found.optimizers.append(value)
        for container, key in _places(value):
            item = _get(container, key)
            if isinstance(item, Tensor):
                found.slots.append((container, key, item))
            elif item is not None and not isinstance(item, _STOP) and not _holds_nothing(item):
                queue.append(item)
    return found
