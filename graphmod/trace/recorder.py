"""Records a call: its operations, its memory, and what of it a graph cannot repeat.

Twice: `EagerRecorder` watches the warm-up call that decides on a capture, `Recorder` follows the capture.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused, Diverged
from graphmod.trace.checked import CheckedTrace
from graphmod.trace.collectives import without_running
from graphmod.trace.compiled import CompiledGraph
from graphmod.trace.dispatch import beside_the_call, hidden
from graphmod.trace.hazards import COMPILES, OUTSIDE, READ_CHANCE, Reason, hazard
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.lines import lines
from graphmod.trace.memory import Call
from graphmod.trace.observing import observer
from graphmod.trace.operations import Facts, Step, address
from graphmod.trace.origins import Origin
from graphmod.trace.overloads import fits_into, run_into
from graphmod.trace.places import place_of
from graphmod.trace.script import Kept, Script
from graphmod.trace.tensors import tensors_in

log = logging.getLogger("graphmod")


class EagerRecorder(CheckedTrace):
    """Watches an eager call. It raises nothing and changes nothing: what a capture would refuse is in `hazards`.

    Attributes:
        script: what a capture of the same call must do, and what it may use.
        compiles: whether torch.compile compiled something where it could be seen: a backward, for the first time.

    Args:
        inputs, gpu, generators: see `CheckedTrace`.
        before_collective: called with `(op, args, kwargs)` before each operation that other processes take part in;
            what it raises ends the call.
        host_draws: is told what is drawn on the host, by operations; None where nobody follows what becomes of it.
    """

    watching = True

    def __init__(
        self,
        inputs: Iterable[Tensor] = (),
        *,
        gpu: int | None = None,
        generators: Iterable[torch.Generator] = (),
        before_collective: Callable[[Any, tuple, dict], None] | None = None,
        host_draws: HostDraws | None = None,
    ) -> None:
        super().__init__(inputs, gpu, generators)
        self._before_collective = before_collective
        self.host_draws = host_draws
        if host_draws is not None:
            host_draws.begin(torch.default_generator)
        self.script = Script(self.trace, () if host_draws is None else host_draws.reads)
        self.compiles = False

    def make(self, function: Callable, values: Any, kwargs: dict) -> Tensor:
        """Makes a tensor on the GPU of Python values, and keeps it for the capture."""
        result = super().make(function, values, kwargs)
        with hidden():
            self.script.note_made(result)
        return result

    def note_compilation(self) -> None:
        """Takes in that torch.compile compiles: the call is to be recorded again."""
        self.compiles = True

    def aim(self, tensor: Tensor, memory: Callable[[], Tensor]) -> None:
        """Lets a capture of this call compute a tensor straight into what `memory()` gives then: a tensor of its size,
        contiguous, as it is. Does nothing where it cannot."""
        place = place_of(tensor, self.made_by) if tensor.is_contiguous() else None
        if place is not None and place.index not in self.script.aims:
            self.script.aims[place.index] = lambda: memory().as_strided(place.size, place.stride)

    def _run(self, step: Step, about: Facts, args: tuple, kwargs: dict, random: bool) -> Any:
        """Runs an operation, whatever the record makes of it."""
        if about.collective and self._before_collective is not None:
            with hidden():
                self._before_collective(step.op, args, kwargs)
        call = Call(step, about, args, kwargs, random, len(self.trace))
        kept: Kept | None = None
        number, drawn = False, None
        try:
            reason = self._why_not(call)
            if self.host_draws is not None:
                number = reason is READ_CHANCE and self._reads_number(call, self.host_draws)
                drawn = self.host_draws.before(step.op, about, args, kwargs, random, self._origins)
            constants = None if reason is None else self._check.kept_by(reason, call.given)
            if constants is not None:
                kept = self.script.kept[call.index] = Kept(reason.kept, constants)
            elif reason is not None and not number:
                self.refuse(call.name, reason)
            self._before(call)
        except Exception as error:
            self._cannot_follow(call, error)
        draws = self._draws if isinstance(step.op, CompiledGraph) and not random else None
        drawing, state = (None, None) if draws is None else (draws.before(None), draws.state())
        result = self._do(step.op, args, kwargs)
        try:
            if draws is not None and draws.state() != state:
                step.op.note_random()
                self.random = call.random = True
                if drawing is not None:
                    self.refuse(call.name, drawing)
            if kept is not None:
                kept.keep(result)
            if self.host_draws is not None and number:
                self.host_draws.got(result)
            fresh = self._done(call, result)
            if self.host_draws is not None:
                self.host_draws.done(drawn, result, fresh)
        except Exception as error:
            self._cannot_follow(call, error)
        return result

    def _reads_number(self, call: Call, draws: HostDraws) -> bool:
        """Whether a number that is read on the host can be drawn again."""
        found = hazard(call.name, lines(), READ_CHANCE, self.on_gpu)
        return draws.read(call.given[0], call.index, found)

    def _cannot_follow(self, call: Call, error: Exception) -> None:
        log.debug("%s cannot be followed", call.name, exc_info=error)
        self.refuse(call.name, Reason(f"cannot be followed ({type(error).__name__}: {error})", OUTSIDE))

    def _note_write(self, where: int, origin: Origin) -> None:
        super()._note_write(where, origin)
        self.script.note_write(where)


class Recorder(CheckedTrace):
    """Follows a capture, and raises `CaptureRefused` before an operation that a graph cannot repeat.

    Attributes:
        kept_at: the addresses of tensors of the recorded call that it goes on to use.

    Args:
        inputs, before_write, generators: see `CheckedTrace`.
        gpu: index of the GPU on which CUDA captures; None under emulation.
        script: of the recorded eager call: a capture that does something else is refused at once.
        targets: index of an operation in the trace -> memory of its result's shape and strides to compute it into.
        after: called with `(op, args, kwargs, result, fresh)` after each operation; `fresh` are the result tensors
            that share no storage with its arguments.
        around: called with the arguments of each operation on lists of tensors, for a context to run it in.
        before_collective: called before the first operation that other processes take part in.
        after_resize: called with each storage that was resized by hand, and its bytes.
    """

    def __init__(
        self,
        inputs: Iterable[Tensor] = (),
        *,
        gpu: int | None = None,
        script: Script | None = None,
        generators: Iterable[torch.Generator] = (),
        before_write: Callable[[Tensor], None] | None = None,
        targets: dict[int, Tensor] | None = None,
        after: Callable | None = None,
        around: Callable[[Iterable[Any]], AbstractContextManager] | None = None,
        before_collective: Callable[[], None] | None = None,
        after_resize: Callable[[torch.UntypedStorage, int], None] | None = None,
    ) -> None:
        super().__init__(inputs, gpu, generators, before_write)
        self.kept_at: set[int] = set()
        self._refused: str | None = None
        self._script = script
        self._made = 0  # tensors of Python values, on the GPU
        self._after = [one for one in (after, observer()) if one is not None]
        self._around, self._before_collective = around, before_collective
        self._after_resize = after_resize
        self._targets = targets or {}

    def finish(self) -> "Recorder":
        """Lets go of the callbacks, so that the record keeps nothing alive but the tensors from outside."""
        self._before_write = self._around = self._before_collective = self._after_resize = None
        self._after = []
        self._sizes.clear()
        self._targets = {}
        self.made_by = {}
        return self

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the host while the capture works on a GPU."""
        return self.on_gpu and not tensor.is_cuda

    # -- refusals ------------------------------------------------------------------------------------------------

    def refuse(self, operation: str, reason: Reason) -> None:
        """Refuses the capture.

        Raises:
            CaptureRefused: always.
        """
        super().refuse(operation, reason)
        self._refused = self._refused or str(self.hazards[-1])
        raise CaptureRefused(str(self.hazards[-1]))

    def note_compilation(self) -> None:
        """Refuses a capture in which torch.compile compiles."""
        self.refuse("torch.compile", COMPILES)

    def check(self) -> None:
        """Refuses the capture, if code that catches every exception kept a refusal to itself, or if the recorded call
        did more.

        Raises:
            CaptureRefused: as the first time.
        """
        refused = self._refused or next(map(str, self.hazards), None)
        if refused is not None:
            raise CaptureRefused(refused)
        differs = None if self._script is None else self._script.ends_otherwise(self.trace)
        if differs is not None:
            raise Diverged(differs)

    # -- what is no operation ------------------------------------------------------------------------------------

    def make(self, function: Callable, values: Any, kwargs: dict) -> Tensor:
        """Makes a tensor on the GPU of Python values: the one of the recorded call.

        Raises:
            Diverged: the values are others than then.
        """
        if self._script is None:
            return super().make(function, values, kwargs)
        with hidden():
            now = function(values, **{**kwargs, "device": "cpu", "requires_grad": False})
            kept = self._script.made(self._made, now)
            if kept is None:
                raise Diverged(f"{lines().place} makes a tensor of other Python values than in the call before")
            self._made += 1
            self._take_address(address(kept))
            return kept.requires_grad_(kwargs.get("requires_grad", False))

    def note_resized(self, storage: torch.UntypedStorage, before: int) -> bool:
        """As in an eager call; the graph has to do the same."""
        followed = super().note_resized(storage, before)
        if followed and self._after_resize is not None:
            self._after_resize(storage, storage.nbytes())
        return followed

    def before_communicating(self) -> None:
        """Takes in that a collective is about to come; to be told before another stream is taken for it."""
        if self._before_collective is not None:
            with beside_the_call():
                self._before_collective()
        self._before_collective = None

    # -- operations ----------------------------------------------------------------------------------------------

    def _run(self, step: Step, about: Facts, args: tuple, kwargs: dict, random: bool) -> Any:
        call = Call(step, about, args, kwargs, random, len(self.trace))
        try:
            differs = None if self._script is None else self._script.differs(call.index, step, lines)
            if differs is not None:
                raise Diverged(differs)
            reason = self._why_not(call)
            kept = None if reason is None else self._kept(call, reason)
            if kept is not None and kept.kind == "result":
                result = kept.result()
                for tensor in tensors_in((result,)):
                    self._take_address(address(tensor))
                return result
            self._before(call)
            result = self._execute(call)
            fresh = self._done(call, result)
        except CaptureRefused as refusal:
            self._refused = self._refused or str(refusal)  # and not the error, whose frames hold this
            raise
        for after in self._after:
            after(step.op, call.args, call.kwargs, result, fresh)
        return result

    def _kept(self, call: Call, reason: Reason) -> Kept | None:
        """What was kept of an operation on constants; kept arguments take the place of those in `call`. None where it
        is to run: it reads a number that was compared before this capture."""
        if reason is READ_CHANCE and self._script is not None and call.index in self._script.numbers:
            return None
        constants = self._check.kept_by(reason, call.given)
        kept = None if constants is None or self._script is None else self._script.kept.get(call.index)
        if kept is None:
            self.refuse(call.name, reason)
        if kept.kind == "arguments":
            call.look_at(*kept.in_place_of(constants, call.args, call.kwargs))
            for where in kept.where.intersection(call.given_at):
                self._take_address(where)
        return kept

    def _take_address(self, where: int) -> None:
        self._origins.note_constant(where)
        self.kept_at.add(where)

    def _execute(self, call: Call) -> Any:
        op, args, kwargs = call.step.op, call.args, call.kwargs
        if call.about.collective and not self.on_gpu:
            return without_running(op, args, kwargs)
        target = self._target(call.index)
        if target is not None and fits_into(op, args, kwargs, target):
            return run_into(op, args, kwargs, target)
        if call.about.lists and self._around is not None:
            with self._around((*args, *kwargs.values())):
                return self._do(op, args, kwargs)
        return self._do(op, args, kwargs)

    def _target(self, index: int) -> Tensor | None:
        if index in self._targets:
            return self._targets[index]
        if self._script is None or index not in self._script.aims:
            return None
        with hidden():
            return self._script.aims[index]()
