"""Records a call: sees its operations, follows its memory, and tells what of it a graph cannot repeat.

Twice: `Recorder` watches the warm-up call that decides on a capture, `Follower` follows the capture, by the `Script`
that the first has left.

Memory is told apart by the addresses of storages. Most operations are harmless whatever they do with tensors that are
known and lie on the device of the call; `see` takes these in and no more. All others go by way of `_carefully`.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused, Diverged
from graphmod.torch_private import OpOverload, TensorBase, TorchDispatchMode, current_node, to_copy
from graphmod.trace import compiled, dispatch
from graphmod.trace.compiled import CompiledGraph
from graphmod.trace.dispatch import beside_the_call, hidden
from graphmod.trace.generators import RESTORES, SETS_STATE, Draws, same_generator
from graphmod.trace.hazards import (
    CHANCE,
    COMPILES,
    CONSTANTS,
    DATA,
    NOT_MADE,
    OUTSIDE,
    PLAIN,
    READ_CHANCE,
    UNDER_A_MODE,
    UNWRITTEN,
    Check,
    Hazard,
    Origins,
    Reason,
    fixed_origin,
    hazard,
    is_harmless,
    needed,
)
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.host_reads import HostReads
from graphmod.trace.lines import Lines, lines, user_frame
from graphmod.trace.operations import (
    Facts,
    Step,
    address,
    draws,
    facts,
    scalar_of,
    scalars_of,
    tensors_in,
    written_tensors,
)
from graphmod.trace.patches import asking
from graphmod.trace.script import Kept, Script
from graphmod.trace.undo import Undo, let_through
from graphmod.trace.untraced import identity, resume, suspend, thread_state, traced

log = logging.getLogger("graphmod")

_storage, _pointer = TensorBase.untyped_storage, torch.UntypedStorage.data_ptr
_new: Callable[..., Any] = tuple.__new__
_node_of_now = current_node
_PLAIN = frozenset(PLAIN)
_VALUES = frozenset((int, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format, complex))
_harmless: dict[int, tuple[Facts, Any, int | None, bool]] = {}


def _look_up(op: Any) -> tuple[Facts, Any, int | None, bool] | None:
    """Of an operator that is harmless on ordinary tensors: facts, what runs it, the origin of its results if that is
    fixed, and whether it can compute into given memory. None of others."""
    about = facts(op)
    if not is_harmless(op, about):
        return None
    found = _harmless[identity(op)] = about, op._op, fixed_origin(about), op in _INTO
    return found


def _take(values: Iterable[Any], given: list[Any]) -> tuple:
    """What an operation is given besides tensors. These are added to `given`; so is None for what else may hold any."""
    scalars: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind in _PLAIN:
            given.append(value)
            scalars.append(Tensor)
        elif kind in _VALUES:
            scalars.append(value)
        elif kind is float:
            scalars.append(value if value == value else "nan")
        elif kind is list or kind is tuple:
            scalars.append(_take(value, given))
        else:
            given.append(None)
            scalars.append(scalar_of(value))
    return tuple(scalars)


class Parts:
    """Makes the eager parts of a call that is recorded or captured; see `step.eager_parts`."""

    def call(self, recorder: Any, function: Callable, args: tuple, kwargs: dict, frame: FrameType, name: str) -> Any:
        """Calls a function of the user's as an eager part.

        Args:
            recorder: of the call.
            frame: of the function that its caller has called in its place.
            name: of a method that nobody has marked; else "".
        """

    def met(self, hazard: Hazard) -> None:
        """The call does, here, what a graph cannot repeat, or not beside eager parts."""

    def after(self, index: int, op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        """An operation of a capture has run; for `index` see `Recorder.number_of`, for the others `Graph.after`."""


# -- operations whose result is computed into given memory -------------------------------------------------------------
def _sum_size(tensor: Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> torch.Size:
    wanted = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    sizes = [1 if i in wanted else size for i, size in enumerate(tensor.size()) if keepdim or i not in wanted]
    return torch.Size(sizes)


def _broadcast_size(one: Any, other: Any, **_: Any) -> torch.Size | None:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return None
    return torch.broadcast_shapes(one.size(), other.size())


_aten = torch.ops.aten
# The operations whose results usually are gradients: what writes the result into given memory, and the result's size,
# because an `out` of another size would be resized under everybody who holds it.
_INTO = {
    _aten.mm.default: (_aten.mm.out, lambda a, b: torch.Size((a.size(0), b.size(1)))),
    _aten.bmm.default: (_aten.bmm.out, lambda a, b: torch.Size((a.size(0), a.size(1), b.size(2)))),
    _aten.sum.dim_IntList: (_aten.sum.IntList_out, _sum_size),
    to_copy: (lambda a, *, out, **_: out.copy_(a), lambda a, **_: a.size()),
    _aten.add.Tensor: (_aten.add.out, _broadcast_size),
    _aten.mul.Tensor: (_aten.mul.out, _broadcast_size),
}


class Producer(NamedTuple):
    """The operation that makes a tensor: its index in the trace and the layout of its result, of which the tensor may
    be a view."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]


