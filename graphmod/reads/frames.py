"""Watches the frames of a call as they run, and notes what each instruction reads of what was there before the call.

`events` tells of them, which stands on `sys.settrace` or `sys.monitoring`.
"""

import dis
import inspect
import logging
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from graphmod.guards.notes import Notes
from graphmod.guards.values import enabled_from
from graphmod.reads import events
from graphmod.reads.operand_stack import VERSIONS, depths, function_of, lies_there
from graphmod.reads.reading import Plan, Reading, plan_of
from graphmod.torch_private import DYNAMO, OpOverload, beside_dynamo, written_by_dynamo
from graphmod.trace import dispatch
from graphmod.trace.garbage import Ages
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.lines import CORE, ENGINE, STDLIB, TORCH, is_library
from graphmod.trace.undo import Undo, let_through
from graphmod.trace.untraced import identity, untraced

log = logging.getLogger("graphmod")

# Of torch, what passes operations on, compiles, traces, stores or tells, and keeps no setting of a program's. Nor does
# what is private to it.
_NOT_OF_TORCH = tuple(
    TORCH + part.replace("/", os.sep)
    for part in (
        *("autograd/", "compiler/", "cuda/", "distributed/", "export/", "func/", "futures/", "fx/", "jit/"),
        *("library.py", "mps/", "mtia/", "multiprocessing/", "nativert/", "nested/", "onnx/", "overrides.py"),
        *("package/", "profiler/", "serialization.py", "sparse/", "storage.py", "types.py", "xpu/"),
        *("utils/_", "utils/checkpoint.py", "utils/hooks.py"),
    )
)
_OF_TORCH = tuple(TORCH + part.replace("/", os.sep) for part in ("autograd/function.py", "autograd/grad_mode.py"))
_OF_OTHERS = tuple(TORCH + part.replace("/", os.sep) for part in ("random.py", "autograd/grad_mode.py"))
_WAITS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_PRIVATE, _SPECIAL = TORCH + "_", TORCH + "__"
# Of the standard library, what leads to no setting of a program's.
_NOT_OF_STDLIB = tuple(
    part.replace("/", os.sep)
    for part in (
        *("ast.py", "asyncio/", "codecs.py", "dis.py", "encodings/", "gettext.py", "importlib/", "linecache.py"),
        *("locale.py", "logging/", "re/", "sysconfig.py", "tokenize.py", "traceback.py", "warnings.py"),
    )
)
_CALLS = CORE + "step" + os.sep  # where calls begin that are watched
_OF_CORE = (CORE + "train" + os.sep, CORE + "decode" + os.sep, CORE + os.path.join("ranks", "data_parallel.py"))
_NOT_OF_CORE = CORE + os.path.join("train", "draws.py")  # what a forward keeps for its own backward
# Where dynamo compiles, and where it runs code of its own that it has written out.
_DYNAMO = os.path.join(*DYNAMO.split("."), "")
_COMPILES = tuple(_DYNAMO + name for name in ("convert_frame.py", "guards.py"))
_FROZEN = ("<frozen os>", "<frozen _collections_abc>")
_CALL = nn.Module._call_impl.__code__
# How modules find their parts: `values` knows, and what is found is noted where it is read.
_MACHINERY = {
    *(one.__code__ for one in vars(weakref.finalize).values() if isinstance(one, FunctionType)),  # counts itself
    *(nn.Module._wrapped_call_impl.__code__, nn.Module.__getattr__.__code__, nn.Module.__setattr__.__code__),
    *(nn.Module.__delattr__.__code__, torch.Tensor.__hash__.__code__),
}
# These go through a module and all in it, and read nothing but its dicts.
_WALKS = {
    one.__code__
    for name in ("modules", "parameters", "buffers", "children")
    for one in (getattr(nn.Module, name), getattr(nn.Module, f"named_{name}"))
}
_WALKS |= {one for code in list(_WALKS) for one in code.co_consts if isinstance(one, CodeType)}
_WALKS.add(nn.Module._named_members.__code__)
# These go through the parameters of an optimizer's group. What they read besides their gradients and state are items
# and attributes that the code names: of each of hundreds of parameters, dozens of instructions would be looked at.
_NAMES = {
    *("append", "as_tensor", "clone", "complex", "defaults", "detach", "device", "dim", "dtype", "full_like", "get"),
    *("getattr", "grad", "is_complex", "is_sparse", "is_tensor", "len", "list", "new_zeros", "ones", "preserve_format"),
    *("requires_grad", "shape", "state", "tensor", "torch", "zeros", "zeros_like", "RuntimeError", "_to_scalar"),
    *("_device_dtype_check_for_fused", "_get_scalar_dtype", "_need_device_dtype_check_for_fused"),
}
_GROUPS = [
    inspect.unwrap(one._init_group).__code__ for one in vars(torch.optim).values() if hasattr(one, "_init_group")
]
_groups = frozenset(identity(code) for code in _GROUPS if _NAMES.issuperset(code.co_names))
_CLEARS = inspect.unwrap(torch.optim.Optimizer.zero_grad).__code__
# By identity: the hash of code takes microseconds, and there is none where dynamo has put a dict among the constants.
_walks = frozenset(map(identity, _WALKS))
# From an operation that is recorded to its kernels nothing comes back but tensors and numbers.
_ON_THE_WAY = (dispatch._fallback, dispatch.current, dispatch._kernel, dispatch._any_stands, untraced)
_OPERATIONS = {one.__code__ for one in (*_ON_THE_WAY, OpOverload.__call__)}
_OPERATIONS |= {one for code in list(_OPERATIONS) for one in code.co_consts if isinstance(one, CodeType)}
_passed_over = frozenset(map(identity, _MACHINERY | _OPERATIONS))
_EXCHANGES = torch.utils.swap_tensors.__code__
_starts_threads = {identity(threading.Thread.start.__code__), identity(ThreadPoolExecutor.submit.__code__)}
# What a program may ask loggers, and decide by.
_ASKS = {
    "isEnabledFor": ("the level from which on a logger is enabled", enabled_from),
    "getEffectiveLevel": ("the effective level of a logger", logging.Logger.getEffectiveLevel),
}
_asks_logger = {identity(getattr(logging.Logger, name).__code__): asks for name, asks in _ASKS.items()}

