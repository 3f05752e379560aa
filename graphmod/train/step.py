"""One training iteration as a callable, from graphs of the layers, from one graph, or eagerly."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from graphmod.config import CompileMode, CUDAGraphConfig, choice, settings
from graphmod.ranks.fully_shard import is_collected
from graphmod.signature.flattening import flatten, rebuild
from graphmod.step.entry import GraphStats
from graphmod.step.static_inputs import mark_static
from graphmod.torch_private import foreach_add_, foreach_copy_, foreach_mul_, unscale_, update_scale_
from graphmod.train.experts import experts_of
from graphmod.train.loss import CountTargets, count_targets_of, criterion_of, next_token_loss, weighted_mean
from graphmod.train.parallel import OverRanks, by_mesh, clip, is_split, local, over_ranks, shards, total_norm
from graphmod.train.settings import NonFinite, Scope, TrainGraphConfig
from graphmod.words import warn_once
from graphmod.wrap.body import body_of
from graphmod.wrap.layers import edge_modules, find_layers, match_layers, ungraph, wrap
from graphmod.wrap.module import CUDAGraphModule

if TYPE_CHECKING:
    from graphmod.train.compile import CompiledUpdate

# -- batches of any form: brought to fixed addresses on the device, and cut into microbatches --------------------------


def _leaves(batch: Any) -> tuple[Any, list[Tensor]]:
    leaves: list[Tensor] = []
    return flatten(batch, leaves, {}), leaves


def microbatches(batch: Any) -> list[Any]:
    """The microbatches of a batch: of its form, with what each tensor has at one place of its first dimension."""
    if isinstance(batch, Tensor):
        return list(batch.unbind(0))
    structure, leaves = _leaves(batch)
    return [rebuild(structure, list(parts)) for parts in zip(*[leaf.unbind(0) for leaf in leaves], strict=True)]


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch of the same form with its tensors on `device`."""
    structure, leaves = _leaves(batch)
    return rebuild(structure, [leaf.to(device) for leaf in leaves])


def pinned(batch: Any) -> Any:
    """A batch of the same form with its tensors in pinned memory."""
    structure, leaves = _leaves(batch)
    return rebuild(structure, [leaf.pin_memory() for leaf in leaves])


def shapes(batch: Any) -> tuple[Any, ...]:
    """The form of a batch and the shapes of its tensors, to be compared."""
    structure, leaves = _leaves(batch)
    return structure, *(leaf.shape for leaf in leaves)


def _shown(found: Any) -> str:
    """What a function of the user returned, as errors name it."""
    if isinstance(found, Tensor):
        return f"a tensor of shape {tuple(found.shape)} on {found.device}"
    return f"{type(found).__name__} {found!r:.80}"


def _check(batch: Any, leaves: list[Tensor]) -> None:
    if not leaves:
        raise TypeError(
            f"a batch must be a tensor, or a dict, list, tuple or dataclass of tensors, got {type(batch).__name__} "
            "without tensors; of a transformers BatchEncoding pass dict(batch)"
        )
    for leaf in leaves:
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise ValueError(f"a batch must hold dense tensors, got one of layout {leaf.layout}; pad it to one shape")
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if len({shape[:1] for shape in shapes}) > 1 or not all(shape and shape[0] for shape in shapes):
        raise ValueError(
            "the first dimension of every tensor in a batch must be the number of microbatches, at least one, got the "
            f"shapes {', '.join(map(str, shapes))}; for a single microbatch add it with unsqueeze(0)"
        )


