"""A captured step that calls modules which are wrapped themselves sees all that these read."""

import copy

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, graph_layers
from tests.support.harness import config


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x).tanh()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        return self.second(self.first(x))


def doubled(module, args, output):
    return output * 2


def of_class(model, monkeypatch):
    monkeypatch.setattr(Layer, "forward", lambda self, x: self.inner(x).sin())


def of_the_outer_class(model, monkeypatch):
    monkeypatch.setattr(Pair, "forward", lambda self, x: self.first(x))


def assigned(model, monkeypatch):
    model.forward = lambda x: Pair.forward(model, x) * 3


def hook(model, monkeypatch):
    model.register_forward_hook(doubled)


def hook_before(model, monkeypatch):
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def hook_of_a_layer(model, monkeypatch):
    model.second.register_forward_hook(doubled)


def another_class(model, monkeypatch):
    model.second.__class__ = type("Other", (Layer,), {"forward": lambda self, x: self.inner(x)})


def shallow_copy(model, monkeypatch):
    model.second = copy.copy(model.first)
    model.second._modules = {"inner": nn.Identity()}


CHANGES = [of_class, of_the_outer_class, assigned, hook, hook_before, hook_of_a_layer, another_class, shallow_copy]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("inner", ["module", "layers"])
def test_a_change_of_what_a_wrapped_module_inside_does_is_noticed(inner, change, device, monkeypatch):
    torch.manual_seed(0)
    model = Pair().to(device)
    called = CUDAGraphModule(model, config()) if inner == "module" else model
    if inner == "layers":
        graph_layers(model, config(), layers=["first", "second"])
    step = CUDAGraphModule(lambda x: called(x) + 1, config(), name="step")
    replays = []
    with torch.no_grad():
        for index in range(16):
            if index == 8:
                change(model, monkeypatch)
            x = torch.randn(4, 6, device=device)
            assert torch.equal(step(x), model(x) + 1), index
            replays.append(step.stats.replays)
    assert replays[7] > 3 and replays[-1] > replays[-4]


@pytest.mark.parametrize("second", ["backward", "torch.autograd.grad"])
def test_a_wrapper_around_wrapped_layers_runs_them_again_without_their_graphs(second, device):
    torch.manual_seed(0)
    model = Pair().to(device)
    plain = copy.deepcopy(model)
    inner = graph_layers(model, config(), layers=["first", "second"])
    outer = CUDAGraphModule(model, config())
    for index in range(16):
        seen = []
        for one, call in ((plain, plain), (model, model if index < 5 else outer)):
            one.zero_grad()
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(index)).to(device).requires_grad_()
            loss = call(x).pow(2).sum()
            if second == "backward" and index > 10:
                loss.backward(retain_graph=True)
            elif index > 10:
                seen.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
            loss.backward()
            seen += [loss.detach().clone(), x.grad, *(p.grad.clone() for p in one.parameters())]
        half = len(seen) // 2
        assert all(map(torch.equal, seen[:half], seen[half:])), index
    assert all(graph.stats.replays for graph in (outer, *inner)) and not any(
        graph.stats.failures for graph in (outer, *inner)
    )


@pytest.mark.parametrize("through", ["module", "wrapper"])
def test_what_a_step_reads_of_a_module_through_its_wrapper_is_watched(through, device):
    module, x = Layer().to(device), torch.ones(3, device=device)
    module.scale = 2.0
    inner = CUDAGraphModule(module, config())
    outer = CUDAGraphModule(lambda x: x * inner.scale, config())
    for index in range(12):
        if index == 6:
            assert outer.stats.replays > 2
            (module if through == "module" else inner).scale = 3.0
        assert outer(x).tolist() == [2.0 if index < 6 else 3.0] * 3
