"""The optimizer holds what changes in tensors, and the schedule has the shape it is said to have."""

import math

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from graphmod.errors import ConfigError
from graphmod.train.model import build_model, model_config
from graphmod.train.optim import MuonWithAdamW, build_optimizer, learning_rates
from graphmod.train.run import train
from graphmod.train.settings import OptimConfig, OptimizerName, Precision, Schedule

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


@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt"])
def test_a_schedule_of_transformers_has_its_numbers_one_step_on(name):
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=11)
    config = OptimConfig(learning_rate=1.0, warmup_fraction=0.2, schedule=Schedule(name))
    rates = learning_rates(config, 10)
    assert rates == [theirs.lr_lambdas[0](step + 1) for step in range(10)] and min(rates) > 0


def test_the_default_is_a_line_and_a_cosine_to_the_floor():
    rates = learning_rates(OptimConfig(learning_rate=2.0, warmup_fraction=0.1, min_lr_ratio=0.25), 40)
    falling = [0.5 + 1.5 * 0.5 * (1 + math.cos(math.pi * step / 35)) for step in range(36)]
    assert rates == pytest.approx([2 * (step + 1) / 5 for step in range(4)] + falling)


@pytest.mark.parametrize("name", list(Schedule))
def test_every_schedule_has_a_rate_for_each_step(name):
    rates = learning_rates(OptimConfig(schedule=name), 20)
    assert len(rates) == 20 and all(0 < rate <= 3e-3 * (1 + 1e-9) for rate in rates)


def test_options_of_a_schedule_are_handed_on_and_wrong_ones_named(settings):
    falling, twice = (
        learning_rates(OptimConfig(schedule=Schedule.cosine_with_restarts, schedule_options=options), 40)
        for options in ({}, {"num_cycles": 2})
    )
    assert falling[2:] == sorted(falling[2:], reverse=True) and twice[2:] != sorted(twice[2:], reverse=True)
    with pytest.raises(ConfigError, match=r"optim.schedule=linear cannot be made with .*'num_cycles'"):
        settings("optim.schedule=linear", "+optim.schedule_options.num_cycles=2")


@pytest.mark.parametrize("name", ["adafactor", "rmsprop", "lbfgs"])
def test_an_optimizer_that_cannot_be_used_says_why(settings, name):
    with pytest.raises(ConfigError) as caught:
        settings(f"optim={name}")
    said = str(caught.value)
    assert f"optim={name} cannot be used: it " in said and "adam, adamw, muon, sgd" in said


def test_muon_takes_the_matrices_of_the_layers_alone(tiny):
    config = tiny("optim=muon")
    model = build_model(config.model, model_config(config.model, 256, 16), Precision.fp32, CPU, 0)
    groups = build_optimizer(model, config.optim, CPU).param_groups
    assert [group["muon"] for group in groups] == [True, False, False]
    names = {id(p): name for name, p in model.named_parameters()}
    matrices = {names[id(p)] for p in groups[0]["params"]}
    assert matrices == {n for n, p in model.named_parameters() if ".layers." in n and p.dim() == 2}
    assert sum(len(group["params"]) for group in groups) == len(names)


def muon_and_weights(found_inf=None):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 8))]
    rate = torch.tensor(0.1)
    group = {"params": weights, "lr": rate, "weight_decay": 0.1, "muon": True, "momentum": 0.9, "nesterov": True}
    optimizer = MuonWithAdamW([group], lr=rate, fused=True)
    if found_inf is not None:
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(found_inf), None
    return optimizer, weights


def test_muon_makes_the_steps_of_torchs_own():
    ours, weights = muon_and_weights()
    same = [nn.Parameter(weight.detach().clone()) for weight in weights]
    theirs = torch.optim.Muon(same, lr=0.1, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for mine, other in zip(weights, same, strict=True):
            mine.grad = torch.sin(torch.arange(mine.numel()).view_as(mine) * (step + 1.0))
            other.grad = mine.grad.clone()
        ours.step()
        theirs.step()
    for mine, other in zip(weights, same, strict=True):
        torch.testing.assert_close(mine, other)
        torch.testing.assert_close(ours.state[mine]["momentum_buffer"], theirs.state[other]["momentum_buffer"])


def test_a_blocked_update_of_muon_changes_nothing():
    optimizer, weights = muon_and_weights(found_inf=1.0)
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.full_like(weight, float("nan"))
    optimizer.step()
    assert all(map(torch.equal, weights, before))
    assert all(bool((optimizer.state[weight]["momentum_buffer"] == 0).all()) for weight in weights)


@pytest.mark.parametrize("name", list(OptimizerName))
def test_every_optimizer_is_eagers_in_graphs_and_resumes_bitwise(on_text, tmp_path, stop_after, monkeypatch, name):
    settings = [f"optim={name.value}", "train.steps=10"]
    plain = train(on_text(*settings, "graph=none"), tmp_path / "none")
    losses = plain.losses
    assert losses[-1] < losses[0]
    layers = train(on_text(*settings, "graph=per_layer"), tmp_path / "layers")
    assert layers.losses == plain.losses and layers.graph["failures"] == 0
    with monkeypatch.context():
        stop_after(6)
        train(on_text(*settings), tmp_path / "parts")
    monkeypatch.undo()
    resumed = train(on_text(*settings, f"train.resume={tmp_path / 'parts'}"), tmp_path / "other")
    assert resumed.losses == plain.losses and resumed.graph["failures"] == 0 and resumed.graph["replays"] > 0
