"""Functions of torch that are no operations, and whose answer or effect a recorded call must not be wrong about.

Whether a stream captures, which code asks to take another way then; reads of a tensor on the host; code that runs past
the dispatcher. Each passes on the calls that no recorder watches.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._device import _device_constructors

from graphmod.trace import compiled, dispatch, seeds
from graphmod.trace.hazards import Reason
from graphmod.trace.lines import asked_by
from graphmod.trace.patches import Patch

# Parts of torch that capture, or must not do something while somebody does. Everybody else takes the way of eager code.
_NEED_THE_TRUTH = (
    "torch.cuda", "torch.optim", "torch._dynamo", "torch._inductor", "torch._functorch", "torch.utils",
    "torch.distributed", "torch.accelerator", "torch._higher_order_ops", "graphmod.backend", "graphmod.ranks",
)  # fmt: skip
_SCRIPTED = Reason(
    "runs code of torch.jit, whose fused kernels are not seen here",
    "use the function that it was made of, or keep it outside the captured module",
)
_as_tensor = torch.as_tensor
_SAVED = Reason("writes a tensor to a file, and a replay writes nothing", "save it after the call")


def _is_capturing() -> list[tuple[Any, str, Any]]:
    original = torch._C._cuda_isCurrentStreamCapturing

    def answer(asking_module: str) -> bool:
        recorder = dispatch.current()
        if recorder is None or recorder.watching:
            return original()
        if asking_module.startswith(_NEED_THE_TRUTH):
            # An optimizer on the CPU need not be capturable, and cannot be.
            return original() if recorder.on_gpu else not asking_module.startswith("torch.optim")
        return False if recorder.on_gpu else original()

    def by_function() -> bool:  # called by torch.cuda.is_current_stream_capturing
        frame = sys._getframe(1)
        inside = frame.f_code.co_name == "is_current_stream_capturing"
        frame = frame.f_back if inside and frame.f_back is not None else frame
        return answer(frame.f_globals.get("__name__", ""))

    return [
        (torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", by_function),
        (torch._C, "_cuda_isCurrentStreamCapturing", lambda: answer(asked_by())),
    ]


def _host_reads() -> list[tuple[Any, str, Any]]:
    def reading(name: str, also_on_gpu: bool) -> Any:
        original = getattr(Tensor, name)

        @functools.wraps(original)
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            recorder = dispatch.current()
            if recorder is not None and (also_on_gpu or not recorder.on_gpu):
                recorder.note_host_read(self, name)
            return original(self, *args, **kwargs)

        return read

    def save(original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            recorder = dispatch.current()
            if recorder is not None:
                recorder.refuse("torch.save", _SAVED)
            return original(*args, **kwargs)

        return run

    # A GPU copies for `cpu`, and is asked itself; its memory may be shared through DLPack without waiting for it.
    methods = {"numpy": True, "tolist": True, "cpu": False, "__dlpack__": False}
    return [
        *((Tensor, name, reading(name, also_on_gpu)) for name, also_on_gpu in methods.items()),
        (torch, "save", save(torch.save)),
        (torch.serialization, "save", save(torch.serialization.save)),
    ]


def _resized() -> list[tuple[Any, str, Any]]:
    """Memory that a storage is given, and gives back, by hand: no operation does that."""
    original = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = original(self, size)
        recorder = dispatch.current()
        if recorder is not None:
            recorder.note_resized(self, before)
        return result

    return [(torch.UntypedStorage, "resize_", resize)]


def _waited_for() -> list[tuple[Any, str, Any]]:
    """A collective that is waited for. Gloo copies its result then, which belongs to the collective."""
    if not torch.distributed.is_available():
        return []
    original = torch.distributed.Work.wait

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dispatch.current() is None:
            return original(self, *args, **kwargs)
        with dispatch.hidden():
            return original(self, *args, **kwargs)

    return [(torch.distributed.Work, "wait", wait)]


def _shapes_of_dtensors() -> list[tuple[Any, str, Any]]:
    """How DTensor finds, once for each kind of operation, the shape of its result: with tensors without memory, which
    are nobody's. It remembers that for each thread, and a backward may run in another one than before."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    owner, name = getattr(module, "ShardingPropagator", None), "_propagate_tensor_meta_non_cached"
    original = getattr(owner, name, None)
    if original is None:
        return []

    @functools.wraps(original)
    def propagate(*args: Any, **kwargs: Any) -> Any:
        with dispatch.hidden():
            return original(*args, **kwargs)

    return [(owner, name, propagate)]


def _made_of_values() -> list[tuple[Any, str, Any]]:
    """Tensors on the GPU made of Python values: a copy from host memory that nobody keeps."""
    _device_constructors()  # which keeps the functions that it finds when it is first asked

    def making(name: str, of: str) -> tuple[Any, str, Any]:
        original = getattr(torch, name)

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if not args and of in kwargs:
                args = (kwargs.pop(of),)
            return _make(original, args, kwargs, kwargs.get("device"))

        return torch, name, make

    return [making("tensor", "data"), making("as_tensor", "data"), making("asarray", "obj")]


