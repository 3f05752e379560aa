"""Graphs read memory and freeze settings; when either is exchanged behind them, they notice before the next result."""

import types

import pytest
import torch
from torch import nn

from tests.support.harness import layered, mlp, play, train, twins, wrapped

CHANGES_AT = (5, 11)


class Model(nn.Module):
    """Every kind of thing that may be exchanged under a graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.GELU()) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def model(device):
    return Model().to(device)


class Layer(nn.Module):
    """Settings in all the places where code keeps them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))
        self.scale, self.active, self.mode = 2.0, True, "plus"
        self.scales, self.table = [1.0, 2.0], {"scale": 3.0}
        self.config = types.SimpleNamespace(scale=0.5)
        self.plain_tensor = torch.ones(8)
        self.tensors = [torch.ones(8)]

    def forward(self, x):
        x = self.linear(x) * self.scale * self.scales[0] * self.table["scale"] * self.config.scale
        x = x + self.shift if self.mode == "plus" else x - self.shift
        if self.active:
            x = torch.tanh(x)
        return x + self.plain_tensor.to(x.device) + self.tensors[0].to(x.device)


def clone_parameters(side, i):
    for parameter in side.model.parameters():
        parameter.data = parameter.data.clone()


def replace_optimizer(side):
    side.optimizer = torch.optim.SGD(side.model.parameters(), lr=0.05, momentum=0.9)


def load_in_place(side, i):
    side.model.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in side.model.state_dict().items()})


def load_assign(side, i):
    state = {k: v * 0.9 if v.is_floating_point() else v.clone() for k, v in side.model.state_dict().items()}
    side.model.load_state_dict(state, assign=True)
    replace_optimizer(side)


def new_parameter(side, i):
    first = side.model.layers[0][0]
    first.weight = nn.Parameter(first.weight.detach() * 0.5)
    replace_optimizer(side)


def new_buffer(side, i):
    side.model.layers[0][1].register_buffer("running_mean", torch.full((8,), 0.25, device=side.device))


def in_place_buffer(side, i):
    side.model.layers[0][1].running_mean.fill_(0.5)


def new_submodule(side, i):
    torch.manual_seed(i)
    side.model.layers[0][3] = nn.Tanh()
    side.model.layers[1][0] = nn.Linear(8, 8).to(side.device)
    replace_optimizer(side)


def dropout_rate(side, i):
    side.model.layers[0][2].p = 0.5 if i < 8 else 0.1


def part_to_eval(side, i):
    side.model.layers[0][1].train(i > 8)


def dropout_to_eval(side, i):
    side.model.layers[1][2].train(i > 8)


def momentum_of_a_norm(side, i):
    side.model.layers[0][1].momentum = 0.3


def to_double_and_back(side, i):
    side.model.double().float()


def load_optimizer(side, i):
    side.optimizer.load_state_dict(side.optimizer.state_dict())


CHANGES = [
    clone_parameters, load_in_place, load_assign, new_parameter, new_buffer, in_place_buffer, new_submodule,
    dropout_rate, part_to_eval, dropout_to_eval, momentum_of_a_norm, to_double_and_back, load_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("graph, replays", [("whole", 2), ("layers", 4)])
def test_a_model_changed_between_steps_gives_eagers_numbers_and_runs_from_graphs_again(graph, replays, change, device):
    def step(side, i):
        if i in CHANGES_AT:
            change(side, i)
        train(side, i, 6, 8)

    twins(model, step, device, graph=wrapped() if graph == "whole" else layered(), replays=replays, steps=24)


def attribute(name, values):
    return lambda layer, k, device: setattr(layer, name, values[k])


def filled(k, device):
    return torch.full((8,), 2.0 + k, device=device)


SETTINGS = {
    "a number": attribute("scale", [3.0, -1.0]),
    "a flag": attribute("active", [False, True]),
    "a string": attribute("mode", ["minus", "plus"]),
    "a list of numbers": attribute("scales", [[5.0, 2.0], [-1.0, 2.0]]),
    "an item of a list": lambda layer, k, device: layer.scales.__setitem__(0, 7.0 + k),
    "an item of a dict": lambda layer, k, device: layer.table.__setitem__("scale", 7.0 + k),
    "a config object": lambda layer, k, device: setattr(layer.config, "scale", 7.0 + k),
    "another config object": lambda layer, k, device: setattr(layer, "config", types.SimpleNamespace(scale=7.0 + k)),
    "a buffer": lambda layer, k, device: setattr(layer, "shift", filled(k, device)),
    "a plain tensor": lambda layer, k, device: setattr(layer, "plain_tensor", filled(k, device)),
    "a tensor in a list": lambda layer, k, device: layer.tensors.__setitem__(0, filled(k, device)),
    "another list of tensors": lambda layer, k, device: setattr(layer, "tensors", [filled(k, device)]),
    "zero with a sign": attribute("scale", [0.0, -0.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_a_module_changed_between_steps(name, device):
    def build(device):
        layer = Layer().to(device)
        layer.plain_tensor, layer.tensors = layer.plain_tensor.to(device), [layer.tensors[0].to(device)]
        return layer

    def step(side, i):
        if i in CHANGES_AT:
            SETTINGS[name](side.model, CHANGES_AT.index(i), device)
        train(side, i)

    play(build, step, device, steps=16)


def test_weights_written_in_place_need_no_new_capture(device):
    def step(side, i):
        if i % 3 == 0:
            with torch.no_grad():
                for index, parameter in enumerate(side.model.parameters()):
                    parameter.copy_(side.batch(i, *parameter.shape, key=index))
            load_in_place(side, i)
        train(side, i)

    side = twins(mlp, step, device, replays=2)
    assert side.call.stats.captures == 2
