"""Operations that several processes do together: what their schemas do not say, and how the emulator repeats them.

The operators of `torch.distributed` (`c10d`) write into their first argument without a word of it in their schemas,
take the process group as an opaque object, and return a handle to wait for. Functional collectives
(`_c10d_functional`) return a tensor that `wait_tensor` makes ready.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from graphmod.trace.tensors import each_tensor, tensors_in

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


def waiting(run: Callable) -> Callable:
    """A collective whose results are there when it returns."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.ScriptObject):
                _work(one).wait()
            elif isinstance(one, Tensor):
                torch.ops._c10d_functional.wait_tensor(one)  # does nothing with what nobody waits for
        return result

    return call


class Messages:
    """What two processes send each other in a replay. It begins where the code began it, and is waited for when its
    memory is used, because two that send first would wait for each other."""

    def __init__(self) -> None:
        self._coming: list[tuple[Any, set]] = []
        self._going: list[tuple[Any, list[Tensor]]] = []

    def send(self, run: Callable, tensors: list[Tensor], *others: Any) -> None:
        """Sends what tensors are now."""
        tensors = [one.clone() for one in tensors]
        self._going.append((_work(run(tensors, *others)), tensors))

    def receive(self, run: Callable, tensors: list[Tensor], *others: Any) -> None:
        """Begins to receive into these tensors."""
        self._coming.append((_work(run(tensors, *others)), _memory_of(tensors)))

    def of(self, name: str) -> Callable | None:
        """What repeats an operator, by the name in its schema, if it is one of these."""
        return {"c10d::send": self.send, "c10d::recv_": self.receive}.get(name)

    def before(self, values: Any) -> None:
        """Waits for what comes into the memory of these values."""
        if not self._coming:
            return
        used = _memory_of(values)
        for work, memory in self._coming:
            if memory & used:
                work.wait()
        self._coming = [one for one in self._coming if not one[1] & used]

    def end(self) -> None:
        """Waits for all."""
        for work, _ in (*self._coming, *self._going):
            work.wait()
        self._coming, self._going = [], []


def _work(handle: torch.ScriptObject) -> Any:
    return torch._C._distributed_c10d.Work.unbox(handle)


def _memory_of(values: Iterable[Any]) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in tensors_in(values)}


def without_running(op: Any, args: tuple, kwargs: dict) -> Any:
    """What a collective returns, holding whatever was in that memory: in a capture none runs, since other processes
    may fail to come that far."""
    if op._schema.name.startswith(_IN_PLACE):
        done = torch.futures.Future()
        done.set_result(list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]])
        work = torch._C._distributed_c10d._create_work_from_future(done).boxed()
        returned = [args[0] if "Tensor" in str(one.type) else work for one in op._schema.returns]
        return returned[0] if len(returned) == 1 else tuple(returned)
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return kwargs[argument.name] if argument.name in kwargs else args[position]
    shapes = op(*map(_without_memory, args), **{key: _without_memory(value) for key, value in kwargs.items()})
    device = next(tensors_in((*args, *kwargs.values()))).device
    return each_tensor(shapes, lambda one: torch.empty_like(one, device=device))


def _without_memory(value: Any) -> Any:
    return each_tensor(value, lambda one: one.detach().to("meta"))
