"""What only a captured backward reads."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config


class Table:
    def __init__(self, tensor):
        self.tensor, self.hidden = tensor, {tensor.clone()}


class Looked(torch.autograd.Function):
    """A backward that reads a tensor its forward does not."""

    @staticmethod
    def forward(ctx, x, table):
        ctx.table = table
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.table.tensor, None


class Peeked(Looked):
    @staticmethod
    def backward(ctx, grad):
        return grad * next(iter(ctx.table.hidden)), None


@pytest.mark.parametrize("function", [Looked, Peeked])
def test_what_only_the_backward_reads_is_held_and_watched(function, device, caplog):
    table = Table(torch.full((3,), 2.0, device=device))

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.table = nn.Linear(3, 3), table

        def forward(self, x):
            return function.apply(self.linear(x), self.table)

    torch.manual_seed(0)
    module = Module().to(device)
    graphed = CUDAGraphModule(module, config())
    for step in range(20):
        if function is Looked and step == 8:
            table.tensor = torch.full((3,), 7.0, device=device)
        x = torch.randn(2, 3, device=device)
        gradients = []
        for call in (graphed, module):
            module.zero_grad()
            call(x).sum().backward()
            gradients.append(module.linear.weight.grad.clone())
        assert torch.equal(*gradients), step
    assert graphed.stats.replays > 15
    assert "found neither" not in caplog.text
