"""Puts a training model into the state for decoding, and back."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

import torch
from torch import nn

from graphmod.wrap.layers import without_graphs

_training = operator.attrgetter("training")


@contextlib.contextmanager
def decoding(modules: list[nn.Module]) -> Iterator[None]:
    """Inference mode, evaluation mode of every module, and none of the graphs of `graph_layers`; all restored after.

    Args:
        modules: all of the model's. Walking them costs more than a decode step, so the caller keeps the list.
    """
    training = list(filter(_training, modules))
    for module in training:
        module.training = False
    try:
        with without_graphs(modules), torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
