"""What a callable works on: the modules and tensors that it holds, closes over or names, found before any call of it
was recorded, and those that recorded calls have read since.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from graphmod.guards.hooks import keeps_accumulators, on_accumulator
from graphmod.ranks.data_parallel import compiled_around, is_taken_over, joins, take_over_later
from graphmod.ranks.fully_shard import shared_otherwise

_KEPT_ACCUMULATOR = (
    "code keeps the node of autograd that accumulates a parameter's gradient (grad_fn.next_functions, as in "
    "Megatron-core's DistributedDataParallel, or register_multi_grad_hook), which a graph does not run; use "
    "register_post_accumulate_grad_hook, or register the hook inside of the step"
)
T = TypeVar("T")
_MOST = 4096  # objects looked at
_DEPTH = 4


class Surroundings:
    """What a callable is known to work on: at first what it plainly holds, later what recorded calls have shown. Empty
    until `discover`.

    Attributes:
        known: whether it has been discovered.
        parameters: the leaf tensors it may differentiate.
        not_to_be_recorded: why its calls must not even be watched; None where they may.
    """

    def __init__(self, root: nn.Module | Callable) -> None:
        self._root = root
        self.known = False
        self.parameters: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._device: torch.device | None = None  # of tensors that a function closes over or names, which may change
        self.not_to_be_recorded: str | None = None
        self._parallel: dict[nn.parallel.DistributedDataParallel, None] = {}

    def discover(self) -> None:
        """Looks at the module, or at what a function closes over and names."""
        self.known = True
        self._tensors = []
        for module in self._modules():
            self._take_in(module.parameters())
            self._tensors += module.buffers()
            self._note_parallel(module.modules())

    def _modules(self) -> list[nn.Module]:
        if isinstance(self._root, nn.Module):
            return [self._root]
        found = list(_modules_and_tensors_of(self._root))
        places = [one.device for one in found if isinstance(one, Tensor)]
        self._device = next((one for one in places if one.type == "cuda"), places[0] if places else None)
        return [one for one in found if isinstance(one, nn.Module)]

    def learn(self, guards: Any, lasting: Iterable[Any] = ()) -> list[Tensor]:
        """Takes in what a recorded call has read.

        Args:
            lasting: the guards of the recordings that still count.

        Returns:
            Parameters that were exchanged since: neither of these leads to them any more.
        """
        self.discover()
        self._take_in(guards.parameters())
        self._tensors += [tensor for tensor in guards.tensors if tensor.is_cuda][:1] or guards.tensors[:1]
        self._note_parallel(guards.modules)
        current = {id(parameter) for module in self._modules() for parameter in module.parameters()}
        current.update(id(parameter) for one in (guards, *lasting) for parameter in one.parameters())
        gone = [parameter for parameter in self.parameters if id(parameter) not in current]
        self.parameters = [parameter for parameter in self.parameters if id(parameter) in current]
        return gone

    def _take_in(self, parameters: Any) -> None:
        known = {id(parameter) for parameter in self.parameters}
        self.parameters += [parameter for parameter in parameters if id(parameter) not in known]

    def _note_parallel(self, modules: Any) -> None:
        for one in modules:
            self.not_to_be_recorded = self.not_to_be_recorded or shared_otherwise(one) or compiled_around(one)
            if isinstance(one, nn.parallel.DistributedDataParallel):
                self._parallel[one] = None

    def kept_accumulators(self, guards: Any, renewed: bool) -> str | None:
        """Why no graph takes the place of the backward of a recorded call: somebody else's accumulators of gradients.

        Args:
            renewed: whether a capture makes others.
        """
        trained = [one for one in (*guards.parameters(), *self.parameters) if one.requires_grad]
        with torch.enable_grad():
            kept = any(map(on_accumulator, trained)) or (renewed and any(map(keeps_accumulators, trained)))
        return _KEPT_ACCUMULATOR if kept else None

    def device(self, leaves: list[Tensor]) -> torch.device | None:
        """A GPU that the callable or its arguments have tensors on, else the CPU; None where there is no tensor."""
        tensors = (*leaves, *self.parameters, *self._tensors)
        on_gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        return on_gpu or self._device or (torch.device("cpu") if tensors else None)

    def joins(self) -> bool:
        """Whether ranks may make calls a different number of times."""
        return any(map(joins, self._parallel))

    def reducers(self) -> dict[int, type]:
        """What averages the gradients of each DistributedDataParallel, as its class tells."""
        return {id(one): type(one) for one in self._parallel}

    def parallel(self) -> list[nn.parallel.DistributedDataParallel]:
        """Those whose gradients are averaged: it works on them, or runs inside the forward of one."""
        around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        return [*self._parallel, *(() if around is None else (around,))]

    def take_over(self) -> str | None:
        """Lets each DistributedDataParallel average gradients in a way that can be captured, from its next forward on.

        Returns:
            Why a replay would not average them: the callable works on one with settings that are not supported, or
            runs inside the forward of one that is not taken over yet. None where it would.
        """
        around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        reasons = [take_over_later(one, inside=True) for one in self._parallel]
        why = next(filter(None, reasons), None)
        if why is None and around is not None and not is_taken_over(around):
            why = take_over_later(around) or "a reducer that is replaced before its next forward"
        return why and f"it is trained with DistributedDataParallel with {why}"


def _modules_and_tensors_of(root: Callable) -> Iterator[nn.Module | Tensor]:
    """Those that a callable closes over, names or holds in attributes."""
    queue: list[tuple[Any, int]] = [(root, 0)]
    seen: set[int] = set()
    while queue and len(seen) < _MOST:
        value, depth = queue.pop(0)
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if _is(value, Tensor) or (_is(value, nn.Module) and not hasattr(type(value), "_reach_through")):
            yield value
        else:
            queue += [(item, depth + 1) for item in _held(value)]


def _is(value: Any, kind: type[T]) -> TypeGuard[T]:
    """Whether a value is one, or says so; a weak proxy of what is gone says nothing."""
    try:
        return isinstance(value, kind)
    except ReferenceError:
        return False


def _held(value: Any) -> Iterator[Any]:
    kind = type(value)  # and not what it says it is: below it is taken for what it is made of
    if issubclass(kind, (type, types.ModuleType, str, bytes, Tensor)):
        return
    if issubclass(kind, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif issubclass(kind, types.FunctionType):
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # still empty
                continue
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        if hasattr(value, "__wrapped__"):
            yield value.__wrapped__
    elif issubclass(kind, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif issubclass(kind, dict):
        yield from list(dict.values(value))[:_MOST]
    elif issubclass(kind, (list, tuple)):
        yield from (list if issubclass(kind, list) else tuple).__getitem__(value, slice(_MOST))
    else:
        try:
            yield from list(object.__getattribute__(value, "__dict__").values())
        except (AttributeError, TypeError):
            return
