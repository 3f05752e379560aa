"""Follows the memory of every aten operation of a call: what it reads, writes and makes.

The recorded warm-up call, both backends, the address watch and the check for what a graph cannot repeat all stand on
this. Imports `tracer`, `trace`, `hazards`, `origins`, `script`, `eager_answers`, `errors` and `overloads`.
"""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from graphmod.eager_answers import asking
from graphmod.errors import CaptureRefused, Diverged
from graphmod.hazards import Check, Hazard, Reason, hazard
from graphmod.lines import Lines, lines
from graphmod.origins import Origins
from graphmod.overloads import fits_into, run_into
from graphmod.script import Kept, Script
from graphmod.seeds import RESTORES, Draws
from graphmod.trace import Facts, Step, address, tensors_in
from graphmod.tracer import Tracer

_STATISTICS = frozenset({3, 4})  # running_mean and running_var; argument 5 says whether it trains


class Recorder(Tracer):
    """Also sees what a call reads and writes.

    There are two uses. In a capture it raises `CaptureRefused` before an operation that a graph cannot repeat. With
    `watching`, around the eager call before that, it raises nothing and changes nothing: what a capture would refuse
    is in `hazards` afterwards, and `script()` is what the capture is to be compared with.

    Attributes:
        hazards: what a graph cannot repeat, in order.
        outside: address -> tensor, what the call read or wrote without having made it or been given it.
        leaves: the leaf tensors that require grad among the tensors it read and had not made, the very objects.
        first_seen: address of a tensor of `outside` -> index in the trace.
        written: the part of `outside` that it changed.
        inputs_written: the addresses of inputs that it changed.
        read: every address it read.
        made_by: address -> index in the trace, operation, size and strides of what was made there last.
        kept_at: the addresses of tensors of the recorded call that a capture goes on to use.
        host_random: where the call drew from a generator on the host although it works on a GPU; None if nowhere.
        seen_until: index in the trace at which compiled code ran first, so that tensors which come up later may have
            been made inside; None where none ran.
        wrote_unseen: whether code ran that it could not see, and that changed something from outside before anything
            that it saw did.

    Args:
        inputs: the tensors the call was given; reading them is no surprise.
        gpu: index of the GPU on which CUDA captures; None under emulation.
        watching: see above.
        script: of the recorded eager call: a capture that does something else is refused at once.
        generators: whose state before the call is to be known.
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
        watching: bool = False,
        script: Script | None = None,
        generators: Iterable[torch.Generator] = (),
        before_write: Callable[[Tensor], None] | None = None,
        targets: dict[int, Tensor] | None = None,
        after: Callable | None = None,
        around: Callable[[Iterable[Any]], AbstractContextManager] | None = None,
    ) -> None:
        super().__init__()
        self.watching, self.on_gpu, self._gpu = watching, gpu is not None, gpu
        self.hazards: list[Hazard] = []
        self.outside: dict[int, Tensor] = {}
        self.leaves: list[Tensor] = []
        self.first_seen: dict[int, int] = {}
        self.written: dict[int, Tensor] = {}
        self.read: set[int] = set()
        self.inputs_written: set[int] = set()
        self.made_by: dict[int, tuple[int, Any, torch.Size, tuple]] = {}
        self.kept_at: set[int] = set()
        self.host_random: str | None = None
        self.seen_until: int | None = None
        self.wrote_unseen = False
        self._inputs = {address(tensor) for tensor in inputs}
        self._known_leaves: set[int] = set()
        self._origins = Origins()
        self._check = Check(gpu, self._origins)
        self._draws: Draws | None = None
        self._generators = generators
        self._touched_state: Lines | None = None
        self._refused: str | None = None
        self._script = script
        self._kept: dict[int, Kept] = {}
        self._before_write, self._after, self._around = before_write, after, around
        self._targets = targets or {}

    def _enter(self, context: contextlib.ExitStack) -> None:
        context.enter_context(asking(self))
        if self.watching or not self.on_gpu:  # a GPU that captures does not tell
            self._draws = Draws(self._gpu, list(self._generators))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._draws = None
        if self.watching and self._touched_state is not None and self.random:
            self.hazards.append(Hazard("the call", self._touched_state, *RESTORES[:2]))

    def finish(self) -> "Recorder":
        """Lets go of the callbacks, so that the record keeps nothing alive but the tensors from outside."""
        self._before_write = self._after = self._around = None
        self._targets = {}
        self.made_by = {}
        return self

    def script(self) -> Script:
        """What a capture of the same call must do, and what it may use; of a call that was watched."""
        return Script(self.trace, self._kept)

    def note_compiled(self) -> None:
        """Takes in that compiled code runs now, which makes tensors out of its sight."""
        if self.seen_until is None:
            self.seen_until = len(self.trace)

    def note_unseen(self, changed: Iterable[Tensor]) -> None:
        """Takes in that code out of its sight changed tensors, or may have."""
        before_any = not self.written and not self.inputs_written
        if self._draws is not None:
            self._draws.after_unseen()
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
        return where in self._origins

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

    def refuse(self, operation: str, reason: Reason) -> None:
        """Takes in that the call does what a graph cannot repeat.

        Raises:
            CaptureRefused: in a capture.
        """
        found = hazard(operation, lines(), reason, self.on_gpu)
        if not self.watching:
            self._refused = self._refused or str(found)
            raise CaptureRefused(str(found))
        if found not in self.hazards:
            self.hazards.append(found)

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
        try:
            return self._record(step, about, args, kwargs, random)
        except CaptureRefused as refusal:
            self._refused = self._refused or str(refusal)  # and not the error, whose frames hold this
            raise

    def _record(self, step: Step, about: Facts, args: tuple, kwargs: dict, random: bool) -> Any:
        index = len(self.trace)
        if self._script is not None:
            differs = self._script.differs(index, step, lines)
            if differs is not None:
                raise Diverged(differs)
        given = list(tensors_in((*args, *kwargs.values()) if kwargs else args))
        given_at = list(map(address, given))
        if about.lifts:
            return self._lift(step, args, kwargs, given_at)
        reason = self._reason(step.op, about, args, kwargs, given)
        if reason is not None:
            constant = self._check.kept_by(reason, given)
            if constant is None or not (self.watching or (self._script and index in self._script.kept)):
                self.refuse(about.name.removeprefix("aten::"), reason)
            elif self.watching:
                self._kept[index] = Kept(reason.kept, constant)
            elif reason.kept == "result":
                return self._take(self._script.kept[index].result())
            else:
                args, kwargs = self._script.kept[index].in_place_of(constant, args, kwargs)
                given = list(tensors_in((*args, *kwargs.values())))
                given_at = list(map(address, given))
                for where in given_at:
                    if where not in self._origins and where not in self._inputs and where not in self.outside:
                        self._take_address(where)
        self._note_reads(given, given_at)
        if about.writes or about.statistics:
            self._note_writes(about, args, kwargs, random, given, given_at)
        if random and self._draws is not None and self._touched_state is None:
            reason_of_draw = self._draws.before(kwargs.get("generator"))
            if reason_of_draw is not None:
                self.refuse(about.name.removeprefix("aten::"), reason_of_draw)
        result = self._execute(step.op, about, args, kwargs, index)
        if random and self._draws is not None:
            self._draws.after(kwargs.get("generator"))
        if self.watching and reason is not None and index in self._kept:
            self._kept[index].keep(result)
        results = list(tensors_in(result if isinstance(result, (tuple, list)) else (result,)))
        reason = self._check.result_reason(results)
        if reason is not None:
            self.refuse(about.name.removeprefix("aten::"), reason)
        results_at = list(map(address, results))
        fresh, fresh_at = results, results_at
        known = set(given_at)
        if not known.isdisjoint(results_at):
            new = [i for i, where in enumerate(results_at) if where not in known or not where]
            fresh, fresh_at = [results[i] for i in new], [results_at[i] for i in new]
        self._origins.note_made(about, random, given, given_at, fresh_at)
        if random and self.on_gpu and self.host_random is None and not any(t.is_cuda for t in (*given, *results)):
            self.host_random = lines().place
        for where, tensor in zip(fresh_at, fresh, strict=True):
            self.made_by[where] = (index, step.op, tensor.size(), tensor.stride())
        if self._after is not None:
            self._after(step.op, args, kwargs, result, fresh)
        return result

    def _reason(self, op: Any, about: Facts, args: tuple, kwargs: dict, given: list[Tensor]) -> Reason | None:
        if not isinstance(op, torch._ops.OpOverload):
            return Reason(
                "is an operator on functions, which runs code of its own choice", "keep it outside the captured module"
            )
        return self._check.reason(about, args, kwargs, given)

    def _lift(self, step: Step, args: tuple, kwargs: dict, given_at: list[int]) -> Any:
        """Takes in a tensor made of values in Python, which are those of the recorded call, as the trace says."""
        self._origins.note_constant(given_at[0])
        result = step.op(*args, **kwargs)
        if self._after is not None:
            self._after(step.op, args, kwargs, result, [result])
        return result

    def _take(self, result: Any) -> Any:
        for tensor in tensors_in(result if isinstance(result, (tuple, list)) else (result,)):
            self._take_address(address(tensor))
        return result

    def _take_address(self, where: int) -> None:
        self._origins.note_constant(where)
        self.kept_at.add(where)

    def _note_reads(self, given: list[Tensor], given_at: list[int]) -> None:
        self.read.update(given_at)
        for where, tensor in zip(given_at, given, strict=True):
            if not where or where in self._origins:
                continue
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._known_leaves:
                self._known_leaves.add(id(tensor))
                self.leaves.append(tensor)
            if where not in self._inputs and where not in self.outside:
                self.outside[where] = tensor.detach()
                self.first_seen[where] = len(self.trace)

    def _execute(self, op: Any, about: Facts, args: tuple, kwargs: dict, index: int) -> Any:
        target = self._targets.get(index) if self._targets else None
        if target is not None and fits_into(op, args, kwargs, target):
            return run_into(op, args, kwargs, target)
        if about.lists and self._around is not None:
            with self._around((*args, *kwargs.values())):
                return op(*args, **kwargs)
        return op(*args, **kwargs)

    def _note_writes(
        self, about: Facts, args: tuple, kwargs: dict, random: bool, given: list[Tensor], given_at: list[int]
    ) -> None:
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
                elif where in self._inputs:
                    self.inputs_written.add(where)
                self._origins.note_write(where, random, given, given_at)
                for kept in self._kept.values():
                    kept.note_write(where)
