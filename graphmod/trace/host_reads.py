"""What a call reads of tensors on the host, where that can be known before the call.

`if mask.all():` and `lengths.max().item()` are the common cases. A graph reads nothing, but a value that is computed
from the call's arguments, from constants and from tensors that the call does not change can be computed before a replay
as well: by the few operations of the recorded call that lead to it. `HostDraws` compares it then, as it compares a
number that is drawn: a whole number, a flag and the contents of a mask must be the same again, a float may be compared.

All that one call reads is brought to the host at once, which waits for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.torch_private import BelowAutograd, NoAutocast, OpOverload, TensorBase, set_grad_enabled
from graphmod.trace.dispatch import hidden
from graphmod.trace.hazards import CONSTANTS, PLAIN, Hazard, Origins, is_mask
from graphmod.trace.operations import Facts, address, each_tensor, extent, tensors_in, written_tensors

_MOST_STEPS = 64  # operations before one replay: more cost more than they bring
_MOST_BYTES = 1 << 16  # of what is compared
_MOST_CONSTANT = 1 << 20  # bytes of a constant that is kept
_SHARE = ("numpy", "__dlpack__")  # which give memory to others
# What fails where an index is out of bounds; on a GPU that ends the process.
_BY_INDEX = (
    "index", "gather", "scatter", "embedding", "take", "put", "_unsafe_index", "one_hot", "select_scatter", "histc",
    "bincount", "nll_loss", "cross_entropy",
)  # fmt: skip


class _Memory:
    """Memory in which a value lies that is followed.

    Attributes:
        source: where it is had: the index of an argument, a tensor from outside, or a copy of a constant; None if one
            of the steps makes it.
        offset, end: bytes from its beginning to where the argument or result begins and ends through which it is had.
        own: whether it may be changed.
        read: whether code has read of it on the host, so that it has to stay as it is for all steps that follow.
    """

    __slots__ = ("end", "offset", "own", "read", "source")

    def __init__(self, source: int | Tensor | None, through: Tensor, own: bool) -> None:
        self.source, self.own, self.read = source, own, False
        self.offset = _offset(through)
        self.end = self.offset + extent(through)


class _View(NamedTuple):
    """A tensor in such memory; `offset` in bytes."""

    memory: _Memory
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Done(NamedTuple):
    """An operation to be done again: what is in `made` are the indices of new tensors among its results."""

    op: Any
    args: tuple
    kwargs: dict
    used: list[_Memory]
    changed: list[_Memory]
    made: list[tuple[int, _Memory]]


class HostReads:
    """The values that one recorded call reads on the host, and how they come about.

    Args:
        leaves: the call's tensor arguments.
        origins: where the values of its tensors come from.
        changed: address -> tensor, what the call has changed so far without having made it or been given it.
        refuse: is told what cannot be known before a call after all, because the call goes on to change what it depends
            on.

    Attributes:
        known: address -> the memory there, whose values are followed.
        read_given: address of an argument on which a value depends -> the first of what reads such a one.
        depends_on: the addresses of tensors from outside on which a value depends, once the call has ended.
        seconds: that `find` took.
    """

    def __init__(
        self,
        leaves: list[Tensor],
        origins: Origins,
        changed: dict[int, Tensor],
        refuse: Callable[[Hazard], None],
    ) -> None:
        self._origins, self._changed, self._refuse = origins, changed, refuse
        self.known: dict[int, _Memory] = {}
        self.read_given: dict[int, Hazard] = {}
        self.depends_on: set[int] = set()
        self.seconds = 0.0
        self._after_part = False
        self._steps: list[_Done] = []
        self._needed: set[int] = set()
        self._read_from: dict[int, list[Hazard]] = {}  # address of a tensor from outside -> what depends on it
        # Computes a value on the device, and the dtype of a number; None where the bytes count.
        self._wanted: list[tuple[Callable[[Callable], Tensor], torch.dtype | None]] = []
        self.values: list[Any] = []
        self._given_at = list(map(address, leaves))
        for index, (where, leaf) in enumerate(zip(self._given_at, leaves, strict=True)):
            if where and _is_plain(leaf) and self._given_at.count(where) == 1:
                self.known[where] = _Memory(index, leaf, own=False)

    # -- the recorded call -------------------------------------------------------------------------------------------

    def before(self, op: Any, about: Facts, args: tuple, kwargs: dict, random: bool) -> _Done | None:
        """Takes in an operation before it runs; returns what `done` is to be given: None where it is not followed."""
        changed = list(written_tensors(about, args, kwargs))
        for tensor in changed:
            for hazard in self._read_from.pop(address(tensor), ()):
                self._refuse(hazard)
        step = None
        if not self._is_other(op, about, args, random):
            step = self._step(op, args, kwargs, changed)
        if step is None:
            for tensor in changed:
                self.known.pop(address(tensor), None)
        return step

    def _is_other(self, op: Any, about: Facts, args: tuple, random: bool) -> bool:
        """Whether an operation is of a kind that is not done again."""
        if not isinstance(op, OpOverload) or not about.name.startswith("aten::"):
            return True
        if about.dynamic and (about.short != "index" or any(map(is_mask, args[1]))):
            return True
        if random or about.unsafe or about.collective or about.statistics or about.lists:
            return True
        # Another value than the recorded one could have led code past it.
        return bool(self._wanted) and about.short.startswith(_BY_INDEX)

    def _step(self, op: Any, args: tuple, kwargs: dict, changed: list[Tensor]) -> _Done | None:
        used: list[_Memory] = []

        def view(tensor: Tensor) -> Any:
            found = self._view(tensor)
            if found is None:
                raise LookupError
            used.append(found.memory)
            return found

        try:
            args, kwargs = each_tensor(args, view), {key: each_tensor(one, view) for key, one in kwargs.items()}
            writes = [self.known[address(tensor)] for tensor in changed]
        except LookupError:
            return None
        if not used or any(memory.read or (isinstance(memory.source, Tensor) and not memory.own) for memory in writes):
            return None
        for memory in writes:
            memory.own = True
        return _Done(op._op, args, kwargs, used, writes, [])

    def _view(self, tensor: Tensor) -> _View | None:
        """A tensor in memory that is followed, which a constant becomes here; None where that is not to be had."""
        if not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        where = address(tensor)
        memory = self.known.get(where)
        if memory is None:
            memory = self._first_seen(tensor, where)
            if memory is None:
                return None
            self.known[where] = memory
        offset = _offset(tensor)
        if isinstance(memory.source, int) and not memory.offset <= offset <= offset + extent(tensor) <= memory.end:
            return None  # what is beside an argument is no part of the next one
        return _View(memory, tensor.size(), tensor.stride(), offset, tensor.dtype)

    def _first_seen(self, tensor: Tensor, where: int) -> _Memory | None:
        if not where or self._after_part:
            return None
        with hidden(), torch.inference_mode(False), torch.no_grad():
            if where in self._origins:
                size = tensor.untyped_storage().nbytes()
                if self._origins.of(where, tensor) != CONSTANTS or size > _MOST_CONSTANT:
                    return None
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                constant = whole.clone()
                return _Memory(constant, constant, own=True)
            if where in self._given_at or where in self._changed or tensor.requires_grad:
                return None
            outside = tensor.detach()
            return _Memory(outside, outside, own=False)

    def done(self, step: _Done | None, result: Any, fresh: list[Tensor]) -> None:
        """Takes in what an operation made, of which `fresh` lies in memory that may have been another tensor's."""
        for tensor in fresh:
            self.known.pop(address(tensor), None)
        if step is None:
            return
        new = set(map(address, fresh)) - {0}
        for index, tensor in enumerate(tensors_in((result,))):
            where = address(tensor)
            if where in new and _is_plain(tensor):
                new.discard(where)
                self.known[where] = memory = _Memory(None, tensor, own=True)
                step.made.append((index, memory))
        if step.made or step.changed:
            self._steps.append(step)

    def forget(self) -> None:
        """Takes in that code ran unseen, which may have changed anything."""
        self.known.clear()
        self._after_part = True

    def read(self, name: str, tensors: list[Tensor], hazard: Hazard) -> Callable[[], Any] | None:
        """Takes in that code is about to read something on the host.

        Args:
            name: of what reads: an operation that reads a number, or something that wants all of these tensors.
            hazard: what it is where that turns out not to be known before a call.

        Returns:
            What gives its present value; None where it cannot be had before a call.
        """
        views = [self._view(tensor) for tensor in tensors]
        found = [view for view in views if view is not None]
        # Nobody sees what is written by way of memory that is shared.
        if name in _SHARE or len(found) < len(tensors) or not self._take(found, hazard):
            return None
        if name == "_local_scalar_dense" and tensors[0].numel() == 1:
            wanted = (lambda there: there(found[0])), tensors[0].dtype
        elif name == "equal" and tensors[0].size() == tensors[1].size():
            wanted = (lambda there: torch.eq(there(found[0]), there(found[1])).all()), torch.bool
        elif name not in ("_local_scalar_dense", "equal") and sum(tensor.nbytes for tensor in tensors) <= _MOST_BYTES:
            wanted = (lambda there: torch.cat([_bytes(there(view)) for view in found])), None
        else:
            return None
        index, (compute, dtype) = len(self._wanted), wanted
        self._wanted.append(wanted)
        with hidden(), torch.inference_mode(False), torch.no_grad():
            now = dict(zip(map(id, found), tensors, strict=True))
            self.values += _on_host([compute(lambda view: now[id(view)].detach())], [dtype])
        return lambda: self.values[index]

    def _take(self, views: list[_View], hazard: Hazard) -> bool:
        """Has the steps that lead to these views done again, unless they are too many; returns whether."""
        wanted, needed = {id(view.memory) for view in views}, set()
        for index in range(len(self._steps) - 1, -1, -1):
            step = self._steps[index]
            if not wanted.isdisjoint(map(id, (*step.changed, *(memory for _, memory in step.made)))):
                needed.add(index)
                wanted.update(map(id, step.used))
        if len(self._needed | needed) > _MOST_STEPS:
            return False
        self._needed |= needed
        used = [memory for index in needed for memory in self._steps[index].used]
        for view in views:
            view.memory.read = True
        for memory in (*used, *(view.memory for view in views)):
            if isinstance(memory.source, int):
                self.read_given.setdefault(self._given_at[memory.source], hazard)
            elif isinstance(memory.source, Tensor) and not memory.own:
                self._read_from.setdefault(address(memory.source), []).append(hazard)
        return True

    def finish(self) -> None:
        """Ends the recording."""
        self._steps = [step for index, step in enumerate(self._steps) if index in self._needed]
        self.depends_on = set(self._read_from)
        self.known, self._read_from = {}, {}
        self._origins, self._changed = Origins(), {}

    # -- replays -----------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def find(self, leaves: list[Tensor]) -> None:
        """Computes what a call with these tensor arguments would read.

        Raises:
            Exception: of an operation that cannot be done with them.
        """
        began, grad = time.perf_counter(), torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            with hidden(), NoAutocast(), BelowAutograd():
                self.values = _on_host(list(self._compute(leaves)), [dtype for _, dtype in self._wanted])
        finally:
            set_grad_enabled(grad)
        self.seconds = time.perf_counter() - began

    def _compute(self, leaves: list[Tensor]) -> Iterator[Tensor]:
        memories: dict[int, tuple[torch.UntypedStorage, int]] = {}

        def there(view: _View) -> Tensor:
            memory = view.memory
            if id(memory) not in memories:
                source = leaves[memory.source] if isinstance(memory.source, int) else memory.source
                assert source is not None, "the steps are in their order"
                take(memory, source)
                if memory.own:
                    storage, moved = memories[id(memory)]
                    memories[id(memory)] = storage.clone(), moved
            storage, moved = memories[id(memory)]
            empty = torch.empty(0, dtype=view.dtype, device=storage.device)
            return empty.set_(storage, (view.offset + moved) // view.dtype.itemsize, view.size, view.stride)

        def take(memory: _Memory, tensor: Tensor) -> None:
            memories[id(memory)] = tensor.untyped_storage(), _offset(tensor) - memory.offset

        for step in self._steps:
            given = each_tensor(step.args, there, _View)
            named = {key: each_tensor(one, there, _View) for key, one in step.kwargs.items()}
            results = list(tensors_in((step.op(*given, **named),)))
            for index, memory in step.made:
                take(memory, results[index])
        for compute, _ in self._wanted:
            yield compute(there)


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    return plain and not tensor.is_meta and not tensor.is_quantized


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _bytes(tensor: Tensor) -> Tensor:
    # As a row whose step is 1, which that of one element need not be.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _on_host(found: list[Tensor], dtypes: list[torch.dtype | None]) -> list[Any]:
    """The values of tensors, brought to the host in one piece from each device: numbers, or bytes."""
    parts = list(map(_bytes, found))
    ends: dict[torch.device, bytes] = {}
    for device in {part.device for part in parts}:
        content = torch.cat([part for part in parts if part.device == device])
        ends[device] = TensorBase.numpy(content.cpu()).tobytes()
    values: list[Any] = []
    for part, dtype in zip(parts, dtypes, strict=True):
        own, ends[part.device] = ends[part.device][: len(part)], ends[part.device][len(part) :]
        values.append(own if dtype is None else torch.frombuffer(bytearray(own), dtype=dtype).item())
    return values
