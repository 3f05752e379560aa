"""Random draws that a second run of the same code repeats without drawing.

To run a layer again with the random numbers it had takes the generator's state, which a graph can neither read nor set.
What the draws gave can be kept instead. What is kept is a forward's own affair, for its backward: so this file is the
one of this room whose code a recording does not look at (`reads/frames.py`).
"""

import contextlib
from typing import Any, Self

import torch
from torch import Tensor

from graphmod.torch_private import DispatchKey, KeyExcluded, TorchDispatchMode, tree_map_only
from graphmod.trace.dispatch import through_a_mode
from graphmod.trace.operations import draws, facts, tensors_in, written_tensors


def _apart(tensor: Tensor) -> Tensor:
    """A tensor of the same memory and version counter without the autograd graph, which leads to whoever keeps this:
    together they would never be freed."""
    with KeyExcluded(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Kept:
    """What one random operation gave: its results, and the content of the arguments it changed."""

    def __init__(self, op: Any, args: tuple, kwargs: dict, result: Any) -> None:
        self._op = op
        self._written = [tensor.clone() for tensor in written_tensors(facts(op), args, kwargs)]
        # What a factory makes gets another version counter on its way out, so that a change would go unnoticed.
        like = op._schema.name.endswith("_like")
        self._made = like or not any(True for _ in tensors_in((*args, *kwargs.values())))
        self._result = None
        returned = [value.alias_info for value in op._schema.returns]
        self._returns_written = bool(returned) and all(alias is not None and alias.is_write for alias in returned)
        if not self._returns_written:
            self._result = tree_map_only(Tensor, torch.clone if self._made else _apart, result)
        self._versions = [tensor._version for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return list(tensors_in((self._result,)))

    def again(self, op: Any, args: tuple, kwargs: dict) -> Any:
        if op is not self._op:
            raise RuntimeError(f"a layer that runs again calls {op} where it called {self._op}; it must do the same")
        if [tensor._version for tensor in self._tensors()] != self._versions:
            raise RuntimeError(f"the result of {op} was changed in place; a layer that runs again needs it as it was")
        targets = list(written_tensors(facts(op), args, kwargs))
        for target, value in zip(targets, self._written, strict=True):
            target.copy_(value)
        if self._returns_written:
            return targets[0] if len(targets) == 1 else tuple(targets)
        return tree_map_only(Tensor, torch.clone, self._result) if self._made else self._result


class _Draws(TorchDispatchMode):
    """Keeps what random operations give, or gives it again. A recorder goes on to see the operations."""

    def __init__(self, kept: list[_Kept], again: bool) -> None:
        super().__init__()
        self._kept, self._again, self._next = kept, again, 0
        self._around = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._next = 0  # a second backward over the same forward runs it yet again
        self._around.enter_context(through_a_mode())
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._around.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not draws(facts(func), args, kwargs):
            return func(*args, **kwargs)
        if self._again:
            self._next += 1
            return self._kept[self._next - 1].again(func, args, kwargs)
        result = func(*args, **kwargs)
        self._kept.append(_Kept(func, args, kwargs, result))
        return result


def kept_draws() -> tuple[_Draws, _Draws]:
    """Contexts for a first run, which keeps what is drawn, and for later runs of the same code, which get it again.

    The later ones raise RuntimeError when the code calls other random operations, or when it changed the result of one
    in place.
    """
    kept: list[_Kept] = []
    return _Draws(kept, again=False), _Draws(kept, again=True)
