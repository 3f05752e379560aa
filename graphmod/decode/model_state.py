"""Puts a training model into the state for decoding, and back."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

import torch
from torch import nn

from graphmod.models.exchange import STATIC, attention
from graphmod.wrap.layers import without_graphs

_training = operator.attrgetter("training")


@contextlib.contextmanager
def decoding(modules: list[nn.Module]) -> Iterator[None]:
    """Inference mode, evaluation mode of every module, none of the graphs of `graph_layers`, and SDPA with masks in the
    place of the attention of training, whose numbers it has; all restored after.

    Args:
        modules: all of the model's, which is the first. Walking them costs more than a decode step, so the caller keeps
            the list.
    """
    model, training = modules[0], list(filter(_training, modules))
    config = getattr(model, "config", None)
    attends = "sdpa" if getattr(config, "_attn_implementation", None) == STATIC else None
    for module in training:
        module.training = False
    try:
        with without_graphs(modules), attention(model, attends), torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
