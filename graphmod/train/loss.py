"""Losses of a microbatch, how many targets each is the mean of, and which tokens are targets.

The loss of a step is the mean over all targets of its microbatches. A microbatch's share in it must be known before its
backward, so targets are counted in the batch itself, on its device.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

IGNORED = -100

Criterion = Callable[..., Tensor]
Forward = Callable[..., Tensor]
CountTargets = Callable[[Any], Tensor]


def mean_cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Mean cross entropy in float32, in nats per token, of logits (B, S, V) over the targets (B, S) int64 that are not
    `ignore_index`; 0-d."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=ignore_index)


class OfRows(nn.Module):
    """A criterion of logits (B, S, V) and targets (B, S) from one of rows, (N, V) float32 and (N,) int64, such as
    `torch.nn.CrossEntropyLoss`."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(logits.float().flatten(0, 1), targets.flatten())


def transformers_logits(model: nn.Module, tokens: Tensor, **more: Any) -> Tensor:
    """(B, S, V), what a causal LM of transformers says to tokens (B, S), called without a key-value cache."""
    return model(input_ids=tokens, use_cache=False, **more).logits


def own_logits(model: nn.Module, tokens: Tensor, **more: Any) -> Tensor:
    """(B, S, V), what any other model returns for tokens (B, S): a tensor, or something that has it as `.logits`."""
    found = model(tokens.contiguous(), **more)  # which may be part of a row, and models call `view`
    return found if isinstance(found, Tensor) else found.logits


def targets_counted_by(count: CountTargets) -> Callable[[Callable], Callable]:
    """A decorator for a loss function: `count(microbatch)` is the number of targets whose mean its loss is, 0-d."""

    def decorate(loss_fn: Callable) -> Callable:
        vars(loss_fn)["count_targets"] = count
        return loss_fn

    return decorate


def count_targets_of(loss_fn: Callable) -> CountTargets | None:
    """The loss function's attribute `count_targets`, also of one inside `functools.partial`; None without one."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "count_targets", None)


def weighted_mean(losses: Tensor, counts: Tensor) -> Tensor:
    """The mean over all targets, 0-d, from means over parts of them; NaN where there are no targets at all.

    Args:
        losses: (N,) floating, each the mean over the targets of its part; what a part without targets has is not read.
        counts: (N,) the targets of each part, of the same device.
    """
    return (torch.where(counts > 0, losses, 0) * counts).sum() / counts.sum()


def require_tokens(tokens: Any) -> None:
    """Raises ValueError unless `tokens` are int64 of two dimensions."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype is not torch.int64:
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(
            f"this loss takes a microbatch of tokens, int64 of shape (sequences, tokens), got {got}; TrainStep's batch "
            "has one more dimension: (microbatches, sequences, tokens). For other batches give TrainStep a loss_fn"
        )


def next_token_loss(
    model: nn.Module, tokens: Tensor, criterion: Criterion = mean_cross_entropy, forward: Forward = transformers_logits
) -> Tensor:
    """Mean cross entropy, in nats per token, of predicting `tokens[:, 1:]` from `tokens[:, :-1]`.

    Every position is a target, so that microbatches of one batch have the same number of them.

    Args:
        model: a transformers causal LM, or what `forward` calls.
        tokens: (B, S + 1) int64.
        criterion: the loss of logits and targets.
        forward: from model and tokens to logits; `own_logits` for models that are not of transformers.

    Raises:
        ValueError: `tokens` have another dtype or number of dimensions.
    """
    require_tokens(tokens)
    return criterion(forward(model, tokens[:, :-1]), tokens[:, 1:])


@targets_counted_by(lambda batch: (batch["labels"][:, 1:] != IGNORED).sum())
def causal_lm_loss(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    criterion: Criterion = mean_cross_entropy,
    forward: Forward = transformers_logits,
) -> Tensor:
    """Mean cross entropy, in nats per token, of predicting the next label, for batches as transformers has them:
    `input_ids` and `labels`, (B, S) int64, where label t is predicted from the tokens before t, and -100 marks what
    is no target; anything else in it is handed to the model by name. The other arguments are those of
    `next_token_loss`."""
    more = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
    # The labels are shifted, because logits without their last position would have to be copied.
    targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return criterion(forward(model, batch.get("input_ids"), **more), targets)


def criterion_of(loss_fn: Callable) -> Criterion | None:
    """The default of the argument `criterion`, if it is a plain function or a module; else None."""
    try:
        argument = inspect.signature(loss_fn).parameters["criterion"]
    except (KeyError, TypeError, ValueError):  # no such argument, or nothing that could tell
        return None
    criterion = argument.default
    # A method or closure may reach the model, whose parameters would then count as used twice.
    plain = isinstance(criterion, types.FunctionType) and criterion.__closure__ is None
    if argument.kind is argument.POSITIONAL_ONLY or not (plain or isinstance(criterion, nn.Module)):
        return None
    return criterion


# -- tokens that are only read: prompts, what a user says, padding -----------------------------------------------------
# A token that is only read is kept as its bitwise complement, a negative number. Batches keep their shape and dtype
# then, whether anything is masked or not.

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
