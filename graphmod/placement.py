"""Where a captured backward leaves the parameters' gradients: in buffers outside the pool, written without a copy.

The operation whose result becomes a gradient is found by running the backward once under a recorder; at capture that
operation computes straight into the buffer. So the gradients need no extra kernel, no replay of another graph can touch
them, and all graphs of a parameter (other shapes, other microbatches) share one buffer. May import `recorder`,
`overloads` and `tape`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from graphmod.overloads import writes_directly
from graphmod.recorder import Recorder, address

if TYPE_CHECKING:
    from graphmod.tape import Group

Gradients = list[tuple[Tensor, Tensor | None]]  # (parameter, its gradient)


class Place(NamedTuple):
    """The operation that makes a gradient: its index in the trace and the layout of its result."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]


def find_places(backward: Callable[[], Gradients], on_gpu: bool) -> list[Place | None]:
    """Runs `backward` and tells, per parameter, which operation made its gradient; None where nothing can compute it
    straight into a buffer (no gradient, no such overload, a result that is only part of its memory)."""
    made: dict[int, tuple[Any, Place]] = {}

    def after(op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        index = len(recorder.trace) - 1
        for tensor in fresh:
            made[address(tensor)] = (op, Place(index, tensor.size(), tensor.stride()))

    recorder = Recorder(refuse=False, on_gpu=on_gpu, after=after)
    with recorder:
        gradients = backward()
    places: list[Place | None] = []
    taken: set[int] = set()
    for parameter, grad in gradients:
        op, place = made.get(address(grad), (None, None)) if grad is not None else (None, None)
        whole = (
            place is not None
            and grad.untyped_storage().nbytes() == grad.nbytes
            and grad.stride() == parameter.stride()
            and place.size.numel() == grad.numel()
            and writes_directly(op)
        )
        places.append(place if whole and place.index not in taken else None)
        if whole:
            taken.add(place.index)
    recorder.finish()
    return places


def buffers_for(group: Group, parameters: list[Tensor]) -> list[Tensor]:
    """The gradient buffer of each parameter, made where it has none."""
    buffers = []
    for parameter in parameters:
        buffer = group.gradient_buffer(parameter)
        if buffer is None or (buffer.size(), buffer.dtype, buffer.device) != (
            parameter.size(),
            parameter.dtype,
            parameter.device,
        ):
            buffer = torch.empty_like(parameter, requires_grad=False)
            group.keep_gradient_buffer(parameter, buffer)
        buffers.append(buffer)
    return buffers


def store(gradients: Gradients, buffers: list[Tensor]) -> tuple[Gradients, Gradients, int]:
    """Inside a capture: brings the gradients to where they stay.

    Returns:
        `(parameter, buffer)` pairs that are written, pairs that are added to, and how many buffers needed a copy.
    """
    written, accumulated, parts = [], [], []
    copies = 0
    for (parameter, grad), buffer in zip(gradients, buffers, strict=True):
        if grad is None:
            continue
        if parameter.grad is not None:
            accumulated.append((parameter, parameter.grad))
            parts.append(grad)
            continue
        if grad.data_ptr() != buffer.data_ptr() or grad.stride() != buffer.stride():
            buffer.copy_(grad)
            copies += 1
        written.append((parameter, buffer))
    if accumulated:
        torch._foreach_add_([target for _, target in accumulated], parts)
    return written, accumulated, copies