NOT_TOLD = (
    "this thread's trace functions are suspended, or other tools (a debugger, a profiler) hold all places of "
    "sys.monitoring"
)
_UNKNOWN_PYTHON = (
    f"{sys.implementation.name} {platform.python_version()} is not CPython 3.11 to 3.13, whose stack is known"
)

# By identity, because the hash of code takes microseconds; held weakly, because dynamo keeps graphs with code.
_known: dict[int, tuple[Plan | None, weakref.ref]] = {}


@cache
def _mutes(filename: str, name: str) -> bool:
    """Whether neither code is of interest nor what that calls: it says something, or imports, or compiles, or is
    compiled, or is what torch.compile changes in torch when it is first used."""
    if name == "patch" and filename.endswith(_DYNAMO + "eval_frame.py"):
        return True
    parts = (f"{os.sep}triton{os.sep}", f"{os.sep}torch{os.sep}_inductor{os.sep}", "torchinductor", *_COMPILES)
    said = filename.startswith((STDLIB + "logging" + os.sep, STDLIB + "warnings.py", "<frozen importlib"))
    said = said and name not in _ASKS
    return said or any(part in filename for part in parts)


def _is_dynamos_guard(frame: FrameType, code: CodeType) -> bool:
    """Whether a frame is of a comparison that dynamo has written out in Python, which is made before compiled code."""
    return (
        code.co_name == "guard" and code.co_filename == "<string>" and frame.f_globals.keys() <= {"G", "__builtins__"}
    )


@cache
def _watched(filename: str) -> bool:
    filename = os.path.normpath(filename)
    if filename.startswith(TORCH):
        private = filename.startswith(_PRIVATE) and not filename.startswith(_SPECIAL)
        return filename.startswith(_OF_TORCH) or not (private or filename.startswith(_NOT_OF_TORCH))
    if filename.startswith(CORE):
        return filename.startswith(_OF_CORE) and not filename.startswith(_NOT_OF_CORE)
    if filename.startswith("<frozen"):
        return filename in _FROZEN
    if _of_stdlib(filename):
        return not filename[len(STDLIB) :].startswith(_NOT_OF_STDLIB)
    return True


@cache
def _serves_others(filename: str) -> bool:
    return _of_stdlib(filename) or os.path.normpath(filename).startswith(_OF_OTHERS)


@cache
def _of_stdlib(filename: str) -> bool:
    return filename.startswith("<frozen") or (filename.startswith(STDLIB) and "-packages" not in filename)


def _for_nobody(frame: FrameType, code: CodeType) -> bool:
    """Whether a frame is of the standard library, or of what in torch others use likewise, and looks up for PyTorch's
    machinery, or for this package's, what that keeps there: the environment, weak dictionaries, random states."""
    if not _serves_others(code.co_filename):
        return False
    caller = frame.f_back
    while caller is not None and _serves_others(caller.f_code.co_filename):
        caller = caller.f_back
    if caller is None:
        return False
    filename = caller.f_code.co_filename
    return filename.startswith((TORCH, CORE)) and not _watched(filename)


