"""Sees every aten operation of a call: what it reads and writes, with which scalars, on which line of the user's code.

The emulated backend, the address watch and the check for what a graph cannot repeat all stand on this one dispatch
mode. Imports only `errors` and `overloads`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphmod.errors import CaptureRefused
from graphmod.overloads import fits_into, run_into

_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_aten = torch.ops.aten
_HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::item"}
_UNREPEATABLE = {
    # Keeps its workspace and weights in a packed form outside the recorded tensors.
    "aten::mkldnn_rnn_layer": "an LSTM or GRU on the CPU; keep it outside the captured module",
    "aten::_cudnn_rnn": "an LSTM or GRU of cuDNN; keep it outside the captured module",
    "aten::miopen_rnn": "an LSTM or GRU of MIOpen; keep it outside the captured module",
}


_FROM_LIST = (
    "uses a tensor made of Python values or on the host, which a graph would copy from an address that changes "
    "(torch.tensor(values), x[[0, 1]]); create it once, outside"
)
_STATISTICS = frozenset({3, 4})  # running_mean and running_var; argument 5 says whether it trains
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}


class Step(NamedTuple):
    """One operation of a trace: its overload, its non-tensor arguments and where the user called it."""

    op: Any
    scalars: tuple
    code: Any
    line: int

    @property
    def place(self) -> str:
        return f"{self.code.co_filename}:{self.line} in {self.code.co_name}" if self.code else "the backward pass"


class _Facts(NamedTuple):
    """What the schema of an overload says, looked up once."""

    writes: frozenset  # positions (int) and names (str) of the arguments it writes
    statistics: bool  # a batch norm, which writes its running statistics without its schema saying so
    random: bool
    dropout: int  # position of the argument `dropout_p`, without which it draws nothing; -1 if it has none
    dynamic: bool
    name: str


_facts_of: dict[Any, _Facts] = {}
_is_internal: dict[str, bool] = {}


def facts(op: Any) -> _Facts:
    found = _facts_of.get(op)
    if found is None:
        schema = getattr(op, "_schema", None)
        writes: set = set()
        for position, argument in enumerate(schema.arguments if schema else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes |= {position, argument.name}
        tags = getattr(op, "tags", ())
        name = schema.name if schema else str(op)
        found = _Facts(
            frozenset(writes),
            name.removeprefix("aten::") in _BATCH_NORMS,
            torch.Tag.nondeterministic_seeded in tags,
            next((i for i, a in enumerate(schema.arguments if schema else ()) if a.name == "dropout_p"), -1),
            torch.Tag.dynamic_output_shape in tags,
            name,
        )
        _facts_of[op] = found
    return found


def _argument(args: tuple, kwargs: dict, position: int, name: str) -> Any:
    """The value passed for an argument whose default is 0."""
    return args[position] if position < len(args) else kwargs.get(name, 0.0)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, one level of lists deep."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    yield item


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for tensors without one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _scalar(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, (list, tuple)):
        return tuple(_scalar(item) for item in value)
    if isinstance(value, float) and value != value:
        return "nan"
    return value


def _user_frame() -> tuple[Any, int]:
    if torch._C._current_autograd_node() is not None:
        return None, 0
    frame = sys._getframe(2)
    while frame is not None:
        if not _internal(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0


def _internal(name: str) -> bool:
    internal = _is_internal.get(name)
    if internal is None:
        internal = _is_internal[name] = name.startswith(_INTERNAL) or "/torch/" in name
    return internal


def place_of(error: BaseException) -> str | None:
    """The line of the user's code in which an error arose; None where none was involved."""
    place, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _internal(code.co_filename):
            place = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place


