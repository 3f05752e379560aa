"""Every private name of PyTorch that the package uses, looked up once.

Private is what begins with one underscore, or lies in a module that does. `tests/test_torch_private.py` finds what is
reached elsewhere. Three kinds of names are kept here:

- names of modules and classes: bound once, so that who uses one pays no look-up. Where this PyTorch lacks one that
  nothing replaces, the import of the package fails, and says which and in which version;
- what is imported with torch.compile only: `from graphmod.torch_private import compile_fx` imports it then;
- attributes of objects (`tensor._version`): used where they are needed, and listed in `ATTRIBUTES` and `OPTIONAL`.

`self_test` tries at the import of the package whether what is needed behaves as it should.
"""

import contextlib
import ctypes
import functools
import importlib
import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn

_C = torch._C


def _nothing() -> None:
    return None


def getter(name: str) -> Callable[[], Any]:
    """A function of PyTorch's C module without arguments, or one that always says None where there is none, or where
    it raises on this build."""
    found = getattr(_C, name, None)
    if found is None:
        return _nothing
    try:
        found()
    except Exception:  # whatever a build without this backend raises
        return _nothing
    return found


# -- what the package cannot do without ------------------------------------------------------------------------------
try:
    from torch._guards import detect_fake_mode as detect_fake_mode
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses import FakeTensorMode as FakeTensorMode
    from torch.distributed import utils as _of_ranks
    from torch.optim._muon import muon as muon
    from torch.utils import _device, _pytree
    from torch.utils import _python_dispatch as _modes
    from torch.utils import checkpoint as checkpoints
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only

    # what belongs to a thread, and goes along to those of autograd that run its backwards
    has_in_thread, in_thread, _put_in_thread = _C._is_key_in_tls, _C._get_obj_in_tls, _C._stash_obj_in_tls

    # tensors whose values are read another way
    conjugated, negated = torch._conj, torch._neg_view

    # modes of the thread
    is_grad_enabled = torch.is_grad_enabled
    is_inference_mode_enabled = torch.is_inference_mode_enabled
    is_anomaly_enabled = torch.is_anomaly_enabled
    any_autocast = _C._is_any_autocast_enabled
    dispatch_modes = _C._len_torch_dispatch_stack
    dispatch_mode_at = _C._get_dispatch_stack_at
    """The dispatch mode at a place of the stack."""
    function_modes = _C._len_torch_function_stack
    function_mode_at = _C._get_function_stack_at
    jit_tracing = _C._get_tracing_state
    functorch_interpreter = _C._functorch.peek_interpreter_stack
    set_grad_enabled = _C._set_grad_enabled
    fp32_precision: Callable[[str, str], Any] = _C._get_fp32_precision_getter
    """`(backend, operation)` -> precision, as inherited."""
    set_fp32_precision = _C._set_fp32_precision_setter
    NoAutocast, BelowAutograd = _C._DisableAutocast, _C._AutoDispatchBelowADInplaceOrView

    # autograd
    forward_ad = torch.autograd.forward_ad
    """Its `_current_level` is -1 outside of every dual level."""
    current_backward = _C._current_graph_task_id
    """A number for each backward pass that autograd runs; -1 outside of one."""
    current_node = _C._current_autograd_node
    """The node that the backward of this thread runs; None outside of one."""
    keeps_graph = _C._autograd._get_current_graph_task_keep_graph
    """Whether the backward of this thread retains the graph."""
    will_run = _C._will_engine_execute_node
    """Whether the backward of this thread is going to run a node."""
    backward_threads, set_backward_threads = _C._is_multithreading_enabled, _C._set_multithreading_enabled
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    """Has a function called at the end of the backward of this thread."""
    top_saved_tensors_hooks = _C._autograd._top_saved_tensors_default_hooks
    """With True: the innermost hooks for saved tensors that are active, `(pack, unpack)`, or None."""
    next_sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
    """The number of the next node that this thread makes in autograd's graph."""
    FunctionBase = _C._FunctionBase
    """The class of the nodes of functions in Python."""
    AccumulateGrad: type = vars(_C._functions)["AccumulateGrad"]
    """The class of the nodes at which backwards end, each at one leaf."""

    # dispatch keys
    DispatchKeySet = _C.DispatchKeySet
    DispatchKey: Any = _C.DispatchKey  # whose members are numbers, of which its stub says nothing
    dispatch_key: Callable[[str], Any] = _C._dispatch_key_parse
    key_included, include_key = _C._dispatch_tls_is_dispatch_key_included, _C._dispatch_tls_set_dispatch_key_included
    key_excluded, exclude_key = _C._dispatch_tls_is_dispatch_key_excluded, _C._dispatch_tls_set_dispatch_key_excluded
    keys_included, keys_excluded = _C._dispatch_tls_local_include_set, _C._dispatch_tls_local_exclude_set
    KeysExcluded, KeyExcluded = _C._ExcludeDispatchKeyGuard, _C._SetExcludeDispatchKeyGuard
    KeysForced: Any = _C._ForceDispatchKeyGuard
    no_dispatch_of_its_own = _C._disabled_torch_dispatch_impl
    higher_order_operators = torch._ops._higher_order_ops
    PUSH_MODE = _modes, _modes._push_mode.__name__

    # tensors, their memory, and operators
    TensorBase = _C.TensorBase
    storage_uses = _C._storage_Use_Count
    """How often a storage is used, by its `_cdata`."""
    storage_behind: Callable[[int], Any] = torch.UntypedStorage._new_with_weak_ptr
    """The storage of a weak reference, by its `cdata`; None where nobody holds it any more."""
    to_dlpack, from_dlpack = _C._to_dlpack, _C._from_dlpack
    to_copy = torch.ops.aten._to_copy.default
    foreach_add_, foreach_copy_, foreach_mul_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_
    foreach_mul = torch._foreach_mul
    unscale_, update_scale_ = torch._amp_foreach_non_finite_check_and_unscale_, torch._amp_update_scale_
    to_device, device_constructors = _of_ranks._to_kwargs, _device._device_constructors
    nn_functions = _C._nn
    pytree_nodes = _pytree.SUPPORTED_NODES
    ScriptFunction, ScriptMethod = _C.ScriptFunction, _C.ScriptMethod
    jit_fuses_on_gpu, jit_fuses_on_cpu = _C._jit_can_fuse_on_gpu, _C._jit_can_fuse_on_cpu
    jit_fuses = _C._jit_texpr_fuser_enabled
    Dropout = nn.modules.dropout._DropoutNd
    """What all modules of dropout derive from."""
