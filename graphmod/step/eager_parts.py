"""Eager parts: calls inside a captured call that a graph cannot repeat, and that are made again at each replay.

In the call that is captured, the graph so far ends at such a call and is launched, the call is made, and another graph
begins; a replay launches, calls, launches. The function and the objects it is given are those of the capture. Tensors
that the graph made it gets as copies, whose changes are taken back; of tensors that it returns there are copies at
fixed addresses. What it reads and does is not watched.

Code after a part must find what it found in the recorded call: what it reads has guards of its own, which are compared
once more when the part was made. In the call that is captured a difference ends the capture, and the rest of that call
runs without one: it cannot be begun again. In a replay a difference is an error.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import itertools
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused, Diverged, EagerPartFailed
from graphmod.guards.changes import SCHEDULERS, all_changes, line_of, name_of, what_changed
from graphmod.guards.guards import Guards
from graphmod.guards.notes import STANDS_FOR, UNGUARDED, Notes
from graphmod.guards.values import Kind, dict_of, kind_of
from graphmod.reads.frames import noting
from graphmod.reads.operand_stack import function_of, is_called, on_stack
from graphmod.signature.call import Call, Flat
from graphmod.signature.flattening import PLAIN_KINDS, Opaque, rebuild
from graphmod.signature.modes import FOREIGN, GRAD, INFERENCE, SETTINGS, difference, entered_again
from graphmod.step.gradients import GradientBuffer, Left, as_memory, is_split, leave_behind, lend, memory_of, part
from graphmod.step.results import PartOf
from graphmod.torch_private import beside_dynamo, conjugated, negated, storage_uses
from graphmod.trace import dispatch
from graphmod.trace.dispatch import hidden
from graphmod.trace.hazards import OUTSIDE, Reason
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.lines import CORE, TORCH, location
from graphmod.trace.operations import Step, address
from graphmod.trace.recorder import Follower, Recorder
from graphmod.trace.untraced import untraced

_JOINED = ("zero_grad",)  # eager parts where they come after one: what that has changed they read
MOST = 8  # in one call: more cost more than they bring
_RAISES = Reason("is an eager part, and raises an error", OUTSIDE)
_TENSOR = object()  # stands for one in a form
_ByGenerator: Any = type(contextlib.contextmanager(lambda: (yield))())
_UNWATCHED = ("contextlib", "warnings")  # what these change and put back has no guard


def eager(function: Callable) -> Callable:
    """Makes each call of a function, inside a call that is captured, an *eager part*: it is made at each replay,
    between two graphs. Anywhere else it is a call like any other.

    For what a graph cannot repeat: an optimizer that counts on the host, `ema.update()`, a metric. A decorator, or
    around the function at the call: `graphmod.eager(optimizer.step)()`.

    The function gets the very objects that it was given in the call that was captured, and tensors of the present one.
    It returns None or tensors without gradient; what else it returns must not be used.
    """

    @functools.wraps(function)
    @beside_dynamo
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder: Any = dispatch.current()
        if recorder is None or not isinstance(recorder, Recorder):
            return function(*args, **kwargs)
        return recorder.eager_part(function, args, kwargs, sys._getframe())

    setattr(call, UNGUARDED, True)
    return call


# -- what a part is given, and gives -----------------------------------------------------------------------------------
def _form_of(value: Any, is_old: Callable[[Any], bool], tensors: list[Tensor]) -> Any:
    """What a value is made of but for its tensors, which are added to a list: comparable, and for `_made_of`.

    Args:
        is_old: whether an object was there before the call, so that it is itself in each call.

    Raises:
        CaptureRefused: it holds an object that the call has made.
    """
    kind = type(value)
    if issubclass(kind, Tensor):
        tensors.append(value)
        return _TENSOR
    if value is None or kind in PLAIN_KINDS:
        return kind, value
    form = functools.partial(_form_of, is_old=is_old, tensors=tensors)
    if kind is types.MethodType:  # another object each time that somebody asks for it
        return kind, Opaque(value.__func__), form(value.__self__)
    if is_old(value):
        return Opaque(value)
    if kind in (list, tuple):
        return kind, *map(form, value)
    if kind is dict:
        return kind, form(tuple(value)), *map(form, value.values())
    if kind is slice:
        return kind, form(value.start), form(value.stop), form(value.step)
    if kind is types.BuiltinMethodType:
        return kind, value.__name__, form(value.__self__)
    if kind is functools.partial:
        return kind, form(value.func), form(value.args), form(value.keywords)
    raise CaptureRefused(f"is given one {kind.__name__} that the call makes, and that a replay would not make anew")


def _made_of(form: Any, tensors: Iterator[Tensor]) -> Any:
    """A value of a form around other tensors."""
    if form is _TENSOR:
        return next(tensors)
    if isinstance(form, Opaque):
        return form.value
    kind, *parts = form
    if kind is types.NoneType or kind in PLAIN_KINDS:
        return parts[0]
    if kind is types.BuiltinMethodType:
        return getattr(_made_of(parts[1], tensors), parts[0])
    made = [_made_of(one, tensors) for one in parts]
    if kind in (list, tuple):
        return kind(made)
    if kind is dict:
        return dict(zip(made[0], made[1:], strict=True))
    if kind is functools.partial:
        return kind(made[0], *made[1], **made[2])
    return kind(*made)


def _kind(tensor: Tensor) -> tuple:
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


class Given:
    """What a part returned, if code goes on to use it: None, tensors, or lists, tuples and dicts of these.

    Attributes:
        tensors: those in it.

    Raises:
        CaptureRefused: it is something else.
    """

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        self._form = _form_of(value, lambda _: False, self.tensors)
        plain = next(_plain_in(self._form), None)
        if plain is not None:
            raise CaptureRefused(f"returns one {type(plain).__name__} that code after it may use; make it a tensor")
        if any(tensor.requires_grad for tensor in self.tensors):
            raise CaptureRefused("returns a tensor that requires grad; return it detached")
        if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in self.tensors):
            raise CaptureRefused("returns a sparse or nested tensor")

    @property
    def outline(self) -> tuple:
        """What must be the same in each call."""
        return self._form, [*map(_kind, self.tensors)]

    def of(self, tensors: list[Tensor]) -> Any:
        """The like of it around other tensors."""
        return _made_of(self._form, iter(tensors))


def _plain_in(form: Any) -> Iterator[Any]:
    if form is _TENSOR or isinstance(form, Opaque):
        return
    kind, *parts = form
    if kind in PLAIN_KINDS:
        yield parts[0]
    for one in parts[1:] if kind is dict else parts if kind in (list, tuple) else ():
        yield from _plain_in(one)


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


def _why_unlike(frame: FrameType | None) -> str | None:
    """Why the call under way would end otherwise in a replay, which runs none of the code around it: that would handle
    an error, or has changed what nobody watches."""
    while frame is not None and not frame.f_code.co_filename.startswith(CORE):
        steps = {step.offset: step.opname for step in dis.get_instructions(frame.f_code)}
        # pyrefly: ignore[missing-attribute] -- typeshed leaves it out
        for entry in dis._parse_exception_table(frame.f_code):
            if not entry.start <= frame.f_lasti < entry.end:
                continue
            after = [name for offset, name in steps.items() if offset >= entry.target][:2]
            if "WITH_EXCEPT_START" in after:
                manager = getattr(on_stack(frame, entry.depth), "__self__", None)
                why = None if manager is None else _why_within(manager)
                if why is not None:
                    return why
            elif after[0] == "PUSH_EXC_INFO":
                return "is called inside a try statement, which no replay runs"
        frame = frame.f_back
    return None


def _why_within(manager: Any) -> str | None:
    """Likewise for a `with` block."""
    kind: Any = type(manager)
    if isinstance(manager, _ByGenerator):
        return _why_unlike(manager.gen.gi_frame)
    leave = inspect.unwrap(kind.__exit__)
    if kind.__module__.startswith("torch.") or not isinstance(leave, types.FunctionType):
        return None
    steps = list(dis.get_instructions(leave))
    ends = [
        before if step.opname == "RETURN_VALUE" else step
        for before, step in itertools.pairwise(steps)
        if "RETURN_" in step.opname
    ]
    if kind.__module__ in _UNWATCHED or any("CONST" not in step.opname or step.argval for step in ends):
        return f"is called inside `with {kind.__name__}`, which no replay enters"
    return None


# -- in a recorded call ------------------------------------------------------------------------------------------------
class RecordedPart:
    """What a recorded call showed of an eager part.

    Attributes:
        name, where: of the function, and where it is called.
        index: how many operations come before it.
        form, kinds: of the function and what it is given; see `_form_of`.
        old: the objects in that, by identity, which were there before the call.
        method: its name, of one that nobody has marked; else "".
        given: what it returned; None where nobody uses that.
        guards: what code after it reads, up to the next.
    """

    guards: Guards

    def __init__(self, name: str, caller: FrameType, index: int, method: str = "") -> None:
        self.name, self.method = name, method
        self.where = location(caller.f_code, caller.f_lineno)
        self.index = index
        self.form: Any = None
        self.kinds: list = []
        self.old: dict[int, Any] = {}
        self.given: Given | None = None

    def guard(self, notes: Notes, backward: bool) -> None:
        """Makes the guards, of notes on what was read after it."""
        self.guards = Guards(notes, backward)

    def __str__(self) -> str:
        return f"{self.name} ({self.where})"


_MOST_REACHED = 2**20  # objects, of which one is looked for
_BEYOND = (type, types.ModuleType, types.CodeType, types.FrameType)  # what everybody can reach


def _reached(roots: Iterable[Any]) -> dict[int, Any] | None:
    """What code can reach that is given some objects, by identity; None if that is too much to look through. Not what
    names of a module lead to."""
    found: dict[int, Any] = {}
    todo = list(roots)
    while todo:
        value = todo.pop()
        if id(value) in found or isinstance(value, _BEYOND):
            continue
        found[id(value)] = value
        if len(found) > _MOST_REACHED:
            return None
        if isinstance(value, weakref.ref):
            todo.append(value())
        elif isinstance(value, types.FunctionType):
            todo += (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
        else:
            todo += gc.get_referents(value)
    return found


def _leaves_in_place(known: RecordedPart) -> bool:
    """Whether a part is known to leave tensors where they are: a method of PyTorch's own."""
    function = known.form[1]
    function = function.value if isinstance(function, Opaque) else function[1].value
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and code.co_filename.startswith(TORCH)


