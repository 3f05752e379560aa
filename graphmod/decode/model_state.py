"""Puts a training model into the state for decoding, and back."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterator
from itertools import repeat

import torch
from torch import nn

from graphmod.models.exchange import STATIC, attention
from graphmod.wrap.layers import without_graphs

_SWITCHES = ("_active_adapter", "_disable_adapters", "scaling")  # of a layer with adapters
_training = operator.attrgetter("training")


def _set(training: list[dict], value: bool) -> None:
    # In one call, which Ctrl-C cannot interrupt: some modules would stay in the other mode.
    deque(map(dict.update, training, repeat({"training": value})), maxlen=0)


@contextlib.contextmanager
def decoding(modules: list[nn.Module]) -> Iterator[None]:
    """Inference mode, evaluation mode of every module, none of the graphs of `graph_layers`, and SDPA with masks in the
    place of the attention of training, whose numbers it has; all restored after.

    Args:
        modules: all of the model's, which is the first. Walking them costs more than a decode step, so the caller keeps
            the list.
    """
    model, training = modules[0], [vars(module) for module in filter(_training, modules)]
    config = getattr(model, "config", None)
    attends = "sdpa" if getattr(config, "_attn_implementation", None) == STATIC else None
    try:
        _set(training, False)
        with without_graphs(modules), attention(model, attends), torch.inference_mode():
            yield
    finally:
        _set(training, True)


def weights_state(modules: list[nn.Module]) -> int:
    """A number that is another one after weights or modules were exchanged, or weights changed in place by an operation
    of PyTorch, or after adapters of peft were switched.

    Args:
        modules: as in `decoding`.
    """
    seen: list = []
    for module in modules:
        own = vars(module)
        seen += map(id, own["_modules"].values())
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                seen += tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
        if "_active_adapter" in own:
            seen += [str(own.get(name)) for name in _SWITCHES]
    return hash(tuple(seen))
