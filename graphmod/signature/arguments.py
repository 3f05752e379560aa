"""What a call does to its arguments beside computing with them: to the containers, to the tensors as objects, to
gradients outside (rule R8). A replay does none of that, so a call that does is never captured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from graphmod.signature.flattening import flatten
from graphmod.signature.signature import PLAIN_TENSORS, argument_names, attributes_of
from graphmod.trace.tensors import is_leaf, is_stale


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
    """The arguments of a call, to be compared with what they are after it. A context manager around the call.

    Args:
        names: those of the positional parameters, for messages.
    """

    def __init__(self, args: tuple, kwargs: dict, names: list[str]) -> None:
        self._named = [*zip(argument_names(args, names), args, strict=True), *kwargs.items()]
        self._before = list(self._take_apart())
        self._states = [list(map(_state, leaves)) for _, leaves, _ in self._before]
        self._beyond: set[tuple[int, int]] = set()  # which tensors' histories a backward inside went into
        self._handles: list[Any] = []

    def _take_apart(self) -> Iterator[tuple[Any, list[Tensor], dict]]:
        for _, value in self._named:
            leaves: list[Tensor] = []
            seen: dict[int, Any] = {}  # which keeps the containers alive, so that identities stay their own
            yield flatten(value, leaves, seen), leaves, seen

    def __enter__(self) -> Given:
        for index, (_, leaves, _) in enumerate(self._before):
            for number, tensor in enumerate(leaves):
                asked = type(tensor) in PLAIN_TENSORS and tensor.requires_grad and torch.is_grad_enabled()
                if asked and not is_stale(tensor):
                    note = functools.partial(self._went_beyond, (index, number))
                    node = get_gradient_edge(tensor).node  # held, because nobody else may hold that of a leaf
                    self._handles.append((node, node.register_prehook(note)))
        return self

    def _went_beyond(self, which: tuple[int, int], _: Any) -> None:
        self._beyond.add(which)

    def __exit__(self, *_: Any) -> None:
        for _, handle in self._handles:
            handle.remove()
        self._handles.clear()

    def returned(self, result: Any) -> str | None:
        """Which container that can be changed the call returns as it was given it, in words; None for none."""
        seen: dict[int, Any] = {}
        flatten(result, [], seen)
        for (name, _), (_, _, given) in zip(self._named, self._before, strict=True):
            if any(part.__class__ is tuple and key in given for key, part in seen.items()):
                return f"returns a container that its argument {name!r} holds; make it return a new one"
        return None

    def changed(self) -> str | None:
        """What the call did to an argument that no replay would do, in words to follow its name; None for nothing."""
        for index, ((name, _), before, after) in enumerate(
            zip(self._named, self._before, self._take_apart(), strict=True)
        ):
            if before[0] != after[0] or list(before[2]) != list(after[2]):
                return (
                    f"changes its argument {name!r}, which no replay does; make it return what is new, or change a copy"
                )
            for number, (tensor, old) in enumerate(zip(before[1], self._states[index], strict=True)):
                if (index, number) in self._beyond:
                    return (
                        f"runs a backward that goes on into its argument {name!r}, whose history is outside of the "
                        "graph; run that backward outside of the call, or pass no tensor that requires grad"
                    )
                now = _state(tensor)
                what = next((key for key in old if old[key] != now.get(key)), None)
                if what is not None:
                    return f"changes the {what} of its argument {name!r}, which no replay does"
        return None