def _unsafe(index: int, parts: list[RecordedPart], later: list[Notes], reads: list[set[int]], backward: bool) -> str:
    """What code reads after a part that nobody has marked, and that may be another now and then, as far as anybody can
    tell; "" if there is nothing.

    Args:
        index: of the part.
        later: what was read after each part, up to the next; reads: the addresses outside of the call.
        backward: whether a backward comes after the part.
    """
    known = parts[index]
    roots = [*known.old.values()]
    kinds = {
        kind for one in roots for kind in type(one).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))
    }
    stored = set()
    for function in [one for kind in kinds for one in vars(kind).values() if isinstance(one, types.FunctionType)]:
        names = function.__globals__
        roots += [value for name in function.__code__.co_names if not callable(value := names.get(name))]
        steps = dis.get_instructions(function.__code__)
        stored |= {(id(names), step.argval) for step in steps if step.opname == "STORE_GLOBAL"}
    reached = _reached(roots)
    if reached is None:
        return f"reads what nobody can tell apart from what {known} is given"
    owners = reached.keys() | set(map(id, kinds))
    looked_up = {"__getattribute__", "__getattr__", *(one.method.rpartition(".")[2] for one in parts)}
    told = None
    for notes in later[index:]:
        for one in notes.notes.values():
            read = id(one.owner) in owners or (id(one.owner), one.key) in stored
            if told is None and read and one.key not in looked_up and not isinstance(one.container, Kind):
                told = f"{name_of(one)} ({line_of(one.where)})"
        for value, _, where in notes.contents.values():
            if told is None and id(value) in owners:
                told = f"the items of a {kind_of(value)} ({line_of(where)})"
    if told is None and not _leaves_in_place(known):
        tensors = [one for one in reached.values() if isinstance(one, Tensor)]
        at = {address(one) for one in tensors} | {
            address(one.grad) for one in tensors if one.is_leaf and one.grad is not None
        }
        moved = backward or not at.isdisjoint(set().union(*reads[index:]) - {0})
        told = "tensors that it reaches, or computes their gradients," if moved else None
    if told is None:
        return ""
    return (
        f"reads {told} after {known}, which may change that now and then; if it never does, call "
        f"graphmod.eager(...{known.method.rpartition('.')[2]})(...)"
    )


