"""Sees every aten operation of a call: what it reads and writes, with which scalars, on which line of the user's code.

The emulated backend, the address watch and the check for what a graph cannot repeat all stand on this one dispatch
mode. Imports `trace`, `hazards` and `overloads`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphmod.hazards import Hazards
from graphmod.overloads import fits_into, run_into
from graphmod.trace import Facts, Step, address, draws, facts, scalar_of, tensors_in, user_frame

_STATISTICS = frozenset({3, 4})  # running_mean and running_var; argument 5 says whether it trains


class Recorder(TorchDispatchMode):
    """Watches a call. With `refuse`, raises `CaptureRefused` before an operation that a graph cannot repeat.

    Attributes:
        trace: the operations, in order.
        outside: address -> tensor, what the call read or wrote without having made it or been given it.
        written: the part of `outside` that it changed.
        inputs_written: the addresses of inputs that it changed.
        read: every address it read.
        made_by: address -> index in the trace, operation, size and strides of what was made there last.
        generators: those passed to random operations.
        wrote_unseen: whether code ran that it could not see, and that changed something from outside before anything
            that it saw did.
        random, backward: whether it drew random numbers, or ran a backward pass.

    Args:
        inputs: the static tensors the call was given; reading them is no surprise.
        on_gpu: True when captured by CUDA.
        refuse: check for hazards.
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
        on_gpu: bool = False,
        refuse: bool = True,
        before_write: Callable[[Tensor], None] | None = None,
        targets: dict[int, Tensor] | None = None,
        after: Callable | None = None,
        around: Callable[[Iterable[Any]], AbstractContextManager] | None = None,
    ) -> None:
        super().__init__()
        self.trace: list[Step] = []
        self.outside: dict[int, Tensor] = {}
        self.written: dict[int, Tensor] = {}
        self.read: set[int] = set()
        self.inputs_written: set[int] = set()
        self.made_by: dict[int, tuple[int, Any, torch.Size, tuple]] = {}
        self.generators: list[torch.Generator] = []
        self.random = False
        self.backward = False
        self.wrote_unseen = False
        self._inputs = {address(tensor) for tensor in inputs}
        self._hazards = Hazards(on_gpu)
        self._on_gpu, self._refuse = on_gpu, refuse
        self._before_write, self._after, self._around = before_write, after, around
        self._targets = targets or {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it stands for costs as much as the rest of the recording

    def finish(self) -> "Recorder":
        """Lets go of the callbacks, so that the record keeps nothing alive but the tensors from outside."""
        self._before_write = self._after = self._around = None
        self._targets = {}
        self.made_by = {}
        return self

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

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the host while the capture works on a GPU."""
        return self._on_gpu and not tensor.is_cuda

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        about = facts(op)
        if about.name.startswith("profiler::"):
            return op(*args, **kwargs)
        code, line = user_frame()
        given = list(tensors_in((*args, *kwargs.values())))
        if self._refuse:
            self._hazards.check(op, about, args, kwargs, given, code, line)
        given_at = set()
        for tensor in given:
            where = address(tensor)
            given_at.add(where)
            self.read.add(where)
            if where and where not in self._hazards.made and where not in self._inputs and where not in self.outside:
                self.outside[where] = tensor.detach()
        self._note_writes(about, args, kwargs)
        target = self._targets.get(len(self.trace))
        if target is not None and fits_into(op, args, kwargs, target):
            result = run_into(op, args, kwargs, target)
        elif about.lists and self._around is not None:
            with self._around((*args, *kwargs.values())):
                result = op(*args, **kwargs)
        else:
            result = op(*args, **kwargs)
        results = list(tensors_in(result if isinstance(result, (tuple, list)) else (result,)))
        fresh = [tensor for tensor in results if address(tensor) not in given_at or not address(tensor)]
        self._hazards.note(about, given, results, fresh)
        for tensor in fresh:
            self.made_by[address(tensor)] = (len(self.trace), op, tensor.size(), tensor.stride())
        self.random = self.random or draws(about, args, kwargs)
        self.backward = self.backward or torch._C._current_autograd_node() is not None
        generator = kwargs.get("generator")
        if generator is not None and not any(generator is known for known in self.generators):
            self.generators.append(generator)
        self.trace.append(
            Step(op, (*map(scalar_of, args), *((k, scalar_of(v)) for k, v in kwargs.items())), code, line)
        )
        if self._after is not None:
            self._after(op, args, kwargs, result, fresh)
        return result

    def _note_writes(self, about: Facts, args: tuple, kwargs: dict) -> None:
        writes = _STATISTICS if about.statistics and args[5] else about.writes
        if not writes:
            return
        for key, value in (*enumerate(args), *kwargs.items()):
            if key not in writes:
                continue
            for tensor in tensors_in((value,)):
                where = address(tensor)
                if self._before_write is not None and (where in self.outside or where in self._inputs):
                    self._before_write(tensor)
                if where in self.outside:
                    self.written.setdefault(where, self.outside[where])
                elif where in self._inputs:
                    self.inputs_written.add(where)
                self._hazards.note_write(where)


def current_recorder() -> Recorder | None:
    """The recorder that watches the present call."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)), None)


def is_recording() -> bool:
    """Whether a recorder watches the present call."""
    return current_recorder() is not None