except (AttributeError, ImportError) as error:
    raise ImportError(f"graphmod does not know torch {torch.__version__}: {error}") from error

# -- what some builds lack ---------------------------------------------------------------------------------------------
_c10d: Any = getattr(_C, "_distributed_c10d", None)  # PyTorch without distributed
if _c10d is not None:
    ProcessGroup, Work, work_from_future = _c10d.ProcessGroup, _c10d.Work, _c10d._create_work_from_future
    from torch.distributed import distributed_c10d as _groups

    groups_of_program = _groups._world
    default_store, group_named = _groups._get_default_store, _groups._resolve_process_group
    bucket_assignment = distributed._compute_bucket_assignment_by_size
    register_comm_hook, FIRST_BUCKET_BYTES = distributed._register_comm_hook, distributed._DEFAULT_FIRST_BUCKET_BYTES
    functional_collectives = torch.ops._c10d_functional
# Without one of these, operations are seen through a dispatch mode.
has_fallback: Any = getattr(_C, "_dispatch_has_backend_fallback", None)
has_kernel_for: Any = getattr(_C, "_dispatch_has_kernel_for_dispatch_key", None)
is_subclass_like: Any = getattr(_C, "_dispatch_isTensorSubclassLike", None)
operator_names: Any = getattr(_C, "_dispatch_get_all_op_names", None)
current_device: Callable[[], int] | None = getattr(_C, "_cuda_getDevice", None)
end_allocation_to_pool: Any = getattr(_C, "_cuda_endAllocateToPool", None)
IS_CAPTURING = _C, "_cuda_isCurrentStreamCapturing"
IS_CAPTURING_TOO = torch.cuda.graphs, IS_CAPTURING[1]
flash_attention: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)
_allocator_settings: Any = getattr(_C, "_accelerator_getAllocatorSettings", None)  # not before torch 2.12
_set_allocator_settings: Any = getattr(_C, "_accelerator_setAllocatorSettings", None)
_GROWING = "expandable_segments"

