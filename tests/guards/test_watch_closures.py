"""What a captured function closes over may be exchanged behind it: optimizers, models, tensors, numbers, modes."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.step.test_watch import CHANGES_AT, clone_parameters, load_optimizer
from tests.support.harness import config, loss_of, mlp, play, twins


def iteration_with(side, optimizer):
    """A step that closes over everything it needs."""

    def iteration(x):
        loss = loss_of(side.model(x)) * side.factor
        loss.backward()
        optimizer().step()
        optimizer().zero_grad()
        return loss.detach()

    return iteration


def raise_rate(side, i):
    for group in side.optimizer.param_groups:
        group["lr"] = 0.05 / i


def change_factor(side, i):
    side.factor = float(i)


def other_optimizer(side, i):
    side.optimizer = torch.optim.SGD(side.model.parameters(), lr=0.01, momentum=0.5)


def other_model(side, i):
    torch.manual_seed(i)
    side.model = mlp(side.device)
    other_optimizer(side, i)


def load_other_momentum(side, i):
    state = side.optimizer.state_dict()
    for values in state["state"].values():
        values["momentum_buffer"] = values["momentum_buffer"] * 0.1
    side.optimizer.load_state_dict(state)


def changing(change):
    """A step that exchanges something at times."""

    def step(side, i):
        if side.iteration is None:
            side.iteration = iteration_with(side, lambda: side.optimizer)
            if side.graphed:
                side.iteration = CUDAGraphModule(side.iteration, config(), name="iteration")
                side.graphs = [side.iteration]
        if i in CHANGES_AT:
            change(side, i)
        return side.iteration(side.batch(i, 4, 8))

    return step


@pytest.mark.parametrize(
    "change",
    [raise_rate, change_factor, other_optimizer, other_model, load_optimizer, load_other_momentum, clone_parameters],
)
def test_what_a_captured_iteration_closes_over_may_be_exchanged(change, device):
    def build(device):
        return {"model": mlp(device), "factor": 1.0, "iteration": None}

    twins(build, changing(change), device, graph=lambda side: None, replays=1, steps=24)


@pytest.mark.parametrize("kind", [tuple, list])
def test_the_betas_of_an_optimizer_may_be_exchanged(kind, device):
    """As a schedule of the momentum does."""

    def build(device):
        model, rate = mlp(device), torch.tensor(0.01, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=device.type == "cuda")
        optimizer.param_groups[0]["betas"] = kind((0.9, 0.99))
        return {"model": model, "optimizer": optimizer, "factor": 1.0, "iteration": None}

    def other_betas(side, i):
        side.optimizer.param_groups[0]["betas"] = kind((0.5, 1 - 0.1 / i))

    twins(build, changing(other_betas), device, graph=lambda side: None, replays=1, steps=24)


@pytest.mark.parametrize("what", ["tensor", "number", "function"])
def test_a_rebound_closure_variable(what, device):
    values = {
        "tensor": [torch.full((8,), float(k), device=device) for k in range(3)],
        "number": [1.0, 2.0, 3.0],
        "function": [torch.tanh, torch.relu, torch.sigmoid],
    }[what]

    def build(device):
        return {"model": mlp(device), "bound": None}

    def step(side, i):
        if side.bound is None:
            current = values[0]

            def call(x):
                x = side.model(x)
                return current(x) if callable(current) else x * current

            def rebind(value):
                nonlocal current
                current = value

            side.bound = CUDAGraphModule(call, config()) if side.graphed else call
            side.rebind = rebind
            side.graphs = [side.bound] if side.graphed else []
        if i in CHANGES_AT:
            side.rebind(values[1 + CHANGES_AT.index(i)])
        loss_of(side.bound(side.batch(i, 4, 8))).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(build, step, device, graph=lambda side: None, replays=2, steps=24)


@pytest.mark.parametrize("also", ["nothing else", "a weight"])
def test_a_callable_whose_model_changes_its_mode(also, device):
    """Modes are looked at after the launch, weights before it: both may have changed."""

    def build(device):
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to(device)

    def graph(side):
        side.graphs = [CUDAGraphModule(side.forward_only, config())]
        side.call = side.graphs[0]

    def step(side, i):
        if i % 3 == 2:
            side.model.train(not side.model.training)
            if also == "a weight":
                side.model[2].weight.data = side.model[2].weight.data * 1.5
        return side.call(side.batch(i, 4, 8))

    def parts(device):
        model = build(device)

        @torch.no_grad()
        def forward_only(x):
            return model(x)

        return {"model": model, "forward_only": forward_only, "call": forward_only}

    _, history = play(parts, step, device, graph=graph, steps=24)
    assert history[-1][0] > 6
