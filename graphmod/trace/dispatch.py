"""How a recorder gets to see each operation of a thread, and of the backwards that the thread starts.

Composite formulas of torch ask whether a dispatch mode is active and then take another way, whose numbers differ in
the last bits. So operations are not seen through a mode, but through a dispatch key next to that of modes, which torch
keeps for extensions and for which it has no kernels of its own: one fallback, registered once, is included for as long
as a recorder watches. Where that key is not to be had, or does not behave as the self-test demands, a mode serves.
"""

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from graphmod.torch_private import (
    FUNCTIONAL_COLLECTIVES,
    PUSH_MODE,
    DispatchKey,
    DispatchKeySet,
    KeysExcluded,
    OpOverload,
    TorchDispatchMode,
    beside_dynamo,
    dispatch_key,
    dispatch_mode_at,
    dispatch_modes,
    exclude_key,
    has_fallback,
    has_in_thread,
    has_kernel_for,
    higher_order_operators,
    in_thread,
    include_key,
    is_compiling,
    is_subclass_like,
    is_traceable_wrapper_subclass,
    key_excluded,
    key_included,
    operator_names,
    put_in_thread,
    without_modes,
)
from graphmod.trace.operations import draws, facts, tensors_in
from graphmod.trace.untraced import identity, resume, suspend, thread_state, traced, untraced

log = logging.getLogger("graphmod")

_KEY_NAME = "Fake"
_KEY = dispatch_key(_KEY_NAME)
_KEYS = DispatchKeySet(_KEY)
_BELOW_MODES = int(_KEY) < int(DispatchKey.Python)  # what a mode runs is still to be seen, not the other way round
_make_subclass, _as_subclass = Tensor._make_subclass, Tensor.as_subclass
_NAMESPACES = ("aten", "c10d", "_c10d_functional", "fsdp")
_libraries: list[Any] = []  # the kernels of `_register_kernels`, which live as long as these do
_library: Any = None  # the registration, which lives as long as this does


