"""Eager parts: calls inside a captured call that a graph cannot repeat, and that are made again at each replay.

In the call that is captured, the graph so far ends at such a call and is launched, the call is made, and another graph
begins; a replay launches, calls, launches. The function and the objects it is given are those of the capture. Tensors
that the graph made it gets as copies, whose changes are taken back; of tensors that it returns there are copies at
fixed addresses. What it reads and does is not watched.

Code after a part must find what it found in the recorded call: all that the call reads is compared once more when the
part was made, since a frame may have looked at it before. Where it differs, or the part raises an error, or a capture
fails after it, the call cannot be begun again, and its rest runs eagerly: its code is run from the beginning, and finds
up to there what the graph and the parts have made (`EagerParts.go_on`).
"""

from __future__ import annotations

import copy
import dis
import functools
import io
import operator
import os
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from graphmod.errors import BackwardUnavailable, CaptureRefused, Diverged, EagerPartFailed
from graphmod.errors import reason as reason_of
from graphmod.guards.changes import what_changed
from graphmod.guards.guards import Guards, put
from graphmod.reads.frames import noting
from graphmod.reads.operand_stack import function_of, is_called
from graphmod.signature.call import Call
from graphmod.signature.flattening import PLAIN_KINDS
from graphmod.signature.modes import FOREIGN, GRAD, INFERENCE, SETTINGS, difference, entered_again
from graphmod.step.gradients import GradientBuffer, Left, as_memory, is_split, leave_behind, left_behind, part
from graphmod.step.results import of_argument, of_gradient
from graphmod.torch_private import beside_dynamo, conjugated, negated, storage_uses
from graphmod.trace import dispatch
from graphmod.trace.dispatch import hidden
from graphmod.trace.fast_forward import FastForward, Trail
from graphmod.trace.garbage import no_garbage_collection
from graphmod.trace.generators import put_back, state_of
from graphmod.trace.hazards import OUTSIDE, Hazard, Reason
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.lines import location
from graphmod.trace.operations import address
from graphmod.trace.recorder import Follower, Parts, Recorder
from graphmod.trace.undo import Unwinding, let_through, within

MOST = 8  # in one call: more cost more than they bring
_RETURNS_OTHERS = "returns other values, or tensors of other kinds, than before"
_RAISES = Reason("is an eager part, and raises an error", OUTSIDE)
_SINGLE = (type, torch.dtype, torch.layout, torch.memory_format)  # of whose objects there is one each


def eager(function: Callable) -> Callable:
    """Makes each call of a function, inside a call that is captured, an *eager part*: it is made at each replay,
    between two graphs. Anywhere else it is a call like any other.

    For what a graph cannot repeat: an optimizer that counts on the host, `ema.update()`, a metric. A decorator, or
    around the function at the call: `graphmod.eager(optimizer.step)()`.

    The function gets the very objects that it was given in the call that was captured, and tensors of the present one.
    It returns plain values or tensors without gradient, alone or in lists, tuples and dicts; what else it returns, and
    a float, must not be used. Where it raises an error, or changes what code after it reads, the rest of that call runs
    eagerly.

    Raises:
        TypeError: `function` cannot be called.
    """
    if not callable(function):
        raise TypeError(
            f"eager takes a function, got {type(function).__name__}; write eager(update)(), not eager(update())"
        )

    @functools.wraps(function)
    @beside_dynamo
    def graphmod_calls_eager_part(*args: Any, **kwargs: Any) -> Any:  # the name that `UNGUARDED` has
        recorder: Any = dispatch.current()
        if recorder is None or not isinstance(recorder, Recorder):
            return function(*args, **kwargs)
        return recorder.eager_part(function, args, kwargs, sys._getframe())

    return graphmod_calls_eager_part


# -- what a part is given, and gives -----------------------------------------------------------------------------------
_OF_THE_CALL = "that the call makes, and that a replay would not make anew"
_OTHER = "that is another than in the call that was recorded"


class _Form(pickle.Pickler):
    """What a value is made of: tensors, objects that are themselves in each call, and how these lie in containers.

    Args:
        is_old: whether an object was there before the call, so that it is itself in each.
        strange: what other objects are, in words.

    Attributes:
        tensors: those in it.
        content: all else, to be compared.

    Raises:
        CaptureRefused: it holds another object.
    """

    def __init__(self, value: Any, is_old: Callable[[Any], bool], strange: str) -> None:
        self._written, self._is_old, self._strange = io.BytesIO(), is_old, strange
        super().__init__(self._written)
        self.tensors: list[Tensor] = []
        self._old: list[Any] = []
        self.dump(value)
        self.content = self._written.getvalue(), list(map(id, self._old))  # in which 0.0 and -0.0 differ
        self.clear_memo()  # which holds all that it has met

    def persistent_id(self, value: Any) -> int | None:
        """The place of what is not taken apart: one of `tensors`, or, below 0, an old object."""
        kind = type(value)
        if issubclass(kind, Tensor):
            self.tensors.append(value)
            return len(self.tensors) - 1
        if value is None or kind is types.MethodType or (kind in PLAIN_KINDS and kind not in _SINGLE):
            return None
        if kind not in _SINGLE and not self._is_old(value):
            return None
        self._old.append(value)
        return -len(self._old)

    def reducer_override(self, value: Any) -> Any:
        """How to make an object anew that is none of Python's containers."""
        kind = type(value)
        if kind is types.MethodType:  # another object each time that somebody asks for it
            return kind, (value.__func__, value.__self__)
        if kind in (slice, functools.partial, types.BuiltinMethodType) or kind in PLAIN_KINDS:
            return NotImplemented
        raise CaptureRefused(f"is given, or returns, one {kind.__name__} {self._strange}")

    @property
    def has_parts(self) -> bool:
        """Whether a tensor is part of another; parts get views of what they return by where these begin in a copy."""
        return any(tensor.storage_offset() for tensor in self.tensors)

    @property
    def outline(self) -> tuple:
        """What must be the same in each call."""
        return self.content, [
            (one.size(), one.stride(), one.dtype, one.device, one.requires_grad) for one in self.tensors
        ]

    def around(self, tensors: list[Tensor]) -> Any:
        """The like of the value around other tensors."""
        return _Made(self.content[0], tensors, self._old).load()