def _inside(path: str) -> bool:
    """Whether code of a file with `path` in its name is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if path in frame.f_code.co_filename.replace("\\", "/"):
            return True
        frame = frame.f_back
    return False


class Recorder(TorchDispatchMode):
    """Watches a call. With `refuse`, raises `CaptureRefused` before an operation that a graph cannot repeat.

    Attributes:
        trace: the operations, in order.
        outside: address -> tensor, what the call read or wrote without having made it or been given it.
        written: the part of `outside` that it changed.
        inputs_written: the addresses of inputs that it changed.
        read: every address it read.
        made_by: address -> index in the trace, operation, size and strides of what was made there last.
        generators: those passed to random operations.
        random, backward: whether it drew random numbers, or ran a backward pass.

    Args:
        inputs: the static tensors the call was given; reading them is no surprise.
        on_gpu: True when captured by CUDA: then "device" tensors are the CUDA ones. Otherwise they are the inputs, the
            tensors from outside and everything computed from them; what is made inside from nothing is host data.
        refuse: check for hazards.
        before_write: called with each tensor from outside that an operation is about to change.
        targets: index of an operation in the trace -> memory of its result's shape and strides to compute it into.
        after: called with `(op, args, kwargs, result, fresh)` after each operation; `fresh` are the result tensors
            that share no storage with its arguments.
    """

    def __init__(
        self,
        inputs: Iterable[Tensor] = (),
        *,
        on_gpu: bool = False,
        refuse: bool = True,
        before_write: Callable[[Tensor], None] | None = None,
        targets: dict[int, Tensor] | None = None,
        after: Callable | None = None,
    ) -> None:
        super().__init__()
        self.trace: list[Step] = []
        self.outside: dict[int, Tensor] = {}
        self.written: dict[int, Tensor] = {}
        self.read: set[int] = set()
        self.inputs_written: set[int] = set()
        self.made_by: dict[int, tuple[int, Any, torch.Size, tuple]] = {}
        self.generators: list[torch.Generator] = []
        self.random = False
        self.backward = False
        self._inputs = {address(tensor) for tensor in inputs}
        self._made: set[int] = set()
        self._host: set[int] = set()
        self._listed: set[int] = set()  # made from Python values, or from nothing else
        self._on_gpu, self._refuse = on_gpu, refuse
        self._before_write, self._after, self._targets = before_write, after, targets or {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it stands for costs as much as the rest of the recording

    def finish(self) -> "Recorder":
        """Lets go of the callbacks, so that the record keeps nothing alive but the tensors from outside."""
        self._before_write = self._after = None
        self._targets = {}
        self.made_by = {}
        return self

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the host while the capture works on a GPU."""
        return self._on_gpu and not tensor.is_cuda

    def _on_device(self, tensor: Tensor) -> bool:
        return tensor.is_cuda if self._on_gpu else address(tensor) not in self._host

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        about = facts(op)
        if about.name.startswith("profiler::"):
            return op(*args, **kwargs)
        code, line = _user_frame()
        given = list(tensors_in((*args, *kwargs.values())))
        if self._refuse:
            self._check(op, about, args, kwargs, given, code, line)
        given_at = set()
        for tensor in given:
            where = address(tensor)
            given_at.add(where)
            self.read.add(where)
            if where and where not in self._made and where not in self._inputs and where not in self.outside:
                self.outside[where] = tensor.detach()
        self._note_writes(about, args, kwargs)
        target = self._targets.get(len(self.trace))
        if target is not None and fits_into(op, args, kwargs, target):
            result = run_into(op, args, kwargs, target)
        else:
            result = op(*args, **kwargs)
        results = list(tensors_in(result if isinstance(result, (tuple, list)) else (result,)))
        fresh = [tensor for tensor in results if address(tensor) not in given_at or not address(tensor)]
        host = bool(fresh) and not any(self._on_device(tensor) for tensor in given)
        listed = bool(given) and all(address(tensor) in self._listed for tensor in given)
        if listed or about.name == "aten::lift_fresh":
            self._listed.update(map(address, results))
        elif self._listed:
            self._listed.difference_update(map(address, fresh))
        for tensor in fresh:
            where = address(tensor)
            self._made.add(where)
            self.made_by[where] = (len(self.trace), op, tensor.size(), tensor.stride())
            if host:
                self._host.add(where)
            else:
                self._host.discard(where)
        if about.random and not self.random:
            self.random = about.dropout < 0 or _argument(args, kwargs, about.dropout, "dropout_p") != 0.0
        self.backward = self.backward or torch._C._current_autograd_node() is not None
        generator = kwargs.get("generator")
        if generator is not None and not any(generator is known for known in self.generators):
            self.generators.append(generator)
        self.trace.append(Step(op, (*map(_scalar, args), *((k, _scalar(v)) for k, v in kwargs.items())), code, line))
        if self._after is not None:
            self._after(op, args, kwargs, result, fresh)
        return result

    def _note_writes(self, about: _Facts, args: tuple, kwargs: dict) -> None:
        writes = _STATISTICS if about.statistics and args[5] else about.writes
        if not writes:
            return
        for key, value in (*enumerate(args), *kwargs.items()):
            if key not in writes:
                continue
            for tensor in tensors_in((value,)):
                where = address(tensor)
                if where in self.outside:
                    if self._before_write is not None:
                        self._before_write(tensor)
                    self.written.setdefault(where, self.outside[where])
                elif where in self._inputs:
                    self.inputs_written.add(where)
                    if self._before_write is not None:
                        self._before_write(tensor)
                if not self._on_gpu:
                    self._host.discard(where)

    def _check(self, op: Any, about: _Facts, args: tuple, kwargs: dict, given: list, code: Any, line: int) -> None:
        reason = self._hazard(about, args, kwargs, given)
        if reason is not None:
            step = Step(op, (), code, line)
            if about.name in _HOST_READS and _inside("/torch/optim/"):
                reason = (
                    "the optimizer reads its step count or learning rate on the host; build it with fused=True (and "
                    "capturable=True on a GPU), and with a tensor as lr"
                )
            raise CaptureRefused(f"{about.name.removeprefix('aten::')} at {step.place}: {reason}")

    def _hazard(self, about: _Facts, args: tuple, kwargs: dict, given: list) -> str | None:
        name = about.name
        if name in _HOST_READS and any(map(self._on_device, given)):
            return (
                "reads a value on the host (.item(), float(), bool(), if, max(a, b), a tensor as a slice bound), and a "
                "replay reads nothing; use torch.where or clamp, or move it out of the captured module"
            )
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                return "indexes with a boolean mask, whose result has no fixed size; use torch.where or masked_fill"
        elif about.dynamic and kwargs.get("output_size") is None and any(map(self._on_device, given)):
            return "has a result whose size depends on the data; pad it, or use nonzero_static or output_size="
        if name in _UNREPEATABLE:
            return f"cannot be repeated from a recording: {_UNREPEATABLE[name]}"
        if any(tensor.layout is not torch.strided for tensor in given):
            return "works on a sparse tensor"
        if self._on_gpu:
            return self._gpu_hazard(about, args, kwargs, given)
        listed = [tensor for tensor in given if tensor.dim() and tensor.numel() and address(tensor) in self._listed]
        if listed and len(listed) < len(given):
            return _FROM_LIST
        return None

    def _gpu_hazard(self, about: _Facts, args: tuple, kwargs: dict, given: list) -> str | None:
        cuda = [tensor for tensor in given if tensor.is_cuda]
        host = [tensor for tensor in given if not tensor.is_cuda]
        if about.name == "aten::_to_copy":
            target = kwargs.get("device")
            kind = torch.device(target).type if target is not None else given[0].device.type
            if cuda and kind == "cpu":
                return "copies a GPU tensor to the host; read it after the replay"
            if host and kind == "cuda":
                return _FROM_LIST
        if about.name == "aten::copy_" and cuda and host:
            return "copies between host and GPU; do it outside the captured module"
        if host and not cuda and about.writes:
            outside = [t for t in host if address(t) not in self._made]
            if outside:
                return (
                    "changes a host tensor, which a replay would not; keep it on the GPU (fused=True, capturable=True)"
                )
        if cuda and any(tensor.dim() for tensor in host):
            return "mixes a host tensor into a GPU operation; move it to the GPU once, outside"
        if cuda and any(address(tensor) not in self._made for tensor in host):
            return "uses the value of a host tensor, which a graph would freeze; keep it on the GPU"
        return None