class Sees(Protocol):
    """Is shown operations."""

    def see(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Runs an operation and gives its result."""


class Watcher(Sees, Protocol):
    """Who watches a call, whatever it does; `Recorder` says what these are."""

    watching: bool
    on_gpu: bool
    goes_through: bool
    ran_compiled: bool
    unfinished: list[Any]

    def refuse(self, operation: str, reason: Any) -> None: ...
    def make(self, function: Callable, values: Any, kwargs: dict) -> Tensor: ...
    def aim(self, tensor: Tensor, memory: Callable[[], Tensor]) -> None: ...
    def before_communicating(self) -> None: ...
    def note_resized(self, storage: torch.UntypedStorage, before: int) -> bool: ...
    def note_host_read(self, tensor: Tensor, name: str) -> None: ...
    def note_random_state(self) -> None: ...
    def note_generator(self, generator: torch.Generator) -> None: ...
    def note_mode(self, mode: TorchDispatchMode) -> None: ...
    def note_compilation(self) -> None: ...


_NAME = "graphmod: recorder"  # of what a thread hands on to those of autograd, as it does the key
_at_work: list[Any] = []  # the recorders of this process: each a `Watcher`, but for the self-test


def current() -> Watcher | None:
    """The recorder that watches the present call; None where there is none, or where it looks away."""
    if not _at_work:  # before anything dearer is looked at
        return None
    recorder = in_thread(_NAME) if has_in_thread(_NAME) else None
    return recorder if recorder in _at_work else None


def is_recording() -> bool:
    """Whether the present call is recorded: it is being captured, or is the warm-up call before that."""
    return current() is not None


def within_an_operation() -> bool:
    """Whether the present code is that of an operation, while somebody records."""
    if has_key():
        return key_excluded(_KEY)
    return dispatch_modes() == 0


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    state = thread_state()
    try:  # as in `untraced`: each frame between here and there would be told of
        suspend(state)
        exclude_key(_KEY, True)
        if _hiding.get(identity(op)) is not False and _hides(op, args, kwargs):
            exclude_key(_KEY, False)
            return traced(op._op_dk, (getattr(DispatchKey, _COMPOSITE), *args), kwargs)
        recorder = current()
        return traced(op, args, kwargs) if recorder is None else recorder.see(op, args, kwargs)
    finally:
        try:
            exclude_key(_KEY, False)
        finally:  # wherever an interrupt comes
            resume(state)


_COMPOSITE = "CompositeImplicitAutograd"
_FIND = {"aten::where", "aten::nonzero_numpy"}  # whose results are as long as the data says, which no tag tells


def _hides(op: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation is a formula of others that reads on the host or draws. Autograd takes it apart; where there
    is none, as in inference mode and for tensors that were made there, it would be seen as a whole, and a graph would
    freeze what it read or drew."""
    may = _hiding.get(identity(op))
    if may is None:
        may = _hiding[identity(op)] = _may_hide(op)
    if not may or any(t.is_nested or t.is_sparse for t in tensors_in((*args, *kwargs.values()))):
        return False
    return facts(op).switch < 0 or draws(facts(op)._replace(random=True), args, kwargs)


_hiding: dict[int, bool] = {}  # by identity of the operator, whose hash takes longer than all else here


def _may_hide(op: Any) -> bool:
    if not isinstance(op, OpOverload):
        return False
    has_kernel = functools.partial(has_kernel_for, op.name())
    if not has_kernel(_COMPOSITE) or has_kernel("CPU") or has_kernel("CUDA"):
        return False
    about, schema = facts(op), op._schema
    tells = any("Tensor" not in str(one.type) for one in schema.returns)
    return tells or op.name() in _FIND or about.random or about.dynamic or (about.switch >= 0 and not about.statistics)


def _standing_for_others(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on a tensor that stands for others, such as a DTensor, of which is shown what its class runs."""
    recorder = current()
    with KeysExcluded(_KEYS), contextlib.ExitStack() as stack:
        if recorder is not None:
            stack.enter_context(Mode(recorder))
        return op(*args, **kwargs)


@functools.cache
def _register_kernels() -> None:
    """Gives each operation a kernel for the key, where that lies above the key of tensors that stand for others
    (DTensor, those of torchao): up to torch 2.12. There PyTorch calls no fallback for these, only a kernel of the
    operation itself, and leaves what their class runs unseen. The kernel has the class run it under a mode that shows
    that.
    """
    libraries = {name: torch.library.Library(name, "IMPL") for name in _NAMESPACES}
    for name in operator_names():
        namespace, _, rest = name.partition("::")
        if namespace in libraries:
            libraries[namespace].impl(rest, _kernel(namespace, rest), _KEY_NAME)
    _libraries.extend(libraries.values())


def _kernel(namespace: str, name: str) -> Callable:
    packet, _, overload = name.partition(".")

    @functools.cache
    def op() -> Any:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        return (_standing_for_others if _any_stands(args, kwargs) else _fallback)(op(), *args, **kwargs)

    return run


def _any_stands(args: tuple, kwargs: dict) -> bool:
    """Whether an argument is a tensor that stands for others, one level of lists deep."""
    return any(
        is_traceable_wrapper_subclass(one)
        for value in (*args, *kwargs.values())
        for one in (value if isinstance(value, (list, tuple)) else (value,))
    )


def _of_ranks() -> tuple:
    """The classes of tensors that several ranks hold together."""
    modules = {"DTensor": "torch.distributed.tensor", "AsyncCollectiveTensor": FUNCTIONAL_COLLECTIVES}
    return tuple(getattr(sys.modules[place], name) for name, place in modules.items() if place in sys.modules)


def _others_are_known() -> bool:
    """Whether a class of tensors that run operations in their own way was loaded, besides those of PyTorch."""
    kinds: list[type] = [Tensor]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any("__torch_dispatch__" in vars(kind) and not kind.__module__.startswith("torch.") for kind in kinds)


class Mode(TorchDispatchMode):
    """Shows the operations to a recorder by way of a dispatch mode."""

    supports_higher_order_operators = True
    hides_nothing = True

    def __init__(self, recorder: Sees) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it stands for costs as much as the rest of the recording

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else dynamo would leave all code uncompiled

    @beside_dynamo
    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _any_stands(args, kwargs or {}):
            return NotImplemented  # its class runs others in its place, which are shown
        if current() is None:  # it looks away
            return op(*args, **(kwargs or {}))
        return untraced(self._recorder.see, op, args, kwargs or {})


@functools.cache
def has_key() -> bool:
    """Whether operations can be seen without a mode. Registers the fallback when it is first asked."""
    global _library
    try:
        if has_fallback(_KEY):
            return False  # somebody else's
        _library = torch.library.Library("_", "IMPL")
        _library.fallback(_fallback, _KEY_NAME)
        _self_test()
        return True
    except Exception as error:
        log.debug("operations are seen through a dispatch mode: %s", error)
        return False


def _self_test() -> None:
    """Raises where the key does not do what recording needs."""
    seen: list[tuple[Any, bool]] = []

    class Probe:
        def see(self, op: Any, args: tuple, kwargs: dict) -> Any:
            seen.append((op, any(arg is leaf for arg in args)))
            return traced(op, args, kwargs)

    with without_modes(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(1, requires_grad=True)
        with _Showing(Probe(), keyed=True):
            if is_subclass_like(leaf):
                raise RuntimeError("torch takes it for a dispatch mode")
            (leaf * 2).sum().backward()
    names = [op.overloadpacket.__name__ for op, _ in seen]
    if names[:2] != ["mul", "sum"] or "expand" not in names or not seen[0][1]:
        raise RuntimeError(f"it shows {names}, the leaf itself: {seen[:1]}")


class _View:
    """What this thread shows to whom. A context that puts it back as it was, however much of it was entered; left in
    another thread, it changes nothing there."""

    _before: tuple[int, Any, bool, bool, int] | None = None
    _modes: Any = None  # what puts back the dispatch modes that were set aside

    def __enter__(self) -> None:
        included = key_included(_KEY)
        excluded = key_excluded(_KEY)
        self._before = threading.get_ident(), current(), included, excluded, dispatch_modes()
        self._change()

    def __exit__(self, *_: object) -> None:
        thread, recorder, included, excluded, modes = self._before or (0, None, False, False, 0)
        if thread != threading.get_ident():
            return
        if self._modes is not None:
            self._modes.__exit__(None, None, None)
            self._modes = None
        while dispatch_modes() > modes:
            dispatch_mode_at(dispatch_modes() - 1).__exit__(None, None, None)
        put_in_thread(_NAME, recorder)
        exclude_key(_KEY, excluded)
        include_key(_KEY, included)

    def _change(self) -> None:
        """Changes it."""

    def _set_modes_aside(self) -> None:
        if dispatch_modes():
            self._modes = without_modes()
            self._modes.__enter__()


class _Showing(_View):
    def __init__(self, recorder: Sees, keyed: bool, in_backward: bool = False) -> None:
        self._recorder, self._keyed, self._in_backward = recorder, keyed, in_backward

    def _change(self) -> None:
        _at_work.append(self._recorder)
        put_in_thread(_NAME, self._recorder)
        if self._keyed:
            include_key(_KEY, True)
        elif not self._in_backward:  # whatever becomes of that, autograd takes away all but modes
            Mode(self._recorder).__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._recorder in _at_work:
            _at_work.remove(self._recorder)


def shown_to(
    recorder: Watcher, given: Iterable[Tensor] = (), in_backward: bool = False
) -> AbstractContextManager[None]:
    """Shows `recorder` each operation of this thread, which works on tensors `given`, and of its backwards.

    Args:
        in_backward: it is for one function that autograd calls, which may end without a word; under a mode, nothing is
            shown of it.
    """
    keyed = has_key() and (_BELOW_MODES or not dispatch_modes())
    if keyed and not _BELOW_MODES:
        if (_of_ranks() and torch.distributed.is_initialized()) or _others_are_known():
            _register_kernels()
        strange = [tensor for tensor in given if is_traceable_wrapper_subclass(tensor)]
        keyed = all(isinstance(tensor, _of_ranks()) for tensor in strange)
    if keyed:
        _pass_over_higher_order_operators()
    return _Showing(recorder, keyed, in_backward)


class hidden(_View):
    """Lets the recorder look away."""

    def _change(self) -> None:
        if has_key():
            include_key(_KEY, False)
        elif current() is not None:
            self._set_modes_aside()
        put_in_thread(_NAME, None)


class beside_the_call(_View):
    """For what a recorder itself does, where no operation led to it: none of that is seen."""

    def _change(self) -> None:
        exclude_key(_KEY, True)
        self._set_modes_aside()


class through_a_mode(_View):
    """Shows operations to the recorder of now by way of a mode: for code that depends on which keys are active."""

    def _change(self) -> None:
        recorder = current()
        if recorder is not None and has_key():
            include_key(_KEY, False)
            Mode(recorder).__enter__()


def by_key() -> bool:
    """Whether operations are shown through the key now, and not through a mode."""
    return key_included(_KEY) and has_key()


_passed_over: set[int] = set()


def _pass_over_higher_order_operators() -> None:
    """Lets operators on functions (`torch.cond`) go past the key, for which they have no kernel, to what they run."""
    for operator in list(higher_order_operators.values()):
        if id(operator) not in _passed_over:
            operator.fallthrough(_KEY)
            _passed_over.add(id(operator))


def replacements() -> list[tuple[Any, str, Any]]:
    """Replacements for what does not go together with the key, while it is in use.

    What makes an object of a class out of a tensor (a parameter among them), which torch does by an operation whose
    result nobody may have looked at before. And modes that are entered meanwhile: those that compute with tensors
    without memory, and any, where the key is above them.
    """
    push, enter, leave = getattr(*PUSH_MODE), TorchDispatchMode.__enter__, TorchDispatchMode.__exit__
    under: dict[int, list[contextlib.ExitStack]] = {}

    def push_mode(mode: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is not None and by_key() and type(mode).__name__ == "FakeTensorMode":
            recorder.note_compilation() if is_compiling() else recorder.note_mode(mode)
            put_in_thread(_NAME, None)  # it sees nothing from here to the end of its call
            include_key(_KEY, False)
        return push(mode, *args, **kwargs)

    def enter_mode(mode: Any) -> Any:
        """Where the key is above modes, what a mode runs is seen by way of another mode below it."""
        seen = getattr(mode, "hides_nothing", False) or type(mode).__name__ == "FakeTensorMode"
        blinds = not _BELOW_MODES and not seen
        with contextlib.ExitStack() as below:
            if blinds and current() is not None and by_key():
                below.enter_context(through_a_mode())
            entered = enter(mode)
            under.setdefault(id(mode), []).append(below.pop_all())
        return entered

    def leave_mode(mode: Any, *error: Any) -> Any:
        try:
            return leave(mode, *error)
        finally:
            if under.get(id(mode)):
                under[id(mode)].pop().close()

    def unseen(make: Any) -> Any:
        @functools.wraps(make)
        def run(*args: Any, **kwargs: Any) -> Any:
            with KeysExcluded(_KEYS):
                return make(*args, **kwargs)

        return run

    return [
        (Tensor, "_make_subclass", staticmethod(unseen(_make_subclass))),
        (Tensor, "as_subclass", unseen(_as_subclass)),
        (*PUSH_MODE, push_mode),
        (TorchDispatchMode, "__enter__", enter_mode),
        (TorchDispatchMode, "__exit__", leave_mode),
    ]