def _make(make: Any, args: tuple, kwargs: dict, device: Any) -> Any:
    """Makes a tensor; one of Python values for a GPU through the recorder of a call that works there."""
    recorder = dispatch.current()
    if recorder is None or len(args) != 1 or isinstance(args[0], Tensor):
        return make(*args, **kwargs)
    if not recorder.on_gpu:
        return _lifted(make, args, kwargs)
    there = device is not None and torch.device(device).type == "cuda"
    return recorder.make(make, args[0], kwargs) if there else _lifted(make, args, kwargs)


def _lifted(make: Any, args: tuple, kwargs: dict) -> Any:
    """A tensor of numbers in Python, shown to the recorder as `torch.tensor` shows it, which `as_tensor` does not."""
    made = make(*args, **kwargs)
    lifts = make is _as_tensor and isinstance(args[0], (bool, int, float, complex))
    return torch.ops.aten.lift_fresh(made) if lifts else made


def _made_like_another() -> list[tuple[Any, str, Any]]:
    """Likewise, of a tensor there. Not so lists that index one: torch.compile and others ask for that function by its
    name."""
    new_tensor = Tensor.new_tensor

    @functools.wraps(new_tensor)
    def new(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function((self,)):
            return handle_torch_function(new_tensor, (self,), self, *args, **kwargs)
        return _make(functools.partial(new_tensor, self), args, kwargs, kwargs.get("device") or self.device)

    return [(Tensor, "new_tensor", new)]


def _one_hot() -> list[tuple[Any, str, Any]]:
    """On the CPU it reads the least and the greatest value, which on a GPU it does not."""
    original = torch._C._nn.one_hot

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        recorder = dispatch.current()
        if recorder is None or recorder.on_gpu or num_classes <= 0 or not tensor.numel():
            return original(tensor, num_classes)
        if tensor.dtype is not torch.int64:
            return original(tensor, num_classes)  # which says what is wrong
        zeros = tensor.new_zeros((*tensor.shape, num_classes))
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    return [(torch._C._nn, "one_hot", one_hot), (torch.nn.functional, "one_hot", one_hot)]


def _bincount() -> list[tuple[Any, str, Any]]:
    """Its result is as long as the greatest value says, which is read on the host. Where `minlength` is enough for all
    values, as for experts, it is a sum of known size; a greater value in a replay is an index out of bounds."""
    original = torch.bincount

    @functools.wraps(original)
    def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        recorder = dispatch.current()
        if recorder is None or weights is not None or minlength <= 0:
            return original(input, weights, minlength)
        if recorder.watching:
            with dispatch.hidden():
                counts = original(input, None, minlength)
            if counts.numel() > minlength:
                return original(input, None, minlength)
        zeros = input.new_zeros(minlength, dtype=torch.int64)
        return zeros.scatter_add_(0, input.long(), torch.ones_like(input, dtype=torch.int64))

    return [(torch, "bincount", bincount)]


def _fuses(on_gpu: bool) -> bool:
    """Whether torch.jit may put its own kernels in the place of operations; else each of them is seen."""
    fuses = torch._C._jit_can_fuse_on_gpu() if on_gpu else torch._C._jit_can_fuse_on_cpu()
    return fuses and torch._C._jit_texpr_fuser_enabled()


def _is_script(function: Any) -> bool:
    """Methods of classes in C++ are of the same type, but are no script: nothing of them is fused."""
    try:
        return function.graph is not None
    except RuntimeError:
        return False


def _scripted() -> list[tuple[Any, str, Any]]:
    def scripted(kind: Any) -> Any:
        original = kind.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = dispatch.current()
            if recorder is not None and _fuses(recorder.on_gpu) and _is_script(self):
                recorder.refuse(f"torch.jit function {getattr(self, 'name', '')!r}", _SCRIPTED)
            return original(self, *args, **kwargs)

        return call

    return [(kind, "__call__", scripted(kind)) for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)]


_patches = [
    Patch(make)
    for make in (
        *(
            _is_capturing,
            _host_reads,
            _resized,
            _waited_for,
            _shapes_of_dtensors,
            _made_of_values,
            _one_hot,
            _bincount,
            _scripted,
            seeds.replacements,
        ),
        compiled.replacements,
    )
]
_patch_on_gpu, _beside_the_key = Patch(_made_like_another), Patch(dispatch.replacements)


@contextlib.contextmanager
def asking(recorder: Any) -> Iterator[None]:
    """Has what these functions do in calls that are recorded reported to the recorder, and answered for it."""
    with contextlib.ExitStack() as stack:
        on_gpu, beside = (_patch_on_gpu,) * recorder.on_gpu, (_beside_the_key,) * dispatch.has_key()
        for patch in (*beside, *_patches, *on_gpu):
            stack.enter_context(patch)
        yield
