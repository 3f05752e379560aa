"""Checks a call as it runs: what of its operations, and of what it does past them, a graph cannot repeat."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphmod.trace.dispatch import hidden
from graphmod.trace.eager_answers import asking
from graphmod.trace.hazards import UNDER_A_MODE, Check, Hazard, Reason, hazard
from graphmod.trace.lines import Lines, lines
from graphmod.trace.memory import Call, MemoryTrace
from graphmod.trace.operations import address
from graphmod.trace.seeds import RESTORES, SETS_STATE, Draws
from graphmod.trace.tensors import tensors_in


class CheckedTrace(MemoryTrace):
    """Checks what a call does; see `recorder` for the two uses.

    Attributes:
        on_gpu: whether it works on a GPU.
        hazards: what a graph cannot repeat, in order; again each time that the call did it.
        collectives: how many operations that other processes take part in it has seen.
        unfinished: what the call has begun that only a backward brings to its end.

    Args:
        inputs, before_write: see `MemoryTrace`.
        gpu: index of the GPU that the call works on; None under emulation.
        generators: whose state before the call is to be known.
    """

    def __init__(
        self,
        inputs: Iterable[Tensor],
        gpu: int | None,
        generators: Iterable[torch.Generator],
        before_write: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__(inputs, before_write)
        self.on_gpu, self._gpu = gpu is not None, gpu
        self.hazards: list[Hazard] = []
        self.collectives = 0
        self.unfinished: list[Any] = []
        self._check = Check(gpu, self._origins)
        self._draws: Draws | None = None
        self._generators = generators
        self._touched_state: Lines | None = None
        self._sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}  # storages that were resized, and theirs before

    def _enter(self, context: contextlib.ExitStack) -> None:
        context.enter_context(asking(self))
        if self.watching or not self.on_gpu:  # a GPU that captures does not tell
            self._draws = Draws(self._gpu, list(self._generators))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None:
            for begun in self.unfinished:
                begun.abandon()
            for storage, size in self._sizes.values():
                if storage.nbytes() != size:
                    storage.resize_(size)
        met = self._draws.moved() if self.watching else None
        if met is not None:
            self.hazards.append(Hazard("the call", met, *SETS_STATE[:2]))
        self._draws = None
        if self._touched_state is not None and self.random:
            self.hazards.append(Hazard("the call", self._touched_state, *RESTORES[:2]))

    def refuse(self, operation: str, reason: Reason) -> None:
        """Takes in that the call does what a graph cannot repeat."""
        self.hazards.append(hazard(operation, lines(), reason, self.on_gpu))

    # -- what is no operation ------------------------------------------------------------------------------------

    def make(self, function: Callable, values: Any, kwargs: dict) -> Tensor:
        """Makes a tensor on the GPU of Python values, which a capture can only take from the recorded call."""
        with hidden():
            result = function(values, **kwargs)
        self._origins.note_constant(address(result))
        return result

    def note_resized(self, storage: torch.UntypedStorage, before: int) -> bool:
        """Takes in that code has made or given back the memory of a storage, of `before` bytes until then. Returns
        whether it did: a tensor without memory, on which torch.compile traces, is nobody's."""
        try:
            where = storage.data_ptr()
        except RuntimeError:
            return False
        if storage.nbytes() > before:
            self._origins.note_allocated(where)
        self._sizes.setdefault(storage._cdata, (storage, before))
        return True

    def before_communicating(self) -> None:
        """Takes in that a collective is about to come; to be told before another stream is taken for it."""

    def note_host_read(self, tensor: Tensor, name: str) -> None:
        """Takes in that a function which is no operation reads a tensor on the host."""
        reason = self._check.read([tensor])
        if reason is not None and not (self.on_gpu and self._check.kept_by(reason, [tensor]) is not None):
            self.refuse(name, reason)

    def note_random_state(self) -> None:
        """Takes in that the state of the random generators is read or written."""
        self._touched_state = self._touched_state or lines()

    def note_generator(self, generator: torch.Generator) -> None:
        """Takes in that code is about to use a generator."""
        if self._draws is not None:
            with hidden():
                self._draws.know(generator, lines())

    def note_mode(self, mode: TorchDispatchMode) -> None:
        """Refuses code that computes under a dispatch mode which hides its operations."""
        self.refuse(type(mode).__name__, UNDER_A_MODE)

    # -- operations ----------------------------------------------------------------------------------------------

    def _why_not(self, call: Call) -> Reason | None:
        """Takes in that an operation is about to run; why a graph cannot repeat it."""
        if call.about.collective:
            self.before_communicating()
            self.collectives += 1
        if call.about.lifts:
            self._origins.note_constant(call.given_at[0])
            return None
        return self._check.reason(call.step.op, call.about, call.args, call.kwargs, call.given)

    def _before(self, call: Call) -> None:
        """Takes in what an operation is going to read, write and draw."""
        if call.about.lifts:
            return
        self._note_reads(call)
        if call.about.writes or call.about.statistics:
            self._note_writes(call)
        if call.random and self._draws is not None and self._touched_state is None:
            reason = self._draws.before(call.kwargs.get("generator"))
            if reason is not None:
                self.refuse(call.name, reason)

    def _done(self, call: Call, result: Any) -> list[Tensor]:
        """Takes in the results of an operation that has run; those that share no storage with its arguments."""
        results = list(tensors_in((result,)))
        if call.random and self._draws is not None:
            self._draws.after(call.kwargs.get("generator"))
        reason = self._check.result_reason(results)
        if reason is not None:
            self.refuse(call.name, reason)
            return []
        if call.about.lifts:
            return results
        known = set(call.given_at) - {0}
        fresh = [tensor for tensor in results if address(tensor) not in known]
        self._origins.note_made(call.about, call.random, call.given, call.given_at, list(map(address, fresh)))
        if self.on_gpu and any(tensor.is_cuda for tensor in call.given):
            self._origins.note_of_kernels(address(tensor) for tensor in fresh if not tensor.is_cuda)
        for tensor in fresh:
            self.made_by[address(tensor)] = (call.index, call.step.op, tensor.size(), tensor.stride())
        return fresh
