"""One training iteration as a callable, from graphs of the layers, from one graph, or eagerly."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from graphmod.config import CompileMode, CUDAGraphConfig, choice
from graphmod.ranks.fully_shard import is_collected
from graphmod.step.entry import GraphStats
from graphmod.train.settings import Scope, train_settings
from graphmod.train.step.activations import recomputed_layers
from graphmod.train.step.compile import compile_layers, compiled
from graphmod.train.step.data_parallel import DataParallel, FullySharded, over_ranks
from graphmod.train.step.iteration import NONFINITE, Iteration
from graphmod.train.step.losses import CountTargets, count_targets_of, next_token_loss
from graphmod.train.step.parts import is_split, shards
from graphmod.train.step.per_layer import LayerGraphs
from graphmod.train.step.staging import Staging
from graphmod.train.step.update import CompiledUpdate
from graphmod.wrap.layers import find_layers, match_layers, ungraph
from graphmod.wrap.module import CUDAGraphModule

__all__ = ["TrainStep", "next_token_loss"]

log = logging.getLogger("graphmod")

_COMPILED_WARMUP = 3


def warmup_steps(config: CUDAGraphConfig, compile: str) -> int:
    """The steps of a `TrainStep` with these settings before it captures; in scope `none`, before it is settled.

    The first step compiles, the second the update, and only a later one is what a capture can be compared with.
    """
    return config.warmup_steps if compile == "none" else max(config.warmup_steps, _COMPILED_WARMUP)


@functools.cache  # of several steps around one model, the first says it
def _say_eager() -> None:
    log.warning(
        "graph=per_layer runs eagerly, because layers are sharded and split (parallel=fsdp_tp); "
        "graph=full_iteration captures the whole step"
    )


class TrainStep:
    """A whole training iteration; `step(batch)` returns its loss, the mean over all targets of its microbatches.

    The numbers are those of eager training in every scope; `config.scope` only says what runs from graphs.

    A batch is a tensor, or a dict, tuple, list or dataclass of tensors, nested as you like. The first dimension of each
    tensor is that of the microbatches; the loss function gets what is at one place of it, in the same form. Any other
    value in a batch is handed on as it is. Each new combination of shapes and dtypes is captured by itself.

    Args:
        model: the model to train, already on its device and in its dtype.
        optimizer: its optimizer, with `fused=True` (and `capturable=True` on a GPU) to be captured.
        loss_fn: `loss_fn(model, microbatch)` returns the 0-d loss of one microbatch, a mean. The default takes tokens,
            int64 (B, S + 1). If it has an argument `criterion` whose default is a plain function or module of tensors
            (logits, targets), `per_layer` hands it that in a graph.
        count_targets: `count_targets(microbatch)` returns how many targets that loss is the mean of, a 0-d tensor, on
            the device, such as `(batch["labels"] != -100).sum()`. With several microbatches, each loss and its gradient
            then weigh as many targets as it has, so that it does not matter how rows are cut into microbatches; one
            without targets weighs nothing. None takes the loss function's own attribute `count_targets`; without one,
            all microbatches weigh the same, which is right where each has as many targets.
        learning_rates: the learning rate of each step, kept on the device and read there, so that it changes inside a
            graph; steps beyond its end use the last one. The optimizer's own rate must then be a tensor. None leaves
            the optimizer's rate alone.
        max_grad_norm: clip the gradients to this total 2-norm; None does not clip.
        autocast_dtype: run forward and loss under autocast of this dtype; None does not.
        nonfinite: what a loss or gradient that is NaN or infinite does, decided on the device without asking the host:
            `skip` leaves this update out, `stop` leaves out this and all later ones (look at `first_nonfinite` at
            times), `ignore` does nothing.
        scale_loss: keep a loss scale as torch.amp.GradScaler does, on the device; for float16 autocast. An update
            whose scaled gradients overflow is left out.
        ema_decay: keep an exponential moving average of the weights in float32, this much of it at each step; None
            keeps none.
        compile: `default` or `max` compiles the layers (scope `per_layer`, or layers that run again in the backward) or
            forward and loss (else) with torch.compile before they are captured, and clipping with the step of Adam or
            AdamW in every scope; `none` does not. See `train/step/compile.py` and `train/step/update.py`.
        config: what to capture (`scope`); None means `TrainGraphConfig()`.
        process_group: train on all ranks of this group, each of which calls the step with batches of its own. All begin
            with the model of the first one; gradients and the loss that is returned are means over the targets of all
            ranks, as if their microbatches were those of one. A model that `fully_shard` was applied to is sharded over
            this group. None trains on this process alone, or on ranks that compute each batch together (tensor
            parallelism).

    Attributes:
        grad_norm: 0-d, the gradients' 2-norm of the last step before clipping; None without clipping or `nonfinite`.
        compile: as given.

    Raises:
        ValueError: `learning_rates` with an optimizer whose rate is a Python number, or `nonfinite` or `scale_loss`
            with one that is not fused and so cannot leave out an update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Callable[[nn.Module, Any], Tensor] = next_token_loss,
        count_targets: CountTargets | None = None,
        learning_rates: Sequence[float] | None = None,
        max_grad_norm: float | None = None,
        autocast_dtype: torch.dtype | None = None,
        nonfinite: str = "ignore",
        scale_loss: bool = False,
        ema_decay: float | None = None,
        compile: str = "none",
        config: CUDAGraphConfig | None = None,
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={nonfinite!r} is not known; choose one of: {', '.join(NONFINITE)}")
        if (nonfinite != "ignore" or scale_loss) and not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"nonfinite={nonfinite!r} and scale_loss need an optimizer that can skip an update without asking "
                f"the host, and this {type(optimizer).__name__} cannot; build AdamW, Adam or SGD with fused=True"
            )
        for group in optimizer.param_groups:
            if learning_rates is not None and not isinstance(group["lr"], Tensor):
                raise ValueError(
                    f"learning_rates needs an optimizer whose lr is a tensor, got {group['lr']!r}; build it with "
                    "lr=torch.tensor(..., device=...)"
                )
        compile = choice(CompileMode, compile, "compile").value
        self.model, self.optimizer = model, optimizer
        self.config, self.compile, self._split = train_settings(config), compile, is_split(model)
        if self._split and self.config.scope is Scope.per_layer:
            # An update on parts of parameters communicates, and finds gradients at other addresses in each step.
            whole = is_collected(model) or not shards(model)
            self.config = replace(self.config, optimizer=False, scope=Scope.per_layer if whole else Scope.none)
            if not whole:
                _say_eager()
        self._undo_compile: Callable[[], None] | None = None
        self._loss_fn = loss_fn
        count_targets = count_targets or count_targets_of(loss_fn)
        if compile != "none":
            loss_fn = self._compile(loss_fn, compile)
        self.grad_norm: Tensor | None = None
        captured = self.config.scope is not Scope.none
        self._parallel: DataParallel | FullySharded | None = over_ranks(model, process_group, captured)
        self._iteration = Iteration(
            model,
            optimizer,
            loss_fn=loss_fn,
            count_targets=count_targets,
            learning_rates=learning_rates,
            max_grad_norm=max_grad_norm,
            autocast_dtype=autocast_dtype,
            nonfinite=nonfinite,
            scale_loss=scale_loss,
            ema_decay=ema_decay,
            compiled_update=None if compile == "none" else CompiledUpdate(optimizer, compile),
            parallel=self._parallel,
        )
        self._stage = Staging(self._iteration.device)
        self._eager_steps = 0
        self._graphs: list[CUDAGraphModule] = []
        self._run, self._evaluate = self._iteration.run, self._iteration.evaluate
        if self.config.scope is Scope.full_iteration:
            self._run = CUDAGraphModule(self._run, self.config, name="train step")
            self._evaluate = CUDAGraphModule(self._evaluate, self.config, name="evaluation step")
            self._graphs = [self._run, self._evaluate]
        elif self.config.scope is Scope.per_layer:
            layers = LayerGraphs(self._iteration, self.config, self._layers())
            self._run, self._graphs = layers.run, layers.graphs

    def _compile(self, loss_fn: Callable, how: str) -> Callable:
        """Compiles what the scope captures; returns the loss function to use."""
        self.config = replace(self.config, warmup_steps=warmup_steps(self.config, how))
        device = next(self.model.parameters()).device
        again = recomputed_layers(self.model)
        # What collects the parameters of a layer is no code that could be compiled with it.
        if self.config.scope is not Scope.per_layer and not again and not self._split:
            return compiled(loss_fn, how, device, in_pieces=True)
        names = again if again and self.config.scope is not Scope.per_layer else self._layers()
        self._undo_compile = compile_layers(self.model, names, how, device)
        return loss_fn

    def _layers(self) -> list[str]:
        patterns = self.config.layers
        return find_layers(self.model) if patterns is None else match_layers(self.model, patterns)

    def __call__(self, batch: Any) -> Tensor:
        """Trains on `batch`, by default int64 of shape (A, B, S + 1) for A microbatches.

        Returns:
            The loss, 0-d, on the device; it stays valid.

        Raises:
            TypeError: the batch holds no tensors, or `count_targets` returned no 0-d tensor on the device.
            ValueError: its tensors disagree about the number of microbatches, or do not suit the loss function.
        """
        batch = self._stage(batch)
        self.grad_norm = None  # a result that is still held when its graph runs again is copied
        loss, self.grad_norm = self._run(batch)
        self._eager_steps += not self._graphs
        return loss

    def evaluate(self, batch: Any) -> Tensor:
        """The loss of `batch` in the same sense, 0-d, with the model in its present mode and no gradient."""
        return self._evaluate(self._stage(batch))

    @property
    def iteration(self) -> Iteration:
        """The arithmetic of a step; without graphs its parts are looked up at each call, and may be wrapped."""
        return self._iteration

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._iteration.device

    @property
    def learning_rate(self) -> Tensor | float:
        """The optimizer's present learning rate, that of its first parameter group."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def captures(self) -> int:
        """Graphs captured so far; cheaper to ask than `stats`."""
        return sum(graph._context.counters.captures for graph in self._graphs)

    @property
    def stats(self) -> GraphStats:
        """The counters of all graphs of this step."""
        if not self._graphs:
            return GraphStats(eager_calls=self._eager_steps)
        total = self._graphs[0].stats
        pools = {id(graph._context.group): graph.stats.pool_bytes for graph in self._graphs}
        for graph in self._graphs[1:]:
            total = total + graph.stats
        total.pool_bytes = sum(pools.values())
        return total

    @property
    def guarded(self) -> bool:
        """Whether steps that are not finite are noticed."""
        return self._iteration.guarded

    @property
    def first_nonfinite(self) -> Tensor:
        """int64 (1,) on the device: the first step, counted from 0, that was not finite; -1 when all were."""
        return self._iteration.first_bad

    @property
    def skipped(self) -> Tensor:
        """int64 (1,) on the device: the number of skipped updates."""
        return self._iteration.skipped

    @property
    def loss_scale(self) -> Tensor | None:
        """float32 () on the device, or None without `scale_loss`."""
        return self._iteration.scale

    @property
    def has_ema(self) -> bool:
        """Whether there are averaged weights."""
        return bool(self._iteration.ema)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Inside, the model has its averaged weights, at the addresses that graphs read; for evaluating and saving."""
        with self._iteration.ema_weights():
            yield

    def state_dict(self) -> dict:
        """Position in the schedule, loss scale, averaged weights; the optimizer has a state_dict of its own."""
        return self._iteration.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` gave, in place, so that graphs stay valid."""
        self._iteration.load_state_dict(state)

    def reset(self) -> None:
        """Frees the graphs and puts the model's layers back. The step then runs eagerly."""
        for graph in self._graphs:
            graph.reset()
        ungraph(self.model)
        if self._undo_compile is not None:
            self._undo_compile()
            self._undo_compile = None
        self._graphs = []
        if self.config.scope is Scope.per_layer:
            self._iteration.loss_fn = self._loss_fn
        self._run, self._evaluate = self._iteration.run, self._iteration.evaluate
        self._stage.clear()
