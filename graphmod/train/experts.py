"""The experts of a transformers model shared out over ranks, each of which trains on batches of its own.

A rank sends each other one as many rows as a capacity says, and has as many places for them: with a fixed one all
shapes are known before a step, so that a graph can hold it. Tokens beyond it raise a mark on the device, and what was
computed counts for nothing: `TrainStep` leaves that update out on the device and runs the step again, with places for
all tokens.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import grouped_mm

from graphmod.errors import ConfigError
from graphmod.torch_private import EVAL_FRAME
from graphmod.trace.dispatch import current
from graphmod.trace.hazards import Reason
from graphmod.trace.undo import under_way

log = logging.getLogger("graphmod")

_NAME = "over_ranks"  # of the implementation of experts that is put into a model
_WEIGHTS = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))
_READ = Reason(
    "have as many places as their tokens need, which the host reads",
    "train them by TrainStep, which gives them a fixed number",
)
_MORE = 2  # times as many places as the capacity says has an expert: less evens out there than among those of a rank
_OTHERWISE = "train it whole (parallel=ddp) or sharded (parallel=fsdp)"

# -- tokens on their way to the experts and back -----------------------------------------------------------------------
# Each token goes to several experts: it has as many assignments. All that moves is gathered, in the backward too, so
# that nothing is added up in an order that changes. A place that no assignment takes holds any row; what comes of it
# goes nowhere.


class _Moved(torch.autograd.Function):
    """(R, D) rows -> (P, D), the rows `there`. `back` has the places where each row went, so many `times`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor, times: int = 1) -> Tensor:
        ctx.save_for_backward(back)
        ctx.times = times
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        (gradient,), (back,) = gradients, ctx.saved_tensors
        gradient = gradient.index_select(0, back)
        return gradient.unflatten(0, (-1, ctx.times)).sum(1) if ctx.times > 1 else gradient, None, None, None


class _Exchanged(torch.autograd.Function):
    """Sends the equal parts of a tensor to the ranks of a group, in their order; what they sent, in their order."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(received, tensor.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        return _Exchanged.apply(gradients[0], ctx.group), None


class _Scaled(torch.autograd.Function):
    """A weight whose gradient is multiplied by a number, and lies as the weight does: fused optimizers want that."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        return (gradients[0] * ctx.factor).contiguous(), None


