"""Operations on tensors that stand for others (DTensor), where the key that recorders see operations through lies above
the key of such classes: up to torch 2.12.

There PyTorch calls no fallback for them, only a kernel of the operation itself, and leaves what their class runs
unseen. So each operation is given a kernel for that key, which has the class run it under a mode that shows what that
runs.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_NAMESPACES = ("aten", "c10d", "_c10d_functional", "fsdp")
_FUNCTIONAL = "torch.distributed._functional_collectives"
_libraries: list[Any] = []  # the registrations, which live as long as these do


@functools.cache
def register(key: str, plain: Callable, standing_for_others: Callable) -> None:
    """Registers a kernel for each operation.

    Args:
        key: name of the dispatch key.
        plain: called with `(op, *args, **kwargs)` of operations on tensors with memory.
        standing_for_others: likewise, of those on tensors without.
    """
    libraries = {name: torch.library.Library(name, "IMPL") for name in _NAMESPACES}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace in libraries:
            libraries[namespace].impl(rest, _kernel(namespace, rest, plain, standing_for_others), key)
    _libraries.extend(libraries.values())


def _kernel(namespace: str, name: str, plain: Callable, standing_for_others: Callable) -> Callable:
    packet, _, overload = name.partition(".")

    @functools.cache
    def op() -> Any:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        return (standing_for_others if any_stands(args, kwargs) else plain)(op(), *args, **kwargs)

    return run


def any_stands(args: tuple, kwargs: dict) -> bool:
    """Whether an argument is a tensor that stands for others, one level of lists deep."""
    return any(
        is_traceable_wrapper_subclass(one)
        for value in (*args, *kwargs.values())
        for one in (value if isinstance(value, (list, tuple)) else (value,))
    )


def of_ranks() -> tuple:
    """The classes of tensors that several ranks hold together."""
    modules = {"DTensor": "torch.distributed.tensor", "AsyncCollectiveTensor": _FUNCTIONAL}
    return tuple(getattr(sys.modules[place], name) for name, place in modules.items() if place in sys.modules)