def is_recording() -> bool:
    """Whether a recorder watches the present call."""
    return any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack())


def compare(before: list[Step], now: list[Step]) -> str | None:
    """Why two traces of the same call differ, naming the user's line; None when they do not.

    A difference means that the code has state in Python (a counter, a learning rate, a branch) that a graph would
    freeze at its present value.
    """
    for old, new in zip(before, now, strict=False):
        if old.op is not new.op:
            return (
                f"{new.place} does {facts(new.op).name.removeprefix('aten::')} where the call before did "
                f"{facts(old.op).name.removeprefix('aten::')}: a graph would freeze one side of a branch in Python"
            )
        if old.scalars != new.scalars:
            values = [(a, b) for a, b in zip(old.scalars, new.scalars, strict=False) if a != b]
            was, now_is = values[0] if values else (old.scalars, new.scalars)
            return (
                f"{new.place} passes {now_is!r} to {facts(new.op).name.removeprefix('aten::')} where the call before "
                f"passed {was!r}: a graph would freeze a Python number; make it a tensor and fill_ it"
            )
    if len(before) != len(now):
        extra = (before if len(before) > len(now) else now)[min(len(before), len(now))]
        return (
            f"the call before did {len(before)} operations, this one {len(now)}; the first that differs is "
            f"{facts(extra.op).name.removeprefix('aten::')} at {extra.place}"
        )
    return None
