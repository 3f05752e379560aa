"""Replaces functions of other libraries that are no operations, and whose answer or effect a recorded call must not be
wrong about: whether a stream captures, which code asks to take another way then; reads of a tensor on the host; seeds
and states of generators; code that runs past the dispatcher.

Such functions belong to the process. So each replacement is put in once, by whoever comes first, and taken out by
whoever leaves last; it passes on the calls that no recorder watches.
"""

import sys
import threading
import types
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from graphmod.torch_private import (
    DYNAMO,
    FUNCTORCH,
    HIGHER_ORDER,
    INDUCTOR,
    INFERS_SHAPES,
    IS_CAPTURING,
    IS_CAPTURING_TOO,
    SHARDING,
    ScriptFunction,
    ScriptMethod,
    beside_dynamo,
    device_constructors,
    jit_fuses,
    jit_fuses_on_cpu,
    jit_fuses_on_gpu,
    nn_functions,
)
from graphmod.trace import compiled, dispatch
from graphmod.trace.dispatch import Watcher
from graphmod.trace.generators import SEEDS
from graphmod.trace.hazards import Reason
from graphmod.trace.undo import Undo

Replacement = tuple[Any, str, Any]
"""An owner, the name of its attribute, and what takes the place of that."""
_ABSENT = object()
# Parts of torch that capture, or must not do something while somebody does. Everybody else takes the way of eager code.
_NEED_THE_TRUTH = (
    "torch.cuda", "torch.optim", DYNAMO, INDUCTOR, FUNCTORCH, "torch.utils",
    "torch.distributed", "torch.accelerator", HIGHER_ORDER, "graphmod.backend", "graphmod.ranks",
)  # fmt: skip
_SCRIPTED = Reason(
    "runs code of torch.jit, whose fused kernels are not seen here",
    "use the function that it was made of, or keep it outside the captured module",
)
_SAVED = Reason("writes a tensor to a file, and a replay writes nothing", "save it after the call")
_NUMBERS, _INTEGERS = (bool, int, float, complex), (int, numpy.generic)
_as_tensor = torch.as_tensor
_NO_STATE = torch.empty(0, dtype=torch.uint8)
_SEEDING = ("manual_seed", "seed", "manual_seed_all", "seed_all")


