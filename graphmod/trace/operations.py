"""What a recorded operation is: facts about operators, addresses of tensors, lines of the user's code, and comparing
two records of a call.
"""

import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.trace.untraced import identity

# Logging formats what it is given: the line that matters is the one that logs.
_INTERNAL = tuple(map(str, (Path(torch.__file__).parent, Path(__file__).parent.parent, Path(logging.__file__).parent)))
_ON_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
_SWITCHES = ("dropout_p", "train", "training")
# What keeps statistics. In inference mode those that are made of others are seen, too.
_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "instance_norm"}
_RUNNING, _TRAINS = frozenset({3, 4}), 5  # positions of their mean and variance, and of whether they write them


# -- operators of `torch.distributed` --------------------------------------------------------------------------------
# Those of `c10d` write into their first argument without a word of it in their schemas, take the process group as an
# opaque object, and return a handle to wait for. Functional collectives return a tensor that `wait_tensor` makes ready.
_IN_PLACE, _FUNCTIONAL = "c10d::", "_c10d_functional::"
_READ_ONLY = ("c10d::send", "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan")
_OF_DTENSOR = "_dtensor::shard_dim_alltoall"
_LOCAL = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "c10d::check_for_nan")


def is_collective(name: str) -> bool:
    """Whether an operator, by the name in its schema, is one that other processes take part in."""
    return name.startswith((_IN_PLACE, _FUNCTIONAL, _OF_DTENSOR)) and name not in _LOCAL


def written_by(name: str) -> frozenset:
    """The positions of the arguments that an operator of `torch.distributed` writes without saying so."""
    if name == "fsdp::all_gather_copy_in":
        return frozenset({1})
    return frozenset({0}) if name.startswith(_IN_PLACE) and name not in _READ_ONLY else frozenset()


def opaque_scalar(value: torch.ScriptObject) -> Any:
    """What an opaque argument is told apart by: a process group by its name, a reduction by its number."""
    kind = value._type().name()
    if kind == "ReduceOp":
        return kind, reduction_of(value)
    if kind == "ProcessGroup":
        return kind, torch._C._distributed_c10d.ProcessGroup.unbox(value).group_name
    return kind


def reduction_of(value: torch.ScriptObject) -> int | None:
    """The number of a reduction, as in `ReduceOp.RedOpType`; None where this PyTorch does not tell."""
    return value.op() if value._has_method("op") else None


# -- operations ------------------------------------------------------------------------------------------------------
class Step(NamedTuple):
    """One operation of a trace: its overload, its non-tensor arguments and where the user called it."""

    op: Any
    scalars: tuple
    code: Any
    line: int

    @property
    def place(self) -> str:
        return f"{self.code.co_filename}:{self.line} in {self.code.co_name}" if self.code else "the backward pass"


class Facts(NamedTuple):
    """What the schema of an overload says, looked up once."""

    writes: frozenset  # positions (int) and names (str) of the arguments it writes
    computes: bool  # it makes a tensor of its arguments' values, or of their shapes
    statistics: bool  # a norm that writes its running statistics without its schema saying so; see `written`
    random: bool
    switch: int  # position of the argument without which it draws nothing, such as `dropout_p`; -1 if it has none
    dynamic: bool
    profiler: bool  # no operation but a mark
    lists: bool  # works on lists of tensors, maybe with several launches of one kernel
    lifts: bool  # takes in a tensor made of values in Python
    views: bool  # all that it gives is memory that it was given
    name: str
    collective: bool = False  # other processes take part in it
    unsafe: bool = False  # its author says that it is for no CUDA graph
    op: Any = None  # held, so that its identity stays its own


_facts_of: dict[int, Facts] = {}  # by identity: the hash of an operator is code in Python
_is_internal: dict[str, bool] = {}


