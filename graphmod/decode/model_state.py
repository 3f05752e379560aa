"""Puts a training model into the state for decoding, and back; tells whether it has changed."""

from __future__ import annotations

import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from graphmod.attention import STATIC, attention
from graphmod.config import CUDAGraphConfig, Verify
from graphmod.decode.interrupts import Held
from graphmod.wrap.extension import HOOKS, Reads, with_memory
from graphmod.wrap.layers import without_graphs
from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")

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
    model: Any = modules[0]
    training = [vars(module) for module in filter(_training, modules)]
    attends = "sdpa" if model.config._attn_implementation == STATIC else None
    with Held() as interrupts:
        try:
            _set(training, False)
            with without_graphs(modules), attention(model, attends), torch.inference_mode(), interrupts.heard():
                return act(*given)
        finally:
            _set(training, True)


class WeightsWatch:
    """Tells at a glance whether weights, or who is called, are others than when it looked last. An operation of PyTorch
    that changes them, an exchange, hooks and a switch of adapters of peft are seen; what writes to memory past PyTorch,
    or into `data`, is not: `ModelWatch` sees that."""

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
        seen += [id(hook) for kind in HOOKS if own[kind] for hook in own[kind].values()]
        if "_active_adapter" in own:
            seen += [str(own.get(name)) for name in _SWITCHES]
    for tensor in _tensors(modules):
        seen += tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    return hash(tuple(seen))


class ModelWatch:
    """Tells whether a model computes something else than it did: by the guards of graphs, which compare what its code
    reads, and by the contents of its tensors, which no count of changes tells where something writes to their memory.

    Its methods are called in the state for decoding.

    Args:
        model: to watch. Its forward is called on two tokens, to see what it reads.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._reads: Reads | None = None
        self._tensors: list[Tensor] = []
        self._together: list[Tensor] = []  # those of one device, of which numbers are to be computed
        self._contents: list[Tensor] = []
        self._unknown = False
        self._numbers: Callable[[Tensor], Tensor] = self._compute
        if model.device.type == "cuda":  # some ten launches a tensor, and a request waits for them
            settings = CUDAGraphConfig(warmup_steps=1, verify=Verify.off)
            self._numbers = CUDAGraphModule(self._compute, settings, name="contents of weights")

    def take(self, modules: list[nn.Module]) -> None:
        """What it computes now is what `changed` compares with. Does not wait for the device."""
        if self._reads is None or self._reads.changed() is not None:
            self._read()
        if self._reads is None:  # `changed` will say so whatever the tensors hold
            return
        found = {id(one): one for one in (*_tensors(modules), *self._reads.tensors)}
        self._tensors = with_memory(found.values())
        self._contents = self._now()

    def changed(self) -> bool:
        """Whether it computes something else, or that cannot be known."""
        if self._reads is None or self._reads.changed() is not None:
            return True
        now = self._now()
        return not now or not all(map(torch.equal, now, self._contents))

    def _read(self) -> None:
        """Looks at what the forward reads."""
        self._reads = None
        if self._unknown:
            return
        model = self._model
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)

        def forward(tokens: Tensor) -> Tensor:
            return model(input_ids=tokens, use_cache=False).logits

        try:
            self._reads = Reads(forward, (tokens,), model.device, model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a model's own code: anything
            self._unknown = True
            log.info("beginnings of prompts are forgotten when a request comes, for the model's forward %s", error)

    def _now(self) -> list[Tensor]:
        """A number for the contents of each tensor, those of one device together; none where there is a kind of tensor
        whose bytes cannot be read."""
        found: dict[torch.device, list[Tensor]] = {}
        for tensor in self._tensors:
            found.setdefault(tensor.device, []).append(tensor)
        numbers = []
        try:
            for self._together in found.values():
                start = torch.zeros((), dtype=torch.int64, device=self._together[0].device)
                compute = self._numbers if len(found) == 1 else self._compute
                numbers.append(compute(start).clone())
        except RuntimeError:
            return []
        return numbers

    def _compute(self, start: Tensor) -> Tensor:
        return torch.stack([number_of(tensor) for tensor in self._together]) + start


_ODD = 0x9E3779B97F4A7C15 - 2**64


def number_of(tensor: Tensor) -> Tensor:
    """() int64: of the bytes of a tensor, by the sums of its rows and of its columns, so that an exchange of either is
    seen. Reads the memory twice."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = len(raw) // 8 * 8
    words = raw[:whole].view(torch.int64)  # another type would be copied to be summed up
    size = (tensor.shape[-1] if tensor.dim() > 1 else 0) * tensor.element_size()
    columns = size // 8 if size and size % 8 == 0 else max(1, math.isqrt(len(words)))
    rows = len(words) // columns
    table, rest = words[: rows * columns].view(rows, columns), words[rows * columns :]
    sums = torch.cat((table.sum(1), table.sum(0), rest))
    places = (2 * torch.arange(len(sums), device=raw.device) + 1) * _ODD
    return (sums * places).sum() + raw[whole:].sum()