# -- what is imported when it is needed --------------------------------------------------------------------------------
DYNAMO, INDUCTOR, FUNCTORCH = "torch._dynamo", "torch._inductor", "torch._functorch"
HIGHER_ORDER, PYTREE = "torch._higher_order_ops", "torch.utils._pytree"
EVAL_FRAME, INDUCTOR_CODE = "torch._dynamo.eval_frame", "torch._inductor.output_code"
REPLICATE, CONTRACT = "torch.distributed._composable.replicate", "torch.distributed._composable.contract"
FSDP_STATE, COMPOSABLE = "torch.distributed.fsdp._fully_shard._fsdp_state", "torch.distributed._composable_state"
FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
REDISTRIBUTE = "torch.distributed.tensor._redistribute"
SHARDING = "torch.distributed.tensor._sharding_prop"
INFERS_SHAPES = "ShardingPropagator", "_propagate_tensor_meta_non_cached"
"""The class in `SHARDING`, and its method, by which DTensor finds the shape of a result."""
_LATER = {
    "CachingAutotuner": "torch._inductor.runtime.triton_heuristics.CachingAutotuner",
    "TritonKernel": "torch._inductor.codegen.triton.TritonKernel",
    "compile_fx": "torch._inductor.compile_fx.compile_fx",
    "dynamo_config": "torch._dynamo.config",
    "fake_process_group": "torch.testing._internal.distributed.fake_pg",
    "functorch_config": "torch._functorch.config",
    "inductor_config": "torch._inductor.config",
    "inductor_options": "torch._inductor.list_mode_options",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, _, last = _LATER[name].rpartition(".")
    try:
        found = importlib.import_module(place)
        return getattr(found, last) if hasattr(found, last) else importlib.import_module(_LATER[name])
    except ImportError as error:
        raise ImportError(f"graphmod needs {_LATER[name]}, which torch {torch.__version__} lacks") from error


# -- attributes of objects ---------------------------------------------------------------------------------------------
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "Tensor": (
        *("_version", "_base", "_is_view", "_is_zerotensor", "_backward_hooks", "_post_accumulate_grad_hooks"),
        "_make_subclass",
    ),
    "storage": ("_cdata",),
    "Generator": ("_cdata",),
    "node": ("_sequence_nr",),
    "operator": ("_schema", "_op", "_op_dk", "_opname"),
    "ScriptObject": ("_type", "_has_method"),
    "ScriptModule": ("_c",),
    "Module": (
        *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"),
        *("_backward_pre_hooks", "_apply", "_call_impl", "_wrapped_call_impl", "_compiled_call_impl"),
        *("_named_members", "_load_from_state_dict"),
    ),
    "forward_ad": ("_current_level",),
    "DistributedDataParallel": (
        *("_comm_hooks", "_delay_all_reduce_params", "_use_python_reducer", "_join_config", "_has_rebuilt_buckets"),
        *("_active_ddp_module", "_get_active_ddp_module", "_inside_ddp_forward", "_build_params_for_reducer"),
        *("_build_debug_param_to_name_mapping", "_ddp_init_helper", "_set_static_graph", "_pre_forward"),
        "_set_params_and_buffers_to_ignore_for_model",
    ),
    "Reducer": ("_rebuild_buckets", "_get_zeros_like_grad_buckets"),
    "ProcessGroup": ("_get_sequence_number_for_group",),
    "DTensor": ("_local_tensor",),
    "DeviceMesh": ("_flatten",),
    COMPOSABLE: ("_module_state_mapping",),
    REPLICATE: ("_ReplicateState",),
    "FSDPState": ("_comm_ctx", "_state_ctx", "_training_state", "_modules_to_run_forward"),
    "FSDPParamGroup": (
        *("_all_gather_result", "_partial_reduce_output", "_post_forward_indices", "_sharded_state", "_to_sharded"),
        "_training_state",
    ),
    "FSDPParam": ("_module_info",),
}
"""What objects of PyTorch are asked for: the kind of object -> the names of its attributes. `forward_ad` is a module,
whose variable changes."""
OPTIONAL: dict[str, str] = {
    "_swap_data_ptr_": "before 2.13: a held result whose views are held is not moved; later calls hand out copies",
    "_bucket_config": "before 2.12: the size of the first bucket is the default",
    "_fsdp_param_groups": "before 2.12: there is one group, `_fsdp_param_group`",
    "_fsdp_param_group": "since 2.12 there may be several",
    "_all_reduce_state": "nothing waits for it",
    "_last_post_reduce_events": "nothing waits for them",
    "_post_reduce_event": "nothing waits for it",
    "_reshard_after_forward_event": "nothing waits for it",
    "_unsharded_inner_tensors": "of tensors that consist of others alone",
    "_unsharded_param": "it was never whole",
    "_init_group": "an optimizer's parameters are followed one by one",
    "_to_scalar": "optimizers do without",
    "_get_scalar_dtype": "optimizers do without",
    "_device_dtype_check_for_fused": "optimizers do without",
    "_need_device_dtype_check_for_fused": "optimizers do without",
    "_in_backward_optimizers": "no optimizer steps in the backward",
    "_optimizer_step_pre_hooks": "there are none",
    "_optimizer_step_post_hooks": "there are none",
    "_global_optimizer_pre_hooks": "there are none",
    "_global_optimizer_post_hooks": "there are none",
    "_step_supports_amp_scaling": "the optimizer does not look at a loss scale",
    "_wrapped_by_lr_sched": "no scheduler drives the optimizer",
    "_opt_called": "schedulers do without",
    "_scale": "advice does not tell a GradScaler that was never used",
    "_growth_tracker": "advice does not tell a GradScaler that was never used",
    "_per_optimizer_states": "advice names no GradScaler for what it keeps of an optimizer",
    "_engine_run_backward": "operations of a backward are told of at the line that calls it",
    "_is_checkpoint_valid": "no code asks how its backward was started",
    "_forward_cls": "the node is not of a function in Python",
    "_concrete_type": "the module is no script",
    "_orig_mod": "the module is not compiled",
    "_filter_pdl": "kernels are not launched early",
    "_enable_pdl_codegen": "kernels are not launched early",
    "_lines": "kernels are not launched early",
}
"""Attributes and functions that not every release or object has, and what it means where one is missing."""


