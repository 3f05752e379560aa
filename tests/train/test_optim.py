"""The optimizer holds what changes in tensors, and the schedule has the shape it is said to have."""

import pytest
import torch
from torch import nn

from graphmod.train.schema import OptimConfig
from graphmod.train.step.optim import build_optimizer, learning_rates

CPU = torch.device("cpu")


def test_vectors_do_not_decay_and_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
    model[2].weight.requires_grad_(False)
    decaying, resting = build_optimizer(model, OptimConfig(weight_decay=0.5), CPU).param_groups
    assert decaying["weight_decay"] == 0.5 and [p.dim() for p in decaying["params"]] == [2]
    assert resting["weight_decay"] == 0.0 and [p.dim() for p in resting["params"]] == [1, 1, 1]


def test_each_group_has_a_learning_rate_tensor_of_its_own():
    groups = build_optimizer(nn.Linear(4, 4), OptimConfig(), CPU).param_groups
    rates = [group["lr"] for group in groups]
    assert all(isinstance(rate, torch.Tensor) and rate.dim() == 0 for rate in rates)
    assert rates[0].data_ptr() != rates[1].data_ptr()
    assert all(group["fused"] for group in groups)


def test_a_changed_learning_rate_tensor_changes_the_step():
    model = nn.Linear(4, 4)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.0), CPU)
    model(torch.ones(1, 4)).sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"].fill_(0.0)
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.gpu
def test_on_a_gpu_the_optimizer_can_be_captured():
    device = torch.device("cuda")
    optimizer = build_optimizer(nn.Linear(4, 4, device=device), OptimConfig(), device)
    assert all(group["capturable"] and group["lr"].device.type == "cuda" for group in optimizer.param_groups)


def test_the_schedule_rises_to_the_peak_and_falls_to_its_floor():
    config = OptimConfig(learning_rate=1.0, warmup_fraction=0.1, min_lr_ratio=0.2)
    rates = learning_rates(config, 100)
    assert len(rates) == 100
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_the_shortest_runs_have_positive_rates_up_to_the_peak(steps, warmup):
    rates = learning_rates(OptimConfig(learning_rate=1.0, warmup_fraction=warmup), steps)
    assert len(rates) == steps and all(0 < rate <= 1 for rate in rates)