def facts(op: Any) -> Facts:
    found = _facts_of.get(identity(op)) or getattr(op, "about", None)
    if found is None:
        schema = getattr(op, "_schema", None)
        name = schema.name if schema else str(op)
        writes: set = set(written_by(name))
        for position, argument in enumerate(schema.arguments if schema else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes |= {position, argument.name}
        tags = getattr(op, "tags", ())
        returned = [one.alias_info for one in (schema.returns if schema else ()) if "Tensor" in str(one.type)]
        found = Facts(
            frozenset(writes),
            any("Tensor" in str(one.type) and one.alias_info is None for one in (schema.returns if schema else ())),
            name.removeprefix("aten::") in _NORMS,
            torch.Tag.nondeterministic_seeded in tags,
            next((i for i, a in enumerate(schema.arguments if schema else ()) if a.name in _SWITCHES), -1),
            torch.Tag.dynamic_output_shape in tags,
            name.startswith("profiler::"),
            name.startswith(_ON_LISTS),
            name == "aten::lift_fresh",
            bool(returned) and None not in returned and not writes,
            name,
            is_collective(name),
            torch.Tag.cudagraph_unsafe in tags,
            op,
        )
        _facts_of[identity(op)] = found
    return found


def written(about: Facts, args: tuple, kwargs: dict) -> frozenset:
    """Positions and names of the arguments that this call of an operation writes."""
    if not about.statistics:
        return about.writes
    trains = args[_TRAINS] if len(args) > _TRAINS else kwargs.get("training", kwargs.get("use_input_stats", True))
    return _RUNNING | {"running_mean", "running_var"} if trains else about.writes


def draws(about: Facts, args: tuple, kwargs: dict) -> bool:
    """Whether this call of an operation draws random numbers: an attention without dropout does not, nor dropout in
    evaluation."""
    if not about.random or about.switch < 0:
        return about.random
    given = [kwargs[name] for name in _SWITCHES if name in kwargs]
    value = args[about.switch] if about.switch < len(args) else given[0] if given else 0.0
    return value is None or value != 0.0


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for tensors without one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def scalar_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, (list, tuple)):
        return tuple(scalar_of(item) for item in value)
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, torch.ScriptObject):
        return opaque_scalar(value)
    return value


def scalars_of(about: Facts, args: tuple, kwargs: dict) -> tuple:
    """What an operation is given beside tensors, and the values in Python of which a tensor is made."""
    scalars = tuple(map(scalar_of, args))
    if kwargs:
        scalars += tuple([(key, scalar_of(value)) for key, value in kwargs.items()])
    return (*scalars, _values(args[0])) if about.lifts else scalars


def _values(tensor: Tensor) -> Any:
    """The values of a tensor on the host, to be compared with those of another; bytes, so that NaN equals NaN."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not plain.numel():
        return b""
    plain = plain.clone()  # memory that numpy has looked at cannot be resized any more
    return torch._C.TensorBase.numpy(plain.view(torch.uint8)).tobytes()


def user_frame() -> tuple[Any, int]:
    """The code and line outside of libraries that a recorder was called from; not to be asked in a backward."""
    frame: FrameType | None = sys._getframe(3)  # what is nearer belongs to recorders
    while frame is not None:
        code = frame.f_code
        internal = _is_internal.get(code.co_filename)
        if internal is None:
            internal = _internal(code.co_filename)
        if not internal:
            return code, frame.f_lineno
        frame = frame.f_back
    return None, 0


def _internal(name: str) -> bool:
    internal = _is_internal.get(name)
    if internal is None:
        internal = _is_internal[name] = name.startswith((*_INTERNAL, "<eval_with_key>")) or "/torch/" in name
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


def step_differs(old: Step, new: Step, place: str) -> str | None:
    """Why an operation is another than that of the same index in the record of an earlier call; None if it is not."""
    name = facts(new.op).name.removeprefix("aten::")
    if old.op is not new.op:
        return (
            f"{place} does {name} where the call before did {facts(old.op).name.removeprefix('aten::')}: a graph would "
            "freeze one side of a branch in Python"
        )
    if old.scalars == new.scalars:
        return None
    if facts(new.op).lifts:
        return f"{place} makes a tensor of other values than in the call before: a graph would freeze them"
    values = [(a, b) for a, b in zip(old.scalars, new.scalars, strict=False) if a != b]
    was, now_is = values[0] if values else (old.scalars, new.scalars)
    return (
        f"{place} passes {now_is!r} to {name} where the call before passed {was!r}: a graph would freeze a Python "
        "number; make it a tensor and fill_ it"
    )


def compare(before: list[Step], now: list[Step]) -> str | None:
    """Why two traces of the same call differ, naming the user's line; None when they do not.

    A difference means that the code has state in Python (a counter, a learning rate, a branch) that a graph would
    freeze at its present value.
    """
    for old, new in zip(before, now, strict=False):
        reason = step_differs(old, new, new.place)
        if reason is not None:
            return reason
    return length_differs(before, now)


def length_differs(before: list[Step], now: list[Step]) -> str | None:
    """Why two traces of which one is the beginning of the other differ; None where they are of one length."""
    if len(before) == len(now):
        return None
    extra = (before if len(before) > len(now) else now)[min(len(before), len(now))]
    return (
        f"the call before did {len(before)} operations, this one {len(now)}; the first that differs is "
        f"{facts(extra.op).name.removeprefix('aten::')} at {extra.place}"
    )
