"""One training iteration as a callable: forward and backward of every microbatch, clipping, optimizer, schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphmod.config import CUDAGraphConfig


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy, in nats per token, of predicting `tokens[:, 1:]` from `tokens[:, :-1]`.

    Args:
        model: a causal LM whose output has `.logits` of shape (B, S, V).
        tokens: (B, S + 1) int64.
    """
    logits = model(input_ids=tokens[:, :-1]).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class _Stats:
    state: str = "eager"
    captures: int = 0
    replays: int = 0
    eager_calls: int = 0
    failures: int = 0
    capture_seconds: float = 0.0
    pool_bytes: int = 0
    copied_bytes: int = 0


class TrainStep:
    """A whole training iteration; `step(batch)` returns the mean loss of the microbatches.

    Args:
        model: the model to train, already on its device and in its dtype.
        optimizer: its optimizer. A learning rate that changes must be a tensor, so that a graph can read it.
        loss_fn: `loss_fn(model, tokens)` returns the 0-d loss of one microbatch.
        learning_rates: the learning rate of each step, kept on the device and read there; steps beyond its end use
            the last one. None leaves the optimizer's own rate alone.
        max_grad_norm: clip the gradients to this total 2-norm; None does not clip.
        autocast_dtype: run forward and loss under autocast of this dtype; None does not.
        config: what to capture (`scope`); None means `CUDAGraphConfig()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Callable[[nn.Module, Tensor], Tensor] = next_token_loss,
        learning_rates: Sequence[float] | None = None,
        max_grad_norm: float | None = None,
        autocast_dtype: torch.dtype | None = None,
        config: CUDAGraphConfig | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.loss_fn, self.max_grad_norm, self.autocast_dtype = loss_fn, max_grad_norm, autocast_dtype
        self.config = config or CUDAGraphConfig()
        self.device = next(model.parameters()).device
        self.grad_norm: Tensor | None = None
        self._rates = None
        if learning_rates is not None:
            self._rates = torch.tensor(list(learning_rates), dtype=torch.float32, device=self.device)
        self.stats = _Stats()
        self._position = torch.zeros(1, dtype=torch.int64, device=self.device)

    def __call__(self, batch: Tensor) -> Tensor:
        """Trains on `batch`, int64 of shape (A, B, S + 1) for A microbatches; returns a 0-d float32 loss."""
        self.stats.eager_calls += 1
        batch = batch.to(self.device, non_blocking=True)
        loss = None
        for tokens in batch:
            with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
                part = self.loss_fn(self.model, tokens) / len(batch)
            part.backward()
            loss = part.detach() if loss is None else loss + part.detach()
        if self._rates is not None:
            rate = self._rates[self._position.clamp(max=len(self._rates) - 1)].squeeze(0)
            for group in self.optimizer.param_groups:
                group["lr"].copy_(rate)
            self._position += 1
        if self.max_grad_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    @property
    def learning_rate(self) -> Tensor | float:
        return self.optimizer.param_groups[0]["lr"]

    def reset(self) -> None:
        pass

    @torch.no_grad()
    def evaluate(self, batch: Tensor) -> Tensor:
        """The mean loss on `batch`, (A, B, S + 1) int64, with the model in its present mode and no gradient."""
        batch = batch.to(self.device, non_blocking=True)
        return torch.stack([self.loss_fn(self.model, tokens) for tokens in batch]).mean()

    def state_dict(self) -> dict:
        return {"position": self._position.cpu()}

    def load_state_dict(self, state: dict) -> None:
        self._position.copy_(state["position"])
