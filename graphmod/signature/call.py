"""One call as a value: what is called, with what, and what that gave. Arguments and result are taken apart once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from graphmod.signature.flattening import flatten
from graphmod.signature.signature import parameter_names


class Flat:
    """A value that was taken apart.

    Attributes:
        value: the value.
        leaves: the tensors in it, each once, in order.
        structure: all else of it, hashable and comparable.
        seen: the identities of its tensors and of the containers in it; see `flatten`.
    """

    __slots__ = ("leaves", "seen", "structure", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.leaves: list[Tensor] = []
        self.seen: dict[int, Any] = {}
        self.structure = flatten(value, self.leaves, self.seen)

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that have a backward."""
        return [tensor for tensor in self.leaves if tensor.requires_grad and not tensor.is_leaf]


class Call:
    """One call of a wrapped callable.

    Attributes:
        function: what is called.
        args, kwargs: its arguments.
        result: what it gave, once it was made without a graph and somebody asks for more than to return that.
    """

    __slots__ = ("_flat", "_leaves", "args", "function", "kwargs", "result")

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self._leaves: list[Tensor] | None = None
        self._flat: Flat | None = None
        self.result: Any = None

    def __call__(self) -> Any:
        """Makes it."""
        return self.function(*self.args, **self.kwargs)

    @property
    def flat(self) -> Flat:
        """Its arguments, `(args, kwargs)`, taken apart."""
        if self._flat is None:
            self._flat = Flat((self.args, self.kwargs))
        return self._flat

    @property
    def leaves(self) -> list[Tensor]:
        """Its tensor arguments, in the order of `flatten`; set by whoever knows them without taking all apart."""
        return self.flat.leaves if self._leaves is None else self._leaves

    @leaves.setter
    def leaves(self, leaves: list[Tensor]) -> None:
        self._leaves = leaves

    @property
    def names(self) -> list[str]:
        """Those of the positional parameters."""
        return parameter_names(self.function)
