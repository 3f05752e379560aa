"""Under autocast a weight is cast once for all of its uses in a block: where a layer's weights have others, it stays
eager, and nowhere else."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, graph_layers
from tests.support.harness import config


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.embed = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)) * self.embed(x).sigmoid())


class Net(nn.Module):
    def __init__(self, times, outside):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.times, self.outside = times, outside

    def forward(self, x):
        before = self.layers[0].embed(x).float() if self.outside == "before" else 0
        h = x
        for _ in range(self.times):
            for layer in self.layers:
                h = layer(h).float()
        after = self.layers[0].embed(h).float() if self.outside == "after" else 0
        return (h + before + after).square().mean()


def run(device, graphed, times=1, outside="", microbatches=1, cache=True, blocks=1):
    torch.manual_seed(0)
    net = Net(times, outside).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrappers = graph_layers(net, config()) if graphed else []
    seen = []
    for i in range(10):
        parts = torch.randn(microbatches * blocks, 4, 8, generator=torch.Generator().manual_seed(i)).to(device)
        for block in parts.split(microbatches):
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=cache):
                losses = [net(part) for part in block]
            for loss in losses:
                loss.backward()
                seen.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *net.parameters()], wrappers


@pytest.mark.parametrize(
    "program, eager",
    [
        ({}, []),
        ({"blocks": 3}, []),
        ({"times": 2}, [0, 1]),
        ({"times": 2, "cache": False}, []),
        ({"microbatches": 2}, [0, 1]),
        ({"outside": "after"}, [0, 1]),
        ({"outside": "before"}, [0, 1]),
        ({"outside": "after", "cache": False}, []),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_layers_share_no_casts_with_other_code(program, eager, device):
    expected, _ = run(device, False, **program)
    found, wrappers = run(device, True, **program)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), f"{index}: {(one - other).abs().max()}"
    for index, wrapper in enumerate(wrappers):
        if index in eager:
            assert wrapper.stats.replays == 0 and wrapper.stats.eager_calls
        else:
            assert wrapper.stats.replays > 10 and wrapper.stats.failures == 0, wrapper.last_failure


def test_a_layer_that_is_called_again_in_a_block_later_says_so_once(device, caplog):
    torch.manual_seed(0)
    net = Net(1, "").to(device)
    wrappers = graph_layers(net, config())
    for i in range(8):
        net.times = 1 if i < 6 else 2
        with torch.autocast(device.type, torch.bfloat16):
            loss = net(torch.randn(4, 8, device=device))
        loss.backward()
        net.zero_grad()
        assert all((wrapper.stats.state == "captured") is (i in range(2, 6)) for wrapper in wrappers), i
    assert "this once" in caplog.text and "cache_enabled=False" in caplog.text


def test_a_gradient_that_is_not_finite_teaches_nothing(device):
    torch.manual_seed(0)
    net = Net(1, "").to(device)
    wrappers = graph_layers(net, config())
    for i in range(8):
        with torch.autocast(device.type, torch.bfloat16):
            loss = net(torch.randn(4, 8, device=device)) * (float("nan") if i < 2 else 1.0)
        loss.backward()
        net.zero_grad()
    assert all(wrapper.stats.replays > 4 for wrapper in wrappers)


@pytest.mark.parametrize("whole", [True, False])
def test_what_one_operation_is_made_of_is_cast_as_well(device, whole):
    """A fused encoder layer leaves its casts to the operations inside of it."""

    def run(graphed):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, device=device)
        model = call = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        if graphed and whole:
            call = CUDAGraphModule(model)
        elif graphed:
            graph_layers(model)
        out = []
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            for step in range(8):
                torch.manual_seed(step)
                out.append(call(torch.randn(2, 5, 16, device=device)).clone())
        return out

    assert all(map(torch.equal, run(False), run(True)))


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "capture fails"])
def test_a_capture_leaves_the_casts_of_others_as_they_were(fails, device):
    """Code around it uses a weight before and after, for which there is one cast, and a sum in 16 bits."""

    def run(graphed):
        torch.manual_seed(0)
        around, inside = nn.Linear(8, 8).to(device), Block().to(device)
        call = CUDAGraphModule(inside, config()) if graphed else inside
        if graphed and fails:
            call._context.group.settle(call._context.config.backend, device)
            call._context.group.backend.capture = failing(call._context.group.backend.capture)
        seen = []
        for step in range(8):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                loss = around(call(around(x))).float().square().mean()
            loss.backward()
            seen += [p.grad.clone() for one in (around, inside) for p in one.parameters()]
            around.zero_grad(), inside.zero_grad()
        return seen, call

    def failing(capture):
        def fail(*args, **kwargs):
            capture(*args, **kwargs)
            raise RuntimeError("another error")

        return fail

    (expected, _), (found, call) = run(False), run(True)
    assert all(map(torch.equal, expected, found))
    assert call.stats.failures if fails else call.stats.replays > 8


def test_wrappers_that_share_a_weight_in_a_block_stay_eager(device):
    def run(graphed):
        torch.manual_seed(0)
        shared = nn.Linear(8, 8).to(device)
        first, second = shared, nn.Sequential(shared, nn.ReLU())
        if graphed:
            first, second = CUDAGraphModule(first, config()), CUDAGraphModule(second, config())
        seen = []
        for step in range(10):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                y = second(first(x))
            y.sum().backward()
            seen += [shared.weight.grad.clone(), shared.bias.grad.clone()]
            shared.zero_grad()
        return seen, (first, second)

    (expected, _), (found, wrappers) = run(False), run(True)
    assert all(map(torch.equal, expected, found))
    assert all(one.stats.state == "disabled" and "autocast block" in one.last_failure for one in wrappers)


def test_a_call_without_gradients_leaves_the_casts_of_others_as_they_were(device):
    def run(graphed):
        torch.manual_seed(0)
        around, inside = nn.Linear(8, 8).to(device), Block().to(device)
        call, seen = CUDAGraphModule(inside, config()) if graphed else inside, []
        for step in range(8):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                y = around(x)
                with torch.no_grad():
                    y = y + call(x)
                loss = around(y).float().square().mean()
            loss.backward()
            seen += [around.weight.grad.clone(), around.bias.grad.clone()]
            around.zero_grad()
        return seen, call

    (expected, _), (found, call) = run(False), run(True)
    assert all(map(torch.equal, expected, found)) and call.stats.replays > 4