class RecordedParts:
    """The eager parts of an eager call that is recorded, or verified.

    Args:
        call: that call.
        noted: what notes what the call reads; None where nothing does.
        draws: what it draws on the host.
        methods: has put methods in place of others.

    Attributes:
        made: the parts, in order.
        unsafe: why code after a part that nobody has marked may find another value than the graph; "" if it cannot.
    """

    def __init__(
        self,
        call: Call,
        noted: noting | None = None,
        draws: HostDraws | None = None,
        methods: AbstractContextManager | None = None,
    ) -> None:
        self._call, self.noted, self._draws, self._methods = call, noted, draws, methods or nullcontext()
        self._drawn = 0
        self._held: list[Any] = []  # so that nothing else comes to lie where these do
        self._reads: list[set[int]] = []  # the addresses read before each part, since the part before
        self.made: list[RecordedPart] = []
        self.unsafe = ""

    def reach(self, value: Any) -> bool:
        """See `recorder.Parts`."""
        return any(id(value) in (_reached(known.old.values()) or ()) for known in self.made)

    def leave(self) -> bool:
        """Nothing is captured."""
        return False

    def call(self, recorder: Any, function: Callable, args: tuple, kwargs: dict, frame: FrameType, method: str) -> Any:
        """See `recorder.Parts`."""
        caller: Any = frame.f_back
        known = RecordedPart(method or _name_of(function), caller, len(recorder.trace), method)
        self.made.append(known)
        self._reads.append(recorder.read_since)
        tensors: list[Tensor] = []
        try:
            self._methods.__exit__(None, None, None)
            with hidden():
                unfit = self._changed()
                unfit = unfit or self._unfit(self._take_given, known, (function, args, kwargs), tensors)
                run = function if self.noted is None else functools.partial(self.noted.unnoted, function)
                result = run(*args, **kwargs)
                if not _is_dropped(frame):
                    unfit = unfit or self._unfit(self._take_returned, known, result, tensors, bool(method))
        except BaseException:
            recorder.refuse(known.name, _RAISES)
            raise
        finally:
            self._methods.__enter__()
        self._held += [result, *tensors]
        recorder.after_part([] if known.given is None else known.given.tensors, tensors)
        self._drawn = 0 if self._draws is None else len(self._draws)
        unfit = unfit or _why_unlike(caller)
        if unfit is not None:
            recorder.refuse(known.name, Reason(f"is an eager part that {unfit}", OUTSIDE))
        return result

    def _changed(self) -> str | None:
        """What code before a part has changed, which that would not find so in a replay."""
        changed = None if self.noted is None else what_changed(self.noted.notes)
        return changed and f"comes after code that {changed}"

    def _unfit(self, take: Callable, *given: Any) -> str | None:
        """Why what a part is given, or gives, cannot be had in a replay."""
        try:
            take(*given)
        except CaptureRefused as refusal:
            return str(refusal)
        return None

    def _take_given(self, known: RecordedPart, value: Any, tensors: list[Tensor]) -> None:
        found: list[Tensor] = []
        known.form = _form_of(value, functools.partial(self._is_old, known), found)
        known.kinds = [*map(_kind, found)]
        tensors += [tensor.detach() for tensor in found]  # and not itself: autograd counts who holds gradients

    def _take_returned(self, known: RecordedPart, result: Any, tensors: list[Tensor], found: bool) -> None:
        known.given = given = Given(result)
        if found and given.tensors:
            raise CaptureRefused("returns tensors, and nobody has marked it as one that always does")
        there = {address(tensor) for tensor in tensors} - {0}
        own = torch.empty(1)
        uses = storage_uses(own.untyped_storage()._cdata)
        for tensor in given.tensors:
            old = self.noted is not None and self.noted.is_old(tensor)
            if old or address(tensor) in there or storage_uses(tensor.untyped_storage()._cdata) > uses:
                raise CaptureRefused("returns a tensor whose memory others have as well; return a copy")

    def _is_old(self, known: RecordedPart, value: Any) -> bool:
        if self.noted is None or not self.noted.is_old(value):
            return False
        if id(value) in self._call.flat.seen:
            raise CaptureRefused(f"is given one {type(value).__name__} that is an argument of the captured call")
        known.old[id(value)] = value
        return True

    def finish(self, recorder: Recorder, differentiable: bool) -> str | None:
        """Makes the guards, after the call. Returns why a graph cannot have these parts.

        Args:
            differentiable: whether the call's result has a backward.
        """
        if not self.made:
            return None
        assert self.noted is not None, "only recorded calls are judged"
        for known, notes in zip(self.made, self.noted.later, strict=True):
            known.guard(notes, recorder.backward)
        reads = [read & recorder.outside.keys() for read in (*self._reads[1:], recorder.read_since)]
        for index, known in enumerate(self.made):
            backward = any(step.code is None for step in recorder.trace[known.index :])
            if known.method and not self.unsafe:
                self.unsafe = _unsafe(index, self.made, self.noted.later, reads, backward)
        if self.unsafe:
            return self.unsafe
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
        if self._draws is not None and len(self._draws) > self._drawn:
            return "draws random numbers on the host after an eager part, which may draw, too; draw them before it"
        return None


