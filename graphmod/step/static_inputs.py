"""The memory through which arguments enter a graph (rule R5).

An input is adopted where it lies, if that is another graph's output; otherwise it has a buffer of the graph's own, into
which each call copies, once per tensor however many graphs read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.errors import CaptureRefused
from graphmod.signature.call import Call
from graphmod.signature.flattening import Leaf
from graphmod.signature.signature import STATIC, argument_paths, has_own_gradient, unusual
from graphmod.trace.operations import address
from graphmod.trace.recorder import Follower


def mark_static(tensor: Tensor) -> Tensor:
    """Tells graphs that `tensor` keeps its address for as long as they live, so that they read it where it is.

    Whoever marks a tensor writes new values into it in place. Returns the tensor.

    Raises:
        TypeError: it is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"mark_static takes a tensor, got {type(tensor).__name__}")
    vars(tensor)[STATIC] = True
    return tensor


_VECTOR = 16 - 1  # the bits of an address that tell where in a vector it is


def _aligned_as(like: Tensor, sizes: list[int]) -> Tensor:
    """Memory for a tensor of some sizes, with the strides of another, that begins where in a vector that one begins."""
    skipped = (like.data_ptr() & _VECTOR) // like.element_size()
    extent = skipped + sum((size - 1) * stride for size, stride in zip(sizes, like.stride(), strict=True)) + 1
    whole = torch.empty(extent if all(sizes) else 0, dtype=like.dtype, device=like.device)
    return whole.as_strided(sizes, like.stride(), skipped if all(sizes) else 0)


class OwnedBuffer:
    """A copy of an argument at a fixed address. Several graphs may read it when they get the same tensor.

    It begins where within 16 bytes its argument begins, and an argument that begins elsewhere gets another graph:
    kernels take another way there, and round otherwise. Dimensions expanded by a zero stride take the memory of one
    element. Copies write through `.data`, so that autograd's version check of what it saved stays quiet. Memory may be
    rewritten without a new version, so a copy is shared only by calls of different wrappers, the layers of one forward:
    between two calls of one wrapper the user's loop has run. Memory that numpy or another library has too is copied for
    each.
    """

    def __init__(self, like: Tensor) -> None:
        # Dimensions broadcast by a zero stride stay so: the memory holds their one element.
        sizes = [1 if stride == 0 else size for size, stride in zip(like.size(), like.stride(), strict=True)]
        compact = _aligned_as(like, sizes)
        self.tensor = compact.expand(like.size())
        # `.data`: writing must not advance the version counter of the tensor that autograd saved for the backward.
        self._memory = compact.data
        # What is no number with a fraction is not rounded, and one element is no vector.
        self._rounds = compact.numel() > 1 and (like.is_floating_point() or like.is_complex())
        self._where = compact.data_ptr()
        self.users = 0
        self._source: Any = None
        self._version = -1
        self._pointer = 0
        self._passes: set[int] = set()  # that read the present content, and the last of them
        self._pass = -1
        self._readers: set[int] = set()  # of the present content, by identity
        self._foreign = False  # whether others than PyTorch write to the memory of the source

    def aligned_as(self, source: Tensor) -> bool:
        """Whether kernels would take the same way with `source`: sums and products are rounded otherwise where memory
        does not begin at a multiple of a vector's size."""
        return not (source.data_ptr() ^ self._where) & _VECTOR or not self._rounds

    def holds(self, source: Tensor) -> bool:
        """Whether the present content is a copy of this very tensor in its present state."""
        return (
            self._source is not None
            and self._source() is source
            and self._version == source._version
            and self._pointer == source.data_ptr()
        )

    def free_for(self, source: Tensor, passes: int) -> bool:
        """Whether `source` may be written while a pass is in flight: not if that reads another argument that was copied
        to here, and several graphs do."""
        return self.users < 2 or passes not in self._passes or self.holds(source)

    def forget(self) -> None:
        """The pass is over: nothing leads to what was copied any more."""
        self._source = None

    def load(self, source: Tensor, passes: int, reader: Any) -> int:
        """Copies unless there is nothing to copy; returns the bytes copied.

        Args:
            passes: the number of the pass; between passes memory may be rewritten without a new version.
            reader: whose call it is. Code between its last call and this one may have done so, too: nothing but calls
                of others, such as the layers of one forward, share a copy.
        """
        if not self._foreign and self._pass == passes and id(reader) not in self._readers and self.holds(source):
            self._readers.add(id(reader))
            return 0
        if not self.holds(source):
            self._passes.clear()
        self._passes.add(passes)
        self._pass, self._readers = passes, {id(reader)}
        memory = self._memory
        source_part = source.detach()
        if memory.size() != source.size():
            source_part = source_part.as_strided(memory.size(), source.stride(), source.storage_offset())
        memory.copy_(source_part)
        # Tensors made in inference mode do not count versions, and those with weak references to them cannot be
        # swapped (`torch.utils.swap_tensors`): parameters, and what one graph alone reads, are copied in each call. So
        # is whatever is read without gradients, where each call is a pass.
        alone = self.users == 1 or (self.users and not torch.is_grad_enabled())
        nameless = alone or source.is_inference() or isinstance(source, nn.Parameter)
        self._source = None if nameless else weakref.ref(source)
        self._version = -1 if nameless else source._version
        self._pointer = source.data_ptr()
        self._foreign = not source.untyped_storage().resizable()  # numpy has it, or another library
        return memory.nbytes


