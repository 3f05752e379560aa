"""Puts a training model into the state for decoding, and back; tells whether its weights have changed."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphmod.decode.interrupts import Held
from graphmod.models.exchange import STATIC, attention
from graphmod.wrap.layers import without_graphs

_SWITCHES = ("_active_adapter", "_disable_adapters", "scaling")  # of a layer with adapters
T = TypeVar("T")
_training = operator.attrgetter("training")


def _set(training: list[dict], value: bool) -> None:
    # In one call, which nothing can interrupt: some modules would stay in the other mode.
    deque(map(dict.update, training, repeat({"training": value})), maxlen=0)


def decoding(modules: list[nn.Module], act: Callable[..., T], *given: Any) -> T:
    """What `act(*given)` returns in inference mode, with every module in evaluation mode, without the graphs of
    `graph_layers`, and with SDPA with masks in the place of the attention of training, whose numbers it has.

    All is restored after, also where Ctrl-C comes at any moment: no context manager for a `with`, which it could leave
    half-way entered or left.

    Args:
        modules: all of the model's, which is the first. Walking them costs more than a decode step, so the caller keeps
            the list.
    """
    model, training = modules[0], [vars(module) for module in filter(_training, modules)]
    attends = "sdpa" if model.config._attn_implementation == STATIC else None
    with Held() as interrupts:
        try:
            _set(training, False)
            with without_graphs(modules), attention(model, attends), torch.inference_mode(), interrupts.heard():
                return act(*given)
        finally:
            _set(training, True)


class WeightsWatch:
    """Tells whether weights are others than when it looked last. An operation of PyTorch that changes them, an
    exchange, and a switch of adapters of peft are seen; what writes to memory past PyTorch, or into `data`, is not."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._storages: list[StorageWeakRef] = []

    def changed(self, modules: list[nn.Module]) -> bool:
        """Looks again.

        Args:
            modules: as in `decoding`.
        """
        now = _state(modules)
        # Memory of weights that are gone may have been given to those that came in their place.
        if now == self._seen and not any(storage.expired() for storage in self._storages):
            return False
        self._seen = now
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors(modules)]
        return True


def _tensors(modules: list[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        own = vars(module)
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                yield tensor


def _state(modules: list[nn.Module]) -> int:
    seen: list = []
    for module in modules:
        own = vars(module)
        seen += map(id, own["_modules"].values())
        if "_active_adapter" in own:
            seen += [str(own.get(name)) for name in _SWITCHES]
    for tensor in _tensors(modules):
        seen += tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    return hash(tuple(seen))
