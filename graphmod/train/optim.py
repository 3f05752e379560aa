"""The optimizer and its learning rates.

Everything a graph must be able to read stands in tensors on the device: the learning rate and the step counts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphmod import torch_private
from graphmod.errors import ConfigError, reason
from graphmod.train.parallel import by_mesh
from graphmod.train.settings import OptimConfig, OptimizerName, Schedule

# -- Muon for matrices and AdamW for everything else, as one optimizer that a graph can hold ---------------------------

# The defaults of torch.optim.Muon.
_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.775, 2.0315), 5, 1e-7


class MuonWithAdamW(torch.optim.AdamW):
    """Steps parameter groups with `muon=True` as `torch.optim.Muon` does, and the others as AdamW.

    torch's own takes the learning rate from the device to the host, which no graph can. Here its arithmetic gives the
    direction, and what follows stays on the device. Steps are scaled so that learning rates and weight decay suited to
    AdamW suit Muon too (`adjust_lr_fn="match_rms_adamw"`). An update that `found_inf` blocks changes nothing.

    Each group has `muon`, `lr` (0-d float32, on the device) and `weight_decay`; those with `muon=True` have `momentum`
    and `nesterov` too, and matrices only, else ValueError is raised.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        for group in groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.dim() != 2:
                    raise ValueError(f"Muon takes matrices only, got a parameter of shape {tuple(parameter.shape)}")
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """One step of all groups. `closure` must be None."""
        if closure is not None:
            raise ValueError("MuonWithAdamW.step takes no closure; compute the gradients before it")
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            return super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any]) -> None:
        blocked = getattr(self, "found_inf", None)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                state["step"] = torch.zeros((), device=parameter.device)  # AdamW looks for one when it is loaded
            buffer, direction = state["momentum_buffer"].clone(), torch.zeros_like(parameter)
            torch_private.muon(
                [direction],
                [parameter.grad],
                [buffer],
                lr=1.0,
                weight_decay=0.0,
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                ns_coefficients=_COEFFICIENTS,
                ns_steps=_ITERATIONS,
                eps=_EPS,
                adjust_lr_fn="match_rms_adamw",
                has_complex=False,
            )
            rate = group["lr"]
            updated = parameter * (1 - rate * group["weight_decay"]) + rate * direction
            _replace(parameter, updated, blocked)
            _replace(state["momentum_buffer"], buffer, blocked)


def _replace(target: Tensor, value: Tensor, blocked: Tensor | None) -> None:
    target.copy_(value if blocked is None else torch.where(blocked > 0, target, value))


# -- what settings ask for ---------------------------------------------------------------------------------------------

# Under which name a schedule knows its floor, as a share of the peak.
_FLOORS = {Schedule.cosine_with_min_lr: "min_lr_rate", Schedule.warmup_stable_decay: "min_lr_ratio"}
_DECAY = 0.2  # of the steps, where `num_decay_steps` is not given
_END_AT_ZERO = {Schedule.linear, Schedule.cosine, Schedule.cosine_with_restarts}


def build_optimizer(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that `config.name` says, fused, with its learning rates in 0-d float32 tensors; parameters of one
    dimension do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    settings: dict[str, Any] = {"fused": True}
    if config.name is OptimizerName.sgd:
        settings |= {"momentum": config.momentum, "nesterov": config.nesterov}
    else:
        settings |= {"betas": tuple(config.betas), "eps": config.eps, "capturable": device.type == "cuda"}
    parts = [(matrices, {"weight_decay": config.weight_decay}), (vectors, {"weight_decay": 0.0})]
    if config.name is OptimizerName.muon:
        outside = _embeddings(model)
        inside = [p for p in matrices if id(p) not in outside and p.dim() == 2]
        held = {id(p) for p in inside}
        parts[0] = ([p for p in matrices if id(p) not in held], parts[0][1])
        parts = [(members, {**options, "muon": False}) for members, options in parts]
        muon = {"muon": True, "momentum": config.momentum, "nesterov": config.nesterov}
        parts.insert(0, (inside, {"weight_decay": config.weight_decay, **muon}))
    # Fused, one group takes tensors of one mesh only.
    groups = [
        {"params": some, "lr": torch.tensor(config.learning_rate, dtype=torch.float32, device=device), **options}
        for members, options in parts
        for (some,) in by_mesh(members)
    ]
    return _CLASSES[config.name](groups, **settings)


_CLASSES: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
    OptimizerName.adamw: torch.optim.AdamW,
    OptimizerName.adam: torch.optim.Adam,
    OptimizerName.sgd: torch.optim.SGD,
    OptimizerName.muon: MuonWithAdamW,
}


def _embeddings(model: nn.Module) -> set[int]:
    """The parameters of the embeddings and of the output layer, by their id."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for name in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, name, lambda: None)()
        modules += [module] if module is not None else []
    return {id(parameter) for module in modules for parameter in module.parameters()}


def learning_rates(config: OptimConfig, steps: int) -> list[float]:
    """The learning rate of each of `steps` steps.

    Step 1 has the rate that the schedule of transformers has after one step, because its first one may be 0; the last
    step has the schedule's end, or, where that is 0, what comes before it. Raises ConfigError where the schedule does
    not take `schedule_options`, or needs others.
    """
    warmup = min(round(config.warmup_fraction * steps), steps)
    peak = config.learning_rate
    options = dict(config.schedule_options)
    if config.schedule in _FLOORS:
        options.setdefault(_FLOORS[config.schedule], config.min_lr_ratio)
    if config.schedule is Schedule.warmup_stable_decay:
        options.setdefault("num_decay_steps", max(1, round(_DECAY * steps)))
    if config.schedule is Schedule.polynomial:
        options.setdefault("lr_end", peak * config.min_lr_ratio)
    optimizer = torch.optim.SGD([torch.zeros(())], lr=peak)
    from transformers import get_scheduler  # loads PEFT, where it is installed: no decoding waits for that

    try:
        schedule = get_scheduler(
            config.schedule.value,
            optimizer,
            num_warmup_steps=warmup + 1,
            num_training_steps=steps + 1 if config.schedule in _END_AT_ZERO else steps,
            scheduler_specific_kwargs=options,
        )
        return [peak * schedule.lr_lambdas[0](step + 1) for step in range(steps)]
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(
            f"optim.schedule={config.schedule} cannot be made with optim.schedule_options="
            f"{config.schedule_options}: {reason(error)}; its options are those of transformers.get_scheduler"
        ) from error
