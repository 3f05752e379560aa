"""One training iteration as a callable, from graphs of the layers, from one graph, or eagerly.

May import the core of graphmod, not the other parts of the training run.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from graphmod.buffers import mark_static
from graphmod.config import CUDAGraphConfig, Scope
from graphmod.layers import edge_modules, find_layers, graph_layers, match_layers, ungraph
from graphmod.lifecycle import GraphStats
from graphmod.module import CUDAGraphModule


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy, in nats per token, of predicting `tokens[:, 1:]` from `tokens[:, :-1]`.

    Args:
        model: a transformers causal LM, whose output has `.logits` of shape (B, S, V).
        tokens: (B, S + 1) int64.
    """
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class _Iteration:
    """The arithmetic of an iteration, the same in every scope."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[nn.Module, Tensor], Tensor],
        learning_rates: Sequence[float] | None,
        max_grad_norm: float | None,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.max_grad_norm, self.autocast_dtype = max_grad_norm, autocast_dtype
        self.device = next(model.parameters()).device
        self.trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.rates: Tensor | None = None
        if learning_rates is not None:
            self.rates = torch.tensor(list(learning_rates), dtype=torch.float32, device=self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)

    def loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return self.loss_fn(self.model, tokens)

    def differentiate(self, batch: Tensor) -> Tensor:
        """Forward and backward of every microbatch; the mean loss."""
        total = None
        for tokens in batch:
            part = self.loss(tokens)
            if len(batch) > 1:
                part = part / len(batch)
            part.backward()
            total = part.detach() if total is None else total + part.detach()
        return total

    def update(self) -> Tensor | None:
        """Learning rate, clipping and optimizer step; returns the gradients' 2-norm before clipping, if it clips."""
        if self.rates is not None:
            rate = self.rates[self.position.clamp(max=len(self.rates) - 1)].squeeze(0)
            for group in self.optimizer.param_groups:
                group["lr"].copy_(rate)
            self.position += 1
        norm = None
        if self.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.trained, self.max_grad_norm)
        self.optimizer.step()
        return norm

    def run(self, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = self.differentiate(batch)
        norm = self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    @torch.no_grad()
    def evaluate(self, batch: Tensor) -> Tensor:
        losses = [self.loss(tokens) for tokens in batch]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


class TrainStep:
    """A whole training iteration; `step(batch)` returns the mean loss of the microbatches.

    The numbers are those of eager training in every scope; `config.scope` only says what runs from graphs.

    Args:
        model: the model to train, already on its device and in its dtype.
        optimizer: its optimizer, with `fused=True` (and `capturable=True` on a GPU) to be captured.
        loss_fn: `loss_fn(model, tokens)` returns the 0-d loss of one microbatch.
        learning_rates: the learning rate of each step, kept on the device and read there, so that it changes inside a
            graph; steps beyond its end use the last one. The optimizer's own rate must then be a tensor. None leaves
            the optimizer's rate alone.
        max_grad_norm: clip the gradients to this total 2-norm; None does not clip.
        autocast_dtype: run forward and loss under autocast of this dtype; None does not.
        config: what to capture (`scope`); None means `CUDAGraphConfig()`.

    Attributes:
        grad_norm: 0-d, the gradients' 2-norm of the last step before clipping; None without clipping.

    Raises:
        ValueError: `learning_rates` with an optimizer whose rate is a Python number.
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
        for group in optimizer.param_groups:
            if learning_rates is not None and not isinstance(group["lr"], Tensor):
                raise ValueError(
                    f"learning_rates needs an optimizer whose lr is a tensor, got {group['lr']!r}; build it with "
                    "lr=torch.tensor(..., device=...)"
                )
        self.model, self.optimizer = model, optimizer
        self.config = config or CUDAGraphConfig()
        self.grad_norm: Tensor | None = None
        self._iteration = _Iteration(model, optimizer, loss_fn, learning_rates, max_grad_norm, autocast_dtype)
        self._inputs: dict[torch.Size, Tensor] = {}
        self._settled: dict[int, Tensor] = {}
        self._eager_steps = 0
        self._graphs: list[CUDAGraphModule] = []
        self._run, self._update, self._evaluate = self._iteration.run, None, self._iteration.evaluate
        if self.config.scope is Scope.full_iteration:
            self._run = CUDAGraphModule(self._run, self.config, name="train step")
            self._evaluate = CUDAGraphModule(self._evaluate, self.config, name="evaluation step")
            self._graphs = [self._run, self._evaluate]
        elif self.config.scope is Scope.per_layer:
            self._graph_layers()

    def _graph_layers(self) -> None:
        patterns = self.config.layers
        layers = find_layers(self.model) if patterns is None else match_layers(self.model, patterns)
        if self.config.optimizer:
            # The optimizer's graph reads every gradient by address, so every parameter's gradient must stay in place.
            layers = [*layers, *edge_modules(self.model, layers)]
        self._graphs = graph_layers(self.model, self.config, layers=layers)
        if self.config.optimizer:
            self._update = CUDAGraphModule(self._iteration.update, self.config, name="optimizer step")
            self._graphs = [*self._graphs, self._update]

    def __call__(self, batch: Tensor) -> Tensor:
        """Trains on `batch`, int64 of shape (A, B, S + 1) for A microbatches; returns a 0-d loss, which stays valid."""
        batch = self._stage(batch)
        self.grad_norm = None  # a result that is still held when its graph runs again is copied
        if self._update is not None:
            loss = self._iteration.differentiate(batch)
            self._settle_gradients()
            self.grad_norm = self._update()
            self.optimizer.zero_grad(set_to_none=True)
        else:
            loss, self.grad_norm = self._run(batch)
        self._eager_steps += not self._graphs
        return loss

    def evaluate(self, batch: Tensor) -> Tensor:
        """The mean loss on `batch`, (A, B, S + 1) int64, with the model in its present mode and no gradient; 0-d."""
        return self._evaluate(self._stage(batch))

    def _stage(self, batch: Tensor) -> Tensor:
        """Brings a batch to a fixed address on the device, without waiting for the step that still runs."""
        if batch.dim() != 3 or batch.dtype is not torch.int64:
            raise ValueError(
                f"a batch must be int64 of shape (microbatches, sequences, tokens), got {batch.dtype} of shape "
                f"{tuple(batch.shape)}"
            )
        target = self._inputs.get(batch.shape)
        if target is None:
            target = mark_static(torch.empty(batch.shape, dtype=batch.dtype, device=self._iteration.device))
            self._inputs[batch.shape] = target
        if target.is_cuda and not batch.is_cuda and not batch.is_pinned():
            batch = batch.pin_memory()
        target.copy_(batch, non_blocking=True)
        return target

    def _settle_gradients(self) -> None:
        """Moves gradients that autograd put at a new address (of tied weights) to where the optimizer's graph reads."""
        for key, parameter in self._graphs[0]._group.shared.items():
            if parameter.grad is not None:
                settled = self._settled.get(key)
                if settled is None:
                    settled = self._settled[key] = torch.empty_like(parameter, requires_grad=False)
                settled.copy_(parameter.grad)
                parameter.grad = settled

    @property
    def learning_rate(self) -> Tensor | float:
        """The optimizer's present learning rate, that of its first parameter group."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def stats(self) -> GraphStats:
        """The counters of all graphs of this step."""
        if not self._graphs:
            return GraphStats(eager_calls=self._eager_steps)
        total = self._graphs[0].stats
        pools = {id(graph._group): graph.stats.pool_bytes for graph in self._graphs}
        for graph in self._graphs[1:]:
            total = total + graph.stats
        total.pool_bytes = sum(pools.values())
        return total

    def state_dict(self) -> dict:
        """The position in the learning-rate schedule; the optimizer has a state_dict of its own."""
        return {"position": self._iteration.position.cpu()}

    def load_state_dict(self, state: dict) -> None:
        self._iteration.position.copy_(state["position"])

    def reset(self) -> None:
        """Frees the graphs and puts the model's layers back. The step then runs eagerly."""
        for graph in self._graphs:
            graph.reset()
        ungraph(self.model)
        self._graphs = []
        self._run, self._update, self._evaluate = self._iteration.run, None, self._iteration.evaluate
        self._inputs.clear()
