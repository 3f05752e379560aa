"""Which tokens are trained on, and which are only read: prompts, what a user says, padding.

A token that is only read is kept as its bitwise complement, a negative number. Batches keep their shape and dtype
then, whether anything is masked or not.
"""

import numpy as np
import torch
from torch import Tensor

from graphmod.train.step.losses import IGNORED

PADDING = ~0


def masked(tokens: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """`tokens`, (N,) of a signed dtype, with the complement of those for which `trained`, (N,) bool, is False."""
    return np.where(trained, tokens, ~tokens)


def inputs_of(tokens: Tensor) -> Tensor:
    """The tokens a model reads, of the shape and dtype of `tokens`; padding becomes token 0."""
    return torch.where(tokens < 0, ~tokens, tokens)


def targets_of(tokens: Tensor) -> Tensor:
    """The tokens a model is trained to predict, of the shape and dtype of `tokens`, with `IGNORED` for the others."""
    return torch.where(tokens < 0, IGNORED, tokens)


def has_masks(tokens: Tensor) -> bool:
    """Whether any of `tokens`, (N,) of any integer dtype, is only read."""
    return tokens.dtype.is_signed and len(tokens) > 0 and bool(tokens.min() < 0)
