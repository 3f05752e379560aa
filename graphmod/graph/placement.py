"""Where a captured backward leaves the parameters' gradients: in buffers outside the pool, written without a copy.

The operation whose result becomes a gradient is found from a first capture, which is thrown away; in the second that
operation computes straight into the buffer. Layers of one kind share what the first of them found. So the gradients
need no extra kernel, no replay of another graph can touch them, and all graphs of a parameter (other shapes, other
microbatches) share one buffer.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.graph.gradients import GradientBuffer, kind_of
from graphmod.graph.group import Group
from graphmod.ranks.fully_shard import taken_together
from graphmod.torch_private import foreach_add_
from graphmod.trace.recorder import Follower, Place

Gradients = list[tuple[Tensor, Tensor | None]]  # (parameter, its gradient)


def find_places(gradients: Gradients, recorder: Follower) -> list[Place | None]:
    """Which operation of a recorded backward made each parameter's gradient; None where nothing can compute it straight
    into a buffer, or where it makes two of them."""
    places: list[Place | None] = []
    taken: set[int] = set()
    for parameter, grad in gradients:
        place = None if grad is None else recorder.place_of(grad)
        fits = place is not None and place.index not in taken and grad.stride() == parameter.stride()
        places.append(place if fits else None)
        if place is not None:
            taken.add(place.index)
    return places


def buffers_for(group: Group, parameters: list[Tensor]) -> list[GradientBuffer]:
    """The gradient buffer of each parameter, made where it has none. The memory may be written where the gradient is
    not there now; that of those that are passing, once `Passing.claim` has said so."""
    buffers, together = [], taken_together(parameters)
    others = {one for members in together.values() for one in members} - set(map(id, parameters))
    taken = {buffer.memory.data_ptr() for one in others if (buffer := group.gradients.get(one)) and buffer.passing}
    for parameter in parameters:
        buffer = group.gradients.get(id(parameter))
        passes = id(parameter) in together and parameter.grad is None
        fits = buffer is not None and buffer.kind == kind_of(parameter) and bool(buffer.passing) is passes
        if passes:
            if not fits or buffer.memory.data_ptr() in taken:
                buffer = GradientBuffer(parameter, group.passing.memory_for(parameter, taken))
                buffer.passing = together[id(parameter)]
            taken.add(buffer.memory.data_ptr())
        elif not fits or (parameter.grad is not buffer.tensor and not buffer.evacuate()):
            buffer = GradientBuffer(parameter, torch.empty_like(parameter, requires_grad=False))
        group.gradients[id(parameter)] = buffer
        buffers.append(buffer)
    return buffers


def targets_for(buffers: list[GradientBuffer], apart: bool) -> list[Tensor | None]:
    """What a captured backward adds each gradient to; None where it overwrites the buffer.

    Args:
        apart: gradients that the user put in place are added to outside of the graph.
    """
    found: list[Tensor | None] = []
    for buffer in buffers:
        grad = buffer.parameter.grad
        own = grad is not None and grad.data_ptr() == buffer.memory.data_ptr()
        found.append(buffer.memory if own else None if apart else grad)
    return found


def store(
    gradients: Gradients, buffers: list[GradientBuffer], into: list[Tensor | None], aimed: Collection[int]
) -> tuple[list[GradientBuffer], list[tuple[GradientBuffer, Tensor]], bool]:
    """Inside a capture: brings the gradients to where they stay.

    Args:
        into: what each is added to, None where it is written to its buffer.
        aimed: positions of the parameters for whose gradient an operation was given the buffer.

    Returns:
        The buffers that are written, those that are added to with the tensor that is, and whether something else than
        the gradient was computed into any of the buffers.

    Raises:
        CaptureRefused: a gradient is sparse.
    """
    written, accumulated, parts = [], [], []
    missed = False
    for position, ((parameter, grad), buffer, target) in enumerate(zip(gradients, buffers, into, strict=True)):
        if grad is None:
            missed = missed or position in aimed
            continue
        if grad.layout is not torch.strided:
            raise CaptureRefused(
                f"has a sparse gradient for a parameter of shape {tuple(parameter.shape)}, whose size may be another "
                "in each step; use sparse=False, or keep that module out of the graph"
            )
        if target is not None:
            accumulated.append((buffer, target))
            parts.append(real(grad))
            continue
        memory = buffer.memory
        if grad._is_zerotensor() or grad.data_ptr() != memory.data_ptr() or grad.stride() != memory.stride():
            memory.copy_(real(grad))
            missed = missed or position in aimed
        written.append(buffer)
    if accumulated:
        foreach_add_([target for _, target in accumulated], parts)
    return written, accumulated, missed


def real(tensor: Tensor) -> Tensor:
    """The tensor itself, or zeros in memory of their own for what autograd only says is zero."""
    if not tensor._is_zerotensor():
        return tensor
    return torch.zeros(tensor.size(), dtype=tensor.dtype, device=tensor.device)
