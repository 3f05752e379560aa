"""Follows the memory of every aten operation of a call: what it reads, writes and makes.

The emulated backend, the address watch and the check for what a graph cannot repeat all stand on this one dispatch
mode. Imports `tracer`, `trace`, `hazards`, `errors` and `overloads`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.hazards import Hazards
from graphmod.overloads import fits_into, run_into
from graphmod.trace import Facts, address, tensors_in
from graphmod.tracer import Tracer

_STATISTICS = frozenset({3, 4})  # running_mean and running_var; argument 5 says whether it trains


class Recorder(Tracer):
    """Also sees what a call reads and writes. Raises `CaptureRefused` before an operation that a graph cannot repeat.

    Attributes:
        outside: address -> tensor, what the call read or wrote without having made it or been given it.
        static: the addresses of those of `outside` that were marked static.
        first_seen: address of a tensor of `outside` -> index in the trace.
        written: the part of `outside` that it changed.
        advanced: what of that may have a part in the results: all but integers and the running statistics of a
            normalization.
        inputs_written: the addresses of inputs that it changed.
        read: every address it read.
        made_by: address -> index in the trace, operation, size and strides of what was made there last.
        seen_until: index in the trace at which compiled code ran first, so that tensors which come up later may have
            been made inside; None where none ran.
        wrote_unseen: whether code ran that it could not see, and that changed something from outside before anything
            that it saw did.

    Args:
        inputs: the static tensors the call was given; reading them is no surprise.
        gpu: index of the GPU on which CUDA captures; None under emulation.
        before_write: called with each tensor from outside that an operation is about to change.
        targets: index of an operation in the trace -> memory of its result's shape and strides to compute it into.
        after: called with `(op, args, kwargs, result, fresh)` after each operation; `fresh` are the result tensors
            that share no storage with its arguments.
        around: called with the arguments of each operation on lists of tensors, for a context to run it in.
    """

    def __init__(
        self,
        inputs: Iterable[Tensor] = (),
        *,
        gpu: int | None = None,
        before_write: Callable[[Tensor], None] | None = None,
        targets: dict[int, Tensor] | None = None,
        after: Callable | None = None,
        around: Callable[[Iterable[Any]], AbstractContextManager] | None = None,
    ) -> None:
        super().__init__()
        self.outside: dict[int, Tensor] = {}
        self.first_seen: dict[int, int] = {}
        self.static: set[int] = set()
        self.written: dict[int, Tensor] = {}
        self.read: set[int] = set()
        self.advanced: dict[int, Tensor] = {}
        self.inputs_written: set[int] = set()
        self.made_by: dict[int, tuple[int, Any, torch.Size, tuple]] = {}
        self.seen_until: int | None = None
        self.wrote_unseen = False
        self._inputs = {address(tensor) for tensor in inputs}
        self._hazards = Hazards(gpu)
        self._refused: str | None = None
        self._on_gpu = gpu is not None
        self._before_write, self._after, self._around = before_write, after, around
        self._targets = targets or {}

    def finish(self) -> "Recorder":
        """Lets go of the callbacks, so that the record keeps nothing alive but the tensors from outside."""
        self._before_write = self._after = self._around = None
        self._targets = {}
        self.made_by = {}
        return self

    def note_compiled(self) -> None:
        """Takes in that compiled code runs now, which makes tensors out of its sight."""
        if self.seen_until is None:
            self.seen_until = len(self.trace)

    def note_unseen(self, changed: Iterable[Tensor]) -> None:
        """Takes in that code out of its sight changed tensors, or may have."""
        before_any = not self.written and not self.inputs_written
        for tensor in changed:
            where = address(tensor)
            if where not in self.outside and where not in self._inputs:
                continue
            self.wrote_unseen = self.wrote_unseen or before_any
            if tensor.is_inference():
                continue  # such tensors count no versions: whether it was changed nobody can tell
            if where in self.outside:
                self.written.setdefault(where, self.outside[where])
            else:
                self.inputs_written.add(where)

    def made(self, where: int) -> bool:
        """Whether an operation made what lies at an address."""
        return where in self._hazards.made

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the host while the capture works on a GPU."""
        return self._on_gpu and not tensor.is_cuda

    def check(self) -> None:
        """Refuses the capture, if code that catches every exception kept a refusal to itself.

        Raises:
            CaptureRefused: as the first time.
        """
        if self._refused is not None:
            raise CaptureRefused(self._refused)

    def _run(self, op: Any, about: Facts, args: tuple, kwargs: dict, code: Any, line: int) -> Any:
        try:
            return self._record(op, about, args, kwargs, code, line)
        except CaptureRefused as refusal:
            self._refused = self._refused or str(refusal)  # and not the error, whose frames hold this
            raise

    def _record(self, op: Any, about: Facts, args: tuple, kwargs: dict, code: Any, line: int) -> Any:
        given = list(tensors_in((*args, *kwargs.values()) if kwargs else args))
        self._hazards.check(op, about, args, kwargs, given, code, line)
        given_at = list(map(address, given))
        self.read.update(given_at)
        for where, tensor in zip(given_at, given, strict=True):
            if where and where not in self._hazards.made and where not in self._inputs and where not in self.outside:
                self.outside[where] = tensor.detach()
                if getattr(tensor, "_graphmod_static", False):
                    self.static.add(where)
                self.first_seen[where] = len(self.trace)
        if about.writes or about.statistics:
            self._note_writes(about, args, kwargs)
        target = self._targets.get(len(self.trace)) if self._targets else None
        if target is not None and fits_into(op, args, kwargs, target):
            result = run_into(op, args, kwargs, target)
        elif about.lists and self._around is not None:
            with self._around((*args, *kwargs.values())):
                result = op(*args, **kwargs)
        else:
            result = op(*args, **kwargs)
        results = list(tensors_in(result if isinstance(result, (tuple, list)) else (result,)))
        results_at = list(map(address, results))
        fresh, fresh_at = results, results_at
        known = set(given_at)
        if not known.isdisjoint(results_at):
            new = [i for i, where in enumerate(results_at) if where not in known or not where]
            fresh, fresh_at = [results[i] for i in new], [results_at[i] for i in new]
        self._hazards.note(about, given, given_at, results_at, fresh_at)
        for where, tensor in zip(fresh_at, fresh, strict=True):
            self.made_by[where] = (len(self.trace), op, tensor.size(), tensor.stride())
        if self._after is not None:
            self._after(op, args, kwargs, result, fresh)
        return result

    def _note_writes(self, about: Facts, args: tuple, kwargs: dict) -> None:
        writes = _STATISTICS if about.statistics and args[5] else about.writes
        for key, value in (*enumerate(args), *kwargs.items()):
            if key not in writes:
                continue
            for tensor in tensors_in((value,)):
                where = address(tensor)
                if self._before_write is not None and (where in self.outside or where in self._inputs):
                    self._before_write(tensor)
                if where in self.outside:
                    self.written.setdefault(where, self.outside[where])
                    if about.writes and (tensor.is_floating_point() or tensor.is_complex()):
                        self.advanced.setdefault(where, self.outside[where])
                elif where in self._inputs:
                    self.inputs_written.add(where)
                self._hazards.note_write(where)