_CHANGES = Reason("changes in place what an eager part was given, or has returned", "make it change a copy")
_NO_PART = Reason(
    "is called in a backward, or where nobody can put a graph on each side of it", "call it in the step itself"
)


# -- the record of a call ----------------------------------------------------------------------------------------------
class Operation:
    """An operation while it is looked at with care.

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


class Recorder:
    """Watches an eager call. It raises nothing and changes nothing: what a capture would refuse is in `hazards`.

    Attributes:
        watching: whether the call is an eager one, which nothing may change, and its frames are watched.
        trace: the operations, in order, but for those that show a tensor made of Python values.
        lifted: these, in order. Of lists that index, PyTorch shows them between other operations.
        script: what a capture of the same call must do, and what it may use.
        hazards: what a graph cannot repeat, in order; again each time that the call did it.
        generators: those passed to random operations.
        random, backward, ran_compiled: whether it drew random numbers, ran a backward pass, ran compiled code.
        compiles: whether torch.compile compiled something where it could be seen: a backward, for the first time.
        on_gpu: whether it works on a GPU.
        truths: truth values that operations gave to the host, by index of the operation.
        reads_on_host: whether it was refused for what it reads on the host, which nobody followed.
        goes_through: whether operations of the call are not run, but shown what they gave before.
        mask_saved: the first place where autograd keeps a mask that is an index for a backward.
        collectives: how many operations that other processes take part in it has seen.
        unfinished: what the call has begun that only a backward brings to its end.
        outside: address -> tensor, what the call read or wrote without having made it or been given it.
        static: the addresses of those of `outside` that were marked static.
        first_seen: address of a tensor of `outside` -> index in the trace.
        first_write: index in the trace of the first operation that changed anything of `outside` or the inputs; None
            where none did.
        written: the part of `outside` that it changed.
        advanced: what of that may have a part in the results: all but integers and the running statistics of a
            normalization.
        inputs_written: the addresses of inputs that it changed.
        read: every address it read, of what it had not made.
        read_since: every address it read since the last eager part, if that was there before it.

    Args:
        inputs: the tensors the call is given; reading them is no surprise.
        gpu: index of the GPU that the call works on; None under emulation.
        generators: whose state before the call is to be known.
        before_collective: called with `(op, args, kwargs)` before each operation that other processes take part in;
            what it raises ends the call.
        host_draws: is told what is drawn on the host, by operations; None where nobody follows what becomes of it.
        in_backward: see `dispatch.shown_to`.
        parts: makes eager parts; None where there can be none.
        follows: whether to find out how what is read on the host comes about; takes `host_draws`.
    """

    watching = True

    goes_through = False

    def __init__(
        self,
        inputs: Iterable[Tensor] = (),
        *,
        gpu: int | None = None,
        generators: Iterable[torch.Generator] = (),
        before_collective: Callable[..., None] | None = None,
        host_draws: HostDraws | None = None,
        in_backward: bool = False,
        parts: Parts | None = None,
        follows: bool = False,
    ) -> None:
        self._given, self._in_backward = list(inputs), in_backward
        self._inputs = {address(tensor) for tensor in self._given} - {0}  # nothing lies there
        self.on_gpu, self._gpu, self._index = gpu is not None, gpu, -1 if gpu is None else gpu
        self._generators, self._before_collective = generators, before_collective
        self.trace: list[Step] = []
        self.lifted: list[Step] = []
        self.host_draws = host_draws
        self._drawn_at: dict[int, Tensor] = {} if host_draws is None else host_draws.at
        self.script: Script | None = Script(self.trace, self.lifted, () if host_draws is None else host_draws.reads)
        self.hazards: list[Hazard] = []
        self.generators: list[torch.Generator] = []
        self.random = self.backward = self.ran_compiled = self.compiles = False
        self.collectives = 0
        self.unfinished: list[Any] = []
        self.outside: dict[int, Tensor] = {}
        self.made_before: Callable[[int], bool] | None = None
        self.static: set[int] = set()
        self.first_seen: dict[int, int] = {}
        self.first_write: int | None = None
        self.written: dict[int, Tensor] = {}
        self.advanced: dict[int, Tensor] = {}
        self.inputs_written: set[int] = set()
        self.read: set[int] = set()
        self.read_since: set[int] = set()
        self.parts = parts
        self._with_parts: set[int] = set()  # addresses of what eager parts were given, or have returned
        self.truths: dict[int, bool] = {}
        self._late_at: dict[int, tuple[Tensor, Hazard]] = {}  # of truth values that a replay is to look at
        self._computed_into = 0  # address of the memory that the operation under way was given for its result
        self._made_by: dict[int, tuple] = {}  # address -> what made it last and could have computed it elsewhere
        self._origins = Origins()
        if host_draws is not None:
            host_draws.follow(self._origins)
        self._check = Check(gpu, self._origins, in_backward)
        self._draws: Draws | None = None
        self._touched_state: Lines | None = None
        self.reads_on_host = False
        self.mask_saved: Hazard | None = None
        self._host_reads: HostReads | None = None
        if follows and host_draws is not None:
            self._host_reads = host_draws.given = HostReads(self._given, self._origins, self.written, self._take_hazard)
        self._sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}  # storages that were resized, and theirs before
        self._after: list[Callable] = []
        self._depth, self._undo = 0, Undo()

    def __enter__(self) -> Any:
        regions = compiled.regions()
        depth = self._depth = len(regions)
        try:
            asking(self, self._undo)
            if self.watching or not self.on_gpu:  # a GPU that captures does not tell
                self._draws = Draws(self._gpu, list(self._generators))
            self._undo.enter(dispatch.shown_to(self, self._given, self._in_backward))
            self._undo.then(lambda _: compiled.leave(regions, depth))
        except BaseException:
            self._undo.run()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.run()
        if error[0] is not None:
            for begun in self.unfinished:
                begun.abandon()
            for storage, size in self._sizes.values():
                if storage.nbytes() != size:
                    storage.resize_(size)
        met = self._draws.moved() if self._draws is not None and self.watching else None
        if met is not None:
            self.hazards.append(Hazard("the call", met, *SETS_STATE[:2]))
        self._draws = None
        if self._touched_state is not None and self.random:
            self.hazards.append(Hazard("the call", self._touched_state, *RESTORES[:2]))

    def refuse(self, operation: str, reason: Reason) -> None:
        """Takes in that the call does what a graph cannot repeat."""
        self._take_hazard(hazard(operation, lines(), reason, self.on_gpu))

    def _take_hazard(self, hazard: Hazard) -> None:
        self.hazards.append(hazard)
        if self.parts is not None:
            self.parts.met(hazard)

    def number_of(self, op: Any) -> int:
        """What the operation under way counts as: its index in the trace, or, of those in `lifted`, one below 0."""
        return -1 - len(self.lifted) if facts(op).lifts else len(self.trace)

    def was_given(self, where: int) -> bool:
        """Whether an input lies at an address."""
        return where in self._inputs

    def made(self, where: int) -> bool:
        """Whether an operation made what lies at an address."""
        return where in self._origins

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the host while the call works on a GPU."""
        return self.on_gpu and not tensor.is_cuda

    def producer_of(self, tensor: Tensor) -> Producer | None:
        """Where the call made a tensor; None where no operation could have computed it straight into other memory (no
        such overload, a tensor that is only part of its memory)."""
        if address(tensor) not in self._made_by:
            return None
        made = Producer(*self._made_by[address(tensor)])
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes and made.size.numel() == tensor.numel()
        return made if whole else None

    # -- what is no operation ------------------------------------------------------------------------------------

    def make(self, function: Callable, values: Any, kwargs: dict) -> Tensor:
        """Makes a tensor on the device of Python values, to be shown as one."""
        with hidden():
            return function(values, **kwargs)

    def aim(self, tensor: Tensor, memory: Callable[[], Tensor]) -> None:
        """Lets a capture of this call compute a tensor straight into what `memory()` gives then: a tensor of its size,
        contiguous, as it is. Does nothing where it cannot."""
        made = self.producer_of(tensor) if tensor.is_contiguous() else None
        if self.script is not None and made is not None and made.index not in self.script.aims:
            self.script.aims[made.index] = lambda: memory().as_strided(made.size, made.stride)

    def note_resized(self, storage: torch.UntypedStorage, before: int) -> bool:
        """Takes in that code has made or given back the memory of a storage, of `before` bytes until then. Returns
        whether it did: a tensor without memory, on which torch.compile traces, is nobody's."""
        try:
            where = storage.data_ptr()
        except RuntimeError:
            return False
        if storage.nbytes() > before:
            index = -1 if storage.device.index is None else storage.device.index
            self._origins.note_made(where, UNWRITTEN, ordinary=index == self._index)
        self._sizes.setdefault(storage._cdata, (storage, before))
        return True

    def before_communicating(self) -> None:
        """Takes in that a collective is about to come; to be told before another stream is taken for it."""

    def before_write(self, tensor: Tensor) -> None:
        """Takes in that an operation is about to change a tensor from outside, or among the inputs."""

    def note_host_read(self, tensor: Tensor, name: str) -> None:
        """Takes in that a function which is no operation reads a tensor on the host."""
        reason = self._check.read([tensor])
        if reason is not None and self._is_compared_here(tensor, name, reason):
            return
        if reason is not None and not (self.on_gpu and self._check.keeps(reason, [tensor])):
            self.refuse(name, reason)

    def _is_compared_here(self, tensor: Tensor, name: str, reason: Reason) -> bool:
        """Whether what is read on the host, at this place of the trace, is compared before a replay."""
        compared = self.script is not None and self._is_compared(name, [tensor], reason)
        if compared and self.script is not None:
            self.script.read_at.add(len(self.trace))
        return compared

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

    def note_compilation(self) -> None:
        """Takes in that torch.compile compiles: the call is to be recorded again."""
        self.compiles = True

    def eager_part(self, function: Callable, args: tuple, kwargs: dict, frame: FrameType, name: str = "") -> Any:
        """Calls a function that is to be an eager part; see `Parts`."""
        if self.parts is None or current_node() is not None:
            self.refuse("an eager part", _NO_PART)
            with hidden():
                return function(*args, **kwargs)
        return self.parts.call(self, function, args, kwargs, frame, name)

    def after_part(self, results: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """Takes in that an eager part was made, of which nothing was seen but what it was given and its results."""
        own = {where for where in map(address, given) if self.made(where)}
        self._with_parts |= (own | set(map(address, results))) - {0}
        self._origins.forget()
        if self._host_reads is not None:
            self._host_reads.forget()
        self._made_by.clear()
        self.read_since = set()
        if self._draws is not None:
            with hidden():
                self._draws.go_on()

    # -- operations ----------------------------------------------------------------------------------------------

    def see(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Runs an operation and takes it in. To be called out of sight of trace functions, as by `untraced`."""
        found = _harmless.get(identity(op)) or _look_up(op)
        if found is None:
            return self._carefully(op, facts(op), args, kwargs)
        about, run, origin, direct = found
        memory, greatest = self._origins.here, CONSTANTS
        given: list[Tensor] = []
        at: list[int] = []
        scalars: tuple = ()
        ordinary = not (about.views and (self.ran_compiled or self._depth))
        try:
            scalars = _take(args, given)
            if kwargs:
                scalars += tuple(zip(kwargs, _take(kwargs.values(), given), strict=True))
                device = kwargs.get("device")
                ordinary = ordinary and (device is None or (device.type == "cpu" and not self.on_gpu))
            for tensor in given:
                where = _pointer(_storage(tensor))
                at.append(where)
                found = memory.get(where)
                if found is None:
                    found = self._note_read(tensor, where)
                if found == NOT_MADE:
                    # Of memory from outside, tensors without values depend on nothing, and some are nested.
                    found = DATA if tensor.numel() and not tensor.is_nested else None
                if found is None:
                    ordinary = False
                elif found > greatest:
                    greatest = found
        except Exception as error:  # tensors that lie nowhere
            let_through(error)
            ordinary = False
        drawn_at = self._drawn_at
        if not ordinary or self._host_reads is not None or (drawn_at and not drawn_at.keys().isdisjoint(at)):
            return self._carefully(op, about, args, kwargs)
        if _node_of_now() is None:
            step = _new(Step, (op, scalars, *user_frame()))
        else:
            step, self.backward = _new(Step, (op, scalars, None, 0)), True
        if not self.watching and not self._is_as_before(step, about):
            return self._carefully(op, about, args, kwargs)
        try:
            if about.writes:
                self._note_writes(about, args, kwargs, greatest)
        except Exception as error:
            self._cannot_follow(about, error)
        state = thread_state()
        try:  # as in `traced`
            resume(state)
            result = run(*args, **kwargs)
        finally:
            suspend(state)
        made = greatest if origin is None else origin
        fresh: list[Tensor] = []
        try:
            plain = type(result) is Tensor and not result.is_nested and result.get_device() == self._index
            where = address(result) if plain else 0  # 0 as well of what is zero and has no memory
            if not where:
                fresh = self._note_results(op, about, given, at, result, made)
            elif where not in at:
                fresh.append(result)
                memory[where] = made
                if direct:
                    self._made_by[where] = (len(self.trace), result.size(), result.stride())
                else:
                    self._made_by.pop(where, None)
        except Exception as error:
            self._cannot_follow(about, error)
        for tensor in fresh if drawn_at else ():
            drawn_at.pop(address(tensor), None)
        for after in self._after:
            after(op, args, kwargs, result, fresh)
        self.trace.append(step)
        return result

    def _is_as_before(self, step: Step, about: Facts) -> bool:
        """Whether a capture has nothing more to do with an operation than to run it."""
        return True

    def _carefully(self, op: Any, about: Facts, args: tuple, kwargs: dict) -> Any:
        # What surrounds compiled code takes views as it sees fit: of arguments that are views themselves, for one.
        if about.profiler or (about.views and compiled.regions()):
            return _do(op, args, kwargs)
        code, line = (None, 0) if _node_of_now() is not None else user_frame()
        self.backward = self.backward or _node_of_now() is not None
        step = Step(op, scalars_of(about, args, kwargs), code, line)
        random = draws(about, args, kwargs)
        generator = kwargs.get("generator")
        if generator is not None and not any(same_generator(generator, known) for known in self.generators):
            self.generators.append(generator)
        self.random = self.random or random
        record = self.lifted if about.lifts else self.trace
        result = self._run(Operation(step, about, args, kwargs, random, len(record)))
        record.append(step)
        return result

    def _run(self, one: Operation) -> Any:
        """Runs an operation, whatever the record makes of it."""
        op = one.step.op
        if one.about.collective and self._before_collective is not None:
            with hidden():
                self._before_collective(op, one.args, one.kwargs)
        kept: Kept | None = None
        number, drawn, followed = False, None, None
        try:
            reason = self._why_not(one)
            if self.host_draws is not None:
                number = reason is READ_CHANCE and self._reads_number(one, self.host_draws)
                drawn = self.host_draws.before(op, one.about, one.args, one.kwargs, one.random)
            if self._host_reads is not None:
                followed = self._host_reads.before(op, one.about, one.args, one.kwargs, one.random)
            kept = None if reason is None else self._to_keep(one, reason)
            if kept is not None and self.script is not None:
                self.script.kept[one.index] = kept
            elif reason is not None and not number:
                self.refuse(one.about.short, reason)
            self._before(one)
        except Exception as error:
            self._cannot_follow(one.about, error)
        draws = self._draws if isinstance(op, CompiledGraph) and not one.random else None
        drawing, state = (None, None) if draws is None else (draws.before(None), draws.state())
        result = _do(op, one.args, one.kwargs)
        if type(result) is bool:
            self.truths[one.index] = result
        try:
            if draws is not None and draws.state() != state:
                op.note_random()
                self.random = one.random = True
                if drawing is not None:
                    self.refuse(one.about.short, drawing)
            if kept is not None:
                kept.keep(result)
            if self.host_draws is not None and number:
                self.host_draws.got(result)
            fresh = self._done(one, result)
            if self.host_draws is not None:
                self.host_draws.done(drawn, result, fresh)
            if self._host_reads is not None:
                self._host_reads.done(followed, result, fresh)
            if kept is not None and kept.compared and kept.kind == "result":
                for tensor in tensors_in((result,)):
                    self._origins.note_made(address(tensor), CONSTANTS)
        except Exception as error:
            self._cannot_follow(one.about, error)
        return result

    def _to_keep(self, one: Operation, reason: Reason) -> Kept | None:
        """What is kept of an operation that reads on the host, for captures; None where that is not to be had."""
        needs = needed(reason, one.args, one.given, self.on_gpu)
        compared = not self._check.keeps(reason, needs)
        if self.script is None or (compared and not self._is_compared(one.about.short, needs, reason)):
            return None
        if reason.kept == "masks" and torch.is_grad_enabled() and any(t.requires_grad for t in one.given):
            self.mask_saved = self.mask_saved or hazard(one.about.short, lines(), reason, self.on_gpu)
        return Kept(reason.kept, needs, compared)

    def _is_compared(self, name: str, tensors: list[Tensor], reason: Reason) -> bool:
        """Whether what is read of tensors on the host can be computed, and compared, before a replay."""
        if reason.kept not in ("result", "masks") or self.host_draws is None:
            return False
        if self._host_reads is None:
            self.reads_on_host = True
            return False
        found = hazard(name, lines(), reason, self.on_gpu)
        try:
            value = self._host_reads.read(name, tensors, found)
        except Exception as error:  # of which the call is to notice nothing
            let_through(error)
            return False
        if value is not None:
            self.host_draws.read_given(value, tensors[0], found)
        return value is not None or self._is_compared_late(name, tensors[0], found)

    def _is_compared_late(self, name: str, tensor: Tensor, hazard: Hazard) -> bool:
        """Whether a truth value is read before the call has changed anything that lasts, so that a replay may stop and
        look at it."""
        early = self.first_write is None and not self.collectives and current_node() is None
        if self.script is None or not early or name != "_local_scalar_dense" or tensor.dtype is not torch.bool:
            return False
        if self.parts is not None:
            self.parts.met(hazard)
        self.script.late[len(self.trace)] = hazard
        self._late_at[address(tensor)] = tensor.detach(), hazard  # held, so that its memory stays its own
        return True

    def _reads_number(self, one: Operation, draws: HostDraws) -> bool:
        """Whether a number that is read on the host can be drawn again; not what comes of comparing tensors."""
        if one.about.short != "_local_scalar_dense":
            return False
        found = hazard(one.about.short, lines(), READ_CHANCE, self.on_gpu)
        return draws.read(one.given[0], one.index, found)

    def _cannot_follow(self, about: Facts, error: Exception) -> None:
        """Takes in an error of the recorder's own, of which the call is to notice nothing."""
        let_through(error)
        name = about.short
        log.debug("%s cannot be followed", name, exc_info=error)
        self.refuse(name, Reason(f"cannot be followed ({type(error).__name__}: {error})", OUTSIDE))

    def _why_not(self, one: Operation) -> Reason | None:
        """Takes in that an operation is about to run; why a graph cannot repeat it."""
        if one.about.collective:
            self.before_communicating()
            self.collectives += 1
        if one.about.lifts:
            self._origins.note_made(one.given_at[0], CONSTANTS)
            if self.watching and self.script is not None and not self.is_host(one.given[0]):
                with hidden():
                    self.script.note_made(one.index, one.given[0])
            return None
        return self._check.reason(one.step.op, one.about, one.args, one.kwargs, one.given)

    def _before(self, one: Operation) -> None:
        """Takes in what an operation is going to read, write and draw."""
        about = one.about
        if about.lifts:
            return
        for tensor, where in zip(one.given, one.given_at, strict=True):
            self._note_read(tensor, where)
        if about.writes or about.statistics:
            origin = max(CHANCE if one.random else CONSTANTS, self._origins.greatest(one.given_at, one.given))
            self._note_writes(about, one.args, one.kwargs, DATA if about.collective else origin)
        if one.random and self._draws is not None and self._touched_state is None:
            reason = self._draws.before(one.kwargs.get("generator"))
            if reason is not None:
                self.refuse(one.about.short, reason)

    def _note_read(self, tensor: Tensor, where: int) -> int | None:
        """Takes in memory that an operation reads, which the call has not made on its device. Returns its origin if it
        is ordinary, as of a strided tensor on that device."""
        here = self._origins.here
        self.read_since.add(where)
        if where in self._origins.earlier:
            self._origins.note_made(where, DATA, ordinary=tensor.get_device() == self._index)
            return here.get(where)
        self.read.add(where)
        if where and where not in here and where not in self._origins.elsewhere:
            before = self.made_before is not None and self.made_before(where)
            if where not in self._inputs and where not in self.outside and not before:
                self.outside[where] = tensor.detach()
                if getattr(tensor, "_graphmod_static", False):
                    self.static.add(where)
                self.first_seen[where] = len(self.trace)
            if tensor.layout is torch.strided and not tensor.is_nested and tensor.get_device() == self._index:
                here[where] = NOT_MADE
        return here.get(where)

    def _note_writes(self, about: Facts, args: tuple, kwargs: dict, origin: int) -> None:
        """Takes in what an operation is going to write, which has `origin` then."""
        for tensor in written_tensors(about, args, kwargs):
            where = address(tensor)
            outside = self.outside.get(where)
            if where in self._late_at:
                self.hazards.append(self._late_at[where][1])
            if where in self._with_parts:
                self.refuse(about.short, _CHANGES)
            if outside is not None or where in self._inputs:
                self.first_write = len(self.trace) if self.first_write is None else self.first_write
                self.before_write(tensor)
            if outside is not None:
                self.written.setdefault(where, outside)
                if about.writes and (tensor.is_floating_point() or tensor.is_complex()):
                    self.advanced.setdefault(where, outside)
            elif where in self._inputs:
                self.inputs_written.add(where)
            self._origins.note_write(where, origin)
            if self.watching and self.script is not None:
                self.script.note_write(where)

    def _done(self, one: Operation, result: Any) -> list[Tensor]:
        """Takes in the results of an operation that has run; those that share no storage with its arguments."""
        if one.random and self._draws is not None:
            self._draws.after(one.kwargs.get("generator"))
        origin = max(CHANCE if one.random else UNWRITTEN, self._origins.result(one.about, one.given, one.given_at))
        return self._note_results(one.step.op, one.about, one.given, one.given_at, result, origin)

    def _note_results(
        self, op: Any, about: Facts, given: list[Tensor], at: list[int], result: Any, origin: int
    ) -> list[Tensor]:
        results = list(tensors_in((result,)))
        reason = self._check.result_reason(results)
        if reason is not None:
            self.refuse(about.short, reason)
            return []
        if about.lifts:
            return results
        # A bucket of gradients may hold both what an operation reads and what it was made to compute there.
        known = set(at) - {0, self._computed_into}
        fresh = [(address(tensor), tensor) for tensor in results]
        fresh = [(where, tensor) for where, tensor in fresh if where not in known]
        for where, tensor in fresh:
            self._origins.note_made(where, origin, ordinary=tensor.get_device() == self._index)
            self._made_by.pop(where, None)
            if op in _INTO:
                self._made_by[where] = (len(self.trace), tensor.size(), tensor.stride())
        if self.on_gpu and any(tensor.is_cuda for tensor in given):
            self._origins.note_of_kernels(where for where, tensor in fresh if not tensor.is_cuda)
        return [tensor for _, tensor in fresh]


def _do(op: Any, args: tuple, kwargs: dict) -> Any:
    """Runs an operation, and whatever Python that runs, in sight of trace functions."""
    return traced(op._op if type(op) is OpOverload else op, args, kwargs)  # what calling it calls


class Graph:
    """What a capture makes, as far as it has to know what the recorder sees."""

    def before_write(self, tensor: Tensor) -> None:
        """An operation is about to change a tensor from outside, or among the inputs."""

    def before_collective(self) -> None:
        """The first operation that other processes take part in is about to run."""

    def collective(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Runs an operation that other processes take part in."""
        return _do(op, args, kwargs)

    def around(self, args: Iterable[Any]) -> AbstractContextManager:
        """A context to run an operation on lists of tensors in."""
        return nullcontext()

    def after(self, op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        """An operation has run; `fresh` are the result tensors that share no storage with its arguments."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was given memory, or gave it back, by hand."""

    def pause(self) -> None:
        """An eager part comes: launches what was captured so far, and captures nothing until `resume`."""

    def resume(self, memory: Iterable[Tensor]) -> None:
        """The eager part was made. What changes from here on is undone if the capture fails.

        Args:
            memory: what the capture has made, and code may go on to use.
        """


class _Observing(threading.local):
    """Who sees the operations of this thread's captures, beside their recorders: is called as `Graph.after`."""

    by: Any = None


observing = _Observing()


class Follower(Recorder):
    """Follows a capture, and raises `CaptureRefused` before an operation that a graph cannot repeat.

    Attributes:
        kept_at: the addresses of tensors of the recorded call, and of results of eager parts, that it goes on to use.
        flags: what the call reads late (`Script.late`), each with the truth value that it went by.
        graph: what the capture makes.

    Args:
        inputs, generators, parts: see `Recorder`.
        gpu: index of the GPU on which CUDA captures; None under emulation.
        script: of the recorded eager call: a capture that does something else is refused at once.
        targets: index of an operation in the trace -> memory of its result's shape and strides to compute it into.
        graph: what the capture makes.
        made_before: tells of an address whether a capture before this one made what lies there, of which nothing is
            kept: it is free as soon as nobody else has it.
    """

    watching = False

    def __init__(
        self,
        inputs: Iterable[Tensor] = (),
        *,
        gpu: int | None = None,
        script: Script | None = None,
        generators: Iterable[torch.Generator] = (),
        targets: dict[int, Tensor] | None = None,
        graph: Graph | None = None,
        parts: Parts | None = None,
        made_before: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(inputs, gpu=gpu, generators=generators, parts=parts)
        self.script, self.made_before = script, made_before
        self.kept_at: set[int] = set()
        self.flags: list[tuple[Tensor, bool]] = []
        self._refused: str | None = None
        self._communicated, self._copies = False, True
        self.graph = Graph() if graph is None else graph
        self._after = [one for one in (self.graph.after, observing.by) if one is not None]
        if parts is not None:
            self._after.append(lambda op, *seen: parts.after(self.number_of(op), op, *seen))
        # Index of an operation -> makes the memory that its result is to be computed into.
        self._into: dict[int, Callable[[], Tensor]] = {} if script is None else dict(script.aims)
        self._into |= {index: lambda memory=memory: memory for index, memory in (targets or {}).items()}

    def finish(self) -> "Follower":
        """Lets go of the graph, so that the record keeps nothing alive but the tensors from outside."""
        self.graph, self._after = Graph(), []
        self._sizes.clear()
        self._into, self._made_by = {}, {}
        return self

    def _is_compared_here(self, tensor: Tensor, name: str, reason: Reason) -> bool:
        return self.script is not None and len(self.trace) in self.script.read_at

    # -- refusals ------------------------------------------------------------------------------------------------

    def refuse(self, operation: str, reason: Reason) -> None:
        """Refuses the capture.

        Raises:
            CaptureRefused: at once, and see `check`.
        """
        super().refuse(operation, reason)
        self.give_up(CaptureRefused(str(self.hazards[-1])))

    def give_up(self, refusal: CaptureRefused) -> NoReturn:
        """See `refuse`."""
        self._refused = self._refused or str(refusal)  # and not the error, whose frames hold this
        raise refusal

    def _cannot_follow(self, about: Facts, error: Exception) -> None:
        raise error

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
        differs = None if self.script is None else self.script.ends_otherwise(self.trace, self.lifted)
        if differs is not None:
            raise Diverged(differs)

    # -- what is no operation ------------------------------------------------------------------------------------

    def make(self, function: Callable, values: Any, kwargs: dict) -> Tensor:
        """Makes a tensor on the device of Python values: the one of the recorded call.

        Raises:
            Diverged: the values are others than then.
        """
        if self.script is None:
            return super().make(function, values, kwargs)
        with hidden():
            plain = {name: value for name, value in kwargs.items() if name != "requires_grad"}  # `as_tensor` has none
            now = function(values, **{**plain, "device": "cpu"})
            kept = self.script.made(len(self.lifted), now)
            if kept is not None:
                self._take_address(address(kept))
                return kept.requires_grad_() if kwargs.get("requires_grad") else kept
            if not self.script.shows(len(self.lifted)):
                unseen = "copies values of the host to the GPU where nobody sees it"
                self.give_up(CaptureRefused(f"{lines().location} {unseen}; create it once, outside, on the device"))
        self.give_up(Diverged(f"{lines().location} makes a tensor of other Python values than in the call before"))

    @contextmanager
    def copying_nothing(self) -> Iterator[None]:
        """Inside, Python values other than a single number would be copied to a GPU, which no capture can do: emulated
        captures fail there as well."""
        before, self._copies = self._copies, self.on_gpu
        try:
            yield
        finally:
            self._copies = before

    def _why_not(self, one: Operation) -> Reason | None:
        if one.about.lifts and not self._copies and one.given[0].dim():
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture.")
        return super()._why_not(one)

    def note_resized(self, storage: torch.UntypedStorage, before: int) -> bool:
        """As in an eager call; the graph has to do the same."""
        followed = super().note_resized(storage, before)
        if followed:
            self.graph.resized(storage)
        return followed

    def before_communicating(self) -> None:
        """Takes in that a collective is about to come; to be told before another stream is taken for it."""
        if not self._communicated:
            self._communicated = True
            with beside_the_call():
                self.graph.before_collective()

    def before_write(self, tensor: Tensor) -> None:
        self.graph.before_write(tensor)

    def after_part(self, results: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """As in an eager call; of the results there are copies, which every replay writes."""
        super().after_part(results, given)
        at = set(map(address, results)) - {0}
        self._inputs |= at
        self.kept_at |= at

    # -- operations ----------------------------------------------------------------------------------------------

    def _is_as_before(self, step: Step, about: Facts) -> bool:
        """Whether there is nothing more to do with a harmless operation than to run it."""
        index = len(self.trace)
        as_recorded = self.script is None or self.script.has(index, step)
        return as_recorded and index not in self._into and not about.lists

    def _run(self, one: Operation) -> Any:
        differs = None if self.script is None else self.script.differs(one.index, one.step, lines)
        if differs is not None:
            self.give_up(Diverged(differs))
        reason = self._why_not(one)
        kept = None if reason is None else self._kept(one, reason)
        if kept is not None and kept.kind == "result":
            result = kept.result()
            if self.script is not None and one.index in self.script.late:
                self.flags.append((one.given[0].detach(), result))
            for tensor in tensors_in((result,)):
                self._take_address(address(tensor))
            return result
        self._before(one)
        result = self._execute(one)
        fresh = self._done(one, result)
        self._computed_into = 0
        for after in self._after:
            after(one.step.op, one.args, one.kwargs, result, fresh)
        return result

    def _kept(self, one: Operation, reason: Reason) -> Kept | None:
        """What was kept of an operation on constants; kept arguments take the place of its own. None where it
        is to run: it reads a number that was compared before this capture."""
        if reason is READ_CHANCE and self.script is not None and one.index in self.script.numbers:
            return None
        kept = None if self.script is None else self.script.kept.get(one.index)
        needs = needed(reason, one.args, one.given, self.on_gpu)
        if kept is None or not (kept.compared or self._check.keeps(reason, needs)):
            self.refuse(one.about.short, reason)
            return None
        if kept.kind != "result":
            one.look_at(*kept.in_place_of(needs, one.args, one.kwargs))
            for where in kept.where.intersection(one.given_at):
                self._take_address(where)
        return kept

    def _take_address(self, where: int) -> None:
        self._origins.note_made(where, CONSTANTS)
        self.kept_at.add(where)

    def _execute(self, one: Operation) -> Any:
        op, args, kwargs = one.step.op, one.args, one.kwargs
        if one.about.collective:
            return self.graph.collective(op, args, kwargs)
        into = self._into.get(one.index)
        if into is not None and op in _INTO:
            with hidden():
                target = into()
            write, size = _INTO[op]
            if size(*args, **kwargs) == target.size():
                self._computed_into = address(target)
                return write(*args, **kwargs, out=target)
        with self.graph.around((*args, *kwargs.values())) if one.about.lists else nullcontext():
            return _do(op, args, kwargs)