class Patch:
    """Attributes that are replaced while anybody uses that, in whichever thread.

    Args:
        make: gives the replacements, when the first enters.
    """

    def __init__(self, make: Callable[[], list[Replacement]]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._users: set[Any] = set()
        self._before: list[tuple[Any, str, Any, Any]] = []

    def take(self, user: Any) -> None:
        """Replaces them, for a user until it leaves."""
        with self._lock:
            self._put_back()  # what an interrupt left
            first = not self._users
            self._users.add(user)
            for owner, name, replacement in self._make() if first else ():
                self._before.append((owner, name, vars(owner).get(name, _ABSENT), replacement))
                setattr(owner, name, replacement)

    def leave(self, user: Any) -> None:
        """Puts them back, if nobody else uses them."""
        with self._lock:
            self._users.discard(user)
            self._put_back()

    def _put_back(self) -> None:
        while not self._users and self._before:
            owner, name, before, replacement = self._before[-1]
            if vars(owner).get(name) is not replacement:
                pass  # somebody put theirs over ours, and goes on to call ours
            elif before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
            self._before.pop()


# By owner and name: a function, and what takes its place. To make them anew took a third of a short recording.
_known: dict[tuple[Any, str], tuple[Any, Callable]] = {}


def _recorded(owner: Any, name: str, run: Callable) -> Replacement:
    """Has `run(recorder, original, *args, **kwargs)` called in the place of a function where a recorder watches."""
    original = getattr(owner, name)
    known = _known.get((owner, name))
    if known is not None and known[0] is original:
        return owner, name, known[1]

    @beside_dynamo  # which would compile it, and then once more for each of the functions
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = dispatch.current()
        return original(*args, **kwargs) if recorder is None else run(recorder, original, *args, **kwargs)

    _known[owner, name] = original, call
    return owner, name, call


def _is_capturing(recorder: Watcher, original: Any) -> bool:
    frame = sys._getframe(2)
    if frame.f_code.co_name == "is_current_stream_capturing" and frame.f_back is not None:
        frame = frame.f_back
    asking = frame.f_globals.get("__name__", "")
    if recorder.watching or (asking.startswith(_NEED_THE_TRUTH) is recorder.on_gpu):
        return original()
    # An optimizer on the CPU need not be capturable, and cannot be.
    return not recorder.on_gpu and not asking.startswith("torch.optim")


def _state(on_gpu: bool, nothing: Any, recorder: Watcher, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads or writes the state of a generator. `checkpoint` does by default, also where nothing is random."""
    if recorder.on_gpu is not on_gpu:
        return original(*args, **kwargs)
    recorder.note_random_state()
    return original(*args, **kwargs) if recorder.watching else nothing


def _refused(name: str, reason: Reason, recorder: Watcher, original: Any, *args: Any, **kwargs: Any) -> Any:
    recorder.refuse(name, reason)
    return _unseen(recorder, original, *args, **kwargs)  # one of them calls others


def _read(recorder: Watcher, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    # A GPU copies for `cpu`, and is asked itself; its memory may be shared through DLPack without waiting for it.
    if not recorder.on_gpu or original.__name__ not in ("cpu", "__dlpack__"):
        recorder.note_host_read(tensor, original.__name__)
    return original(tensor, *args, **kwargs)


def _resize(recorder: Watcher, original: Any, storage: torch.UntypedStorage, size: int) -> Any:
    """Memory that a storage is given, and gives back, by hand: no operation does that."""
    before = storage.nbytes()
    result = original(storage, size)
    recorder.note_resized(storage, before)
    return result


def _unseen(recorder: Watcher, original: Any, *args: Any, **kwargs: Any) -> Any:
    with dispatch.hidden():
        return original(*args, **kwargs)


def _make(recorder: Watcher, make: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a tensor of Python values. On the GPU that is a copy from host memory that nobody keeps, and goes by way of
    the recorder. It is shown as `torch.tensor` shows it, which `as_tensor` does not."""
    name = "obj" if getattr(make, "__name__", "") == "asarray" else "data"
    args = (kwargs.pop(name),) if not args and name in kwargs else args
    if len(args) != 1 or isinstance(args[0], Tensor):
        return make(*args, **kwargs)
    device = kwargs.get("device")
    if recorder.on_gpu and device is not None and torch.device(device).type == "cuda":
        return _shown(recorder, recorder.make(make, args[0], kwargs))
    made = make(*args, **kwargs)
    return _shown(recorder, made) if make is _as_tensor and isinstance(args[0], _NUMBERS) else made


def _shown(recorder: Watcher, made: Tensor) -> Tensor:
    """Shows the recorder a tensor made of Python values, as `torch.tensor` does; returns it, or what stands for it."""
    shown = torch.ops.aten.lift_fresh(made)
    if not recorder.goes_through:
        return made
    return shown.requires_grad_() if made.requires_grad else shown


def _make_like(recorder: Watcher, new_tensor: Any, like: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Makes a tensor of Python values where another is."""
    if has_torch_function((like,)):
        return handle_torch_function(new_tensor, (like,), like, *args, **kwargs)
    device = kwargs.pop("device", None) or like.device
    return _make(recorder, partial(new_tensor, like), *args, device=device, **kwargs)


def _index(recorder: Any, original: Any, tensor: Tensor, key: Any, *value: Any) -> Any:
    """Indexes a tensor in a capture. A GPU is given lists where nobody sees the copy, which no capture can make: those
    of the recorded call take their place. That call goes past here, since others know this function by its name."""
    if tensor.is_cuda is not recorder.on_gpu:
        return original(tensor, key, *value)
    alone = not isinstance(key, tuple) and (not _is_list(key) or all(isinstance(one, _INTEGERS) for one in key))
    indices = (key,) if alone else tuple(key)
    if any(map(_is_list, indices)):
        first = recorder.script is None or not recorder.script.shows_list(len(recorder.lifted))
        if value and isinstance(value[0], _NUMBERS) and first:  # a tensor is made of that first, before torch 2.15
            value = (torch.tensor(value[0], dtype=tensor.dtype),)
        there = {"device": tensor.device}
        key = tuple(_shown(recorder, recorder.make(_indices, one, there)) if _is_list(one) else one for one in indices)
    with recorder.copying_nothing():
        return original(tensor, key, *value)


def _is_list(index: Any) -> bool:
    """Whether an index is a list, or what else is no tensor and names several places."""
    return hasattr(type(index), "__len__") and not isinstance(index, (Tensor, str))


def _indices(listed: Any, **kwargs: Any) -> Tensor:
    """The tensor that a list stands for where it indexes another."""
    made = torch.tensor(listed, **kwargs)
    return made if made.dtype in (torch.bool, torch.uint8) else made.long()


def _one_hot(recorder: Watcher, original: Any, tensor: Tensor, num_classes: int = -1) -> Tensor:
    """On the CPU it reads the least and the greatest value, which on a GPU it does not."""
    if recorder.on_gpu or num_classes <= 0 or not tensor.numel() or tensor.dtype is not torch.int64:
        return original(tensor, num_classes)  # which says what is wrong
    zeros = tensor.new_zeros((*tensor.shape, num_classes))
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def _bincount(
    recorder: Watcher, original: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> Tensor:
    """Its result is as long as the greatest value says, which is read on the host. Where `minlength` is enough for all
    values, as for experts, it is a sum of known size; a greater value in a replay is an index out of bounds."""
    if weights is not None or minlength <= 0:
        return original(input, weights, minlength)
    if recorder.watching:
        with dispatch.hidden():
            counts = original(input, None, minlength)
        if counts.numel() > minlength:
            return original(input, None, minlength)
    zeros = input.new_zeros(minlength, dtype=torch.int64)
    return zeros.scatter_add_(0, input.long(), torch.ones_like(input, dtype=torch.int64))


def _script(recorder: Watcher, original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    if _fuses(recorder.on_gpu) and _is_script(function):
        recorder.refuse(f"torch.jit function {getattr(function, 'name', '')!r}", _SCRIPTED)
    return original(function, *args, **kwargs)


def _fuses(on_gpu: bool) -> bool:
    """Whether torch.jit may put its own kernels in the place of operations; else each of them is seen."""
    fuses = jit_fuses_on_gpu() if on_gpu else jit_fuses_on_cpu()
    return fuses and jit_fuses()


def _is_script(function: Any) -> bool:
    """Methods of classes in C++ are of the same type, but are no script: nothing of them is fused."""
    try:
        return function.graph is not None
    except RuntimeError:
        return False


def _replacements() -> list[Replacement]:
    device_constructors()  # which keeps the functions that it finds when it is first asked
    save = partial(_refused, "torch.save", _SAVED)
    found = [
        *(_recorded(Tensor, name, _read) for name in ("numpy", "tolist", "cpu", "__dlpack__")),
        *(_recorded(module, "save", save) for module in (torch, torch.serialization)),
        _recorded(torch.UntypedStorage, "resize_", _resize),
        *(_recorded(kind, "__call__", _script) for kind in (ScriptFunction, ScriptMethod)),
        *(_recorded(*place, _is_capturing) for place in (IS_CAPTURING_TOO, IS_CAPTURING)),
    ]
    if torch.distributed.is_available():  # to wait may be to copy a result, which is part of the collective
        found.append(_recorded(torch.distributed.Work, "wait", _unseen))
    # DTensor finds the shape of a result with tensors without memory, which are nobody's, once for each kind of
    # operation. It remembers that for each thread, and a backward may run in another one than before.
    kind, name = INFERS_SHAPES
    owner = getattr(sys.modules.get(SHARDING), kind, None)
    if hasattr(owner, name):
        found.append(_recorded(owner, name, _unseen))
    for on_gpu, module in ((False, torch), (False, torch.random), (True, torch.cuda), (True, torch.cuda.random)):
        found.append(_recorded(module, "get_rng_state", partial(_state, on_gpu, _NO_STATE)))
        found.append(_recorded(module, "set_rng_state", partial(_state, on_gpu, None)))
        names = [name for name in _SEEDING if isinstance(vars(module).get(name), types.FunctionType)]
        found += [_recorded(module, name, partial(_refused, name, SEEDS)) for name in names]
    found += [_recorded(kind, "__call__", compiled.shown) for kind in compiled.kinds()]
    beside_the_key = dispatch.replacements() if dispatch.has_key() else []
    return [*beside_the_key, *found, *compiled.replacements(_patch_of_operators)]


def _operators() -> list[Replacement]:
    """Replacements for functions that torch.compile takes for operators, by their identity: for none other."""
    return [
        *(_recorded(torch, name, _make) for name in ("tensor", "as_tensor", "asarray")),
        *(_recorded(module, "one_hot", _one_hot) for module in (nn_functions, torch.nn.functional)),
        _recorded(torch, "bincount", _bincount),
    ]


_patch, _patch_of_operators = Patch(_replacements), Patch(_operators)
_patch_on_gpu = Patch(lambda: [_recorded(Tensor, "new_tensor", _make_like)])
_patch_in_capture = Patch(lambda: [_recorded(Tensor, name, _index) for name in ("__getitem__", "__setitem__")])


def asking(recorder: Watcher, undo: Undo) -> None:
    """Has what these functions do in calls that are recorded reported to the recorder, and answered for it."""
    always = ((_patch, True), (_patch_of_operators, True))
    for patch, wanted in (*always, (_patch_on_gpu, recorder.on_gpu), (_patch_in_capture, not recorder.watching)):
        if wanted:
            undo.then(lambda _, patch=patch: patch.leave(recorder))
            patch.take(recorder)
