"""A parameter that a layer uses several times, and that other calls use too, gets its gradients summed in eager's
order: a discriminator with spectral norm, a layer that stands twice in a model, a weight tied to code outside."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from graphmod import CUDAGraphModule, graph_layers
from tests.support.harness import config


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.tanh(torch.tanh(x @ self.weight) @ self.weight) @ self.weight.t()


def discriminator():
    layers = [parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(2)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def play(device, graphed, make, wrap, calls, outside):
    torch.manual_seed(0)
    module = make().to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    wrappers, call = [], module
    if graphed and wrap == "module":
        call = CUDAGraphModule(module, config())
        wrappers = [call]
    elif graphed:
        wrappers = graph_layers(nn.ModuleDict({"inside": module}), config(), layers="inside")
    seen = []
    for i in range(10):
        xs = torch.randn(calls, 4, 8, generator=torch.Generator().manual_seed(i)).to(device)
        loss = sum(call(x).square().mean() for x in xs)
        if outside:
            loss = loss + sum((p * p).mean() for p in module.parameters())
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen, wrappers


@pytest.mark.parametrize("make", [Twice, discriminator])
@pytest.mark.parametrize("wrap", ["module", "layers"])
@pytest.mark.parametrize("calls, outside", [(1, False), (2, False), (3, False), (1, True), (2, True)])
def test_gradients_are_summed_as_in_eager(make, wrap, calls, outside, device):
    expected, _ = play(device, False, make, wrap, calls, outside)
    found, wrappers = play(device, True, make, wrap, calls, outside)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), f"{index}: {(one - other).abs().max()}"
    assert wrappers[0].stats.replays > 6, wrappers[0].last_failure