def _plan_of(code: CodeType) -> Plan | None:
    where = identity(code)
    known = _known.get(where)
    if known is None:
        passed_over = code is _CALL or where in _walks
        looked_at = not passed_over and (_watched(code.co_filename) or code in written_by_dynamo())
        found = plan_of(code) if looked_at else None
        gone = weakref.ref(code, lambda _: _known.pop(where, None))
        told = looked_at and (code.co_freevars or code.co_name.startswith("__"))  # see `Frames._note_function`
        known = _known[where] = found if found or told else None, gone
    return known[0]


@cache
def _can_peek() -> bool:
    """Whether what a frame holds lies where it is looked for."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in VERSIONS:
        return False
    one, two, found = object(), object(), []

    def asked(first: Any, second: Any) -> bool:
        return first is second

    steps = list(dis.get_instructions(asked.__code__))
    reach = depths(asked.__code__, steps)
    plan = {step.offset: reach[step.offset] for step in steps if step.opname == "IS_OP"}

    class Probe:
        def entered(self, frame: FrameType, code: CodeType) -> int | events.Plan:
            return plan if code is asked.__code__ else events.NOTHING

        def step(self, frame: FrameType, code: CodeType, planned: int) -> None:
            found.append(lies_there(frame, one, two, asked, planned))

        def left(self, frame: FrameType) -> None:
            pass

    before = events.before()
    try:
        events.begin(Probe())
        asked(one, two)
    finally:
        events.end(before)
    return found == [True]


def _two_given(frame: FrameType) -> tuple[Any, Any]:
    one, other = frame.f_code.co_varnames[:2]
    return events.variable(frame, one), events.variable(frame, other)


class Frames:
    """While it is active, notes what the code of this thread reads, before it does.

    Attributes:
        notes: where that goes. Errors from looking, at what may be of any kind, end there as well.
        heard: whether anything was told.
        missed: why something was not told.
    """

    def __init__(self, notes: Notes, of_model: Callable[[FrameType], None] = lambda _: None) -> None:
        self.write_to(notes)
        self._of_model = of_model  # is told of each frame that runs a backward, or a layer whose gradients are wanted
        self._muted: FrameType | None = None  # in which, and in what that calls, nothing is looked at
        self.heard = False
        self.missed = ""
        self._before: Any = None
        self._written = written_by_dynamo()

    def write_to(self, notes: Notes) -> None:
        self.notes, self._reading = notes, Reading(notes)
        self.step = self._reading.step

    def __enter__(self) -> "Frames":
        if _can_peek():
            self._before = events.before()
            self.missed = "" if events.begin(self) else NOT_TOLD
        else:
            self.missed = _UNKNOWN_PYTHON
        return self

    def __exit__(self, *_: Any) -> None:
        if self._before is not None and not events.end(self._before):
            self.missed = self.missed or NOT_TOLD
        self._before = self._muted = None

    @beside_dynamo
    def entered(self, frame: FrameType, code: CodeType) -> int | events.Plan:
        """See `events.Told`, as for the rest."""
        self.heard = True
        if identity(code) in _passed_over:
            return events.NEVER
        try:
            return self._entered(frame, code)
        except Exception as error:  # which would be raised in the code that is watched
            let_through(error)
            log.debug("%s cannot be followed", code, exc_info=error)
            self.missed = self.missed or f"{code.co_name} cannot be followed: {error}"
            return events.NOTHING

    @beside_dynamo
    def _entered(self, frame: FrameType, code: CodeType) -> int | events.Plan:
        notes = self.notes
        written = code in self._written if self._written else False
        if code.co_name == ENGINE:
            self._of_model(frame)
        if code is _CALL:
            module = events.variable(frame, "self")
            notes.try_to(notes.called, module)
            if torch.is_grad_enabled() and vars(module).get("_parameters"):
                self._of_model(frame)
        elif self._muted is not None:
            return events.NOTHING
        elif identity(code) in _walks:
            notes.try_to(notes.walked, events.variable(frame, "self"))
        elif identity(code) in _groups and self._goes_through_group(frame):
            return events.END
        elif code is _CLEARS and type(vars(events.variable(frame, "self")).get("param_groups")) is list:
            self._note(frame, self._reading.clears, events.variable(frame, "self"))
            return events.END
        elif identity(code) in _asks_logger and not _for_nobody(frame, code):
            self._note(frame, notes.asked, events.variable(frame, "self"), *_asks_logger[identity(code)])
        elif code is _EXCHANGES:
            notes.try_to(notes.exchanged, *_two_given(frame))
        elif identity(code) in _starts_threads:
            caller = frame.f_back or frame
            notes.elsewhere = notes.elsewhere or (caller.f_code, caller.f_lineno)
        elif written:
            notes.where = (code, frame.f_lineno)
            notes.try_to(notes.compiled, frame)
        if self._muted is None and (_mutes(code.co_filename, code.co_name) or _is_dynamos_guard(frame, code)):
            self._muted = frame
            return events.END
        found = None if self._muted is not None else _plan_of(code)
        if found is None or (not written and _for_nobody(frame, code)):
            return events.NOTHING
        if code.co_freevars or not is_library(code.co_filename):  # else nothing of the function is noted
            self._note_function(frame, code)
        return found

    def _goes_through_group(self, frame: FrameType) -> bool:
        """Notes what code reads that goes through an optimizer's group, if that is kept as torch keeps it."""
        code, (optimizer, group) = frame.f_code, _two_given(frame)
        if type(group) is not dict or not isinstance(vars(optimizer).get("state"), dict):
            return False
        keys = [one for one in code.co_consts if type(one) is str]
        self._note(frame, self._reading.group, code.co_names, keys, optimizer, group)
        return True

    def _note_function(self, frame: FrameType, code: CodeType) -> None:
        """Notes what belongs to a function that is about to run, whoever called it."""
        function = function_of(frame)
        if function is not None:
            self._note(frame, self.notes.runs, function)
            if code.co_name.startswith("__") and code.co_argcount:  # which Python may have found by itself
                self._note(frame, self.notes.special, events.variable(frame, code.co_varnames[0]), function)

    def _note(self, frame: FrameType, note: Callable, *seen: Any) -> None:
        """Notes something that a frame reads which is about to run."""
        notes = self.notes
        notes.where, notes.frame = (frame.f_code, frame.f_lineno), frame
        notes.try_to(note, *seen)
        notes.frame = None

    @beside_dynamo
    def left(self, frame: FrameType) -> None:
        self.notes.callers.pop(identity(frame), None)  # another may lie where it lay, or go on with it
        self.notes.arounds.pop(identity(frame), None)
        if frame is self._muted:
            self._muted = None