def lacking(kind: str, value: Any) -> str | None:
    """Of an object of PyTorch, what `ATTRIBUTES` has and it has not, as a sentence; None where it has all."""
    missing = [name for name in ATTRIBUTES[kind] if not hasattr(value, name)]
    return f"{kind} of torch {torch.__version__} has no {', '.join(missing)}" if missing else None


def beside_dynamo(function: Callable) -> Callable:
    """Keeps torch.compile from looking at a function, and at whatever that calls. Returns it."""
    dynamo = _C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


# -- autograd ---------------------------------------------------------------------------------------------------------
def saves_tensors(node: Any) -> bool:
    """Whether a node of autograd's graph has saved tensors, so that it raises when it runs again after they were
    freed."""
    if isinstance(node, FunctionBase):
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


# -- settings of the process ------------------------------------------------------------------------------------------
# What is said of it -> what tells it. A build that lacks one has None for it in every call.
SETTINGS_OF_ANY_DEVICE = {
    "deterministic algorithms": getter("_get_deterministic_algorithms"),
    "deterministic algorithms, warn_only": getter("_get_deterministic_algorithms_warn_only"),
    "fill_uninitialized_memory": getter("_get_deterministic_fill_uninitialized_memory"),
    "flash attention enabled": getter("_get_flash_sdp_enabled"),
    "memory-efficient attention enabled": getter("_get_mem_efficient_sdp_enabled"),
    "math attention enabled": getter("_get_math_sdp_enabled"),
    "reduced precision in math attention": getter("_get_math_sdp_allow_fp16_bf16_reduction"),
}
SETTINGS_OF_CUDA = {
    "cudnn attention enabled": getter("_get_cudnn_sdp_enabled"),
    "overrideable attention enabled": getter("_get_overrideable_sdp_enabled"),
    "cudnn enabled": getter("_get_cudnn_enabled"),
    "cudnn.benchmark": getter("_get_cudnn_benchmark"),
    "cudnn.deterministic": getter("_get_cudnn_deterministic"),
    "reduced precision sums of float16": getter("_get_cublas_allow_fp16_reduced_precision_reduction"),
    "reduced precision sums of bfloat16": getter("_get_cublas_allow_bf16_reduced_precision_reduction"),
    "float16 accumulation": getter("_get_cublas_allow_fp16_accumulation"),
}
SETTINGS_OF_CPU = {
    "mkldnn enabled": getter("_get_mkldnn_enabled"),
    "mkldnn.deterministic": getter("_get_mkldnn_deterministic"),
    "reduced precision sums of float16 on the CPU": getter("_get_cpu_allow_fp16_reduced_precision_reduction"),
    "number of threads": torch.get_num_threads,
}
attention_order = getter("_get_sdp_priority_order")
SETTERS: dict[str, Any] = {
    "deterministic algorithms": getattr(_C, "_set_deterministic_algorithms", None),
    "fill_uninitialized_memory": getattr(_C, "_set_deterministic_fill_uninitialized_memory", None),
    "flash attention enabled": getattr(_C, "_set_sdp_use_flash", None),
    "memory-efficient attention enabled": getattr(_C, "_set_sdp_use_mem_efficient", None),
    "math attention enabled": getattr(_C, "_set_sdp_use_math", None),
    "reduced precision in math attention": getattr(_C, "_set_math_sdp_allow_fp16_bf16_reduction", None),
    "cudnn attention enabled": getattr(_C, "_set_sdp_use_cudnn", None),
    "overrideable attention enabled": getattr(_C, "_set_sdp_use_overrideable", None),
    "cudnn enabled": getattr(_C, "_set_cudnn_enabled", None),
    "cudnn.benchmark": getattr(_C, "_set_cudnn_benchmark", None),
    "cudnn.deterministic": getattr(_C, "_set_cudnn_deterministic", None),
    "order of attention backends": getattr(_C, "_set_sdp_priority_order", None),
    "mkldnn enabled": getattr(_C, "_set_mkldnn_enabled", None),
    "mkldnn.deterministic": getattr(_C, "_set_mkldnn_deterministic", None),
}
"""What sets them, of those that can be set. A build that lacks one has None for it."""


