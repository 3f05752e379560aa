"""What a wrapped callable reaches, and the modes all of that is in now. Imports `reach`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.reach import Reach, reach

_training, _TRAINING = operator.attrgetter("training"), repeat("training")
_grad = operator.attrgetter("grad")

SWITCHES_MODE = "switches a module between train and eval mode, which no replay does; do it around the call"


class Surroundings:
    """Empty until `discover`.

    Attributes:
        known: whether it has been discovered.
        parameters: the parameters the callable may differentiate.
    """

    def __init__(self, root: nn.Module | Callable) -> None:
        self._root = root
        self._is_module = isinstance(root, nn.Module)
        self._found: Reach | None = None
        self._modules: list[nn.Module] = []
        self._attributes: list[dict[str, Any]] | None = []  # where their modes are; None where only they can tell
        self.parameters: list[Tensor] = []
        self._gradients_of: list[Tensor] = []

    @property
    def known(self) -> bool:
        return self._found is not None

    def discover(self) -> None:
        """Walks what the callable reaches."""
        found = self._found = reach(self._root)
        self._found_modules(found)
        self.parameters = list(self._root.parameters()) if self._is_module else found.parameters()
        # A callable that is no module may run a backward: which gradients are absent is part of its state.
        self._gradients_of = [] if self._is_module else self.parameters

    def device(self, leaves: list[Tensor]) -> torch.device | None:
        """A GPU that the callable or its arguments have tensors on, else the CPU; None where there is no tensor."""
        tensors = [*leaves, *self.parameters, *(tensor for _, _, tensor in self._found.slots)]
        cpu = torch.device("cpu") if tensors else None
        return next((tensor.device for tensor in tensors if tensor.is_cuda), cpu)

    def now(self, *objects: Any) -> Reach:
        """What the callable and `objects` reach now. A module whose tensors are all in place is not walked again."""
        if not self._is_module or objects or not self._found.in_place():
            self._found = reach(self._root, *objects)
            self._found_modules(self._found)
        return self._found

    def _found_modules(self, found: Reach) -> None:
        self._modules = found.modules
        self._attributes = list(map(vars, found.modules))
        if not all("training" in own for own in self._attributes) or any(
            hasattr(type(m), "training") for m in found.modules
        ):
            self._attributes = None  # scripted modules, and properties of that name

    def distributed(self) -> bool:
        """Whether the callable reaches DistributedDataParallel, or is called inside its forward."""
        kind = nn.parallel.DistributedDataParallel
        return kind._get_active_ddp_module() is not None or any(isinstance(module, kind) for module in self._modules)

    def training(self) -> bytes:
        """Train/eval mode of every module reached."""
        if self._attributes is None:
            return bytes(map(_training, self._modules))
        return bytes(map(operator.getitem, self._attributes, _TRAINING))

    def modes(self) -> bytes:
        """Train/eval mode of every module reached, and which gradients are absent where that matters."""
        training = self.training()
        if self._gradients_of:
            training += bytes(map(operator.is_, map(_grad, self._gradients_of), repeat(None)))
        return training