def compiled_code() -> None:
    """Stands, among functions, for code that dynamo has written: it is one with all that it calls."""


class noting:
    """Notes what the body reads. Afterwards the notes hold what was there before it, and nothing that it made.

    Args:
        roots: objects that were there before.
        host_draws: is told what the body draws from generators in Python.
        places: whether to note where code comes upon things.

    Attributes:
        notes: those.
        with_model: the functions in which a backward ran, or a module with parameters and gradients.
    """

    def __init__(self, *roots: Any, host_draws: HostDraws | None = None, places: bool = False) -> None:
        self.with_model: set[FunctionType] = set()
        self._roots, self._host_draws, self._places, self._undo = roots, host_draws, places, Undo()

    def __enter__(self) -> Notes:
        notes = self.notes = Notes(self._undo.enter(Ages()), self._host_draws)
        notes.around = self.functions_around if self._places else None
        self._undo.then(lambda _: setattr(notes, "around", None))  # which leads here
        for root in self._roots:
            notes.try_to(notes.root, root)
        frames = Frames(notes, lambda frame: self.with_model.update(self.functions_around(frame.f_back) or ()))
        self._undo.then(lambda _: setattr(notes, "unseen", frames.missed or ("" if frames.heard else NOT_TOLD)))
        self._undo.enter(frames)
        return notes

    def __exit__(self, *_: object) -> None:
        self._undo.run()

    def functions_around(self, frame: FrameType | None) -> tuple[FunctionType, ...] | None:
        """The functions of before in which a frame runs, the outermost first, but for the one that the body has called;
        `compiled_code` in the place of such. None in a backward, which none of them can leave out."""
        found: list[FunctionType | None] = []
        written = written_by_dynamo()
        while frame is not None and not (code := frame.f_code).co_filename.startswith(_CALLS):
            known = self.notes.arounds.get(identity(frame))
            if known is not None or code.co_name == ENGINE:
                outer = None if known is None else known[0]
                return None if outer is None else (*outer, *self._old_of(found))
            passed_over = code is _CALL or identity(code) in _passed_over or code.co_flags & _WAITS
            if not (passed_over or code.co_filename.startswith(CORE)):
                found.append(compiled_code if code in written else function_of(frame))
            frame = frame.f_back
        return self._old_of([*found[:-1], *(one for one in found[-1:] if one is compiled_code)])

    def _old_of(self, found: list[FunctionType | None]) -> tuple[FunctionType, ...]:
        return tuple(one for one in reversed(found) if one is not None and self.is_old(one))

    def unnoted(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of which nothing is noted, inside the body."""
        chance = self.notes.chance
        chance.look_away()
        try:
            return untraced(lambda: function(*args, **kwargs))
        finally:
            chance.look_again()
            self.notes.after_part = True

    def is_old(self, value: Any) -> bool:
        """Whether a value was there before the body."""
        return self.notes.ages.is_old(value)