class StaticInput:
    """One tensor argument as a graph reads it.

    `tensor` is what the captured code was given. Either `buffer` is set, which what is given is copied into if the
    graph reads it, or the memory is adopted (`pointer` must match).
    """

    __slots__ = ("buffer", "name", "pointer", "tensor")

    def __init__(self, tensor: Tensor, buffer: OwnedBuffer | None, name: str) -> None:
        self.tensor, self.buffer, self.name = tensor, buffer, name
        self.pointer = tensor.data_ptr()


def without_history(tensor: Tensor) -> Tensor:
    """The same memory, without the autograd graph that led to it."""
    with torch.no_grad():  # a view stays one, because autocast keeps its casts of leaves that are none
        made = tensor.view_as(tensor) if tensor._is_view() else tensor.detach()
    return made.requires_grad_(tensor.requires_grad)


def unlike_eager(inputs: list[StaticInput], sources: list[Tensor], recorder: Follower, writes_back: bool) -> str | None:
    """Why what was captured is not what the code does with the caller's own tensors; None if it is.

    Args:
        sources: those, for which the inputs stand.
        writes_back: whether what is written into a copy is written into the caller's tensor after a replay.
    """
    given_at = list(map(address, sources))
    changed = (recorder.written.keys() | recorder.inputs_written) - {0}
    for static, source in zip(inputs, sources, strict=True):
        where, copied = address(static.tensor), static.buffer is not None
        written, source_at = where in recorder.inputs_written, address(source)
        if written and (static.tensor.requires_grad or (copied and not writes_back)):
            return f"changes its argument {static.name} in place; make it change a copy"
        shared = source_at in recorder.outside or given_at.count(source_at) > 1
        if copied and where in recorder.read and (source_at in changed or (written and shared)):
            return f"changes memory that its argument {static.name} shares; pass a copy of it"
    for static in inputs:
        grad = static.tensor.grad if static.tensor.is_leaf else None
        if grad is not None and address(grad) in recorder.read:
            return f"reads the gradient of its argument {static.name}; pass that as an argument, too"
    return None


def named_arguments(entry: Any, call: Call) -> list[tuple[str, Tensor]]:
    """The tensors among a call's arguments, with their names."""
    paths = argument_paths(entry.signature.structure, call.names)
    names = {part.index: path for path, part in paths.items() if part.__class__ is Leaf}
    return [(f"argument {names.get(index, f'tensor {index}')}", leaf) for index, leaf in enumerate(call.leaves)]


def no_copy(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Which of some tensors can have no copy that code could not tell from it, and why; None if all can."""
    whys = ((name, why) for name, tensor in named if (why := unusual(tensor)) is not None)
    return next((f"{name} is {why}, of which no graph can be given a copy" for name, why in whys), None)


def static_inputs(graph: Any, call: Call, carried: list[tuple[str, Tensor]]) -> list[StaticInput]:
    """What stands for each tensor argument of a call in its capture, and for each of `carried`, which have names.

    Raises:
        CaptureRefused: one of them can have no copy that code could not tell from it, or is on the host.
    """
    group, given = graph.context.group, named_arguments(graph.entry, call)
    if (why := no_copy((*given, *carried))) is not None:
        raise CaptureRefused(why)
    made = []
    for name, source in (*given, *carried):
        if group.backend.on_gpu and not source.is_cuda:
            raise CaptureRefused(
                f"{name} is on the host, and a graph would copy it from one fixed address; move it to the "
                "GPU before the call (.to(device, non_blocking=True) from pinned memory)"
            )
        if len(made) < len(given):
            known = next((buffer for buffer in group.buffers if buffer.holds(source)), None)
            memory, buffer = static_memory(graph, source, graph.context, known)
        else:  # another tensor in each call
            buffer = OwnedBuffer(source)
            memory = buffer.tensor.detach()
            graph.context.counters.copied_bytes += buffer.load(source, graph.tape.arena.passes, graph.context)
        made.append(StaticInput(_like(source, memory), buffer, name.removeprefix("argument ")))
    return made


def static_memory(
    graph: Any, source: Tensor, reader: Any, known: OwnedBuffer | None = None
) -> tuple[Tensor, OwnedBuffer | None]:
    """Where a capture reads what it is given: in another graph's output, or in a buffer that is returned, too, and that
    holds it now.

    Args:
        reader: see `OwnedBuffer.load`.
        known: a buffer that others read as well.
    """
    if not (source.is_conj() or source.is_neg()):
        if getattr(source, STATIC, False):
            return source.detach(), None
        owner = graph.context.group.static.get(address(source))
        if owner is not None and owner.dtype is source.dtype:
            offset = source.storage_offset() + owner.storage_offset()
            return owner.as_strided(source.size(), source.stride(), offset), None
    buffer = OwnedBuffer(source) if known is None else known
    graph.context.counters.copied_bytes += buffer.load(source, graph.tape.arena.passes, reader)
    return buffer.tensor.detach(), buffer


def _like(source: Tensor, memory: Tensor) -> Tensor:
    """A leaf over `memory` that looks to code like the argument `source`."""
    if type(source) is nn.Parameter:
        made: Tensor = nn.Parameter(memory, source.requires_grad)
    elif source.is_leaf:
        made = memory.requires_grad_(source.requires_grad)
    else:  # a view, because autocast keeps its casts of leaves
        with torch.no_grad():
            made = memory.view_as(memory).requires_grad_(source.requires_grad)
    for name, value in vars(source).items():  # dynamo's notes too, on which it may guard
        if name != STATIC:
            setattr(made, name, value)
    if has_own_gradient(source) and source.grad is not None:
        made.grad = source.grad.detach().clone()
    return made
