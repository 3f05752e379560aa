"""One note: what was at a place when code first looked there."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.guards.contents import CONTAINERS, content, is_plain, same, same_content
from graphmod.guards.lookup import Kind, Place, Slots, dict_of, get
from graphmod.torch_private import weak_reference


def geometry(tensor: Tensor) -> tuple:
    """All that a graph freezes about a tensor it reads by address."""
    if tensor.layout is not torch.strided:
        return (id(tensor), tensor.layout)
    try:
        where = tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        where = 0
    return (where, tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad)


_HELD = (nn.Module, type, *CONTAINERS, nn.Parameter, types.ModuleType)


def _held(value: Any) -> tuple[Any, bool]:
    """The value, or a weak reference to it and True: a note keeps nothing alive that the call made."""
    if is_plain(value) or isinstance(value, _HELD):
        return value, False
    try:
        return weak_reference(value), True
    except TypeError:
        return value, False


class Note:
    """What was at one place when the call first looked there.

    Attributes:
        key: attribute name, key or index.
        kind: the class that the owner had.
        geometry: of a tensor.
        items: of a container.
        where: code and line that looked.
    """

    __slots__ = (
        "_container",
        "_owner",
        "_value",
        "_view",
        "_weak_owner",
        "_weak_value",
        "geometry",
        "items",
        "key",
        "kind",
        "where",
    )

    def __init__(self, owner: Any, place: Place, where: tuple) -> None:
        self.key, self.where, self.kind = place.key, where, type(owner)
        self._owner, self._weak_owner = _held(owner)
        self._container = place.container
        self._view = None  # what makes the container of the object, which would keep that alive
        if self._weak_owner and place.container is dict_of(owner):
            self._container, self._view = None, dict_of
        elif self._weak_owner and isinstance(place.container, (Kind, Slots)):
            self._container, self._view = None, type(place.container)
        self._value, self._weak_value = _held(place.value)
        self.geometry = geometry(place.value) if isinstance(place.value, Tensor) else None
        self.items = content(place.value) if isinstance(place.value, CONTAINERS) else None

    @property
    def owner(self) -> Any:
        """The object whose place it is; None when that is gone."""
        return self._owner() if self._weak_owner else self._owner

    @property
    def container(self) -> Any:
        return self._container if self._view is None else self._view(self.owner)

    def own(self) -> dict | None:
        """The attributes of the owner, where the place is among them."""
        held = dict_of(self.owner)
        return held if self._view is dict_of or self._container is held else None

    def before(self) -> Any:
        """What was there; None when that is gone."""
        return self._value() if self._weak_value else self._value

    @property
    def gone(self) -> bool:
        """Whether what was there is no more."""
        return self._weak_value and self._value() is None

    def now(self) -> Any:
        return get(self.container, self.key)

    def changed(self) -> bool:
        """Whether the place holds another value than at first. A container in the place of an equal one is none."""
        before, now = self.before(), self.now()
        if before is now:
            return self.geometry is not None and geometry(now) != self.geometry
        if self.items is not None and type(before) is type(now):
            return not same_content(self.items, content(now) or ())
        return not same(before, now)
