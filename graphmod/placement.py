"""Where a captured backward leaves the parameters' gradients: in buffers outside the pool, written without a copy.

The operation whose result becomes a gradient is found from a first capture, which is thrown away; in the second that
operation computes straight into the buffer. Layers of one kind share what the first of them found. So the gradients
need no extra kernel, no replay of another graph can touch them, and all graphs of a parameter (other shapes, other
microbatches) share one buffer. May import `recorder`, `trace`, `overloads` and `group`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from graphmod.overloads import writes_directly
from graphmod.recorder import Recorder
from graphmod.trace import address

if TYPE_CHECKING:
    from graphmod.group import Group

Gradients = list[tuple[Tensor, Tensor | None]]  # (parameter, its gradient)


class Place(NamedTuple):
    """The operation that makes a gradient: its index in the trace and the layout of its result."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]


def find_places(gradients: Gradients, recorder: Recorder) -> list[Place | None]:
    """Which operation of a recorded backward made each parameter's gradient; None where nothing can compute it straight
    into a buffer (no gradient, no such overload, a result that is only part of its memory)."""
    places: list[Place | None] = []
    taken: set[int] = set()
    for parameter, grad in gradients:
        made = recorder.made_by.get(address(grad)) if grad is not None else None
        if made is None:
            places.append(None)
            continue
        index, op, size, stride = made
        whole = (
            grad.untyped_storage().nbytes() == grad.nbytes
            and grad.stride() == parameter.stride()
            and size.numel() == grad.numel()
            and writes_directly(op)
        )
        places.append(Place(index, size, stride) if whole and index not in taken else None)
        if whole:
            taken.add(index)
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
