"""Tensors among the arguments and results of an operation, which may lie in lists and tuples."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def each_tensor(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with each tensor in it replaced by what `change` makes of it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([each_tensor(one, change) for one in value])
    return value


def is_stale(tensor: Tensor) -> bool:
    """Whether a tensor is a view that was made under `no_grad`, and whose memory was changed with gradients since:
    autograd refuses whoever asks for its history."""
    try:
        return tensor.is_leaf is None
    except RuntimeError:
        return True


def is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is one, so that it may collect a gradient."""
    return not is_stale(tensor) and tensor.is_leaf