def _grouped(keys: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(A,) keys in ascending order, where these are, and (groups + 1,) where each group begins in that order."""
    ordered, order = torch.sort(keys, stable=True)
    return ordered, order, torch.searchsorted(ordered, torch.arange(groups + 1, device=keys.device))


def _places(of: Tensor, starts: Tensor, order: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of groups with so many places each: (P,) what is at each place, (A,) at which place each one is, and (P,) which
    are taken. What is beyond the capacity, or in no group, is said to be at any place.

    Args:
        of: (A,) the group of each, in ascending order.
        starts: (groups + 1,) where each group begins.
        order: (A,) which they are, in this order.
    """
    count, device = len(order), order.device
    ranked = starts[:-1, None] + torch.arange(capacity, device=device)
    taken = (ranked < starts[1:, None]).flatten()
    at = torch.arange(count, device=device) - starts[of]
    places = (of * capacity + at.clamp(max=capacity - 1)).clamp(max=len(taken) - 1)
    return order[ranked.clamp(max=count - 1).flatten()], torch.empty_like(order).scatter_(0, order, places), taken


# -- the experts of a model --------------------------------------------------------------------------------------------


class Experts:
    """The experts of a model on the ranks of a process group.

    Attributes:
        group: the process group.
        ranks: how many are in it.
        load: float32 () on the device: the most rows that there were for the places of a rank or an expert, as a
            multiple of these, in the forwards of a step or an evaluation; that of all ranks after `agree`.
        reruns: how often there was no room for all tokens.
    """

    def __init__(self, group: distributed.ProcessGroup, capacity_factor: float, device: torch.device) -> None:
        self.group, self.ranks = group, distributed.get_world_size(group)
        self.load = torch.zeros((), device=device)
        self.reruns = 0
        self._factor, self._fixed = capacity_factor, False

    @property
    def held(self) -> Tensor:
        """bool () on the device: whether tokens were left out, so that nothing may follow from what was computed."""
        return self.load > 1

    def run(self, run: Callable[[Any], Any], again: Callable[[Any], Any], batch: Any) -> Any:
        """What `run` gives of a batch, with as many places as the capacity says; where these were too few, `again` with
        places for all tokens, without graphs and compiled code, and with the same random numbers."""
        device = self.load.device
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index])
        states = [generator.get_state() for generator in generators]
        self.load.zero_()
        self._fixed = True
        try:
            found = run(batch)
        finally:
            self._fixed = False
        load = self.load.item()
        if not load > 1:
            return found
        del found  # which may take much memory
        if not self.reruns:
            enough = math.ceil(10 * load * self._factor) / 10
            log.warning(
                f"experts got {load:.2f} times the tokens that capacity_factor={self._factor} has places for: the step "
                "had no effect and ran again without a graph, with places for all. That takes longer; where it happens "
                f"often, raise it (parallel.capacity_factor): about {enough} would have been enough"
            )
        self.reruns += 1
        self.load.zero_()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        with _plainly():
            return again(batch)

    def agree(self) -> None:
        """After the forwards of a step: gives `load` on all ranks the greatest of any."""
        distributed.all_reduce(self.load, distributed.ReduceOp.MAX, group=self.group)

    def capacity(self, counts: Tensor, assignments: int, most: int) -> int:
        """The places of each of some groups, of which so many `counts` go to each, `most` at the most; the mean is
        that of so many `assignments`. Outside of `run` there are enough for all, which the host is told."""
        busiest = counts.amax()
        if self._fixed:
            places = min(math.ceil(self._factor * assignments / len(counts)), most)
            torch.maximum(self.load, busiest.float() / places, out=self.load)
            return places
        if (recorder := current()) is not None:
            recorder.refuse("experts over ranks", _READ)
        distributed.all_reduce(busiest, distributed.ReduceOp.MAX, group=self.group)
        return int(busiest)


@contextmanager
def _plainly() -> Iterator[None]:
    """Inside, neither graphs nor compiled code run."""
    depth = under_way.plain
    compiles = EVAL_FRAME in sys.modules  # which takes seconds to load
    with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
        try:
            under_way.plain = depth + 1
            yield
        finally:
            under_way.plain = depth


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What a module of experts gives for (T, D) tokens, each of which chose K experts, with these weights."""
    experts: Experts = self.over_ranks
    kind, ranks, (count, choices) = hidden_states.device.type, experts.ranks, top_k_index.shape
    own = self.num_experts // ranks  # of each rank
    tokens = hidden_states
    if torch.is_autocast_enabled(kind):  # as matrix products take it; so less is sent
        tokens = tokens.to(torch.get_autocast_dtype(kind))
    with torch.no_grad():
        chosen, order, starts = _grouped(top_k_index.flatten(), self.num_experts)
        counts = starts.diff().view(ranks, own)
        capacity = experts.capacity(counts.sum(1), len(order), count * min(choices, own))
        assignments, places, _ = _places(chosen // own, starts[::own], order, capacity)
        ends = _Exchanged.apply(counts, experts.group).cumsum(1)  # of each expert's rows from each rank
        rows = torch.arange(capacity, device=order.device).expand(ranks, -1).contiguous()
        expert_of = torch.searchsorted(ends, rows, right=True).flatten()  # `own` where there is none
    sent = _Moved.apply(tokens, assignments // choices, places, choices)
    found = _of_experts(self, _Exchanged.apply(sent, experts.group), expert_of, own, count * choices)
    found = _Moved.apply(_Exchanged.apply(found, experts.group), places, assignments)
    weighted = found.unflatten(0, (-1, choices)) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)


def _of_experts(self: Any, rows: Tensor, expert_of: Tensor, own: int, assignments: int) -> Tensor:
    """What this rank's `own` experts give for (R, D) rows, each by its own; of so many assignments of each rank."""
    experts: Experts = self.over_ranks
    # Products of groups of any size read on the host where these end, for all other numbers, and need aligned rows.
    aligned = all(size % 8 == 0 for size in self.down_proj.shape[1:])
    grouped = rows.dtype is torch.bfloat16 and aligned and not self.has_bias
    with torch.no_grad():
        ordered, order, starts = _grouped(expert_of, own)
        ends, taken = starts[1:].int(), None
        if grouped:
            there, back = (
                order,
                torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)),
            )
        else:
            capacity = experts.capacity(starts.diff(), _MORE * assignments, len(order))
            there, back, taken = _places(ordered, starts, order, capacity)

    def linear(name: str, given: Tensor) -> Tensor:
        # The losses of ranks are added up in gradients of experts, and averaged in those of all else.
        weight, *bias = (
            _Scaled.apply(getattr(self, one).to_local(), 1 / experts.ranks).to(given.dtype)
            for one in ((name, f"{name}_bias") if self.has_bias else (name,))
        )
        weight = weight if self.is_transposed else weight.transpose(1, 2)
        if grouped:
            return grouped_mm(given, weight, offs=ends)
        return torch.baddbmm(bias[0][:, None], given, weight) if bias else torch.bmm(given, weight)

    given = _Moved.apply(rows, there, back)
    inside = linear("gate_up_proj" if self.has_gate else "up_proj", given if grouped else given.unflatten(0, (own, -1)))
    found = linear("down_proj", self._apply_gate(inside) if self.has_gate else self.act_fn(inside))
    if taken is not None:  # what is at places that are not taken adds nothing to the gradients of weights
        found = torch.where(taken[:, None], found.flatten(0, 1), 0)
    return _Moved.apply(found, back, there)


