"""Follows the memory of a call: what its operations read, write and make, by the addresses of storages."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from graphmod.trace.operations import Facts, Step, address, written
from graphmod.trace.origins import Origin, Origins
from graphmod.trace.tensors import tensors_in
from graphmod.trace.tracer import Tracer


class Call:
    """An operation while it is recorded.

    Attributes:
        given, given_at: its tensor arguments, and their addresses.
    """

    __slots__ = ("about", "args", "given", "given_at", "index", "kwargs", "random", "step")

    def __init__(self, step: Step, about: Facts, args: tuple, kwargs: dict, random: bool, index: int) -> None:
        self.step, self.about, self.random, self.index = step, about, random, index
        self.look_at(args, kwargs)

    def look_at(self, args: tuple, kwargs: dict) -> None:
        """Takes these for its arguments."""
        self.args, self.kwargs = args, kwargs
        self.given = list(tensors_in((*args, *kwargs.values()) if kwargs else args))
        self.given_at = list(map(address, self.given))

    @property
    def name(self) -> str:
        return self.about.name.removeprefix("aten::")


class MemoryTrace(Tracer):
    """Sees what a call reads and writes.

    Attributes:
        outside: address -> tensor, what the call read or wrote without having made it or been given it.
        static: the addresses of those of `outside` that were marked static.
        first_seen: address of a tensor of `outside` -> index in the trace.
        first_write: index in the trace of the first operation that changed anything of `outside` or the inputs; None
            where none did.
        written: the part of `outside` that it changed.
        advanced: what of that may have a part in the results: all but integers and the running statistics of a
            normalization.
        inputs_written: the addresses of inputs that it changed.
        read: every address it read.
        made_by: address -> index in the trace, operation, size and strides of what was made there last.

    Args:
        inputs: the tensors the call was given; reading them is no surprise.
        before_write: called with each tensor from outside that an operation is about to change.
    """

    def __init__(self, inputs: Iterable[Tensor], before_write: Callable[[Tensor], None] | None) -> None:
        super().__init__(inputs)
        self.outside: dict[int, Tensor] = {}
        self.first_seen: dict[int, int] = {}
        self.first_write: int | None = None
        self.static: set[int] = set()
        self.written: dict[int, Tensor] = {}
        self.advanced: dict[int, Tensor] = {}
        self.read: set[int] = set()
        self.inputs_written: set[int] = set()
        self.made_by: dict[int, tuple[int, Any, torch.Size, tuple]] = {}
        self._inputs = {address(tensor) for tensor in self._given} - {0}  # nothing lies there
        self._origins = Origins()
        self._before_write = before_write

    def made(self, where: int) -> bool:
        """Whether an operation made what lies at an address."""
        return where in self._origins

    def _note_reads(self, call: Call) -> None:
        self.read.update(call.given_at)
        for where, tensor in zip(call.given_at, call.given, strict=True):
            if not where or where in self._origins:
                continue
            if where not in self._inputs and where not in self.outside:
                self.outside[where] = tensor.detach()
                if getattr(tensor, "_graphmod_static", False):
                    self.static.add(where)
                self.first_seen[where] = call.index

    def _note_writes(self, call: Call) -> None:
        writes = written(call.about, call.args, call.kwargs)
        origin = Origin.chance if call.random else Origin.constants
        origin = (
            Origin.data if call.about.collective else max(origin, self._origins.greatest(call.given_at, call.given))
        )
        for key, value in (*enumerate(call.args), *call.kwargs.items()):
            if key not in writes:
                continue
            for tensor in tensors_in((value,)):
                where = address(tensor)
                if where in self.outside or where in self._inputs:
                    self.first_write = call.index if self.first_write is None else self.first_write
                    if self._before_write is not None:
                        self._before_write(tensor)
                if where in self.outside:
                    self.written.setdefault(where, self.outside[where])
                    if call.about.writes and (tensor.is_floating_point() or tensor.is_complex()):
                        self.advanced.setdefault(where, self.outside[where])
                elif where in self._inputs:
                    self.inputs_written.add(where)
                self._note_write(where, origin)

    def _note_write(self, where: int, origin: Origin) -> None:
        self._origins.note_write(where, origin)
