"""The evaluation losses of a run: over the same held-out batches each time."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.step.entry import GraphStats
from graphmod.train.loss import count_targets_of, weighted_mean
from graphmod.train.run.ranks import ALONE, Ranks
from graphmod.train.step import TrainStep, microbatches, on_device

_COUNTERS = ("captures", "replays", "eager_calls", "failures", "capture_seconds", "copied_bytes", "verified")


class Evaluation:
    """Batches to evaluate on, how much each of them weighs, and what graphs do for it.

    Args:
        batches: on the host, as `TrainStep` takes them; all of them, of which each rank takes its part.
        loss_fn: the loss function of the run, with a `count_targets` unless each batch has as many targets.
        device: of the model.
        ranks: of the run.
    """

    def __init__(self, batches: list[Any], loss_fn: Callable, device: torch.device, ranks: Ranks = ALONE) -> None:
        self._step: TrainStep | None = None
        self._ranks, self._device, self._any = ranks, device, bool(batches)
        self._spent = dict.fromkeys(_COUNTERS, 0)
        # Each as many, because a rank with parts of the model only computes nothing alone; more than there are count
        # for nothing.
        self._counted = len(batches[ranks.data_rank :: ranks.data_ranks])
        rounds = -(-len(batches) // ranks.data_ranks)
        batches = [batches[(ranks.data_rank + index * ranks.data_ranks) % len(batches)] for index in range(rounds)]
        self._batches = [on_device(batch, device) for batch in batches]
        count, self._targets = count_targets_of(loss_fn), None
        if count is not None and batches:
            # Once and on the host: they are the same at every evaluation.
            targets = [torch.stack([count(part) for part in microbatches(batch)]).sum() for batch in batches]
            self._targets = torch.stack(targets).to(device)

    def __bool__(self) -> bool:
        return self._any

    def __call__(self, model: nn.Module, step: TrainStep) -> dict[str, Tensor]:
        """The mean loss over all targets, by tag, 0-d on the device; that of the averaged weights too, if there are
        any. The model is in training mode afterwards."""
        before = step.stats
        model.eval()
        try:
            losses = {"eval/loss": self._mean(step)}
            if step.has_ema:
                with step.ema_weights():
                    losses["eval/ema_loss"] = self._mean(step)
            return losses
        finally:
            model.train()
            self._note(step, before)

    def _note(self, step: TrainStep, before: GraphStats) -> None:
        if step is not self._step:  # `graph=auto` exchanged it, and its counters begin anew
            self._step, self._spent = step, dict.fromkeys(_COUNTERS, 0)
        after = step.stats
        for name in _COUNTERS:
            self._spent[name] += getattr(after, name) - getattr(before, name)

    def apart(self, step: TrainStep) -> tuple[dict[str, Any], dict[str, Any]]:
        """The counters of `step`, those of `GraphStats`, without what evaluations added, and what they added."""
        spent = self._spent if step is self._step else dict.fromkeys(_COUNTERS, 0)
        counters: dict[str, Any] = asdict(step.stats)
        for name, value in spent.items():
            counters[name] -= value
        return counters, spent

    def _mean(self, step: TrainStep) -> Tensor:
        losses = [step.evaluate(batch) for batch in self._batches]
        if self._ranks.data_ranks == 1:
            found = torch.stack(losses)
            return found.mean() if self._targets is None else weighted_mean(found, self._targets)
        total = torch.zeros(2, device=self._device)  # losses times targets, and targets, where there are any
        for index, loss in enumerate(losses[: self._counted]):
            targets = torch.ones_like(loss) if self._targets is None else self._targets[index].to(loss.dtype)
            total += torch.stack([torch.where(targets > 0, loss, 0) * targets, targets])
        weighted, targets = self._ranks.sum(total).unbind()
        return weighted / targets
