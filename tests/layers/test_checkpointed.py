"""Layers inside a checkpoint have eager's numbers, from graphs where that can be, and their memory stays saved."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphmod import graph_layers
from tests.support.harness import config


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), dropout

    def forward(self, x, scale=None):
        hidden = nn.functional.gelu(self.up(x)).tanh().sin()
        hidden = nn.functional.dropout(self.down(hidden), self.dropout, self.training)
        return x + hidden * (1 if scale is None else scale)


class Net(nn.Module):
    def __init__(self, width=8, layers=3, dropout=0.0, **how):
        super().__init__()
        self.layers = nn.ModuleList([Block(width, dropout) for _ in range(layers)])
        self.how = how

    def forward(self, x):
        scale = torch.ones((), device=x.device) * 0.5
        for layer in self.layers:
            x = checkpoint(layer, x, scale, **self.how) if self.how else layer(x, scale)
        return x.square().mean()


def run(device, graphed, rows=4, width=8, steps=8, autocast=False, **settings):
    torch.manual_seed(0)
    net = Net(width, **settings).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrappers = graph_layers(net, config()) if graphed else []
    torch.manual_seed(1)
    seen = []
    for i in range(steps):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(i)).to(device).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = net(x)
        loss.backward()
        optimizer.step()
        seen += [loss.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in net.parameters())]
        optimizer.zero_grad()
    return seen, wrappers


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("dropout, autocast", [(0.0, False), (0.5, False), (0.0, True)])
def test_numbers_are_eagers(reentrant, preserve, dropout, autocast, device):
    settings = {"use_reentrant": reentrant, "preserve_rng_state": preserve, "dropout": dropout, "autocast": autocast}
    expected, _ = run(device, False, **settings)
    found, wrappers = run(device, True, **settings)
    assert all(map(torch.equal, expected, found))
    if not dropout and not (autocast and reentrant):
        assert all(wrapper.stats.replays >= 5 and wrapper.stats.failures == 0 for wrapper in wrappers)


@pytest.mark.gpu
def test_on_a_gpu_a_checkpoint_saves_memory():
    sizes = {"rows": 4096, "width": 512, "layers": 12}
    _, plain = run(torch.device("cuda"), True, **sizes)
    _, saving = run(torch.device("cuda"), True, use_reentrant=False, **sizes)
    assert all(wrapper.stats.replays >= 5 for wrapper in saving)
    assert saving[0].stats.pool_bytes < 0.5 * plain[0].stats.pool_bytes