# -- methods that become eager parts by themselves ---------------------------------------------------------------------
class _Tried:
    """A method that may become an eager part, in the call in which these are looked at.

    Attributes:
        causes: what a graph cannot repeat and it did, outside of other such methods that it calls; in words.
        is_most: whether a backward ran inside, so that it is most of the call.
    """

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.is_most = False

    def take_in(self, causes: Counter[str], operations: list[Step]) -> None:
        """Takes in one of its calls."""
        self.causes += causes
        self.is_most = self.is_most or any(step.code is None for step in operations)


class Methods:
    """The methods that one callable calls and that become eager parts although nobody has marked them: an optimizer's
    `step`, an average's `update`.

    A recorded call that is refused shows which such methods ran. In the next, what a graph cannot repeat is counted
    before and after each. If nothing is left but what some of them do, those are eager parts from then on. Each of
    these calls is one of the user's, like any other.

    Attributes:
        refused: why the first call was refused.
        found: those that are eager parts, by name; why: the first thing that they do and a graph cannot repeat.

    Args:
        wanted: whether there are to be any.
    """

    def __init__(self, wanted: bool = False) -> None:
        self._gave_up = not wanted
        self.refused = self.why = ""
        self.found: list[str] = []
        self._methods: list[tuple[Any, str]] = []
        self._tried: dict[tuple[int, str], _Tried] | None = None
        self._inside: Counter[str] = Counter()  # causes in the methods that the one under way has called so far

    def learn(self, recorder: Recorder, refused: str) -> bool:
        """Takes in a recorded call that was refused. Returns whether the next may do better."""
        parts = recorder.parts
        assert isinstance(parts, RecordedParts) and parts.noted is not None, "it was recorded"
        noted = parts.noted
        if self._gave_up:
            return False
        if self.found:  # what comes after them is no better
            self.refused = f"{self.refused}. It {parts.unsafe}" if parts.unsafe else self.refused
            self.give_up()
        elif self._tried is None:
            self.refused, self._tried = refused, {}
            self._methods = noted.methods
            self._gave_up = not self._methods
        else:
            tried, self._tried = {key: one for key, one in self._tried.items() if one.causes}, None
            rest = _causes(recorder, noted.notes)
            for one in tried.values():
                rest -= one.causes
            if rest or any(one.is_most for one in tried.values()):
                tried = {}
            # What one method keeps, the others of its object use; and a rate that changes would be another graph.
            owners = {id(owner) for owner, _ in self._of(tried)}
            owners |= {id(one.optimizer) for one, _ in self._of(tried) if isinstance(one, SCHEDULERS)}
            for owner, name in self._methods:
                if id(owner) in owners or name in _JOINED:
                    tried.setdefault((id(owner), name), _Tried())
            self._methods = self._of(tried)
            self.found = [f"{type(owner).__name__}.{name}" for owner, name in self._methods if name not in _JOINED]
            self.why = next((cause for one in tried.values() for cause in one.causes), "")
            self._gave_up = not self.found
        return not self._gave_up

    def give_up(self) -> None:
        """Takes in that something was compiled, once more where methods were in place: that is what it stands on."""
        if self._methods:
            self._gave_up, self._methods, self.found = True, [], []

    def _of(self, tried: dict[tuple[int, str], _Tried]) -> list[tuple[Any, str]]:
        return [(owner, name) for owner, name in self._methods if (id(owner), name) in tried]

    def in_place(self, noted: noting | None = None) -> AbstractContextManager:
        """Inside, calls of these methods come here, as far as somebody records them.

        Args:
            noted: what notes what the call reads, if it does.
        """
        owners: dict[tuple[int, str], tuple[Any, set[int]]] = {}
        for owner, name in self._methods:
            holders = (owner, *type(owner).__mro__)
            holder = next(one for one in holders if name in (dict_of(one) or getattr(one, "__dict__", ())))
            owners.setdefault((id(holder), name), (holder, set()))[1].add(id(owner))
        return _InPlace(
            [(one, name, self._stand_in(one, name, those, noted)) for (_, name), (one, those) in owners.items()]
        )

    def _stand_in(self, holder: Any, name: str, owners: set[int], noted: noting | None) -> Callable:
        found = vars(holder)[name]
        function = getattr(found, STANDS_FOR, found)  # another thread may record, too

        @functools.wraps(function)
        @beside_dynamo
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder: Any = dispatch.current()
            owner = args[0] if isinstance(holder, type) else holder
            if not isinstance(recorder, Recorder) or id(owner) not in owners:
                return function(*args, **kwargs)
            if name in _JOINED and not (recorder.parts and recorder.parts.reach(owner)):
                return function(*args, **kwargs)
            method, given = (types.MethodType(function, owner), args[1:]) if owner is not holder else (function, args)
            if self._tried is not None and noted is not None:
                tried = self._tried.setdefault((id(owner), name), _Tried())
                return self._try(tried, recorder, noted, method, given, kwargs)
            return recorder.eager_part(method, given, kwargs, sys._getframe(), f"{type(owner).__name__}.{name}")

        setattr(call, STANDS_FOR, function)
        return call

    def _try(
        self, tried: _Tried, recorder: Recorder, noted: noting, method: Callable, args: tuple, kwargs: dict
    ) -> Any:
        before, begin = untraced(_causes, recorder, noted.notes), len(recorder.trace)
        outside, self._inside = self._inside, Counter()
        try:
            return method(*args, **kwargs)
        finally:
            new = untraced(_causes, recorder, noted.notes) - before
            tried.take_in(new - self._inside, recorder.trace[begin:])
            self._inside = outside + new