def dynamo_stance() -> str:
    """The stance that torch.compiler.set_stance has set."""
    frames = sys.modules.get(EVAL_FRAME)
    stance = getattr(frames, "_stance", None)
    return "default" if stance is None else stance.stance


BEGINS = "set_skip_guard_eval_unsafe"
"""The function in `EVAL_FRAME` that is called when compiled code is called, and before that returns."""
ENDS = "_maybe_set_eval_frame"
"""The function there that is called when compiled code has begun, and when it has returned."""


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
    kind = getattr(sys.modules.get(EVAL_FRAME), "OptimizedModule", ())
    return isinstance(module, kind) or module._compiled_call_impl is not None


def _is_fx_tracing() -> bool:
    return torch.fx._symbolic_trace._is_fx_tracing_flag


# Since 2.14 each thread has a flag of its own.
is_fx_tracing: Callable[[], bool] = getattr(torch.fx._symbolic_trace, "_get_is_fx_tracing", _is_fx_tracing)
"""Whether torch.fx runs code on proxies now."""


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
    names = {**vars(module), "_new_patcher": Nothing, "_set_is_fx_tracing": lambda _: None}
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
    if issubclass(type(value), _NEVER_WEAKLY):
        raise TypeError(f"a weak reference to {type(value).__name__} would outlive it")
    return weakref.ref(value)


