"""The optimizer and its learning rates.

Everything a graph must be able to read stands in tensors on the device: the learning rate and the step counts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from graphmod.errors import ConfigError, reason
from graphmod.train.settings import OptimConfig, OptimizerName, Schedule
from graphmod.train.step.muon import MuonWithAdamW
from graphmod.train.step.parts import by_mesh

# Under which name a schedule knows its floor, as a share of the peak.
_FLOORS = {
    Schedule.cosine_with_min_lr: "min_lr_rate",
    Schedule.warmup_stable_decay: "min_lr_ratio",
}
_DECAY = 0.2  # of the steps, where `num_decay_steps` is not given
_END_AT_ZERO = {Schedule.linear, Schedule.cosine, Schedule.cosine_with_restarts}


def build_optimizer(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that `config.name` says, fused, with its learning rates in 0-d float32 tensors; parameters of one
    dimension do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    settings: dict[str, Any] = {"lr": _rate(config, device), "fused": True}
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
        {"params": some, "lr": _rate(config, device), **options}
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


def _rate(config: OptimConfig, device: torch.device) -> torch.Tensor:
    return torch.tensor(config.learning_rate, dtype=torch.float32, device=device)


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
    step has the schedule's end, or, where that is 0, what comes before it.

    Raises:
        ConfigError: the schedule does not take `schedule_options`, or needs others.
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
            f"optim.schedule={config.schedule.value} cannot be made with optim.schedule_options="
            f"{config.schedule_options}: {reason(error)}; its options are those of transformers.get_scheduler"
        ) from error


def check_schedule(config: OptimConfig) -> None:
    """Raises ConfigError where `learning_rates` does."""
    learning_rates(config, 10)