def _causes(recorder: Recorder, notes: Notes) -> Counter[str]:
    """All that a graph cannot repeat of a recorded call, so far."""
    with hidden():
        return Counter([*map(str, recorder.hazards), *map(str, all_changes(notes))])


class _InPlace:
    """Inside, classes have other methods, and objects, where these have one of their own: what is in an object, its
    own code may copy, pickle or count.

    Args:
        methods: `(class or object, name, method)` of each.
    """

    def __init__(self, methods: list[tuple[Any, str, Callable]]) -> None:
        self._methods = methods

    def __enter__(self) -> None:
        for holder, name, stand_in in self._methods:
            _put(holder, name, stand_in)

    def __exit__(self, *_: object) -> None:
        for holder, name, stand_in in self._methods:
            if vars(holder).get(name) is stand_in:
                _put(holder, name, getattr(stand_in, STANDS_FOR))


def _put(holder: Any, name: str, method: Callable) -> None:
    if isinstance(holder, type):
        type.__setattr__(holder, name, method)
    else:
        vars(holder)[name] = method


# -- in a capture, and in its replays ----------------------------------------------------------------------------------
class CutShort(Exception):
    """A capture ended after an eager part, and its call went on without.

    Attributes:
        reason: why; None where that was no fault of the capture's.
        result: what the call returned; error: what it raised.
        given: the tensors that it had in the place of its arguments.
    """

    def __init__(
        self, reason: BaseException | None, result: Flat | None, error: BaseException | None, given: list[Tensor]
    ) -> None:
        super().__init__()
        self.reason, self.result, self.error, self.given = reason, result, error, given

    def end(self, call: Call) -> Any:
        """Returns what the call returned, or raises what it raised.

        Args:
            call: that was made.
        """
        if self.error is not None:
            raise self.error
        assert self.result is not None, "it came to its end"
        own = dict(zip(map(id, self.given), call.leaves, strict=True))
        leaves = [own.get(id(tensor), tensor) for tensor in self.result.leaves]
        return rebuild(self.result.structure, leaves)


