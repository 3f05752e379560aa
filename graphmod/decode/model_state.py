"""Puts a training model into the state for decoding, and back. Imports torch, transformers' types and `layers`."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from graphmod.layers import without_graphs

_training = operator.attrgetter("training")


@contextlib.contextmanager
def decoding(model: PreTrainedModel) -> Iterator[None]:
    """Inference mode, evaluation mode of every module, and none of the graphs of `graph_layers`; all restored after."""
    training: list[nn.Module] = list(filter(_training, model.modules()))
    for module in training:
        module.training = False
    try:
        with without_graphs(model), torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