def _takes_references() -> bool:
    """Whether what is handed to `_stash_obj_in_tls` loses a reference, as before PyTorch 2.13."""
    value = object()
    held, before = [value], sys.getrefcount(value)
    _put_in_thread("graphmod: test", value)
    _put_in_thread("graphmod: test", None)
    lost = before - sys.getrefcount(value)
    for one in (*held * lost, *[None] * lost):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    return lost > 0


_to_be_given = _takes_references()


_CHECKPOINTS = {"_checkpoint_hook": "frame", "_recomputation_hook": "target_frame_ref"}
"""Hooks of a checkpoint -> the variable of theirs that leads to what it keeps."""
# What runs a checkpoint, decorators of torch 2.15 too; its variables: `function, args, kwargs, preserve`.
RUNS_CHECKPOINT = inspect.unwrap(getattr(checkpoints, "_checkpoint_impl", checkpoints.checkpoint)).__code__


def checkpoint_of(pack: Callable) -> tuple[Any, bool] | None:
    """What a checkpoint with `use_reentrant=False` keeps of the call that it runs, and whether it runs it again, for
    the backward; None where a hook for saved tensors is of no such checkpoint.

    Args:
        pack: the first of the hooks.
    """
    kind = getattr(pack, "__qualname__", "").partition(".")[0]
    if kind not in _CHECKPOINTS:
        return None
    function: Any = inspect.unwrap(pack)
    found = function.__closure__[function.__code__.co_freevars.index(_CHECKPOINTS[kind])].cell_contents
    return (found, False) if kind == "_checkpoint_hook" else (found(), True)


def put_in_thread(name: str, value: Any) -> None:
    """Has this thread, and those of autograd that run its backwards from here on, know a value by a name."""
    if _to_be_given:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _put_in_thread(name, value)


def settle_attention_order(device: torch.device) -> None:
    """Lets PyTorch decide which attention it prefers on a GPU. It does so when attention first runs there, by changing
    a setting of the process, so that the first call of a model would end in another mode than it began in."""
    with contextlib.suppress(Exception), without_modes(), torch.no_grad():
        query = torch.empty(1, 1, 8, 64, dtype=torch.float16, device=device)
        torch._fused_sdp_choice(query, query, query)


@contextlib.contextmanager
def growing_segments() -> Iterator[None]:
    """Inside, memory is reserved from the GPU's driver in segments that grow (`expandable_segments` of
    PYTORCH_ALLOC_CONF), unless the user has said whether it is to be.

    Otherwise what was freed serves nothing larger: gradients would not fit where activations were. Not among ranks:
    NCCL registers the memory that a captured collective uses, and some releases take it for one allocation
    (pytorch#165419).
    """
    if _allocator_settings is not None:
        before = _allocator_settings()
    else:  # of these two the second counts
        before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")
    among_ranks = distributed.is_available() and distributed.is_initialized()
    # Of all allocators only PyTorch's own has segments.
    if among_ranks or _set_allocator_settings is None or _GROWING in before or "cudaMallocAsync" in before:
        yield
        return
    try:
        _set_allocator_settings(",".join(filter(None, (before.strip(", "), f"{_GROWING}:True"))))
        yield
    finally:
        _set_allocator_settings(f"{_GROWING}:False")
        _set_allocator_settings(before)  # which does not say so


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


