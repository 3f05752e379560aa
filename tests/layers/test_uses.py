"""Arguments that a captured layer uses several times, and that code outside uses too: summed in eager's order."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, graph_layers


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Attends(nn.Module):
    """Uses `memory` for keys and for values."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, memory):
        weights = (self.query(x) @ self.key(memory).transpose(-1, -2)).softmax(-1)
        return x + weights @ self.value(memory)


class Squares(nn.Module):
    """One operation uses `x` twice, and another once more."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x * x) + x.sin()


class Skips(nn.Module):
    def __init__(self, kind, width=16, outside=True):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([kind(width) for _ in range(3)])
        self.outside = outside

    def forward(self, x):
        hidden, kept = self.first(x), []
        for block in self.blocks:
            kept.append(hidden)
            hidden = block(hidden)
        for one in kept if self.outside else ():
            hidden = hidden + 0.3 * one.sin()
        return hidden.float().square().mean()


class Encodes(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.encoder = nn.Linear(width, width), Residual(width)
        self.blocks = nn.ModuleList([Attends(width) for _ in range(3)])

    def forward(self, x):
        memory, hidden = self.encoder(self.first(x)), x
        for block in self.blocks:
            hidden = block(hidden, memory)
        return hidden.float().square().mean()


def trained(make, device, dtype, wrap, steps=9):
    torch.manual_seed(0)
    model = make().to(device, dtype)
    wrappers = graph_layers(model) if wrap else []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step)).to(device, dtype)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [one.detach().clone() for one in model.parameters()], wrappers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [lambda: Skips(Residual), lambda: Skips(Squares), Encodes],
    ids=["residual", "twice in one operation", "keys and values"],
)
def test_sums_are_rounded_as_in_eager(make, dtype, device):
    losses, weights, _ = trained(make, device, dtype, wrap=False)
    found, graphed, wrappers = trained(make, device, dtype, wrap=True)
    assert found == losses and all(map(torch.equal, graphed, weights))
    assert all(wrapper.stats.replays > 8 and wrapper.stats.captures == 2 for wrapper in wrappers)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("kind", [Residual, Squares])
def test_a_use_outside_that_begins_later_is_told_and_learned(kind, every, which, device, caplog):
    """An auxiliary loss of hidden states, after some steps."""
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = Skips(kind, outside=False).to(device)
        wrappers = graph_layers(model) if wrap else []
        found.append([])
        for step in range(24):
            hidden, kept = model.first(torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(device)), []
            for block in model.blocks:
                kept.append(hidden)
                hidden = block(hidden)
            loss = hidden.square().mean()
            if step >= 8 and step % every == 0:
                loss = loss + 0.3 * kept[which].pow(3).abs().mean()
            model.zero_grad()
            loss.backward()
            found[-1].append([parameter.grad.clone() for parameter in model.parameters()])
    same = [all(map(torch.equal, *two)) for two in zip(*found, strict=True)]
    assert all(same[:8] + same[9:])
    assert sum("which had not used that before" in line for line in caplog.messages) == 1
    assert all(wrapper.stats.replays > 30 for wrapper in wrappers)


class Queries(nn.Module):
    """A learned tensor is an argument of each layer, which uses it several times."""

    def __init__(self, width=16):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 8, width))
        self.blocks = nn.ModuleList([Attends(width) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.queries)
        return x.square().mean()


class Normalized(nn.Module):
    """A weight is an argument of what divides it by its norm, twice in a step."""

    def __init__(self, width=16):
        super().__init__()
        weighted = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.norm, self.weight = weighted.parametrizations.weight[0], nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        fake, real = ((part @ self.norm(self.weight)).tanh() for part in x.chunk(2))
        return (real.sum() - fake.sum()).exp().mean()


@pytest.mark.parametrize("make", [Queries, Normalized])
def test_parameters_as_arguments_are_rounded_as_in_eager(make, device):
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = make().to(device)
        wrappers = []
        for name, module in list(model.named_modules()) if wrap else ():
            if isinstance(module, Attends) or name == "norm":
                wrappers.append(CUDAGraphModule(module))
                model.set_submodule(name, wrappers[-1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found.append([])
        for step in range(12):
            x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            found[-1] += [one.grad.clone() for one in model.parameters()]
    assert all(map(torch.equal, *found))
    assert all(wrapper.stats.replays > 8 for wrapper in wrappers)


def test_zeros_in_the_recorded_step_do_not_tell(device):
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = Skips(Residual).to(device)
        if wrap:
            graph_layers(model)
        found.append([])
        for step in range(8):
            x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step)).to(device)
            (model(x) * (step > 3)).backward()
            found[-1] += [one.grad.clone() for one in model.parameters()]
            model.zero_grad()
    assert all(map(torch.equal, *found))


def differentiable(wrapper):
    (entry,) = wrapper._context.entries
    return [graph.differentiable for graph in entry.graphs]


def test_only_what_code_outside_uses_is_kept_apart(device):
    _, _, inside = trained(lambda: Skips(Residual, outside=False), device, torch.float32, wrap=True)
    assert [differentiable(wrapper) for wrapper in inside] == [[[0]]] * 3
    _, _, outside = trained(lambda: Skips(Residual), device, torch.float32, wrap=True)
    assert [differentiable(wrapper) for wrapper in outside] == [[[0, 0]]] * 3


def test_gradients_of_inputs_and_a_second_backward_have_all_uses(device):
    _, _, wrappers = trained(lambda: Skips(Residual), device, torch.float32, wrap=True)
    block = wrappers[0]
    x = torch.randn(2, 8, 16, device=device)
    plain = x.clone().requires_grad_()
    block.module(plain).square().sum().backward()
    hidden = x.clone().requires_grad_() * 1
    (found,) = torch.autograd.grad(block(hidden).square().sum(), hidden)
    assert torch.equal(found, plain.grad)
    leaf = x.clone().requires_grad_()
    loss = block(leaf * 1).square().sum()
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, plain.grad)
    loss.backward()
    assert torch.equal(leaf.grad, plain.grad + plain.grad)


def test_learning_leaves_no_hooks_and_an_unused_backward_teaches_nothing(device):
    torch.manual_seed(0)
    model = Skips(Residual).to(device)
    wrappers = graph_layers(model)
    for _ in range(6):
        model(torch.randn(2, 8, 16, device=device))  # results that are dropped
    for _ in range(8):
        loss = model(torch.randn(2, 8, 16, device=device))
        loss.backward()
        model.zero_grad()
    assert all(wrapper.stats.failures == 0 and wrapper.stats.replays > 6 for wrapper in wrappers)