class _Made(pickle.Unpickler):
    def __init__(self, content: bytes, tensors: list[Tensor], old: list[Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors, self._old = tensors, old

    def persistent_load(self, place: int) -> Any:
        return self._tensors[place] if place >= 0 else self._old[-1 - place]


def _returned(value: Any, is_old: Callable[[Any], bool], strange: str) -> _Form:
    """What a part returned, if code goes on to use it: plain values, tensors, objects from before the call, or
    containers of these. See `_Form`.

    Raises:
        CaptureRefused: it is something else.
    """
    form = _Form(value, is_old, strange)
    if type(value) in (float, complex):
        raise CaptureRefused(f"returns one {type(value).__name__} that code after it may use; make it a tensor")
    if any(tensor.requires_grad for tensor in form.tensors):
        raise CaptureRefused("returns a tensor that requires grad; return it detached")
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in form.tensors):
        raise CaptureRefused("returns a sparse or nested tensor")
    return form


def _name_of(function: Callable) -> str:
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return name if owner is None or isinstance(owner, types.ModuleType) else f"{type(owner).__name__}.{name}"


def _is_dropped(frame: FrameType) -> bool:
    """Whether code makes nothing of what a frame will give: not what a function in C would, as in
    `out.extend(map(part, x))`."""
    caller, function = frame.f_back, function_of(frame)
    assert caller is not None, "a recorder has called"
    steps = list(dis.get_instructions(caller.f_code))
    at = max(index for index, step in enumerate(steps) if step.offset <= caller.f_lasti)  # caches follow it
    return steps[at + 1].opname == "POP_TOP" and function is not None and is_called(caller, function, steps, at)


def _beside() -> tuple:
    """What contexts of `contextlib` and `warnings` change, on which there is no guard."""
    here = os.stat(".")
    return sys.stdout, sys.stderr, id(warnings.filters), warnings.showwarning, here.st_dev, here.st_ino


# -- in a recorded call ------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class RecordedPart:
    """What a recorded call showed of an eager part.

    Attributes:
        function: what is called; found: whether nobody has marked it, and no backward runs in it.
        name, where: of the function, and where it is called.
        index: how many operations come before it.
        given: the outline of the function and what it is given.
        old: the objects in that, and in what it returned, which were there before the call, by identity.
        returned: the outline of what it returned; None where nobody uses that.
        goes_on, backward: whether operations come after it, and a backward.
        refused: whether no replay could call it so, or use what it gives.
        late: whether it is called after code that changes what no replay changes, or not before its end.
    """

    function: Callable
    found: bool
    name: str
    where: str
    index: int
    given: tuple = ()
    old: dict[int, Any] = field(default_factory=dict)
    returned: tuple | None = None
    goes_on: bool = False
    backward: bool = False
    refused: bool = False
    late: bool = False

    def form_of(self, given: tuple) -> _Form:
        """What a later call of the function, of these arguments, is made of."""
        return _Form(given, self.is_old, _OTHER)

    def is_old(self, value: Any) -> bool:
        """Whether an object is one of `old`."""
        return id(value) in self.old

    def finish(self, recorder: Recorder) -> None:
        """Takes in what the call did after it."""
        later = recorder.trace[self.index :]
        self.goes_on, self.backward = bool(later), any(step.code is None for step in later)

    def __str__(self) -> str:
        return f"{self.name} ({self.where})"


class RecordedParts(Parts):
    """The eager parts of a recorded call.

    Args:
        call: that call.
        noted: what notes what the call reads.
        draws: what it draws on the host.
        found: has put functions in place of those that are found to be parts.
        earlier: the guards of a call that was recorded before it, and its parts.

    Attributes:
        made: the parts, in order.
    """

    def __init__(
        self,
        call: Call,
        noted: noting,
        draws: HostDraws,
        found: AbstractContextManager,
        earlier: tuple[Guards | None, list[RecordedPart]] = (None, []),
    ) -> None:
        self._call, self.noted, self._draws, self._found = call, noted, draws, found
        self._earlier, self._made_earlier = earlier
        self._is_as_then = False
        self._drawn = 0
        self._held: list[Any] = []  # so that nothing else comes to lie where these do
        self._histories = _Histories([])  # of tensors that the part under way is given
        self._beside = _beside()
        self.made: list[RecordedPart] = []

    def call(self, recorder: Any, function: Callable, args: tuple, kwargs: dict, frame: FrameType, name: str) -> Any:
        """See `recorder.Parts`."""
        caller: Any = frame.f_back
        where = location(caller.f_code, caller.f_lineno)
        known = RecordedPart(function, bool(name), name or _name_of(function), where, len(recorder.trace))
        self.made.append(known)
        try:
            self._found.__exit__(None, None, None)
            with hidden():
                given = self._judged(recorder, known, self._take_given, (function, args, kwargs))
                with self._histories:
                    result = self.noted.unnoted(function, *args, **kwargs)
                returned = self._judged(recorder, known, self._take_returned, result, given, not _is_dropped(frame))
        except BaseException:
            recorder.refuse(known.name, _RAISES)
            raise
        finally:
            self._found.__enter__()
        self._held += [result, *given]
        recorder.after_part(returned, given)
        self._drawn = len(self._draws)
        return result

    def _judged(self, recorder: Recorder, known: RecordedPart, take: Callable, *given: Any) -> list[Tensor]:
        """The tensors in what a part is given, or gives, if a replay can have that."""
        try:
            return take(known, *given)
        except CaptureRefused as refusal:
            known.refused = not known.late
            recorder.refuse(known.name, Reason(f"is an eager part that {refusal}", OUTSIDE))
            return []

    def met(self, hazard: Hazard) -> None:
        """See `recorder.Parts`."""
        last = self.made[-1] if self.made else None
        if last is None or not (last.refused or last.late):  # told of the part itself, not of where it is called
            around = self.noted.functions_around(sys._getframe(1))
            self.noted.notes.touched.setdefault(around, set()).add(str(hazard))

    def _differs(self) -> str | None:
        """What the call before has read and this one would find otherwise, in words."""
        return None if self._earlier is None else self._earlier.moved() or self._earlier.changed(gradients=False)

    def _take_given(self, known: RecordedPart, value: tuple) -> list[Tensor]:
        self._is_as_then, self._histories = self._differs() is None, _Histories([])
        if _beside() != self._beside:
            raise CaptureRefused(
                "is called where output, warnings or the working directory are redirected, as they are in no replay"
            )
        changed = what_changed(self.noted.notes)
        if changed is not None:  # and a replay would not
            known.late = True
            raise CaptureRefused(f"comes after code that {changed}")
        form = _Form(value, functools.partial(self._is_old, known), _OF_THE_CALL)
        known.given = form.outline
        made = [one for one in form.tensors if one.requires_grad and not self.noted.is_old(one)]
        if made and not known.found:
            raise CaptureRefused("is given a tensor that requires grad; pass it detached")
        self._histories = _Histories(made)
        return [tensor.detach() for tensor in form.tensors]  # and not itself: autograd counts who holds gradients

    def _take_returned(self, known: RecordedPart, result: Any, given: list[Tensor], is_used: bool) -> list[Tensor]:
        changed = self._differs() if self._is_as_then else None
        if changed is not None:
            raise CaptureRefused(f"changes what code after it reads: {changed}")
        histories, self._histories = self._histories, _Histories([])
        if histories.changed:
            raise CaptureRefused("hooks a tensor that it is given, or changes its history")
        if histories.kept:
            raise CaptureRefused("keeps a tensor that it is given, or what it makes of one; pass it detached")
        if not is_used:
            return []
        form = _returned(result, functools.partial(self._is_old, known), _OF_THE_CALL)
        known.returned = form.outline
        before = next(iter(self._made_earlier[len(self.made) - 1 :]), known)
        if before.where == known.where and before.returned not in (None, known.returned):
            raise CaptureRefused(_RETURNS_OTHERS)
        there = {address(tensor) for tensor in given} - {0}
        own = torch.empty(1)
        uses = storage_uses(own.untyped_storage()._cdata)
        for tensor in form.tensors:
            shared = address(tensor) in there or storage_uses(tensor.untyped_storage()._cdata) > uses
            if shared or self.noted.is_old(tensor):
                raise CaptureRefused("returns a tensor whose memory others have as well; return a copy")
        if form.has_parts:
            raise CaptureRefused("returns part of another tensor; return a copy")
        return form.tensors

    def _is_old(self, known: RecordedPart, value: Any) -> bool:
        if not self.noted.is_old(value):
            return False
        if id(value) in self._call.flat.seen:
            raise CaptureRefused(f"is given one {type(value).__name__} that is an argument of the captured call")
        known.old[id(value)] = value
        return True

    def finish(self, recorder: Recorder, differentiable: bool) -> str | None:
        """Takes in that the call is over. Returns why a graph cannot have these parts.

        Args:
            differentiable: whether the call's result has a backward.
        """
        if not self.made:
            return None
        for known in self.made:
            known.finish(recorder)
        late = None if recorder.script is None else next(iter(recorder.script.late.values()), None)
        if late is not None:
            return str(late)
        if recorder.inputs_written:
            return "has an eager part, and changes an argument in place; make it change a copy"
        if len(self.made) > MOST:
            every = "; ".join(map(str, self.made))
            return f"has {len(self.made)} eager parts, and at most {MOST} of them are worth it: {every}"
        if differentiable:
            return (
                "has an eager part, and returns a tensor that requires grad; capture the whole step, its backward "
                "included, or keep that part between the layers"
            )
        if recorder.collectives:
            return "communicates with other processes, and has an eager part, which no replay of theirs waits for"
        if len(self._draws) > self._drawn:
            return "draws random numbers on the host after an eager part, which may draw, too; draw them before it"
        return None


class VerifiedParts(Parts):
    """The eager parts of a call that is verified.

    Args:
        recorded: those of the recorded call; guards: of that.
        modes: tells the modes of now.

    Attributes:
        last: how many operations come before the first of them after which no replay would have gone on; None where
            each would.
    """

    def __init__(self, recorded: list[RecordedPart], guards: Guards, modes: Callable[[], tuple]) -> None:
        self._recorded, self._guards, self._modes = iter(recorded), guards, modes
        self.last: int | None = None

    def call(self, recorder: Any, function: Callable, args: tuple, kwargs: dict, frame: FrameType, name: str) -> Any:
        """See `recorder.Parts`."""
        known, modes, goes_on = next(self._recorded, None), self._modes(), False
        try:
            with hidden():
                result = function(*args, **kwargs)
                goes_on = known is not None and self._modes() == modes and self._goes_on(known, result)
            return result
        finally:
            if not goes_on and self.last is None:
                self.last = len(recorder.trace)

    def _goes_on(self, known: RecordedPart, result: Any) -> bool:
        if self._guards.moved() is not None or self._guards.changed(gradients=False) is not None:
            return False
        try:
            return known.returned is None or _returned(result, known.is_old, _OTHER).outline == known.returned
        except CaptureRefused:
            return False


# -- in a capture, and in its replays ----------------------------------------------------------------------------------
class CutShort(Exception):
    """A graph cannot go on after an eager part: the rest of the call is to run eagerly, see `EagerParts.go_on`.

    Attributes:
        parts: that go on.
        reason: why; None where the part has raised an error, which is the user's.
    """

    def __init__(self, parts: EagerParts, reason: Exception | None) -> None:
        super().__init__(reason)
        self.parts, self.reason = parts, reason


@dataclass
class _Loan:
    """Memory of the graph's, of which eager code has a copy in each call. What that writes there, whenever it does, is
    brought back after each part.

    Attributes:
        memory: all of it as bytes; of a tensor that a part returned, what the graph reads in its place.
        lent: what eager code has in the call under way.
    """

    memory: Tensor
    lent: Tensor | None = None


class _Own:
    """A tensor of the graph's, as parts have it: over the copy of its memory. It is called as what else gives a part a
    tensor.

    Attributes:
        memory: the tensor.
        loan: the memory in which it lies.
        made: what eager code has in its place in the call under way; history: what its history was to begin with.
    """

    def __init__(self, loan: _Loan, like: Tensor) -> None:
        self.loan, self.memory, self._has_history = loan, like.detach(), like.requires_grad
        self.made: Tensor | None = None
        self.history: tuple = ()

    def __call__(self, _: list[Tensor]) -> Tensor:
        if self.made is None and self._has_history:
            with torch.enable_grad():
                self.made = _Ended.apply(torch.empty(0, requires_grad=True), self._make)
        elif self.made is None:
            self.made = self._make()
        self.history = _history(self.made)
        return self.made

    def _make(self) -> Tensor:
        like, loan = self.memory, self.loan
        with torch.inference_mode(like.is_inference()), torch.no_grad():
            loan.lent = loan.memory.clone() if loan.lent is None else loan.lent
            made = torch.empty(0, dtype=like.dtype, device=like.device)
            made.set_(loan.lent.untyped_storage(), like.storage_offset(), like.size(), like.stride())
            made = conjugated(made) if like.is_conj() else made
            return negated(made) if like.is_neg() else made


class _Ended(torch.autograd.Function):
    """Makes a tensor with a history, as that of a replayed graph is for eager code: it is there, and leads nowhere."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise BackwardUnavailable(_ENDED)


_ENDED = (
    "a function that is called between two graphs, as an eager part, runs a backward from a tensor that it was given, "
    "or hooks it, whose history those graphs have; call it outside of the captured call, or write eager_parts=False"
)


class _Histories(TorchFunctionMode):
    """Sees what becomes of the histories of some tensors, inside.

    Attributes:
        changed: whether one is another now.
        kept: whether somebody has one who had none: the tensor, or something that was made inside and has a history.
    """

    changed = kept = False

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors, self._made = tensors, []

    def __enter__(self) -> Self:
        if self._tensors:
            self._before, self._uses = list(map(_history, self._tensors)), list(map(sys.getrefcount, self._tensors))
            super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self._tensors:
            super().__exit__(exc_type, exc_val, exc_tb)
            uses, self._uses = self._uses, list(map(sys.getrefcount, self._tensors))
            self.changed = list(map(_history, self._tensors)) != self._before
            self.kept = any(map(operator.gt, self._uses, uses)) or any(one() is not None for one in self._made)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            given = any(one is tensor for tensor in self._tensors)
            if isinstance(one, Tensor) and one.grad_fn is not None and not given:
                self._made.append(weakref.ref(one))
        return result


def _history(tensor: Tensor) -> tuple:
    """What hooks, and operations in place, would change of a tensor's history."""
    return tensor.grad_fn, tensor.retains_grad, [*(tensor._backward_hooks or ())]


@dataclass(eq=False)
class EagerPart:
    """An eager part of a graph.

    Attributes:
        known: what the recorded call showed.
        form: what it is given, but for the tensors.
        sources: what gives these, in a call with some tensor arguments; an `_Own` where the graph makes it.
        modes: in which it is called.
        inputs: those of the graph that it reads between it and the next part.
        gradients: those that the code before it left behind, for whoever looks at them.
        advances: the tensors whose version that code has raised, once for each time.
        results: the tensors that it returned, as the graph has them.
        reads: the leaf tensors whose gradients the graph reads up to the next part; reads_at: where these lie.
        outcome: what it returned last, as it is, and the error that it raised.
        left, modes_after: the gradients and the modes as it left them last.
        wrote: what it changed in place, of what a backward after it may need, by identity.
        then: the identities of that, and which gradients were absent after it, in the call that was captured.
    """

    known: RecordedPart
    form: _Form
    sources: list[Callable[[list[Tensor]], Tensor]]
    modes: tuple
    inputs: list[tuple[int, Any]]
    gradients: list[tuple[Tensor, Left]] = field(default_factory=list)
    advances: list[Tensor] = field(default_factory=list)
    results: list[_Own] = field(default_factory=list)
    reads: list[Tensor] = field(default_factory=list)
    reads_at: list[int] = field(default_factory=list)
    outcome: tuple[Any, Exception | None] = (None, None)
    left: list[Tensor | None] = field(default_factory=list)
    modes_after: tuple = ()
    wrote: dict[int, Tensor | _Own] = field(default_factory=dict)
    then: tuple[set[int], list[bool]] = field(default_factory=lambda: (set(), []))

    @property
    def own(self) -> list[_Own]:
        """The tensors of the graph that it is given."""
        return [source for source in self.sources if isinstance(source, _Own)]

    def learn(self, owned: list[Tensor]) -> None:
        """Takes what it did, in the call that is captured, for what it does; `owned`: see `EagerParts`."""
        self.then = set(self.wrote), [grad is None for grad in self.left]
        self.reads, self.reads_at = owned, list(map(_grad_at, owned))

    def watch(self, reads: set[int]) -> None:
        """Takes in the addresses that the graph reads between it and the next part."""
        self.inputs = [(index, buffer) for index, buffer in self.inputs if address(buffer.tensor) in reads]
        found = [(parameter, at) for parameter, at in zip(self.reads, self.reads_at, strict=True) if at in reads]
        self.reads, self.reads_at = [parameter for parameter, _ in found], [at for _, at in found]

    def take(self, guards: Guards) -> _Form | None:
        """Copies what it returned to where the graph reads it; returns what that is made of, if code uses it.

        Args:
            guards: of the whole call.

        Raises:
            CaptureRefused: it is of another kind than in the recorded call, or the graph cannot go on after it.
        """
        reason = self._changed(guards)
        if reason is not None:
            raise CaptureRefused(f"{self.known} changes what code after it reads: {reason}")
        if self.known.returned is None:
            return None
        returned = _returned(self.outcome[0], self.known.is_old, _OTHER)
        if returned.outline != self.known.returned or returned.has_parts:
            raise CaptureRefused(f"{self.known} {_RETURNS_OTHERS}")
        if not self.results:
            with torch.inference_mode(False), torch.no_grad():
                self.results = [_Own(_Loan(kept.data), kept) for kept in map(torch.clone, returned.tensors)]
        for own, tensor in zip(self.results, returned.tensors, strict=True):
            own.made = own.loan.lent = tensor
        return returned

    def _changed(self, guards: Guards) -> str | None:
        """What code after it would find otherwise than in the call that was captured, in words."""
        reason = guards.moved() or guards.changed(gradients=False)
        if reason is not None:
            return reason
        if self.known.goes_on and self.modes_after != self.modes:
            return f"a mode of PyTorch ({difference(self.modes, self.modes_after)[0]})"
        writes, absent = self.then
        if self.wrote.keys() - writes:
            return "a tensor is changed in place that was not so before, and that a backward after it may need"
        if [grad is None for grad in self.left] != absent or list(map(_grad_at, self.reads)) != self.reads_at:
            return "other gradients are there, or absent"
        return None


_version = operator.attrgetter("_version")


class Versions:
    """The versions of some tensors, which count how often each was changed in place."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors, self._before = tensors, list(map(_version, tensors))

    def raised(self) -> list[Tensor]:
        """The tensors whose version is higher since, once for each time."""
        pairs = zip(self._tensors, self._before, strict=True)
        return [tensor for tensor, before in pairs for _ in range(tensor._version - before)]


def _now(one: Any) -> Any:
    """A tensor, or what eager code has in its place in the call under way."""
    return one.made if isinstance(one, _Own) else one


def _grad_at(parameter: Tensor) -> int:
    return 0 if parameter.grad is None else address(part(parameter.grad))


_STATE = ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_state_of = operator.attrgetter(*_STATE)


def _give(parameter: Tensor, state: Iterable[Any]) -> None:
    for name, held in zip(_STATE, state, strict=True):
        if getattr(parameter, name) is not held:
            setattr(parameter, name, held)


def present(recording: Any, parameters: list[Tensor], generators: Iterable[Any] = ()) -> Callable[[], None]:
    """Returns what brings back what code finds now, beside the values of tensors.

    Args:
        recording: of what it reads and draws from.
        parameters: leaf tensors that may collect gradients.
        generators: those that it may draw from as well.
    """
    places, host = recording.guards.keep(), recording.host_draws.states()
    others = [(generator, state_of(generator)) for generator in generators]
    now = [(parameter.grad, _state_of(parameter)) for parameter in parameters]

    def bring_back() -> None:
        places()
        put_back([*others, *host])
        for parameter, (grad, state) in zip(parameters, now, strict=True):
            _give(parameter, state)
            if parameter.grad is not grad:
                parameter.grad = grad

    return bring_back


def _in_modes(modes: tuple, others: tuple, device_type: str) -> ExitStack:
    """Enters modes, if they are not those of now."""
    stack = ExitStack()
    if modes != others:
        stack.enter_context(entered_again(modes, device_type))
        stack.enter_context(torch.inference_mode(modes[INFERENCE]))
        stack.enter_context(torch.set_grad_enabled(modes[GRAD]))
    return stack


class EagerParts(Parts):
    """The eager parts of a call that is captured, and of its graph.

    Args:
        graph: the `StepGraph`.
        call: that is captured; given: the static tensors in the place of its arguments.
        owned: the leaf tensors that may collect gradients.
        memory, ends, found: what is in place of gradients, parameters and functions while it captures.

    Attributes:
        graph, made: the graph, and its parts in order.
        versions: tells what the code since the last part has raised.
    """

    def __init__(
        self,
        graph: Any,
        call: Call,
        given: list[Tensor],
        owned: list[Tensor],
        memory: as_memory,
        ends: Any,
        found: AbstractContextManager,
    ) -> None:
        self.graph, self._call, self._given, self._owned = graph, call, given, owned
        self._memory, self._ends, self._found = memory, ends, found
        self.made: list[EagerPart] = []
        self._trail = Trail()
        self._loans: dict[int, _Loan] = {}
        self._own: dict[int, tuple[Tensor, _Own]] = {}  # by identity of the tensors that the captured call has
        self._lent: list[_Own] = []
        self._since = [parameter.grad for parameter in owned]  # those after the last part
        self._then = [(_grad_at(p), [*map(copy.copy, _state_of(p))]) for p in owned]  # to begin with
        self._may_change = [tensor for tensor in graph.recording.guards.tensors if not tensor.is_inference()]
        self._segments: list[Callable[[], None]] = []
        self.versions = Versions(self._may_change)
        self.begin()

    @property
    def began(self) -> bool:
        """Whether one was called in the replay, or capture, under way."""
        return self._done > 0

    def begin(self) -> None:
        """A call begins, or has ended: what its parts were given is theirs."""
        self._done, self._carried = 0, self.graph.given([])
        self._host = self.graph.recording.host_draws.states()
        self._put_back: Callable[[], None] | None = None
        for made in self.made:
            made.outcome, made.left = (None, None), []
        for own in self._lent:
            own.made = None
        for loan in self._loans.values():
            loan.lent = None

    # -- the capture ---------------------------------------------------------------------------------------------

    def after(self, index: int, op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        """See `recorder.Parts`."""
        self._trail.note(index, op, args, kwargs, result, fresh)

    def call(self, recorder: Any, function: Callable, args: tuple, kwargs: dict, frame: FrameType, name: str) -> Any:
        """See `recorder.Parts`."""
        with hidden():
            try:
                made = self._next(recorder, function, args, kwargs)
            except CaptureRefused as refusal:
                recorder.give_up(refusal)
                raise
            recorder.graph.pause()
            self._trail.hold()
            self._memory.__exit__()
            made.gradients = left_behind(self._owned, self._since, self._given, recorder.made, self.graph.entry)
            self._ends.stand_back()
            self._bind(self._carried)
            self._found.__exit__(None, None, None)
            advances = self.versions.raised()
            try:
                self._run(made, self._call.leaves)
                made.advances, self.versions = advances, Versions(self._may_change)
                self._since, self._put_back = made.left, present(self.graph.recording, self._owned)
                made.learn(self._owned)
                returned = self._take(made, self._call.leaves)
            except CutShort as cut:
                raise Unwinding(cut) from None
        tensors = [own.memory for own in made.results]
        self._own.update((id(tensor), (tensor, own)) for tensor, own in zip(tensors, made.results, strict=True))
        self._loans.update((address(own.memory), own.loan) for own in made.results)
        increment_version([tensor for tensor, own in self._own.values() if id(own) in made.wrote])
        self._found.__enter__()
        self._bind(self._given[len(self._call.leaves) :])
        self._ends.stand_in()
        self._memory.__enter__()
        recorder.after_part(tensors, [own.memory for own in made.own])
        with hidden():
            recorder.graph.resume(self._trail.held)
        return None if returned is None else returned.around(tensors)

    def _next(self, recorder: Follower, function: Callable, args: tuple, kwargs: dict) -> EagerPart:
        """The part that comes, where the recorded call had the same one.

        Raises:
            CaptureRefused: it had not, or it is given what no replay could give it.
        """
        recording, entry, number = self.graph.recording, self.graph.entry, len(self.made)
        known = recording.parts[number] if number < len(recording.parts) else None
        if known is None or known.index != len(recorder.trace):
            raise Diverged("calls another eager part than the call before")
        form = known.form_of((function, args, kwargs))
        if form.outline != known.given:
            raise Diverged(f"calls the eager part {known} with other values than the call before")
        modes = self.graph.context.group.modes()
        if modes[FOREIGN] is not None or modes[SETTINGS] != entry.signature.modes[SETTINGS]:
            raise CaptureRefused(f"calls the eager part {known} under a mode that no replay could enter")
        if entry.copies_out:
            raise CaptureRefused(f"has the eager part {known}, and results of it are held that cannot be moved")
        sources, inputs = self._sources(known, recorder, form.tensors), enumerate(self.graph.inputs)
        form.tensors = []
        if self.made:
            self.made[-1].watch(recorder.read_since)
        buffers = [(index, one.buffer) for index, one in inputs if one.buffer is not None]
        self.made.append(EagerPart(known, form, sources, modes, buffers))
        return self.made[-1]

    def _sources(self, known: RecordedPart, recorder: Follower, tensors: list[Tensor]) -> list[Callable]:
        places = {id(static): index for index, static in enumerate(self._given)}
        stood_in = {id(view): view._base for view in self.graph.stand_ins.values() if view._base is not None}
        guards = self.graph.recording.guards
        held = {*map(id, guards.tensors), *map(id, self._owned)}
        grads = {_grad_at(p): p for p in self._owned if p.grad is not None and not is_split(p.grad)}
        found: list[Callable] = []
        for tensor in tensors:
            tensor = stood_in.get(id(tensor), tensor)
            where = address(tensor)
            if id(tensor) in places:
                found.append(operator.itemgetter(places[id(tensor)]))
            elif id(tensor) in held:
                found.append(lambda _, tensor=tensor: tensor)
            elif tensor.requires_grad and not (known.found and recorder.made(where)):
                raise CaptureRefused(f"gives the eager part {known} a tensor that requires grad; pass it detached")
            elif where in grads:
                found.append(of_gradient(grads[where], tensor))
            elif (of_given := of_argument(tensor, self._given)) is not None:
                found.append(of_given)
            elif recorder.made(where) or where in recorder.kept_at:
                self._own.setdefault(id(tensor), (tensor, self._own_of(tensor)))
                found.append(self._own[id(tensor)][1])
            elif where in recorder.outside or any(address(one) == where for one in guards.tensors):
                found.append(lambda _, tensor=tensor: tensor.detach())
            else:
                raise CaptureRefused(
                    f"gives the eager part {known} a tensor that was found neither among its arguments nor in an "
                    "attribute, variable or item that its code reads"
                )
        return found

    def _own_of(self, tensor: Tensor) -> _Own:
        where = address(tensor)
        if where not in self._loans:
            with torch.inference_mode(False):
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._loans[where] = _Loan(memory)
        return _Own(self._loans[where], tensor)

    def _run(self, made: EagerPart, leaves: list[Tensor]) -> None:
        """Makes the call of a part, of which `outcome` tells then."""
        graph, group = self.graph, self.graph.context.group
        graph.context.counters.eager_parts += 1
        self._done += 1
        given = graph.given(leaves)
        leave_behind(made.gradients, given, graph.entry.copies_out)
        increment_version(made.advances)
        function, args, kwargs = made.form.around([source(given) for source in made.sources])
        may_change = self._watched() if made.known.backward else []
        tensors = list(map(_now, may_change))
        before = list(map(_version, tensors))
        with _in_modes(made.modes, graph.entry.signature.modes, group.backend.device_type):
            try:
                made.outcome = function(*args, **kwargs), None
                if any(own.made is not None and _history(own.made) != own.history for own in made.own):
                    raise BackwardUnavailable(_ENDED)
            except Exception as error:  # under no other name here, whose frame it leads to
                let_through(error)
                made.outcome = None, error
            made.modes_after = group.modes()
        graph.keep_carried()
        now = list(map(_version, tensors))
        changed = () if now == before else zip(may_change, before, now, strict=True)
        made.left = [parameter.grad for parameter in self._owned]
        made.wrote = {id(one): one for one, was, is_now in changed if was != is_now}

    def _watched(self) -> list[Tensor | _Own]:
        """What a part may change in place and a backward may need."""
        owns = [own for made in self.made[: self._done] for own in made.own]
        owns += [own for made in self.made[: self._done - 1] for own in made.results]
        return [*self._may_change, *(own for own in owns if not own.memory.is_inference())]

    def _take(self, made: EagerPart, leaves: list[Tensor]) -> _Form | None:
        """Has the graph find what a part returned, and what it wrote; see `EagerPart.take`.

        Raises:
            CutShort: the part raised an error, or the graph cannot go on after it.
        """
        if made.outcome[1] is not None:
            raise CutShort(self, None)
        try:
            returned = made.take(self.graph.recording.guards)
        except CaptureRefused as refusal:
            raise CutShort(self, refusal) from None
        with torch.inference_mode(False), torch.no_grad():
            for loan in self._loans.values():
                if loan.lent is not None:
                    loan.memory.copy_(loan.lent)
        given = self.graph.given(leaves)
        for index, buffer in made.inputs:
            buffer.load(given[index], self.graph.tape.arena.passes, self.graph.context)
        return returned

    def cut_short(self, error: BaseException) -> None:
        """The capture failed after a part was called.

        Raises:
            CutShort: the rest of the call is to run eagerly.
        """
        if isinstance(error, Unwinding):
            raise error.reason from None
        if isinstance(error, Exception):
            let_through(error)
            raise CutShort(self, error) from error

    def finish(self, captured: Any) -> list[Tensor | None]:
        """Takes in the capture; returns the gradients after the last part, which nobody is to hold later."""
        self._segments = captured.segments
        self.made[-1].watch(captured.seen.read_since)
        self._lent, self._own = [own for _, own in self._own.values()], {}
        self.begin()
        self._done = len(self.made)  # up to the last launch, without which the call is not over
        since, self._since = self._since, []
        return since

    @property
    def lent(self) -> list[tuple[Tensor, Left]]:
        """The gradients that parts see."""
        return [pair for made in self.made for pair in made.gradients]

    # -- replays -------------------------------------------------------------------------------------------------

    def launch_last(self) -> None:
        """Launches what comes after the last part, for the call that was captured."""
        if self.graph.context.group.backend.on_gpu:  # the emulator has run it
            self._segments[-1]()
        self._done = 0

    def replay(self, leaves: list[Tensor]) -> None:
        """Replays, with the parts in between.

        Raises:
            CutShort: after one of them.
        """
        self.begin()
        for launch, made in zip(self._segments, self.made, strict=False):
            launch()
            if not self.began:
                self.graph.recording.host_draws.advance()
            self._run(made, leaves)
            self._take(made, leaves)
        self._segments[-1]()
        self.begin()

    def _bind(self, tensors: list[Tensor]) -> None:
        """Puts these where the call finds, and binds anew, tensors whose values it reads."""
        for place, tensor in zip(self.graph.recording.guards.carried, tensors, strict=True):
            put(place.container, place.note, tensor)

    # -- the rest of a call that was cut short ---------------------------------------------------------------------

    def go_on(self, call: Call) -> Any:
        """Makes the rest of a call, after the last part that was made: its Python runs from the beginning, and finds
        what it found then, and no operation or part up to there runs once more.

        Raises:
            EagerPartFailed: that Python does something else now.
        """
        graph, group, last = self.graph, self.graph.context.group, self.made[self._done - 1]
        for _, left in self.lent:
            if isinstance(left, GradientBuffer):
                left.evacuate(for_another=True)  # the graph may not know of it
        bring_back = self._put_back or present(graph.recording, self._owned)
        made_before = iter(self.made)

        def part_again(function: Callable, args: tuple, kwargs: dict) -> Any:
            made = next(made_before)
            with hidden():
                form = made.known.form_of((function, args, kwargs))
                if form.content != made.form.content or made.known.index != len(fast.trace):
                    fast.give_up(Diverged("it calls another eager part than before"))
                for source, tensor in zip(made.sources, form.tensors, strict=True):
                    if isinstance(source, _Own):
                        source.made = tensor
                if made is last:
                    found.__exit__(None, None, None)
                    bring_back()
                    entered.close()
                    if group.modes() != last.modes_after:
                        fast.give_up(CaptureRefused("it has changed a mode of PyTorch that is entered around it"))
                else:
                    for parameter, grad in zip(self._owned, made.left, strict=True):
                        parameter.grad = grad
                # Once more, since what autograd has saved of these was saved after the part, and not before it.
                increment_version(list(map(_now, made.wrote.values())))
            if made is last:
                fast.arrive()
            if made.outcome[1] is not None:
                raise made.outcome[1]
            return made.outcome[0]

        fast = FastForward(call.leaves, group.gpu, graph.recording.script, self._trail, self._lend, part_again)
        # Those of its own graph: in a call of another kind they may have been given up since.
        found = graph.context.found.in_place({made.known.function for made in self.made if made.known.found})
        entered = ExitStack()
        try:
            entered.enter_context(_in_modes(graph.entry.signature.modes, group.modes(), group.backend.device_type))
            guards = graph.recording.guards
            if guards.changed(gradients=False) is not None:
                guards.restore()
            self._bind(self._carried)
            put_back(self._host)
            for parameter, (where, state) in zip(self._owned, self._then, strict=True):
                if _grad_at(parameter) != where:  # no other name for what is put there, which nobody may hold later
                    parameter.grad = fast.wrong(torch.empty_like(parameter)) if where else None
                _give(parameter, state)
            unthreaded = torch.autograd.set_multithreading_enabled(False)
            result = within(no_garbage_collection(), unthreaded, found, fast, call=call)
            if not fast.arrived:
                raise CaptureRefused("its code does not come there again")
            return result
        except Exception as error:
            if fast.arrived:
                raise
            raise EagerPartFailed(
                f"{graph.context.name!r}: neither a graph nor eager code can go on after {last.known}: "
                f"{reason_of(error)}. This call is done up to and with that, and the rest is not; keep that part out "
                "of the captured call"
            ) from error
        finally:
            if not fast.arrived:
                entered.close()
                bring_back()
            self.begin()

    def _lend(self, memory: Tensor) -> Tensor:
        return self._own_of(memory)([])
