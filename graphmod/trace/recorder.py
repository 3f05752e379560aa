"""Records a call: its operations, its memory, and what of it a graph cannot repeat.

The recorded warm-up call, both backends, the address watch and the check for what a graph cannot repeat all stand on
this.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphmod.errors import CaptureRefused, Diverged
from graphmod.trace.collectives import without_running
from graphmod.trace.compiled import CompiledGraph
from graphmod.trace.dispatch import beside_the_call, hidden
from graphmod.trace.eager_answers import asking
from graphmod.trace.hazards import COMPILES, OUTSIDE, UNDER_A_MODE, Check, Hazard, Reason, hazard
from graphmod.trace.lines import Lines, lines
from graphmod.trace.memory import Call, MemoryTrace
from graphmod.trace.operations import Facts, Step, address, tensors_in
from graphmod.trace.origins import Origin
from graphmod.trace.overloads import fits_into, run_into
from graphmod.trace.script import Kept, Script
from graphmod.trace.seeds import RESTORES, SETS_STATE, Draws

log = logging.getLogger("graphmod")


class Recorder(MemoryTrace):
    """Also checks what a call does.

    There are two uses. In a capture it raises `CaptureRefused` before an operation that a graph cannot repeat. With
    `watching`, around the eager call before that, it raises nothing and changes nothing: what a capture would refuse
    is in `hazards` afterwards, and `script()` is what the capture is to be compared with.

    Attributes:
        hazards: what a graph cannot repeat, in order.
        times: how often the call did each of them.
        kept_at: the addresses of tensors of the recorded call that a capture goes on to use.
        host_random: where the call drew from a generator on the host although it works on a GPU; None if nowhere.
        collectives: how many operations that other processes take part in it has seen.
        unfinished: what the call has begun that only a backward brings to its end.
        compiles: whether torch.compile compiled something where it could be seen: a backward, for the first time.

    Args:
        inputs, before_write: see `MemoryTrace`.
        gpu: index of the GPU on which CUDA captures; None under emulation.
        watching: see above.
        script: of the recorded eager call: a capture that does something else is refused at once.
        generators: whose state before the call is to be known.
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
        watching: bool = False,
        script: Script | None = None,
        generators: Iterable[torch.Generator] = (),
        before_write: Callable[[Tensor], None] | None = None,
        targets: dict[int, Tensor] | None = None,
        after: Callable | None = None,
        around: Callable[[Iterable[Any]], AbstractContextManager] | None = None,
        before_collective: Callable[[], None] | None = None,
        after_resize: Callable[[torch.UntypedStorage, int], None] | None = None,
    ) -> None:
        super().__init__(inputs, before_write)
        self.watching, self.on_gpu, self._gpu = watching, gpu is not None, gpu
        self.hazards: list[Hazard] = []
        self.times: list[int] = []
        self.kept_at: set[int] = set()
        self.host_random: str | None = None
        self.compiles = False
        self.collectives = 0
        self.unfinished: list[Any] = []
        self._check = Check(gpu, self._origins)
        self._draws: Draws | None = None
        self._generators = generators
        self._touched_state: Lines | None = None
        self._met_generator: Lines | None = None
        self._refused: str | None = None
        self._script = script
        self._kept: dict[int, Kept] = {}
        self._made: list[tuple[Tensor, Tensor]] = []
        self._after, self._around, self._before_collective = after, around, before_collective
        self._after_resize = after_resize
        self._sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}  # storages that were resized, and theirs before
        self._targets = targets or {}

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
        if self.watching and self._met_generator is not None and self._draws.moved():
            self._add(Hazard("the call", self._met_generator, *SETS_STATE[:2]))
        self._draws = None
        if self.watching and self._touched_state is not None and self.random:
            self._add(Hazard("the call", self._touched_state, *RESTORES[:2]))

    def _add(self, found: Hazard) -> None:
        if found in self.hazards:
            self.times[self.hazards.index(found)] += 1
        else:
            self.hazards.append(found)
            self.times.append(1)

    def finish(self) -> "Recorder":
        """Lets go of the callbacks, so that the record keeps nothing alive but the tensors from outside."""
        self._before_write = self._after = self._around = self._before_collective = self._after_resize = None
        self._sizes.clear()
        self._targets = {}
        self.made_by = {}
        return self

    def script(self) -> Script:
        """What a capture of the same call must do, and what it may use; of a call that was watched."""
        return Script(self.trace, self._kept, self._made)

    def make(self, function: Callable, values: Any, kwargs: dict) -> Any:
        """Makes a tensor on the GPU of Python values, which a capture can only take from the recorded call.

        Raises:
            Diverged: in a capture, the values are others than then.
        """
        with hidden():
            if self.watching or self._script is None:
                result = function(values, **kwargs)
                self._made.append((result.detach().cpu(), result.detach().clone()))
                self._origins.note_constant(address(result))
                return result
            now = function(values, **{**kwargs, "device": "cpu", "requires_grad": False})
            then, kept = (
                self._script.made[len(self._made)] if len(self._made) < len(self._script.made) else (None, None)
            )
            if then is None or now.dtype is not then.dtype or not torch.equal(now.nan_to_num(), then.nan_to_num()):
                raise Diverged(f"{lines().place} makes a tensor of other Python values than in the call before")
            self._made.append((then, kept))
            result = kept.clone().requires_grad_(kwargs.get("requires_grad", False))
        self._take_address(address(result))
        return result

    def note_resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Takes in that code has made or given back the memory of a storage, of `before` bytes until then."""
        try:
            where = storage.data_ptr()
        except RuntimeError:  # of a tensor without memory, on which torch.compile traces
            return
        if storage.nbytes() > before:
            self._origins.note_allocated(where)
        self._sizes.setdefault(storage._cdata, (storage, before))
        if self._after_resize is not None:
            self._after_resize(storage, storage.nbytes())

    def before_communicating(self) -> None:
        """Takes in that a collective is about to come; to be told before another stream is taken for it."""
        if not self.collectives and self._before_collective is not None:
            with beside_the_call():
                self._before_collective()
        self._before_collective = None

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the host while the capture works on a GPU."""
        return self.on_gpu and not tensor.is_cuda

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
                self._draws.know(generator)
            self._met_generator = self._met_generator or lines()

    def note_mode(self, mode: TorchDispatchMode) -> None:
        """Refuses code that computes under a dispatch mode which hides its operations."""
        self.refuse(type(mode).__name__, UNDER_A_MODE)

    def note_compilation(self) -> None:
        """Refuses a capture in which torch.compile compiles. A call that was watched is to be recorded again."""
        self.compiles = True
        if not self.watching:
            self.refuse("torch.compile", COMPILES)

    def refuse(self, operation: str, reason: Reason) -> None:
        """Takes in that the call does what a graph cannot repeat.

        Raises:
            CaptureRefused: in a capture.
        """
        found = hazard(operation, lines(), reason, self.on_gpu)
        if not self.watching:
            self._refused = self._refused or str(found)
            raise CaptureRefused(str(found))
        self._add(found)

    def check(self) -> None:
        """Refuses the capture, if code that catches every exception kept a refusal to itself, or if the recorded call
        did more.

        Raises:
            CaptureRefused: as the first time.
        """
        if self._refused is None and self._touched_state is not None and self.random:
            self._refused = str(Hazard("the call", self._touched_state, *RESTORES[:2]))
        differs = None if self._refused or self._script is None else self._script.ends_otherwise(self.trace)
        if differs is not None:
            raise Diverged(differs)
        if self._refused is not None:
            raise CaptureRefused(self._refused)

    def _run(self, step: Step, about: Facts, args: tuple, kwargs: dict, random: bool) -> Any:
        if self.watching:
            return self._watch(step, about, args, kwargs, random)
        try:
            call = Call(step, about, args, kwargs, random, len(self.trace))
            if self._script is not None:
                differs = self._script.differs(call.index, step, lines)
                if differs is not None:
                    raise Diverged(differs)
            kept = self._before(call)
            if kept is not None and kept.kind == "result":
                return self._take(kept.result())
            result = self._execute(call)
            self._done(call, result)
            return result
        except CaptureRefused as refusal:
            self._refused = self._refused or str(refusal)  # and not the error, whose frames hold this
            raise

    def _watch(self, step: Step, about: Facts, args: tuple, kwargs: dict, random: bool) -> Any:
        """Runs an operation, whatever the record makes of it."""
        call = Call(step, about, args, kwargs, random, len(self.trace))
        try:
            kept = self._before(call)
        except Exception as error:
            kept = self._cannot_follow(call, error)
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
            self._done(call, result)
        except Exception as error:
            self._cannot_follow(call, error)
        return result

    def _cannot_follow(self, call: Call, error: Exception) -> None:
        log.debug("%s cannot be followed", call.name, exc_info=error)
        self.refuse(call.name, Reason(f"cannot be followed ({type(error).__name__}: {error})", OUTSIDE))

    def _before(self, call: Call) -> Kept | None:
        """Takes in an operation that is about to run, and checks it; what is kept of it, or was."""
        if call.about.collective:
            self.before_communicating()
            self.collectives += 1
        if call.about.lifts:
            self._origins.note_constant(call.given_at[0])
            return None
        kept = None
        reason = self._reason(call)
        if reason is not None:
            constants = self._check.kept_by(reason, call.given)
            known = None if self._script is None else self._script.kept.get(call.index)
            if constants is not None and self.watching:
                kept = self._kept[call.index] = Kept(reason.kept, constants)
            elif constants is not None and known is not None:
                kept = known
                if kept.kind == "result":
                    return kept
                call.look_at(*kept.in_place_of(constants, call.args, call.kwargs))
                for where in call.given_at:
                    if where in kept.where:
                        self._take_address(where)
            else:
                self.refuse(call.name, reason)
        self._note_reads(call)
        if call.about.writes or call.about.statistics:
            self._note_writes(call)
        if call.random and self._draws is not None and self._touched_state is None:
            reason = self._draws.before(call.kwargs.get("generator"))
            if reason is not None:
                self.refuse(call.name, reason)
        return kept

    def _done(self, call: Call, result: Any) -> None:
        """Takes in the results of an operation that has run."""
        results = list(tensors_in(result if isinstance(result, (tuple, list)) else (result,)))
        if call.random and self._draws is not None:
            self._draws.after(call.kwargs.get("generator"))
        if call.random and self.on_gpu and self.host_random is None:
            on_gpu = any(tensor.is_cuda for tensor in (*call.given, *results))
            self.host_random = None if on_gpu else lines().place
        reason = self._check.result_reason(results)
        if reason is not None:
            self.refuse(call.name, reason)
            return
        results_at = list(map(address, results))
        fresh, fresh_at = results, results_at
        known = set(call.given_at)
        if not call.about.lifts and not known.isdisjoint(results_at):
            new = [i for i, where in enumerate(results_at) if where not in known or not where]
            fresh, fresh_at = [results[i] for i in new], [results_at[i] for i in new]
        if not call.about.lifts:
            self._origins.note_made(call.about, call.random, call.given, call.given_at, fresh_at)
            if self.on_gpu and any(tensor.is_cuda for tensor in call.given):
                self._origins.note_of_kernels(where for where, t in zip(fresh_at, fresh, strict=True) if not t.is_cuda)
        if self.watching:
            return
        for where, tensor in zip(fresh_at, fresh, strict=True):
            self.made_by[where] = (call.index, call.step.op, tensor.size(), tensor.stride())
        if self._after is not None:
            self._after(call.step.op, call.args, call.kwargs, result, fresh)

    def _reason(self, call: Call) -> Reason | None:
        if isinstance(call.step.op, CompiledGraph):
            return self._check.compiled(call.step.op, call.given)
        if not isinstance(call.step.op, torch._ops.OpOverload):
            return Reason(
                "is an operator on functions (torch.cond, while_loop, scan, flex_attention), which runs code of its "
                "own choice",
                f"compile what calls it, use torch.where in place of torch.cond, or {OUTSIDE}",
            )
        return self._check.reason(call.about, call.args, call.kwargs, call.given)

    def _take(self, result: Any) -> Any:
        for tensor in tensors_in(result if isinstance(result, (tuple, list)) else (result,)):
            self._take_address(address(tensor))
        return result

    def _take_address(self, where: int) -> None:
        self._origins.note_constant(where)
        self.kept_at.add(where)

    def _execute(self, call: Call) -> Any:
        op, args, kwargs = call.step.op, call.args, call.kwargs
        if call.about.collective and not self.on_gpu:
            return without_running(op, args, kwargs)
        target = self._targets.get(call.index) if self._targets else None
        if target is not None and fits_into(op, args, kwargs, target):
            return run_into(op, args, kwargs, target)
        if call.about.lists and self._around is not None:
            with self._around((*args, *kwargs.values())):
                return self._do(op, args, kwargs)
        return self._do(op, args, kwargs)

    def _note_write(self, where: int, origin: Origin) -> None:
        super()._note_write(where, origin)
        for kept in self._kept.values():
            kept.note_write(where)
