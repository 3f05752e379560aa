"""What will be guarded, in words: the values that a recorded call read, by the kind of object that holds them."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.check.report import Guarded
from graphmod.guards.changes import line_of, tensor_rate
from graphmod.guards.guards import Guards
from graphmod.guards.library import is_users
from graphmod.guards.values import Cell, describe, dict_of, is_plain


class Kinds:
    """Takes in guards, and sorts what they compare."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple, tuple[str, str, str]]] = {}
        self._parameters: dict[int, Tensor] = {}
        self._tensors: dict[int, Tensor] = {}
        self._modules: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._code: set[tuple] = set()
        self._references: set[tuple] = set()

    def add(self, guards: Guards) -> None:
        """Takes in the guards of one recorded call."""
        self._optimizers.update((id(one), one) for one in guards.optimizers)
        self._modules.update((id(one), one) for one in guards.modules)
        for tensor in guards.tensors:
            (self._parameters if isinstance(tensor, nn.Parameter) else self._tensors)[id(tensor)] = tensor
        groups = {id(group): one for one in guards.optimizers for group in one.param_groups}
        told = list(guards.told())
        holders = {id(dict_of(owner)): owner for owner, _, _, _ in told if not isinstance(owner, (dict, type))}
        for owner, key, value, where in told:
            owner = holders.get(id(owner), owner) if key is None else owner
            held = dict_of(owner) if key is None and not isinstance(owner, dict) else owner
            if key is None and isinstance(held, dict) and value is None:
                for name, item in held.items():
                    if isinstance(name, str) and is_plain(item):
                        self._set(_kind(owner, groups), (id(owner), name), name, item, where)
                continue
            place = (id(owner), str(key))
            if callable(value) and not isinstance(value, nn.Module):
                self._code.add(place)
            elif not is_plain(value) or isinstance(key, Tensor) or _is_torchs(owner):
                self._references.add(place)
            elif isinstance(key, (str, int)):
                self._set(_kind(owner, groups), place, str(key), value, where)
            elif isinstance(owner, (Cell, types.CellType)):
                self._set(_kind(owner, groups), place, "a variable", value, where)

    def _set(self, kind: str, place: tuple, name: str, value: Any, where: tuple) -> None:
        self._values.setdefault(kind, {})[place] = (name, describe(value), line_of(where))

    def told(self) -> list[Guarded]:
        """What is compared, in the order in which people look for it."""
        found = []
        for optimizer in self._optimizers.values():
            found += _of_optimizer(optimizer, self._values.pop(_settings_of(optimizer), {}).values())
        last = self._values.pop(_OF_LIBRARIES, None)
        others = {**self._values, **({_OF_LIBRARIES: last} if last else {})}
        for kind, values in others.items():
            found.append(Guarded(kind, len(values), list(values.values())))
        if self._modules:
            found.append(
                Guarded(_many(len(self._modules), "module", "their classes, modes and hooks"), len(self._modules))
            )
        for tensors, noun in ((self._parameters, "parameter"), (self._tensors, "other tensor")):
            if tensors:
                found.append(Guarded(_many(len(tensors), noun, "by address, shape and strides"), len(tensors)))
        others = len(self._references | self._code)
        if others:
            found.append(Guarded(_many(others, "reference", "to objects and functions, by identity"), others))
        return found


def _many(count: int, noun: str, how: str) -> str:
    return f"{noun}{'' if count == 1 else 's'} ({how})"


def _is_torchs(owner: Any) -> bool:
    return isinstance(owner, type) and owner.__module__.partition(".")[0] == "torch"


def _settings_of(optimizer: torch.optim.Optimizer) -> str:
    return f"settings of {type(optimizer).__name__}"


def _kind(owner: Any, groups: dict[int, torch.optim.Optimizer]) -> str:
    if id(owner) in groups:
        return _settings_of(groups[id(owner)])
    if isinstance(owner, dict):
        if any(owner is one.defaults for one in groups.values()):
            return "defaults of optimizers"
        name = dict.get(owner, "__name__") if dict.__contains__(owner, "__builtins__") else None
        return _of_module(name) if isinstance(name, str) else "items of dicts"
    if isinstance(owner, list):
        return "items of lists"
    if isinstance(owner, (Cell, types.CellType)):
        return "variables of closures"
    if isinstance(owner, type):
        return f"class attributes of {owner.__name__}" if _is_users(owner.__module__) else _OF_LIBRARIES
    if inspect.ismodule(owner):
        return _of_module(owner.__name__)
    return f"settings of {type(owner).__name__}"


_OF_LIBRARIES = "global variables and class attributes of libraries"


def _of_module(name: str) -> str:
    return f"global variables of {name}" if _is_users(name) else _OF_LIBRARIES


def _is_users(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_users(file)


def _of_optimizer(optimizer: torch.optim.Optimizer, values: Iterable[tuple]) -> list[Guarded]:
    values = sorted(values, key=lambda one: one[0] != "lr")
    rates = [group.get("lr") for group in optimizer.param_groups]
    number = next((rate for rate in rates if isinstance(rate, float)), None)
    note, driven = "", False
    if number is not None and any(name == "lr" for name, _, _ in values):
        driven = hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")
        note = "the rate is a Python number: when it changes, the step is recorded and captured again. "
        if driven:
            note += "A scheduler changes it, so that the step would be eager most of the time: "
        else:
            note += "Under a scheduler, "
        note += tensor_rate(optimizer)
    count = len(values)
    return [Guarded(_settings_of(optimizer), count, values, note, driven)] if count else []
