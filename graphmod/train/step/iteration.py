"""The arithmetic of one training iteration, the same in every scope.

Nothing here asks the device for a value: the position in the schedule, the loss scale, whether the step was finite
and what follows from that are tensors on the device, so that a graph can hold all of it.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.torch_private import foreach_add_, foreach_copy_, foreach_mul_, unscale_, update_scale_
from graphmod.train.step.data_parallel import DataParallel, FullySharded
from graphmod.train.step.losses import CountTargets, weighted_mean
from graphmod.train.step.parts import by_mesh, clip, local, total_norm
from graphmod.train.step.staging import microbatches
from graphmod.train.step.update import CompiledUpdate

NONFINITE = ("stop", "skip", "ignore")
# Those of torch.amp.GradScaler.
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
_NEVER = -1


class Iteration:
    """Forward, backward and update. The arguments are those of `TrainStep`.

    Attributes:
        position: int64 (1,), steps done.
        first_bad: int64 (1,), the first step, counted from 0, whose loss or gradient was not finite; -1 before it.
        skipped: int64 (1,), updates that did not happen.
        scale, growth: float32 and int32 (), the loss scale and the finite steps since it last changed; or None.
        ema: averaged weights in float32, in the order of `trained`; empty without averaging.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Callable[..., Tensor],
        count_targets: CountTargets | None,
        learning_rates: Sequence[float] | None,
        max_grad_norm: float | None,
        autocast_dtype: torch.dtype | None,
        nonfinite: str,
        scale_loss: bool,
        ema_decay: float | None,
        compiled_update: CompiledUpdate | None = None,
        parallel: DataParallel | FullySharded | None = None,
    ) -> None:
        self.compiled_update, self.parallel = compiled_update, parallel
        self.model, self.optimizer = model, optimizer
        self.loss_fn, self.count_targets = loss_fn, count_targets
        self.max_grad_norm, self.autocast_dtype = max_grad_norm, autocast_dtype
        self.nonfinite, self.ema_decay = nonfinite, ema_decay
        device = self.device = next(model.parameters()).device
        self.trained = [p for group in optimizer.param_groups for p in group["params"]]
        # In the order in which `clip_grad_norm_(model.parameters())` adds their squares up: the sum's last bit depends
        # on it, and the optimizer's groups have another.
        known = {id(p): p for p in self.trained}
        self._clipped = [known.pop(id(p)) for p in model.parameters() if id(p) in known] + [*known.values()]
        self.rates: Tensor | None = None
        if learning_rates is not None:
            self.rates = torch.tensor(list(learning_rates), dtype=torch.float32, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.guarded = nonfinite != "ignore" or scale_loss
        self.first_bad = torch.full((1,), _NEVER, dtype=torch.int64, device=device)
        self.skipped = torch.zeros(1, dtype=torch.int64, device=device)
        self.scale: Tensor | None = None
        self.growth: Tensor | None = None
        if scale_loss:
            self.scale = torch.tensor(_FIRST_SCALE, device=device)
            self.growth = torch.zeros((), dtype=torch.int32, device=device)
        if self.guarded:
            # Fused optimizers look at this 0-d flag on the device, and change nothing where it is 1.
            vars(optimizer).update(found_inf=torch.zeros((), device=device), grad_scale=None)
        else:
            # A flag that a guarded iteration left behind would go on blocking updates.
            for name in ("found_inf", "grad_scale"):
                optimizer.__dict__.pop(name, None)
        self.ema = [p.detach().float().clone() for p in self.trained] if ema_decay is not None else []

    def loss(self, microbatch: Any) -> Tensor:
        wanted = self.autocast_dtype is not None
        if not wanted and not torch.is_autocast_enabled(self.device.type):
            return self._loss(microbatch)
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=wanted):
            return self._loss(microbatch)

    def _loss(self, microbatch: Any) -> Tensor:
        if self.parallel is None or not torch.is_grad_enabled():
            return self.loss_fn(self.model, microbatch)
        return self.parallel(self.loss_fn, microbatch)

    def _counts(self, parts: list[Any]) -> Tensor | None:
        """(A,) the targets of each microbatch; None where all weigh the same."""
        if self.count_targets is None:
            return None
        counts = [self.count_targets(part) for part in parts]
        for count in counts:
            if not isinstance(count, Tensor) or count.dim() or count.device != self.device:
                got = f"{type(count).__name__} {count!r}"
                if isinstance(count, Tensor):
                    got = f"a tensor of shape {tuple(count.shape)} on {count.device}"
                raise TypeError(
                    f"count_targets returned {got}; expected a 0-d tensor on {self.device}, such as "
                    '(batch["labels"] != -100).sum()'
                )
        return torch.stack(counts)

    def differentiate(self, batch: Any) -> Tensor:
        """Forward and backward of every microbatch; the mean loss over all their targets, and those of all ranks."""
        parts = microbatches(batch)
        counts = self._counts(parts) if len(parts) > 1 or self.parallel is not None else None
        weights = None if counts is None else self._weights(counts)
        starts = weights if weights is None or self.scale is None else weights * self.scale
        losses = []
        for index, microbatch in enumerate(parts):
            with self._apart(index + 1 < len(parts)):
                loss, start = self.loss(microbatch), None
                if starts is not None:
                    start = starts[index].to(loss.dtype)
                elif len(parts) > 1:
                    loss = loss / len(parts)
                losses.append(loss.detach())
                # On this thread: to wake autograd's own costs more than a layer's backward does from its graph.
                with torch.autograd.set_multithreading_enabled(False):
                    (loss * self.scale if self.scale is not None and start is None else loss).backward(start)
            del loss  # else its autograd graph lives on through the next forward
        if self.parallel is not None:
            return self._mean_over_ranks(self.parallel, losses, counts, weights)
        return functools.reduce(operator.add, losses) if counts is None else weighted_mean(torch.stack(losses), counts)

    def _weights(self, counts: Tensor) -> Tensor:
        """(A,) the share of each microbatch in all targets, by which its loss is multiplied: where its backward starts
        from, so that it costs no operation on the loss. Of several ranks, whose gradients are averaged, all shares
        together are their number."""
        if self.parallel is None:
            return counts / counts.sum()
        return counts / (self.parallel.sum(counts.sum()) / self.parallel.ranks)

    def _apart(self, wanted: bool) -> AbstractContextManager:
        return nullcontext() if self.parallel is None else self.parallel.apart(wanted)

    @staticmethod
    def _mean_over_ranks(
        parallel: DataParallel | FullySharded, losses: list[Tensor], counts: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        # All ranks look at one loss to decide whether the update happens.
        if counts is None or weights is None:
            mine = functools.reduce(operator.add, losses)
        else:
            mine = (torch.where(counts > 0, torch.stack(losses), 0) * weights).sum()
        return parallel.sum(mine.clone()) / parallel.ranks

    def update(self, loss: Tensor | None = None) -> Tensor | None:
        """Learning rate, clipping and optimizer step; returns the gradients' 2-norm before clipping, if there is one.

        Args:
            loss: of the step, 0-d; looked at only by a guarded iteration, which needs it.
        """
        if self.rates is not None:
            rate = self.rates[self.position.clamp(max=len(self.rates) - 1)].squeeze(0)
            for group in self.optimizer.param_groups:
                group["lr"].copy_(rate)
        overflow = self._unscale(self.scale) if self.scale is not None else None
        norm = None
        compiled = self.compiled_update if self.compiled_update is not None and self.compiled_update.ready() else None
        if self.max_grad_norm is not None and compiled is None:
            norm = clip(self._clipped, self.max_grad_norm)
        elif self.max_grad_norm is not None or (self.guarded and overflow is None):
            norm = total_norm(self._clipped)
        if self.guarded:
            self._guard(loss, norm, overflow)
        self.position += 1
        if compiled is not None:
            compiled(norm, self.max_grad_norm)
        else:
            self.optimizer.step()
        if self.ema_decay is not None:
            with torch.no_grad():
                for averages, parameters in by_mesh(self.ema, self.trained):
                    foreach_mul_(averages, self.ema_decay)
                    foreach_add_(averages, parameters, alpha=1 - self.ema_decay)
        return norm

    def _unscale(self, scale: Tensor) -> Tensor:
        """Divides the gradients by the loss scale; a 0-d float32 that is 1 where one of them is not finite."""
        overflow = torch.zeros((), device=self.device)
        inverse = scale.double().reciprocal().float()
        for (grads,) in by_mesh(p.grad for p in self.trained if p.grad is not None):
            unscale_(grads, overflow, inverse)
        return overflow

    def _guard(self, loss: Tensor | None, norm: Tensor | None, overflow: Tensor | None) -> None:
        """Decides on the device whether the update happens, and notes the first step that was not finite."""
        # An overflow is how the right scale is found, and no fault of the run, until there is nothing to lower.
        assert loss is not None
        if overflow is None or self.scale is None or self.growth is None:
            assert norm is not None
            unfit = ~torch.isfinite(norm)
        else:
            unfit = (overflow > 0) & (self.scale < 1.0)
            update_scale_(self.scale, self.growth, overflow, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)
        bad = ~torch.isfinite(loss) | unfit
        blocked = bad if self.nonfinite != "ignore" else torch.zeros_like(bad)
        if overflow is not None:
            blocked = blocked | (overflow > 0)
        self.first_bad.copy_(torch.where((self.first_bad < 0) & bad, self.position, self.first_bad))
        if self.nonfinite == "stop":
            # The host hears of it at the next log point; until then the weights stay as they were before it.
            blocked = blocked | (self.first_bad >= 0).squeeze(0)
        self.optimizer.found_inf.copy_(blocked)  # pyrefly: ignore[missing-attribute] set above, as GradScaler does
        self.skipped += blocked

    def run(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        loss = self.differentiate(batch)
        norm = self.update(loss)
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        parts = microbatches(batch)
        losses = [self.loss(part) for part in parts]
        if self.parallel is not None:
            self.parallel.settle()
        if len(losses) == 1:
            return losses[0]
        counts = self._counts(parts)
        return torch.stack(losses).mean() if counts is None else weighted_mean(torch.stack(losses), counts)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Puts the averaged weights where the trained ones are, at the same addresses, and back again."""
        with torch.no_grad():
            kept = [p.detach().clone() for p in self.trained]
            self._put(self.ema)
            try:
                yield
            finally:
                self._put(kept)

    def _put(self, values: list[Tensor]) -> None:
        foreach_copy_([local(p) for p in self.trained], [local(value) for value in values])

    def state_dict(self) -> dict:
        """On the CPU; of averaged weights this rank's part."""
        parts = {"position": self.position, "first_bad": self.first_bad, "skipped": self.skipped}
        if self.scale is not None and self.growth is not None:
            parts |= {"scale": self.scale, "growth": self.growth}
        state: dict = {name: tensor.cpu().clone() for name, tensor in parts.items()}
        if self.ema:
            state["ema"] = [local(tensor).cpu().clone() for tensor in self.ema]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        for name in ("position", "first_bad", "skipped", "scale", "growth"):
            if name in state and getattr(self, name) is not None:
                getattr(self, name).copy_(state[name])
        for average, saved in zip(self.ema, state.get("ema", ()), strict=bool(self.ema) and "ema" in state):
            local(average).copy_(saved)