def _knows_checkpoints() -> bool:
    """Whether it has the variables, and its hooks; to make one would import the compiler."""
    if not {"function", "args", "kwargs", "preserve"} <= {*RUNS_CHECKPOINT.co_varnames}:
        return False
    codes = {kind: getattr(checkpoints, kind).__init__.__code__.co_consts for kind in _CHECKPOINTS}
    packs = {kind: one for kind, found in codes.items() for one in found if getattr(one, "co_name", "") == "pack_hook"}
    return all(name in packs[kind].co_freevars for kind, name in _CHECKPOINTS.items())


def self_test() -> None:
    """Tries what has no replacement.

    Raises:
        ImportError: this PyTorch lacks it, or it works in another way; the message names it.
    """
    with without_modes(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        node: Any = (leaf * 1).grad_fn
    for kind, value in (
        *(("Tensor", leaf), ("storage", leaf.untyped_storage()), ("node", node), ("Generator", torch.Generator())),
        *(("operator", torch.ops.aten.add.Tensor), ("ScriptObject", torch.ScriptObject), ("Module", nn.Module())),
        ("forward_ad", forward_ad),
    ):
        if missing := lacking(kind, value):
            raise ImportError(f"graphmod cannot go without it: {missing}")
    key = dispatch_key("Fake")
    for name, works in (
        ("_C._is_any_autocast_enabled", lambda: any_autocast() in (True, False)),
        ("_C._is_key_in_tls", lambda: has_in_thread("graphmod") in (True, False)),
        ("_C._stash_obj_in_tls", lambda: (put_in_thread("graphmod: test", None), True)[1]),
        ("_C._get_obj_in_tls", lambda: in_thread("graphmod: test") is None),
        ("_C._len_torch_dispatch_stack", lambda: dispatch_modes() >= 0),
        ("_C._len_torch_function_stack", lambda: function_modes() >= 0),
        ("fx._symbolic_trace", lambda: is_fx_tracing() in (True, False)),
        ("_C._get_tracing_state", lambda: (jit_tracing(), True)[1]),
        ("_C._functorch.peek_interpreter_stack", lambda: (functorch_interpreter(), True)[1]),
        ("_C._get_fp32_precision_getter", lambda: isinstance(fp32_precision("mkldnn", "matmul"), str)),
        ("_C._current_graph_task_id", lambda: current_backward() == -1 or current_backward() >= 0),
        ("_C._current_autograd_node", lambda: current_backward() >= 0 or current_node() is None),
        ("_C._autograd._get_sequence_nr", lambda: next_sequence_number() >= node._sequence_nr()),
        ("_C._autograd._top_saved_tensors_default_hooks", lambda: (top_saved_tensors_hooks(True), True)[1]),
        ("utils.checkpoint._checkpoint_hook", _knows_checkpoints),
        ("_C._is_multithreading_enabled", lambda: backward_threads() in (True, False)),
        ("_C._dispatch_tls_is_dispatch_key_included", lambda: key_included(key) in (True, False)),
        ("_C._dispatch_tls_is_dispatch_key_excluded", lambda: key_excluded(key) in (True, False)),
        ("_C._storage_Use_Count", lambda: storage_uses(leaf.untyped_storage()._cdata) > 0),
        ("_C._to_dlpack", lambda: from_dlpack(to_dlpack(leaf.detach())).data_ptr() == leaf.data_ptr()),
        ("autograd.forward_ad._current_level", lambda: isinstance(forward_ad._current_level, int)),
    ):
        try:
            fine = works()
        except Exception as error:
            raise ImportError(f"graphmod needs torch.{name}, which torch {torch.__version__} lacks") from error
        if not fine:
            raise ImportError(f"torch.{name} of torch {torch.__version__} answers in a way graphmod does not know")


self_test()
