"""The tensors that a capture is given in place of the caller's arguments, and whether code could tell them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphmod.errors import CaptureRefused
from graphmod.graph.buffers import OwnedBuffer, StaticInput, adopted
from graphmod.signature.flattening import Leaf
from graphmod.signature.signature import argument_paths, attributes_of, has_own_gradient, parameter_names, unusual
from graphmod.trace.operations import address
from graphmod.trace.recorder import Recorder


class Sources:
    """The arguments that a graph was captured with.

    Attributes:
        identities: those of the tensors.
        changed: the storages from outside that the captured code changes: no argument may share them, because the
            graph reads a copy that was made before.
    """

    __slots__ = ("_storages", "changed", "identities")

    def __init__(self, leaves: list[Tensor]) -> None:
        self.identities = set(map(id, leaves))
        self._storages = list(map(address, leaves))
        self.changed: frozenset[int] = frozenset()

    def unlike_eager(self, inputs: list[StaticInput], recorder: Recorder) -> str | None:
        """Why what was recorded is not what the code does with the caller's own tensors; None if it is."""
        changed = frozenset(recorder.written) | recorder.inputs_written
        for static, source in zip(inputs, self._storages, strict=True):
            where, copied = address(static.tensor), static.buffer is not None
            if where in recorder.inputs_written and (copied or static.tensor.requires_grad):
                return f"changes its argument {static.name} in place; make it change a copy"
            if where not in recorder.read:
                continue
            if copied and source and source in changed:
                return f"changes memory that its argument {static.name} shares; pass a copy of it"
            self.changed = changed if copied else self.changed
        for static in inputs:
            grad = static.tensor.grad if static.tensor.is_leaf else None
            if grad is not None and address(grad) in recorder.read:
                return f"reads the gradient of its argument {static.name}; pass that as an argument, too"
        return None


def static_inputs(graph: Any, leaves: list[Tensor]) -> list[StaticInput]:
    """What stands for each tensor argument in a capture.

    Raises:
        CaptureRefused: one of them can have no copy that code could not tell from it.
    """
    group, arena = graph.context.group, graph.tape.arena
    paths = argument_paths(graph.entry.signature.structure, parameter_names(graph.context.call))
    names = {part.index: path for path, part in paths.items() if part.__class__ is Leaf}
    made = []
    for index, source in enumerate(leaves):
        name = names.get(index, f"tensor {index}")
        why = unusual(source)
        if why is not None:
            raise CaptureRefused(f"argument {name} is {why}, of which no graph can be given a copy")
        if group.backend.on_gpu and not source.is_cuda:
            raise CaptureRefused(
                f"argument {name} is on the host, and a graph would copy it from one fixed address; move it to the "
                "GPU before the call (.to(device, non_blocking=True) from pinned memory)"
            )
        memory = adopted(source, group.static)
        buffer = None
        if memory is None:
            buffer = next((b for b in group.buffers if b.holds(source)), None) or OwnedBuffer(source)
            graph.context.counters.copied_bytes += buffer.load(source, arena.passes, graph.context)
            memory = buffer.tensor.detach()
        made.append(StaticInput(_like(source, memory), buffer, name))
    return made


def _like(source: Tensor, memory: Tensor) -> Tensor:
    """A leaf over `memory` that looks to code like the argument `source`."""
    if type(source) is nn.Parameter:
        made: Tensor = nn.Parameter(memory, source.requires_grad)
    elif source.is_leaf:
        made = memory.requires_grad_(source.requires_grad)
    else:  # a view, because autocast keeps its casts of leaves
        with torch.no_grad():
            made = memory.view_as(memory).requires_grad_(source.requires_grad)
    for name, value in attributes_of(source).items():
        setattr(made, name, value)
    if has_own_gradient(source):
        made.grad = source.grad.detach().clone()
    return made
