"""What a recorded operation is: facts about operators, the tensors that they are given and give, and what else they are
given."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.torch_private import ProcessGroup, TensorBase
from graphmod.trace.lines import location
from graphmod.trace.untraced import identity

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


def opaque_scalar(value: Any) -> Any:
    """What an opaque argument is told apart by: a process group by its name, a reduction by its number."""
    kind = value._type().name()
    if kind == "ReduceOp":
        return kind, reduction_of(value)
    if kind == "ProcessGroup":
        return kind, ProcessGroup.unbox(value).group_name
    return kind


def reduction_of(value: Any) -> int | None:
    """The number of a reduction, as in `ReduceOp.RedOpType`; None where this PyTorch does not tell."""
    return value.op() if value._has_method("op") else None


# -- tensors, which may lie in lists and tuples ------------------------------------------------------------------------
def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def each_tensor(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """The value with each tensor in it, or what else is of a kind, replaced by what `change` makes of it."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([each_tensor(one, change, kind) for one in value])
    return value


def is_stale(tensor: Tensor) -> bool:
    """Whether a tensor is a view that was made under `no_grad`, and whose memory was changed with gradients since:
    autograd refuses whoever asks for its history."""
    try:
        return tensor.is_leaf is None
    except RuntimeError:
        return True


def is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is one, so that it may collect a gradient."""
    return not is_stale(tensor) and tensor.is_leaf


# -- operations ------------------------------------------------------------------------------------------------------
class Step(NamedTuple):
    """One operation of a trace: its overload, its non-tensor arguments and where the user called it."""

    op: Any
    scalars: tuple
    code: Any
    line: int

    @property
    def location(self) -> str:
        return location(self.code, self.line) if self.code else "the backward pass"


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

    @property
    def short(self) -> str:
        """The name without its namespace, where that is PyTorch's."""
        return self.name.removeprefix("aten::")


_facts_of: dict[int, Facts] = {}  # by identity: the hash of an operator is code in Python


def facts(op: Any) -> Facts:
    found = _facts_of.get(identity(op)) or getattr(op, "about", None)
    if found is None:
        schema = getattr(op, "_schema", None)
        name, arguments, returns = (schema.name, schema.arguments, schema.returns) if schema else (str(op), (), ())
        writes: set = {1} if name == "fsdp::all_gather_copy_in" else set()
        if name.startswith(_IN_PLACE) and name not in _READ_ONLY:
            writes.add(0)
        for position, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes |= {position, argument.name}
        tags = getattr(op, "tags", ())
        returned = [one.alias_info for one in returns if "Tensor" in str(one.type)]
        found = Facts(
            frozenset(writes),
            None in returned,
            name.removeprefix("aten::") in _NORMS,
            torch.Tag.nondeterministic_seeded in tags,
            next((i for i, argument in enumerate(arguments) if argument.name in _SWITCHES), -1),
            torch.Tag.dynamic_output_shape in tags,
            name.startswith("profiler::"),
            name.startswith(_ON_LISTS),
            name == "aten::lift_fresh",
            bool(returned) and None not in returned and not writes,
            name,
            name.startswith((_IN_PLACE, _FUNCTIONAL, _OF_DTENSOR)) and name not in _LOCAL,
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


def written_tensors(about: Facts, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The tensors that this call of an operation writes."""
    targets = written(about, args, kwargs)
    return tensors_in([value for key, value in (*enumerate(args), *kwargs.items()) if key in targets])


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


def extent(tensor: Tensor) -> int:
    """The bytes from the first element of a tensor to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size() if tensor.numel() else 0


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
    return TensorBase.numpy(plain.view(torch.uint8)).tobytes()