def experts_of(model: nn.Module) -> Experts | None:
    """The experts of a model that `split_experts` was applied to; None of any other one."""
    return next((vars(module)["over_ranks"] for module in model.modules() if "over_ranks" in vars(module)), None)


def split_experts(
    model: nn.Module, process_group: distributed.ProcessGroup | None = None, *, capacity_factor: float = 2.0
) -> nn.Module:
    """Leaves this rank its part of the experts of a transformers model, in place, and returns it: of those of the first
    rank. All ranks of `process_group` (None: all there are) call this, before the optimizer is made, and then train it
    by `TrainStep`, each with batches of its own, which are of one shape. Each forward is one of all ranks.

    Args:
        capacity_factor: how many times the mean of all ranks is the most that a rank may get of the tokens of another
            in a step (in all numbers but bfloat16, also an expert of all tokens, twice that). Where one gets more, the
            step has no effect and runs again without a graph, which takes more time. As many as there are ranks is
            always enough in bfloat16.

    Raises:
        ConfigError: the model has no experts whose weights are stacked, their number does not divide by the ranks, they
            are split already, or `capacity_factor` is no number above 0.
    """
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor  # takes a second
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if not 0 < capacity_factor < math.inf:
        raise ConfigError(f"capacity_factor must be above 0 and finite, got {capacity_factor}; 2 is usual")
    group = process_group if process_group is not None else distributed.group.WORLD
    if group is None:
        raise ConfigError("experts are split over a process group, and there is none: call init_process_group() before")
    ranks = distributed.get_world_size(group)
    layers: list[Any] = [module for module in model.modules() if _is_stacked(module)]
    if not layers or not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} has no experts to share out, which are modules of transformers with stacked "
            f"weights (gate_up_proj, down_proj), as in Qwen3-MoE and Mixtral; {_OTHERWISE}"
        )
    for module in layers:
        count = module.num_experts
        if count % ranks:
            raise ConfigError(
                f"{count} experts cannot be shared out evenly over {ranks} ranks; take a number of ranks that divides "
                f"{count} (parallel.gpus), or {_OTHERWISE}"
            )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError("the model is split or sharded over ranks already; split the experts of a whole model")
    device = next(layers[0].parameters()).device
    mesh = DeviceMesh.from_group(group, device.type)
    experts = Experts(group, capacity_factor, device)
    for module in layers:
        module.over_ranks = experts
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    model.set_experts_implementation(_NAME)
    return model


def _is_stacked(module: nn.Module) -> bool:
    """Whether a module of transformers holds experts whose weights are stacked."""
    own = dict(module.named_parameters(recurse=False))
    known = hasattr(module, "is_transposed") and hasattr(module, "num_experts")
    return known and any(all(name in own and own[name].dim() == 3 for name in names) for names in _WEIGHTS)
