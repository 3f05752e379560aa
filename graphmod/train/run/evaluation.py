"""The evaluation losses of a run: over the same held-out batches each time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from graphmod.train.step.losses import count_targets_of, weighted_mean
from graphmod.train.step.staging import microbatches
from graphmod.train.step.step import TrainStep


class Evaluation:
    """Batches to evaluate on, and how much each of them weighs.

    Args:
        batches: on the host, as `TrainStep` takes them.
        loss_fn: the loss function of the run, with a `count_targets` unless each batch has as many targets.
        device: of the model.
    """

    def __init__(self, batches: list[Tensor], loss_fn: Callable, device: torch.device) -> None:
        self._batches = [batch.to(device) for batch in batches]
        count, self._targets = count_targets_of(loss_fn), None
        if count is not None and batches:
            # Once and on the host: they are the same at every evaluation.
            targets = [torch.stack([count(part) for part in microbatches(batch)]).sum() for batch in batches]
            self._targets = torch.stack(targets).to(device)

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __call__(self, model: nn.Module, step: TrainStep) -> dict[str, Tensor]:
        """The mean loss over all targets, by tag, 0-d on the device; that of the averaged weights too, if there are
        any. The model is in training mode afterwards."""
        model.eval()
        try:
            losses = {"eval/loss": self._mean(step)}
            if step.has_ema:
                with step.ema_weights():
                    losses["eval/ema_loss"] = self._mean(step)
            return losses
        finally:
            model.train()

    def _mean(self, step: TrainStep) -> Tensor:
        losses = torch.stack([step.evaluate(batch) for batch in self._batches])
        return losses.mean() if self._targets is None else weighted_mean(losses, self._targets)
