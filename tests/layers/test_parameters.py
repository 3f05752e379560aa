"""Frozen and unused parameters, and gradients of inputs."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.layers.test_shared_parameters import Shared
from tests.support.harness import config, layered, loss_of, mlp, play, train, twins, wrapped


def test_frozen_parameters_get_no_gradient(device):
    def build(device):
        model = mlp(device)
        model[0].requires_grad_(False)
        return model

    twins(build, train, device, replays=2)


def test_a_frozen_layer_between_trained_ones(device):
    def build(device):
        model = Shared().to(device)
        model.layers[1].requires_grad_(False)
        return model

    twins(build, train, device, graph=layered(), replays=6)


@pytest.mark.parametrize("graph", [wrapped, layered])
def test_parameters_frozen_and_unfrozen_while_training(graph, device):
    def step(side, i):
        side.model.layers[1].requires_grad_(not 5 <= i < 10)
        train(side, i)

    _, history = play(lambda d: Shared().to(d), step, device, graph=graph(), steps=20)
    assert history[-1][0] > history[-4][0] and history[-1][1] == history[-4][1], "not captured again"


def test_a_model_frozen_altogether_runs_forward_only(device):
    def step(side, i):
        return side.call(side.batch(i, 4, 8))

    twins(lambda d: mlp(d).requires_grad_(False), step, device, replays=1)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x).tanh()


def test_gradients_of_unused_parameters_stay_none(device):
    side = twins(lambda d: Branches().to(d), train, device, replays=2)
    train(side, 99)
    side.call(side.batch(0, 4, 8)).sum().backward()
    assert side.model.unused.weight.grad is None


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = mlp("cpu"), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        x = self.body(x)
        return self.left(x), self.right(x)


def test_outputs_that_take_turns_in_the_loss(device):
    """A parameter behind an output that is not in this step's loss keeps its gradient None."""

    def step(side, i):
        outputs = side.call(side.batch(i, 4, 8))
        loss_of(outputs if i % 3 == 0 else outputs[i % 2]).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    _, history = play(lambda d: TwoHeads().to(d), step, device, steps=24)
    assert history[-1][0] > 24


def test_an_output_that_is_never_in_the_loss(device):
    def step(side, i):
        left, _ = side.call(side.batch(i, 4, 8))
        loss_of(left).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(lambda d: TwoHeads().to(d), step, device, replays=2)


@pytest.mark.parametrize("graph", [wrapped, layered])
@pytest.mark.parametrize("kept", ["dropped", "accumulated", "kept across steps"])
def test_the_gradient_of_an_input(kept, graph, device):
    def step(side, i):
        if i == 0:
            side.kept, side.x = [], side.batch(0, 4, 8).requires_grad_()
        if kept != "accumulated":
            side.x = side.batch(i, 4, 8).requires_grad_()
        else:
            with torch.no_grad():
                side.x.copy_(side.batch(i, 4, 8))
        loss_of(side.call(side.x)).backward()
        side.note(x=side.x.grad)
        if kept == "kept across steps":
            side.kept.append(side.x.grad)
        side.note(kept=side.kept)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    replays = 2 if graph is wrapped else 6
    twins(lambda d: Shared().to(d), step, device, graph=graph(), replays=replays)


def test_only_the_input_requires_grad(device):
    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        loss_of(side.call(x)).backward()
        side.note(x=x.grad)

    twins(lambda d: mlp(d).requires_grad_(False), step, device, replays=2)


def test_an_input_that_requires_grad_only_sometimes(device):
    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_(i % 2 == 0)
        loss_of(side.call(x)).backward()
        side.note(x=x.grad)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(mlp, step, device, replays=2, steps=16)


def test_one_input_used_by_two_graphs(device):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([mlp("cpu"), mlp("cpu")])

        def forward(self, x):
            return self.layers[0](x) * self.layers[1](x)

    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        loss_of(side.call(x)).backward()
        side.note(x=x.grad)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(lambda d: Both().to(d), step, device, graph=layered(), replays=4)


def test_a_layer_whose_weights_change_between_forward_and_backward_is_refused_like_in_eager(device):
    """Eager stops with an error there; gradients from the new weights would be silently wrong."""

    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        with torch.no_grad():
            for parameter in side.model.parameters():
                parameter.mul_(1.01)
        try:
            loss.backward()
        except RuntimeError:
            side.optimizer.zero_grad()
            return "refused"
        return "accepted"

    play(mlp, step, device, steps=8)


@pytest.mark.filterwarnings("error:An output with one or more elements was resized")
def test_no_capture_writes_a_gradient_of_another_shape_into_a_buffer(device):
    """The first layer's backward has one operation less than that of the others, whose parameters look the same."""

    class Like(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([mlp("cpu"), mlp("cpu"), mlp("cpu")])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) + x
            return x

    twins(lambda d: Like().to(d), train, device, graph=layered(), replays=6)


class Normed(nn.Sequential):
    def forward(self, x, scale):
        return super().forward(x) * scale


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Normed(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.scale)
        return x * self.scale


def whole_step(side):
    def step(x):
        loss = loss_of(side.model(x))
        loss.backward()
        return loss.detach()

    side.step = CUDAGraphModule(step, config())
    side.graphs = [side.step]


@pytest.mark.parametrize(("graph", "replays"), [(wrapped(), 2), (layered(), 4), (whole_step, 1)])
@pytest.mark.parametrize("way", ["load_state_dict", "to another dtype and back"])
def test_parameters_that_are_swapped_while_graphs_read_them(way, graph, replays, device):
    """What `torch.utils.swap_tensors` demands of them: that nobody leads to them weakly, or from C++."""

    def step(side, i):
        if i in (5, 6):
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                if way == "load_state_dict":
                    side.model.load_state_dict({key: one.clone() * 2 for key, one in side.model.state_dict().items()})
                else:
                    side.model.double().float()
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
        x = side.batch(i, 4, 8)
        if hasattr(side, "step"):
            loss = side.step(x)
        else:
            loss = loss_of(side.call(x))
            loss.backward()
        side.note_gradients()
        side.model.zero_grad()
        return loss.detach()

    twins(lambda d: Scaled().to(d), step, device, graph=graph, replays=replays, steps=16)


def test_gradients_of_another_dtype_than_their_parameters(device):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device, torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        return model

    model, eager = make(), make()
    graphed = CUDAGraphModule(model, warmup_steps=2)
    for i in range(8):
        for _ in range(2):
            x = torch.randn(4, 8, device=device, dtype=torch.bfloat16)
            for module in (graphed, eager):
                module(x).square().sum().backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert one.grad.dtype is torch.float32 and torch.equal(one.grad, other.grad)
        if i % 3 == 2:
            model.zero_grad()
            eager.zero_grad()
    assert graphed.stats.replays > 20 and not graphed.stats.failures, graphed.last_failure


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.empty = mlp("cpu"), nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.body(x) + self.empty.sum()


def test_a_parameter_without_elements_gets_an_empty_gradient(device):
    twins(lambda device: Empty().to(device), train, device, replays=2)
    module = Empty().to(device)
    graphed = CUDAGraphModule(module, config())
    for _ in range(6):
        module.zero_grad()
        loss_of(graphed(torch.randn(4, 8, device=device))).backward()
    assert graphed.stats.replays and module.empty.grad.numel() == 0
