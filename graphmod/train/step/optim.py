"""The optimizer and its learning rates.

Everything a graph must be able to read stands in tensors on the device: the learning rate and the step counts.
"""

import math

import torch
from torch import nn

from graphmod.train.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """Fused AdamW with its learning rate in a 0-d float32 tensor; parameters of one dimension do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = []
    for decay, members in (
        (config.weight_decay, [parameter for parameter in trained if parameter.dim() > 1]),
        (0.0, [parameter for parameter in trained if parameter.dim() <= 1]),
    ):
        if members:
            rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)
            groups.append({"params": members, "weight_decay": decay, "lr": rate})
    return torch.optim.AdamW(
        groups,
        lr=torch.tensor(config.learning_rate, dtype=torch.float32, device=device),
        betas=tuple(config.betas),
        eps=config.eps,
        fused=True,
        capturable=device.type == "cuda",
    )


def learning_rates(config: OptimConfig, steps: int) -> list[float]:
    """The learning rate of each of `steps` steps: a linear rise to the peak, then a cosine to `min_lr_ratio` of it."""
    warmup = min(round(config.warmup_fraction * steps), steps)
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_ratio
    rates = [peak * (step + 1) / (warmup + 1) for step in range(warmup)]
    falling = steps - warmup
    for step in range(falling):
        progress = step / max(falling - 1, 1)
        rates.append(floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    return rates
