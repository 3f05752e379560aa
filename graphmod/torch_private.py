"""Every private name of PyTorch that the rest may use, looked up once.

A name that this PyTorch has not (a later release, a build for the CPU) is replaced by what stands for "never set".
What cannot be replaced, `self_test` names when the package is imported.
"""

import contextlib
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import muon as muon
from torch.utils._python_dispatch import _disable_current_modes

_C = torch._C


def _nothing() -> None:
    return None


def getter(name: str, *arguments: Any) -> Callable[[], Any]:
    """A function of PyTorch's C module without arguments, or one that always says None where there is none, or where
    it raises on this build.

    Args:
        arguments: what to pass to it in each call.
    """
    found = getattr(_C, name, None)
    if found is None:
        return _nothing
    try:
        found(*arguments)
    except Exception:  # whatever a build without this backend raises
        return _nothing
    return (lambda: found(*arguments)) if arguments else found


def beside_dynamo(function: Callable) -> Callable:
    """Keeps torch.compile from looking at a function, and at whatever that calls. Returns it."""
    dynamo = _C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


# -- modes of the thread --------------------------------------------------------------------------------------------
is_grad_enabled = torch.is_grad_enabled
is_inference_mode_enabled = torch.is_inference_mode_enabled
any_autocast = _C._is_any_autocast_enabled
dispatch_modes = _C._len_torch_dispatch_stack
function_modes = _C._len_torch_function_stack
function_mode_at = _C._get_function_stack_at
jit_tracing = _C._get_tracing_state
is_anomaly_enabled = torch.is_anomaly_enabled
functorch_interpreter = _C._functorch.peek_interpreter_stack
current_backward = _C._current_graph_task_id
"""A number for each backward pass that autograd runs; -1 outside of one."""
forward_ad = torch.autograd.forward_ad
"""Its `_current_level` is -1 outside of every dual level."""
top_saved_tensors_hooks = _C._autograd._top_saved_tensors_default_hooks
"""With True: the innermost hooks for saved tensors that are active, `(pack, unpack)`, or None."""


next_sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""The number of the next node that this thread makes in autograd's graph."""


def saves_tensors(node: Any) -> bool:
    """Whether a node of autograd's graph has saved tensors, so that it raises when it runs again after they were
    freed."""
    if isinstance(node, _C._FunctionBase):
        return bool(node._raw_saved_tensors)
    for name in _saved_by(type(node)):
        try:
            found = getattr(node, name)
        except RuntimeError:  # a list of them, which have been freed
            return True
        if any(one.data is not None for one in (found if isinstance(found, (tuple, list)) else (found,))):
            return True
    return False