class Staging:
    """A fixed place on the device for the batches of each form and shape."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[Any, list[Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        """A batch of the same form at its place, without waiting for the step that still runs; what it holds beside
        tensors stays as it is. Raises TypeError where it holds no tensors, and ValueError where its tensors disagree
        about the number of microbatches, or are not dense."""
        if type(batch) is Tensor:  # most batches, of which to find the form would take longer than the copy
            places = self._places.get((batch.shape, batch.dtype))
            return self._load(batch, places[0] if places else self._made(batch, [batch], (batch.shape, batch.dtype))[0])
        structure, leaves = _leaves(batch)
        key = structure, *[(leaf.shape, leaf.dtype) for leaf in leaves]
        places = self._places.get(key) or self._made(batch, leaves, key)
        return rebuild(structure, [self._load(leaf, place) for leaf, place in zip(leaves, places, strict=True)])

    def _made(self, batch: Any, leaves: list[Tensor], key: Any) -> list[Tensor]:
        _check(batch, leaves)
        places = [mark_static(torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)) for leaf in leaves]
        self._places[key] = places
        return places

    @staticmethod
    def _load(leaf: Tensor, place: Tensor) -> Tensor:
        if place.is_cuda and not leaf.is_cuda and not leaf.is_pinned():
            leaf = leaf.pin_memory()
        place.copy_(leaf.detach() if leaf.requires_grad else leaf, non_blocking=True)
        return place

    def clear(self) -> None:
        """Forgets all places; graphs that read them must be gone."""
        self._places.clear()


# -- the arithmetic of one iteration, the same in every scope ----------------------------------------------------------
# Nothing here asks the device for a value: the position in the schedule, the loss scale, whether the step was finite
# and what follows from that are tensors on the device, so that a graph can hold all of it.

# Those of torch.amp.GradScaler.
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
_NEVER = -1


@dataclass(eq=False, repr=False)
class Iteration:
    """Forward, backward and update. The arguments are those of `TrainStep`.

    Attributes:
        position: int64 (1,), steps done.
        first_bad: int64 (1,), the first step, counted from 0, whose loss or gradient was not finite; -1 before it.
        skipped: int64 (1,), updates that did not happen.
        scale, growth: float32 and int32 (), the loss scale and the finite steps since it last changed; or None.
        ema: averaged weights in float32, in the order of `trained`; empty without averaging.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[..., Tensor]
    count_targets: CountTargets | None
    learning_rates: InitVar[Sequence[float] | None]
    max_grad_norm: float | None
    autocast_dtype: torch.dtype | None
    nonfinite: str
    scale_loss: InitVar[bool]
    ema_decay: float | None
    compiled_update: "CompiledUpdate | None"
    parallel: OverRanks | None

    def __post_init__(self, learning_rates: Sequence[float] | None, scale_loss: bool) -> None:
        device = self.device = next(self.model.parameters()).device
        self.trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        # In the order in which `clip_grad_norm_(model.parameters())` adds their squares up: the sum's last bit depends
        # on it, and the optimizer's groups have another.
        known = {id(p): p for p in self.trained}
        self._clipped = [known.pop(id(p)) for p in self.model.parameters() if id(p) in known] + [*known.values()]
        self.rates: Tensor | None = None
        if learning_rates is not None:
            self.rates = torch.tensor(list(learning_rates), dtype=torch.float32, device=device)
        self.experts = None if self.parallel is None else self.parallel.experts
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.guarded = self.nonfinite != "ignore" or scale_loss or self.experts is not None
        self.first_bad = torch.full((1,), _NEVER, dtype=torch.int64, device=device)
        self.skipped = torch.zeros(1, dtype=torch.int64, device=device)
        self.scale: Tensor | None = None
        self.growth: Tensor | None = None
        if scale_loss:
            self.scale = torch.tensor(_FIRST_SCALE, device=device)
            self.growth = torch.zeros((), dtype=torch.int32, device=device)
        if self.guarded:
            # Fused optimizers look at this 0-d flag on the device, and change nothing where it is 1.
            vars(self.optimizer).update(found_inf=torch.zeros((), device=device), grad_scale=None)
        else:
            # A flag that a guarded iteration left behind would go on blocking updates.
            for name in ("found_inf", "grad_scale"):
                self.optimizer.__dict__.pop(name, None)
        self.ema = [p.detach().float().clone() for p in self.trained] if self.ema_decay is not None else []

    def loss(self, microbatch: Any) -> Tensor:
        wanted = self.autocast_dtype is not None
        if not wanted and not torch.is_autocast_enabled(self.device.type):
            return self._loss(microbatch)
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=wanted):
            return self._loss(microbatch)

    def _loss(self, microbatch: Any) -> Tensor:
        if self.parallel is None or not torch.is_grad_enabled():
            loss = self.loss_fn(self.model, microbatch)
        else:
            loss = self.parallel(self.loss_fn, microbatch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"loss_fn returned {_shown(loss)}; expected the mean over the targets of a microbatch, a 0-d tensor, "
                'such as cross_entropy(logits, labels) with reduction="mean"'
            )
        return loss.reshape(()) if loss.dim() else loss

    def _counts(self, parts: list[Any]) -> Tensor | None:
        """(A,) the targets of each microbatch; None where all weigh the same."""
        if self.count_targets is None:
            return None
        counts = [self.count_targets(part) for part in parts]
        for count in counts:
            if not isinstance(count, Tensor) or count.dim() or count.device != self.device:
                raise TypeError(
                    f"count_targets returned {_shown(count)}; expected a 0-d tensor on {self.device}, such as "
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
            with nullcontext() if self.parallel is None or index + 1 == len(parts) else self.parallel.apart():
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
        if self.experts is not None:
            self.experts.agree()
        if self.parallel is None and counts is not None:
            return weighted_mean(torch.stack(losses), counts)
        if self.parallel is None:
            return functools.reduce(operator.add, losses)
        # All ranks look at one loss to decide whether the update happens.
        if counts is None or weights is None:
            mine = functools.reduce(operator.add, losses)
        else:
            mine = (torch.where(counts > 0, torch.stack(losses), 0) * weights).sum()
        return self.parallel.sum(mine.clone()) / self.parallel.ranks

    def _weights(self, counts: Tensor) -> Tensor:
        """(A,) the share of each microbatch in all targets, by which its loss is multiplied: where its backward starts
        from, so that it costs no operation on the loss. Of several ranks, whose gradients are averaged, all shares
        together are their number."""
        if self.parallel is None:
            return counts / counts.sum()
        return counts / (self.parallel.sum(counts.sum()) / self.parallel.ranks)

    def update(self, loss: Tensor | None = None) -> Tensor | None:
        """Learning rate, clipping and optimizer step; returns the gradients' 2-norm before clipping, if there is one.

        Args:
            loss: of the step, 0-d; looked at only by a guarded iteration, which needs it.
        """
        held, before = None, []
        if self.experts is not None:  # where tokens were left out, nothing may change
            held, counters = self.experts.held, (self.position, self.first_bad, self.skipped, self.scale, self.growth)
            before = [(tensor, tensor.clone()) for tensor in counters if tensor is not None]
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
            self._guard(loss, norm, overflow, held)
        self.position += 1
        if compiled is not None:
            compiled(norm, self.max_grad_norm)
        else:
            self.optimizer.step()
        if self.ema_decay is not None:
            self._average(self.ema_decay, held)
        if held is not None:
            for tensor, value in before:
                tensor.copy_(torch.where(held, value, tensor))
        return norm

    @torch.no_grad()
    def _average(self, decay: float, held: Tensor | None) -> None:
        if held is None:
            for averages, parameters in by_mesh(self.ema, self.trained):
                foreach_mul_(averages, decay)
                foreach_add_(averages, parameters, alpha=1 - decay)
            return
        for average, parameter in zip(map(local, self.ema), map(local, self.trained), strict=True):
            average.copy_(torch.where(held, average, (average * decay).add_(parameter, alpha=1 - decay)))

    def _unscale(self, scale: Tensor) -> Tensor:
        """Divides the gradients by the loss scale; a 0-d float32 that is 1 where one of them is not finite."""
        overflow = torch.zeros((), device=self.device)
        inverse = scale.double().reciprocal().float()
        for (grads,) in by_mesh(p.grad for p in self.trained if p.grad is not None):
            unscale_(grads, overflow, inverse)
        return overflow

    def _guard(self, loss: Tensor | None, norm: Tensor | None, overflow: Tensor | None, held: Tensor | None) -> None:
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
        if held is not None:
            blocked = blocked | held
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
        if self.experts is not None:
            self.experts.agree()
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


# -- an iteration from graphs of its own for each layer, for the loss and for the update -------------------------------


class LayerGraphs:
    """The graphs of an iteration in scope `per_layer`, those of the model first. With `config.optimizer` what lies
    beside the layers is captured too, the criterion of the loss function, where it has one, and the update."""

    def __init__(self, iteration: Iteration, config: TrainGraphConfig, layers: list[str]) -> None:
        self._iteration, self._update = iteration, None
        self._settled: dict[int, Tensor] = {}
        model, body = iteration.model, None
        if config.body and config.layers is None:
            body = body_of(model, layers)
        if config.optimizer:
            # The optimizer's graph reads every gradient by address, so every parameter's gradient must stay in place.
            layers = [*layers, *edge_modules(model, layers)]
        self.graphs: list[CUDAGraphModule] = wrap(model, config, match_layers(model, layers), body)
        self._groups = list({id(graph._context.group): graph._context.group for graph in self.graphs}.values())
        if config.optimizer:
            self._graph_criterion(config)
            self._update = CUDAGraphModule(iteration.update, config, name="optimizer step")
            self.graphs = [*self.graphs, self._update]

    def _graph_criterion(self, config: TrainGraphConfig) -> None:
        """Puts the loss of the logits beside the head, whose results it then reads where they are."""
        criterion = criterion_of(self._iteration.loss_fn)
        if criterion is None:
            return
        # The caller keeps losses, and a copy of one number costs less than to look for those that are still held.
        config = replace(config, clone_outputs=True)
        graphed = CUDAGraphModule(criterion, config, name="loss", group=self.graphs[-1]._context.group)
        self._iteration.loss_fn = functools.partial(self._iteration.loss_fn, criterion=graphed)
        self.graphs = [*self.graphs, graphed]

    def run(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """As `Iteration.run`."""
        if self._update is None:
            return self._iteration.run(batch)
        loss = self._iteration.differentiate(batch)
        self._settle_gradients()
        norm = self._update(loss) if self._iteration.guarded else self._update()
        self._iteration.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _settle_gradients(self) -> None:
        """Moves gradients that autograd put at a new address (of tied weights) to where the optimizer's graph reads."""
        for key, parameter in itertools.chain.from_iterable(group.shared.items() for group in self._groups):
            if parameter.grad is not None:
                settled = self._settled.get(key)
                if settled is None:
                    settled = self._settled[key] = torch.empty_like(parameter, requires_grad=False)
                settled.copy_(parameter.grad)
                parameter.grad = settled


# -- the step ----------------------------------------------------------------------------------------------------------

__all__ = ["TrainStep", "next_token_loss"]

_COMPILED_WARMUP = 3


def warmup_steps(config: CUDAGraphConfig, compile: str) -> int:
    """The steps of a `TrainStep` with these settings before it captures; in scope `none`, before it is settled.

    The first step compiles, the second the update, and only a later one is what a capture can be compared with.
    """
    return config.warmup_steps if compile == "none" else max(config.warmup_steps, _COMPILED_WARMUP)


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
            AdamW in every scope; `none` does not. See `train/compile.py`.
        config: what to capture (`scope`); None means `TrainGraphConfig()`.
        process_group: train on all ranks of this group, each of which calls the step with batches of its own. All begin
            with the model of the first one; gradients and the loss that is returned are means over the targets of all
            ranks, as if their microbatches were those of one. A model that `fully_shard` was applied to is sharded over
            this group, and the experts of one that `split_experts` was applied to are split over it. None trains on
            this process alone, or on ranks that compute each batch together (tensor parallelism).

    Attributes:
        grad_norm: 0-d, the gradients' 2-norm of the last step before clipping; None without clipping or `nonfinite`.
        compile: as given.
        device: where the model is.
        guarded: whether steps that are not finite are noticed.
        first_nonfinite: int64 (1,) on the device: the first step, counted from 0, that was not finite; -1 when all
            were.
        skipped: int64 (1,) on the device: the number of skipped updates.
        loss_scale: float32 () on the device, or None without `scale_loss`.
        has_ema: whether there are averaged weights.
        iteration: the arithmetic of a step; without graphs its parts are looked up at each call, and may be wrapped.

    Raises:
        ValueError: `learning_rates` with an optimizer whose rate is a Python number; `nonfinite`, `scale_loss` or split
            experts with one that is not fused and so cannot leave out an update; or a fused one that has parameters
            of which each rank holds a part and others in one group.
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
        nonfinite = choice(NonFinite, nonfinite, "nonfinite").value
        skips = nonfinite != "ignore" or scale_loss or experts_of(model) is not None
        if skips and not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"nonfinite={nonfinite!r}, scale_loss and split experts need an optimizer that can skip an update "
                f"without asking the host, and this {type(optimizer).__name__} cannot; build AdamW, Adam or SGD with "
                "fused=True"
            )
        for group in optimizer.param_groups:
            if learning_rates is not None and not isinstance(group["lr"], Tensor):
                raise ValueError(
                    f"learning_rates needs an optimizer whose lr is a tensor, got {group['lr']!r}; build it with "
                    "lr=torch.tensor(..., device=...)"
                )
            if group.get("fused") and len(by_mesh(group["params"])) > 1:
                raise ValueError(
                    "a parameter group of the optimizer has parameters of which each rank holds a part beside others, "
                    "and a fused step takes either; make a group of each kind: torch.optim.AdamW([{'params': [p for p "
                    "in model.parameters() if isinstance(p, DTensor) is kind]} for kind in (True, False)], fused=True)"
                )
        compile = choice(CompileMode, compile, "compile").value
        self.model, self.optimizer = model, optimizer
        self.compile, self._split = compile, is_split(model)
        is_whole = isinstance(config, TrainGraphConfig)
        self.config = config if is_whole else TrainGraphConfig(**vars(settings(config)))
        if self._split and self.config.scope is Scope.per_layer:
            # An update on parts of parameters communicates, and finds gradients at other addresses in each step.
            whole = is_collected(model) or not shards(model)
            self.config = replace(self.config, optimizer=False, scope=Scope.per_layer if whole else Scope.none)
            if not whole:
                warn_once(
                    "graph=per_layer runs eagerly, because layers are sharded and split (parallel=fsdp_tp); "
                    "graph=full_iteration captures the whole step"
                )
        self._undo_compile: Callable[[], None] | None = None
        self._loss_fn = loss_fn
        count_targets, compiled_update = count_targets or count_targets_of(loss_fn), None
        if compile != "none":
            from graphmod.train.compile import CompiledUpdate  # which no other step loads

            loss_fn, compiled_update = self._compile(loss_fn, compile), CompiledUpdate(optimizer, compile)
        self.grad_norm: Tensor | None = None
        self.iteration = iteration = Iteration(
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
            compiled_update=compiled_update,
            parallel=over_ranks(model, process_group, captured=self.config.scope is not Scope.none),
        )
        self.device, self.guarded, self.has_ema = iteration.device, iteration.guarded, bool(iteration.ema)
        self.first_nonfinite, self.skipped = iteration.first_bad, iteration.skipped
        self.loss_scale: Tensor | None = iteration.scale
        self._stage = Staging(self.device)
        self._eager_steps = 0
        self.graphs: list[CUDAGraphModule] = []  # what runs from graphs, that around the layers first
        self._run, self._evaluate = iteration.run, iteration.evaluate
        if self.config.scope is Scope.full_iteration:
            self._run = CUDAGraphModule(self._run, self.config, name="train step")
            self._evaluate = CUDAGraphModule(self._evaluate, self.config, name="evaluation step")
            self.graphs = [self._run, self._evaluate]
        elif self.config.scope is Scope.per_layer:
            layers = LayerGraphs(iteration, self.config, self._layers())
            self._run, self.graphs = layers.run, layers.graphs

    def _compile(self, loss_fn: Callable, how: str) -> Callable:
        """Compiles what the scope captures; returns the loss function to use."""
        from graphmod.train.activations import recomputed_layers
        from graphmod.train.compile import compile_layers, compiled

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
            TypeError: the batch holds no tensors, `loss_fn` returned no single number, or `count_targets` no 0-d tensor
                on the device.
            ValueError: its tensors disagree about the number of microbatches, or do not suit the loss function.
        """
        batch = self._stage(batch)
        self.grad_norm = None  # a result that is still held when its graph runs again is copied
        loss, self.grad_norm = self._with_room(self._run, self.iteration.run, batch)
        self._eager_steps += not self.graphs
        return loss

    def evaluate(self, batch: Any) -> Tensor:
        """The loss of `batch` in the same sense, 0-d, with the model in its present mode and no gradient."""
        return self._with_room(self._evaluate, self.iteration.evaluate, self._stage(batch))

    def _with_room(self, run: Callable[[Any], Any], again: Callable[[Any], Any], batch: Any) -> Any:
        """What `run` gives; or `again`, without graphs, where an expert had no room for all tokens of the batch."""
        experts = self.iteration.experts
        return run(batch) if experts is None else experts.run(run, again, batch)

    @property
    def learning_rate(self) -> Tensor | float:
        """The optimizer's present learning rate, that of its first parameter group."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def reruns(self) -> int:
        """How often a step or evaluation ran again because an expert had no room for all its tokens."""
        return 0 if self.iteration.experts is None else self.iteration.experts.reruns

    @property
    def captures(self) -> int:
        """Graphs captured so far; cheaper to ask than `stats`."""
        return sum(graph._context.counters.captures for graph in self.graphs)

    @property
    def stats(self) -> GraphStats:
        """The counters of all graphs of this step."""
        if not self.graphs:
            return GraphStats(eager_calls=self._eager_steps)
        each = [graph.stats for graph in self.graphs]
        pools = {id(graph._context.group): one.pool_bytes for graph, one in zip(self.graphs, each, strict=True)}
        return replace(sum(each[1:], each[0]), pool_bytes=sum(pools.values()))

    def ema_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has its averaged weights, at the addresses that graphs read; for evaluating and saving."""
        return self.iteration.ema_weights()

    def state_dict(self) -> dict:
        """Position in the schedule, loss scale, averaged weights; the optimizer has a state_dict of its own."""
        return self.iteration.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` gave, in place, so that graphs stay valid."""
        self.iteration.load_state_dict(state)

    def reset(self) -> None:
        """Frees the graphs and puts the model's layers back. The step then runs eagerly."""
        for graph in self.graphs:
            graph.reset()
        ungraph(self.model)
        if self._undo_compile is not None:
            self._undo_compile()
            self._undo_compile = None
        self.graphs = []
        if self.config.scope is Scope.per_layer:
            self.iteration.loss_fn = self._loss_fn
        self._run, self._evaluate = self.iteration.run, self.iteration.evaluate
        self._stage.clear()
