"""One call as a value: what is called, with what, and what that gave. Arguments and result are taken apart once.

Owns also what a call does to its arguments beside computing with them: to the containers, to the tensors as objects, to
gradients outside (rule R8). A replay does none of that, so a call that does is never captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from graphmod.signature.flattening import OBJECTS, Constant, flatten
from graphmod.signature.signature import PLAIN_TENSORS, argument_names, attributes_of, parameter_names
from graphmod.trace.operations import is_leaf, is_stale


class Flat:
    """A value that was taken apart.

    Args:
        bound: values that go with it, of which objects are taken apart too.
        kept: containers that count by identity where they are in it, and are not taken apart.

    Attributes:
        value: the value, or a tuple of it and of those.
        leaves: the tensors in it, each once, in order.
        structure: all else of it, hashable and comparable.
        seen: the identities of its tensors and of the containers in it; see `flatten`.
    """

    __slots__ = ("kept", "leaves", "seen", "structure", "value")

    def __init__(self, value: Any, bound: Sequence[Any] = (), kept: Sequence[Any] = ()) -> None:
        self.value = (value, *bound) if bound else value
        self.kept = kept
        self.leaves: list[Tensor] = []
        self.seen: dict[int, Any] = {id(one): (Constant(one), one) for one in kept}
        self.structure: Any = flatten(value, self.leaves, self.seen)
        if bound:
            self.seen[OBJECTS] = None
            self.structure = (tuple, self.structure, *(flatten(one, self.leaves, self.seen) for one in bound))

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
        oldest: the least sequence number that a node of autograd's has that it made, if somebody asks for that.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.result: Any = None
        self.oldest = 0

    def __call__(self) -> Any:
        """Makes it."""
        return self.function(*self.args, **self.kwargs)

    @functools.cached_property
    def flat(self) -> Flat:
        """Its arguments, `(args, kwargs)`, taken apart."""
        return Flat((self.args, self.kwargs))

    @functools.cached_property
    def leaves(self) -> list[Tensor]:
        """Its tensor arguments, in the order of `flatten`; set by whoever knows them without taking all apart."""
        return self.flat.leaves

    @property
    def names(self) -> list[str]:
        """Those of the positional parameters."""
        return parameter_names(self.function)


# -- what a call does to its arguments ---------------------------------------------------------------------------------


def _state(tensor: Tensor) -> dict[str, Any]:
    """What a tensor is as an object, its values apart. Those of other classes answer as their code likes."""
    if type(tensor) not in PLAIN_TENSORS:
        return {}
    found: dict[str, Any] = {
        "requires_grad": tensor.requires_grad,
        "class": tensor.__class__,
        "dtype": tensor.dtype,
        "device": tensor.device,
        "attributes": {name: id(value) for name, value in attributes_of(tensor).items()},
        "retain_grad": tensor.retains_grad,
        "hooks": [*(tensor._backward_hooks or ()), *(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())],
    }
    if tensor.layout is torch.strided and not tensor.is_nested:
        found["shape"] = (tensor.size(), tensor.stride(), tensor.storage_offset())
        found["memory"] = tensor.data_ptr() if tensor.device.type != "meta" and not tensor._is_zerotensor() else 0
    if is_leaf(tensor):
        grad = tensor.grad
        found["gradient"] = None if grad is None else (id(grad), 0 if grad.is_inference() else grad._version)
    return found


class Given:
    """The arguments of a call, to be compared with what they are after it. A context manager around the call."""

    def __init__(self, call: Call) -> None:
        self._call, self._before = call, call.flat
        self._states = list(map(_state, self._before.leaves))
        self._beyond: set[int] = set()  # which tensors' histories a backward inside went into
        self._handles: list[Any] = []

    def __enter__(self) -> Given:
        for index, tensor in enumerate(self._before.leaves):
            asked = type(tensor) in PLAIN_TENSORS and tensor.requires_grad and torch.is_grad_enabled()
            if asked and not is_stale(tensor):
                note = functools.partial(lambda which, _: self._beyond.add(which), index)
                node = get_gradient_edge(tensor).node  # held, because nobody else may hold that of a leaf
                self._handles.append((node, node.register_prehook(note)))
        return self

    def name(self, identity: int) -> str:
        """The name of the argument that holds an object."""
        args, kwargs = self._call.args, self._call.kwargs
        named = [*zip(argument_names(args, self._call.names), args, strict=True), *kwargs.items()]
        return next((name for name, value in named if identity in Flat(value).seen), "")

    def __exit__(self, *_: Any) -> None:
        for _, handle in self._handles:
            handle.remove()
        self._handles.clear()

    def returned(self, result: Flat) -> str | None:
        """Which container that can be changed the call returns as it was given it, in words; None for none."""
        given = self._before.seen
        held = next((key for key, part in result.seen.items() if part.__class__ is tuple and key in given), None)
        if held is None:
            return None
        return f"returns a container that its argument {self.name(held)!r} holds; make it return a new one"

    def changed(self) -> str | None:
        """What the call did to an argument that no replay would do, in words to follow its name; None for nothing."""
        before, after = self._before, Flat((self._call.args, self._call.kwargs))
        if before.structure != after.structure or list(before.seen) != list(after.seen):
            name = self._changed_argument(after)
            return f"changes its argument {name!r}, which no replay does; make it return what is new, or change a copy"
        for index, (tensor, old) in enumerate(zip(before.leaves, self._states, strict=True)):
            if index in self._beyond:
                return (
                    f"runs a backward that goes on into its argument {self.name(id(tensor))!r}, whose history is "
                    "outside of the graph; run that backward outside of the call, or pass no tensor that requires grad"
                )
            now = _state(tensor)
            what = next((key for key in old if old[key] != now.get(key)), None)
            if what is not None:
                return f"changes the {what} of its argument {self.name(id(tensor))!r}, which no replay does"
        return None

    def _changed_argument(self, after: Flat) -> str:
        """The name of the first argument that is not made of what it was."""
        names = [*argument_names(self._call.args, self._call.names), *self._call.kwargs]
        old, new = ([*one.structure[1][1:], *one.structure[2][2:]] for one in (self._before, after))
        changed = next((name for name, *parts in zip(names, old, new, strict=True) if parts[0] != parts[1]), None)
        if changed is not None:
            return changed
        return self.name(next(now for now, then in zip(after.seen, self._before.seen, strict=True) if now != then))