@functools.cache
def _saved_by(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved")]


# -- settings of the process ----------------------------------------------------------------------------------------
fp32_precision: Callable[[str, str], Any] = _C._get_fp32_precision_getter
"""`(backend, operation)` -> precision, as inherited."""


def dispatch_mode_at(index: int) -> Any:
    """The dispatch mode at a place of the stack."""
    return _C._get_dispatch_stack_at(index)


def dynamo_stance() -> str:
    """The stance that torch.compiler.set_stance has set."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(frames, "_stance", None)
    return "default" if stance is None else stance.stance


def is_compiling() -> bool:
    """Whether torch.compile, or what comes after dynamo in it, compiles now in this thread."""
    return torch._guards.TracingContext.try_get() is not None


def frames_compiled() -> int:
    """How often dynamo has compiled something in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["frames"]["total"]


def written_by_dynamo() -> Any:
    """A mapping of code that dynamo has put in the place of other code to that other; where there is none, what
    contains nothing and asks for no hash, which code with a dict among its constants has not."""
    return getattr(sys.modules.get("torch._dynamo.utils"), "orig_code_map", ())


def dynamo_guards(code: types.CodeType) -> Any:
    """The guards under which dynamo runs code that it has written: `check(variables)` compares the present with what
    it was compiled for, and `check_verbose` gives an object that says what differs. None where it keeps none."""
    entries = _C._dynamo.eval_frame._debug_get_cache_entry_list(written_by_dynamo()[code])
    return next((entry.guard_manager for entry in entries if entry.code is code), None)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is what torch.compile made of another, or was compiled in place."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return isinstance(module, kind) or module._compiled_call_impl is not None


def is_fx_tracing() -> bool:
    """Whether torch.fx runs code on proxies now."""
    tracer = sys.modules.get("torch.fx._symbolic_trace")
    return tracer is not None and tracer._is_fx_tracing_flag


def is_traced() -> bool:
    """Whether torch.export, torch.fx or torch.jit makes another program of what code does now."""
    return torch.compiler.is_compiling() or jit_tracing() is not None or is_fx_tracing()


def when_compiled(function: Callable) -> Callable:
    """Has dynamo call a function of constants where it compiles a call of it, and not in what it compiles. Returns
    it."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


class _Beside(threading.local):
    active = False


_beside = _Beside()


@contextlib.contextmanager
def fx_beside_others() -> Iterator[None]:
    """While it is active, no other thread notices what torch.fx traces in this one.

    Elsewhere it exchanges `__call__` of all modules for as long as it traces, and tells all threads that it does: a
    module that another calls then may fail, and compiled code refuses to run. What is traced in here must call neither
    modules nor functions of `torch.fx.wrap`, and may unpickle no graphs.
    """
    _trace_by_thread()
    before, _beside.active = _beside.active, True
    try:
        yield
    finally:
        _beside.active = before


def _trace_by_thread() -> None:
    tracer = torch.fx.Tracer
    trace, plain = tracer.trace, inspect.unwrap(tracer.trace, stop=_is_by_thread)
    if _is_by_thread(plain):
        return
    if "_new_patcher" not in plain.__code__.co_names:  # a PyTorch that does it in another way
        return
    module = sys.modules[plain.__module__]

    class Nothing(module._Patcher):
        def patch(self, *_: Any, **__: Any) -> None:
            pass

        patch_method = patch

    # The same code with names of its own: what it sets of its module, and whom it lets exchange functions.
    names = {**vars(module), "_new_patcher": Nothing}
    beside = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    beside.__kwdefaults__ = plain.__kwdefaults__

    @functools.wraps(trace)
    @beside_dynamo
    def by_thread(*args: Any, **kwargs: Any) -> Any:
        return (beside if _beside.active else trace)(*args, **kwargs)

    vars(by_thread)["_graphmod_by_thread"] = True
    tracer.trace = by_thread


def _is_by_thread(function: Callable) -> bool:
    return hasattr(function, "_graphmod_by_thread")


# -- tensors --------------------------------------------------------------------------------------------------------
_guards: Any = getattr(_C._dynamo.guards, "TensorGuards", None)


def alike(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """A function that tells, of tensors passed to it, whether each is of the same class, dtype, device, shape and
    strides as one of `tensors` is now, and requires grad as that does, in a tenth of the time that it takes to ask for
    these one by one: the guards of torch.compile. It may say no where they are, after a change of modes. None where
    this PyTorch has no such function, or one that works in another way."""
    if not _guards_work():
        return None
    return _guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.size()) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check


@functools.cache
def _guards_work() -> bool:
    try:
        with torch.inference_mode(False), torch.no_grad():
            one, other = torch.zeros(2, 3), torch.nn.Parameter(torch.zeros(3, 3))
            sizes = {"dynamic_dims_sizes": [[2, 3], [3, 3]], "dynamic_dims_strides": [[3, 1], [3, 1]]}
            check = _guards(one, other, **sizes).check
            others = (
                torch.zeros(2, 4),
                torch.zeros(3, 2).t(),
                torch.zeros(2, 3).double(),
                one.clone().requires_grad_(),
            )
            return check(one, other) and not any(check(different, other) for different in others)
    except Exception:  # whatever a PyTorch with another signature raises
        return False


# Where one of these goes, PyTorch 2.11 does not tell weak references to it, which then lead to memory that is freed.
_NEVER_WEAKLY = (_C._CudaStreamBase, _C._CudaEventBase)


def weak_reference(value: Any) -> weakref.ref:
    """A weak reference to a value.

    Raises:
        TypeError: values of this kind cannot be held weakly.
    """
    if isinstance(value, _NEVER_WEAKLY):
        raise TypeError(f"a weak reference to {type(value).__name__} would outlive it")
    return weakref.ref(value)


def settle_attention_order(device: torch.device) -> None:
    """Lets PyTorch decide which attention it prefers on a GPU. It does so when attention first runs there, by changing
    a setting of the process, so that the first call of a model would end in another mode than it began in."""
    with contextlib.suppress(Exception), _disable_current_modes(), torch.no_grad():
        query = torch.empty(1, 1, 8, 64, dtype=torch.float16, device=device)
        torch._fused_sdp_choice(query, query, query)


@functools.cache
def settle_assembler() -> None:
    """Lets Triton name what it keeps on disk after the assembler that PyTorch sets for it.

    Triton asks for its version once. A process that has used Triton before PyTorch set another one would name kernels
    otherwise than PyTorch's compile workers do, and the next process would compile anew what these have compiled.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
        from triton.backends.nvidia.compiler import get_ptxas_version

        _set_triton_ptxas_path()
        get_ptxas_version.cache_clear()


def self_test() -> None:
    """Calls what has no replacement.

    Raises:
        ImportError: this PyTorch lacks it, or it works in another way; the message names it.
    """
    for name, works in (
        ("_is_any_autocast_enabled", lambda: any_autocast() in (True, False)),
        ("_len_torch_dispatch_stack", lambda: dispatch_modes() >= 0),
        ("_len_torch_function_stack", lambda: function_modes() >= 0),
        ("_get_tracing_state", lambda: (jit_tracing(), True)[1]),
        ("_functorch.peek_interpreter_stack", lambda: (functorch_interpreter(), True)[1]),
        ("_current_graph_task_id", lambda: current_backward() == -1 or current_backward() >= 0),
        ("forward_ad._current_level", lambda: isinstance(forward_ad._current_level, int)),
        ("_autograd._top_saved_tensors_default_hooks", lambda: (top_saved_tensors_hooks(True), True)[1]),
    ):
        try:
            fine = works()
        except Exception as error:
            raise ImportError(f"graphmod needs torch._C.{name}, which torch {torch.__version__} lacks") from error
        if not fine:
            raise ImportError(f"torch._C.{name} of torch {torch.__version__} answers in a way graphmod does not know")


self_test()