class _Loan:
    """Memory of the graph's, of which parts have a copy in each call. What they write there, whenever they do, is
    brought back after each part.

    Attributes:
        memory: all of it as bytes; of a tensor that a part returned, what the graph reads in its place.
        lent: what parts have in the call under way.
    """

    __slots__ = ("lent", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.lent: Tensor | None = None

    def bring_back(self) -> None:
        """Copies what parts have to where the graph reads it."""
        if self.lent is not None:
            self.memory.copy_(self.lent)


class _Own:
    """A tensor of the graph's, as parts have it: over the copy of its memory.

    Attributes:
        loan: that memory.
        made: the tensor of the call under way.
    """

    def __init__(self, loan: _Loan, like: Tensor) -> None:
        self.loan, self.memory = loan, like.detach()
        self.made: Tensor | None = None

    def of_now(self) -> Tensor:
        """The tensor in the call under way, which may begin with it."""
        if self.made is None:
            like, loan = self.memory, self.loan
            if loan.lent is None:
                loan.lent = loan.memory.clone()
            with torch.inference_mode(like.is_inference()), torch.no_grad():
                made = torch.empty(0, dtype=like.dtype, device=like.device)
                made.set_(loan.lent.untyped_storage(), like.storage_offset(), like.size(), like.stride())
                made = conjugated(made) if like.is_conj() else made
                self.made = negated(made) if like.is_neg() else made
        return self.made

    def forget(self) -> None:
        """Ends the call under way."""
        self.made = self.loan.lent = None


def _bytes_of(tensor: Tensor) -> Tensor:
    """All memory of its storage."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _gradient_of(parameter: Tensor, part_of: PartOf | None) -> Tensor:
    grad = parameter.grad
    assert grad is not None, "it was lent to the part"
    return grad if part_of is None else part_of.of(grad)


class EagerPart:
    """An eager part of a graph.

    Attributes:
        known: what the recorded call showed.
        gradients: the gradients that the code before it left behind, for whoever looks at them.
        returned: what it returned last; None where nobody uses that.
        results: the tensors in that, as the graph has them.
        inputs: those of the graph that it reads between it and the next part.

    Args:
        form, sources: what it is given; see `_form_of`, and `_tensor` for the tensors in it.
        modes: in which it is called; others: whether the captured call is in other ones.
    """

    def __init__(self, known: RecordedPart, form: Any, sources: list[Any], modes: tuple, others: bool) -> None:
        self.known, self._form, self._sources = known, form, sources
        self._modes, self._enters, self._modes_after = modes, others, modes
        self._goes_on = True  # whether operations follow
        self.gradients: list[tuple[Tensor, Left]] = []
        self.returned: Given | None = None
        self.results: list[_Own] = []
        self.inputs: list[tuple[int, Any]] = []
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._owned: list[Tensor] = []
        self._grads: list[int] = []

    def run(self, leaves: list[Tensor], modes_now: Callable[[], tuple], device_type: str, copies: bool) -> Any:
        """Makes the call.

        Args:
            leaves: the tensor arguments of the captured call.
        """
        leave_behind(self.gradients, copies)
        made = [self._tensor(source, leaves) for source in self._sources]
        function, args, kwargs = _made_of(self._form, iter(made))
        with self._as_there(device_type):
            result = function(*args, **kwargs)
            self._modes_after = modes_now()
        return result

    @property
    def own(self) -> list[_Own]:
        """The tensors of the graph that it is given."""
        return [source for source in self._sources if isinstance(source, _Own)]

    def _tensor(self, source: Any, leaves: list[Tensor]) -> Tensor:
        if isinstance(source, int):
            return leaves[source]
        if isinstance(source, PartOf):
            return source.of(leaves[source.index])
        if isinstance(source, _Own):
            return source.of_now()
        return source() if callable(source) else source

    def _as_there(self, device_type: str) -> AbstractContextManager:
        if not self._enters:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(entered_again(self._modes, device_type))
        stack.enter_context(torch.inference_mode(self._modes[INFERENCE]))
        stack.enter_context(torch.set_grad_enabled(self._modes[GRAD]))
        return stack

    def take(self, result: Any) -> None:
        """Copies what it returned to where the graph reads it.

        Raises:
            CaptureRefused: it is of another kind than in the recorded call, or the graph cannot go on after it.
        """
        reason = self._changed()
        if reason is not None:
            raise CaptureRefused(f"{self.known} changes what code after it reads: {reason}")
        if self.known.given is None:
            return
        given = Given(result)
        if given.outline != self.known.given.outline:
            raise CaptureRefused(f"{self.known} returns other values, or tensors of other kinds, than before")
        self.returned = given
        if not self.results:
            with torch.inference_mode(False), torch.no_grad():
                self.results = [_Own(_Loan(kept), kept) for kept in map(torch.clone, given.tensors)]
        for own, tensor in zip(self.results, given.tensors, strict=True):
            own.made = own.loan.lent = tensor

    def watch(
        self, owned: list[Tensor], tensors: list[Tensor], inputs: list[Any], seen: Recorder, reads: set[int], end: int
    ) -> None:
        """Begins to compare what the graph reads after it with what it is now.

        Args:
            owned: leaf tensors of which it may look at gradients.
            tensors: those of the callable; inputs: see `StaticInput`.
            seen: the record of the capture.
            reads: the addresses that it reads up to the next part; end: how many operations come before that.
        """
        backward = any(step.code is None for step in seen.trace[self.known.index : end])
        self._goes_on = len(seen.trace) > self.known.index
        self.inputs = [(i, one.buffer) for i, one in enumerate(inputs) if one.buffer and address(one.tensor) in reads]
        self._tensors = [tensor for tensor in tensors if address(tensor) in reads]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        at = dict(zip(map(id, owned), self._grads, strict=True))
        self._owned = [p for p in owned if (backward if not at[id(p)] else at[id(p)] in reads)]
        self._grads = [at[id(p)] for p in self._owned]

    def note_gradients(self, owned: list[Tensor]) -> None:
        """Notes where gradients are, right after it was made."""
        self._grads = list(map(_grad_at, owned))

    def _changed(self) -> str | None:
        """What code after it would find otherwise than in the recorded call, in words."""
        guards = self.known.guards
        reason = guards.moved() or guards.changed(gradients=False)
        if reason is None and self._goes_on and self._modes_after != self._modes:
            reason = f"a mode of PyTorch ({difference(self._modes, self._modes_after)[0]})"
        if reason is None and [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            reason = "a tensor has moved to another address"
        if reason is None and self._owned and list(map(_grad_at, self._owned)) != self._grads:
            reason = "other gradients are there, or absent"
        return reason


def _grad_at(parameter: Tensor) -> int:
    return 0 if parameter.grad is None else address(part(parameter.grad))


class EagerParts:
    """The eager parts of a call that is captured, and of its graph.

    Args:
        graph: the `StepGraph`.
        call: that is captured; given: the static tensors in the place of its arguments.
        owned: the leaf tensors that may collect gradients.

    Attributes:
        made: in order.
        began: whether one was called in the replay, or capture, under way.
        left: whether the call that was captured went on without.
        since: the gradients after the last one.
    """

    def __init__(self, graph: Any, call: Call, given: list[Tensor], owned: list[Tensor]) -> None:
        self._graph, self._call, self._given, self._owned = graph, call, given, owned
        self.made: list[EagerPart] = []
        self.began = self.left = False
        self._captures = True
        self._reads: list[set[int]] = []  # the addresses read before each part, since the part before
        self._loans: dict[int, _Loan] = {}
        self._own: dict[int, tuple[Tensor, _Own]] = {}  # by identity of the tensors that the captured call has
        self._recorder: Follower | None = None
        self.since: list[Tensor | None] = []
        self.result: Flat | None = None
        self._segments: list[Callable[[], None]] = []

    def within(self, ends: Any, memory: as_memory, methods: AbstractContextManager) -> None:
        """Takes in what the capture has put in place of parameters, gradients and methods."""
        self._ends, self._memory, self._methods = ends, memory, methods
        self.since = [parameter.grad for parameter in self._owned]

    # -- the capture ---------------------------------------------------------------------------------------------

    def reach(self, value: Any) -> bool:
        """See `recorder.Parts`."""
        return any(id(value) in (_reached(made.known.old.values()) or ()) for made in self.made)

    def call(self, recorder: Any, function: Callable, args: tuple, kwargs: dict, frame: FrameType, method: str) -> Any:
        """See `recorder.Parts`."""
        self._recorder = recorder
        try:
            with hidden():
                made = self._next(recorder, function, args, kwargs)
        except CaptureRefused as refusal:
            recorder.give_up(refusal)
            return function(*args, **kwargs)
        with hidden():
            recorder.graph.pause()
        self.began, self._captures = True, False
        try:
            with hidden():
                self._leave_behind(recorder, made)
                self._show()
                result = self._run(made, self._call.leaves)
        except BaseException as error:
            recorder.give_up(CaptureRefused(f"{made.known} raises {type(error).__name__}"))
            raise
        try:
            with hidden():
                made.note_gradients(self._owned)
                buffers = [(i, one.buffer) for i, one in enumerate(self._graph.inputs) if one.buffer]
                self._take(made, result, self._call.leaves, buffers)
        except CaptureRefused as refusal:
            recorder.give_up(refusal)
            return result
        tensors = [own.memory for own in made.results]
        self._own.update((id(tensor), (tensor, own)) for tensor, own in zip(tensors, made.results, strict=True))
        self._loans.update((address(own.memory), own.loan) for own in made.results)
        self._hide()
        self.since = [parameter.grad for parameter in self._owned]
        self._reads.append(recorder.read_since)
        recorder.after_part(tensors, [own.memory for own in made.own])
        with hidden():
            recorder.graph.resume()
        self._captures = True
        return None if made.returned is None else made.returned.of(tensors)

    def _next(self, recorder: Follower, function: Callable, args: tuple, kwargs: dict) -> EagerPart:
        """The part that comes, where the recorded call had the same one.

        Raises:
            CaptureRefused: it had not, or it is given what no replay could give it.
        """
        recording, entry = self._graph.recording, self._graph.entry
        number = len(self.made)
        known = recording.parts[number] if number < len(recording.parts) else None
        if known is None or known.index != len(recorder.trace):
            raise Diverged("calls another eager part than the call before")
        tensors: list[Tensor] = []
        form = _form_of((function, args, kwargs), lambda value: id(value) in known.old, tensors)
        if form != known.form or [*map(_kind, tensors)] != known.kinds:
            raise Diverged(f"calls the eager part {known} with other values than the call before")
        modes = self._graph.context.group.modes()
        before = entry.signature.modes
        if modes[FOREIGN] is not None or modes[SETTINGS] != before[SETTINGS]:
            raise CaptureRefused(f"calls the eager part {known} under a mode that no replay could enter")
        if entry.copies_out:
            raise CaptureRefused(f"has the eager part {known}, and results of it are held that cannot be moved")
        made = EagerPart(known, form, self._sources(known, recorder, tensors), modes, modes != before)
        self.made.append(made)
        return made

    def _sources(self, known: RecordedPart, recorder: Follower, tensors: list[Tensor]) -> list[Any]:
        places = {id(static): index for index, static in enumerate(self._given)}
        at = {address(static): index for index, static in enumerate(self._given) if address(static)}
        stood_in = {id(view): view._base for view in self._graph.stand_ins.values() if view._base is not None}
        guards = self._graph.recording.guards
        held = {*map(id, guards.tensors), *map(id, self._owned)}
        left = [(p, p.grad) for p in self._owned if p.grad is not None and not is_split(p.grad)]
        grads = {address(grad): (parameter, grad) for parameter, grad in left}
        found: list[Any] = []
        for tensor in tensors:
            tensor = stood_in.get(id(tensor), tensor)
            where = address(tensor)
            if id(tensor) in places:
                found.append(places[id(tensor)])
            elif id(tensor) in held:
                found.append(tensor)
            elif tensor.requires_grad:
                raise CaptureRefused(f"gives the eager part {known} a tensor that requires grad; pass it detached")
            elif where in grads:
                parameter, grad = grads[where]
                part_of = None if tensor is grad else PartOf(0, grad, tensor, argument=True)
                found.append(functools.partial(_gradient_of, parameter, part_of))
            elif where in at:
                found.append(PartOf(at[where], self._given[at[where]], tensor, argument=True))
            elif recorder.made(where) or where in recorder.kept_at:
                found.append(self._own_of(tensor, where))
            elif where in recorder.outside or any(address(one) == where for one in guards.tensors):
                found.append(tensor.detach)
            else:
                raise CaptureRefused(
                    f"gives the eager part {known} a tensor that was found neither among its arguments nor in an "
                    "attribute, variable or item that its code reads"
                )
        return found

    def _own_of(self, tensor: Tensor, where: int) -> _Own:
        if id(tensor) not in self._own:
            if where not in self._loans:
                self._loans[where] = _Loan(_bytes_of(tensor))
            self._own[id(tensor)] = tensor, _Own(self._loans[where], tensor)
        return self._own[id(tensor)][1]

    def _run(self, made: EagerPart, leaves: list[Tensor]) -> Any:
        graph, context = self._graph, self._graph.context
        context.counters.eager_parts += 1
        group = context.group
        return made.run(leaves, group.modes, group.backend.device_type, graph.entry.copies_out)

    def _take(self, made: EagerPart, result: Any, leaves: list[Tensor], inputs: list[tuple[int, Any]]) -> None:
        """Has the graph find what a part returned, and what it wrote.

        Args:
            inputs: those of the graph that it is going to read, and that have a buffer.

        Raises:
            CaptureRefused: see `EagerPart.take`.
        """
        made.take(result)
        with torch.inference_mode(False), torch.no_grad():
            for loan in self._loans.values():
                loan.bring_back()
        for index, buffer in inputs:
            buffer.load(leaves[index], self._graph.tape.arena.passes, self._graph.context)

    def _leave_behind(self, recorder: Follower, made: EagerPart) -> None:
        """Lends a part the gradients that code before it has left in memory of the graph."""
        for parameter, before in zip(self._owned, self.since, strict=True):
            grad = parameter.grad
            if grad is not before:
                lent = None if grad is None else lend(parameter, grad, recorder.made, self._graph.entry)
                made.gradients.append((parameter, lent))

    def _show(self) -> None:
        """Puts parameters and gradients where eager code finds them."""
        self.show_gradients()
        self._memory.__exit__()
        self._ends.stand_back()
        self._methods.__exit__(None, None, None)

    def _hide(self) -> None:
        """Undoes `_show`, but for gradients that were set or let go meanwhile."""
        self._methods.__enter__()
        self._ends.stand_in()
        for parameter in self._owned:
            memory = memory_of(parameter.grad)
            if memory is not parameter.grad:
                parameter.grad = memory

    def show_gradients(self) -> None:
        """Lets users have those gradients that lie in memory of the graph."""
        for made in self.made:
            for parameter, left in made.gradients:
                if isinstance(left, GradientBuffer) and parameter.grad is left.memory:
                    parameter.grad = left.tensor

    def leave(self) -> bool:
        """See `recorder.Parts`."""
        if not self.began:
            return False
        if self._captures:
            self._captures = False
            assert self._recorder is not None, "a part was called"
            with hidden():
                self._recorder.graph.leave()
        if not self.left:
            self.left = True
            self._show()
        return True

    def cut_short(self, captured: Any, error: BaseException) -> None:
        """The capture failed after a part was called.

        Args:
            captured: what it made; None where it did not come to its end.
            error: with which it failed.

        Raises:
            CutShort: with what the call gave.
        """
        if captured is not None:
            self.launch_last(captured.segments)
        of_call = None if self.result is not None else error
        reason = error if self.result is not None or isinstance(error, EagerPartFailed) else None
        raise CutShort(reason, self.result, of_call, self._given) from None

    def finish(self, captured: Any) -> None:
        """Takes in the capture."""
        seen, recording = captured.seen, self._graph.recording
        self._segments = captured.segments
        bounds = [made.known.index for made in self.made[1:]] + [len(seen.trace)]
        reads = [*self._reads[1:], seen.read_since]
        for made, end, read in zip(self.made, bounds, reads, strict=True):
            made.watch(self._owned, recording.guards.tensors, self._graph.inputs, seen, read, end)
        self._lent = [own for _, own in self._own.values()]
        self._own = {}
        self._end()

    @property
    def lent(self) -> list[tuple[Tensor, Left]]:
        """The gradients that parts see."""
        return [pair for made in self.made for pair in made.gradients]

    # -- replays -------------------------------------------------------------------------------------------------

    def launch_last(self, segments: list[Callable[[], None]] | None = None) -> None:
        """Launches what comes after the last part, for the call that was captured."""
        if self._graph.context.group.backend.on_gpu:  # the emulator has run it
            (segments or self._segments)[-1]()
        self.began = False

    def _end(self) -> None:
        """A call has ended: what its parts were given is theirs."""
        for own in self._lent:
            own.forget()

    def replay(self, leaves: list[Tensor]) -> None:
        """Replays, with the parts in between.

        Raises:
            EagerPartFailed: a part has changed what code after it reads.
        """
        graph = self._graph
        try:
            for launch, made in zip(self._segments, self.made, strict=False):
                launch()
                if not self.began:
                    self.began = True
                    graph.recording.host_draws.advance()
                self._take(made, self._run(made, leaves), leaves, made.inputs)
        except CaptureRefused as refusal:
            graph.context.drop(graph.tape)
            graph.context.keep_eager(graph.entry, str(refusal))
            raise EagerPartFailed(
                f"{graph.context.name!r}: {refusal}. This call is done up to and with that, and the rest is not; "
                "further calls run eagerly. Keep that part outside of the captured call"
            ) from refusal
        finally:
            self._end()
        self._segments[-1]()
        self.began = False
