"""Parameters that several graphs use, or one graph several times: shared, tied, of modules called twice."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config, layered, loss_of, make_sides, mlp, play, twins, wrapped

ACCUMULATION = pytest.mark.parametrize("accumulation", [1, 3])


def accumulate(accumulation, batch):
    """A step over several microbatches; `batch(side, i, key)` makes the arguments."""

    def step(side, i):
        for micro in range(accumulation):
            loss = loss_of(side.call(batch(side, i, micro)))
            side.note(loss=loss)
            loss.backward()
            side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    return step


def rows(side, i, key):
    return side.batch(i, 4, 8, key=key)


class Twice(nn.Module):
    """The same layer two or three times in one forward."""

    def __init__(self, times=2):
        super().__init__()
        self.layer, self.times = mlp("cpu"), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.layer(x) + x
        return x


@ACCUMULATION
@pytest.mark.parametrize("times", [2, 3])
def test_a_layer_called_several_times_in_one_forward(times, accumulation, device):
    step = accumulate(accumulation, rows)
    twins(lambda d: Twice(times).to(d), step, device, graph=layered("layer"), replays=2 * times * accumulation)


class Shared(nn.Module):
    """Two layers with one weight between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.layers[2][0].weight = self.layers[0][0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@ACCUMULATION
def test_a_parameter_shared_by_two_graphs(accumulation, device):
    twins(lambda d: Shared().to(d), accumulate(accumulation, rows), device, graph=layered(), replays=6 * accumulation)


@ACCUMULATION
def test_a_parameter_shared_inside_one_graph(accumulation, device):
    twins(lambda d: Shared().to(d), accumulate(accumulation, rows), device, graph=wrapped(), replays=2 * accumulation)


@ACCUMULATION
def test_a_parameter_shared_by_a_graph_and_eager_code(accumulation, device):
    step = accumulate(accumulation, rows)
    twins(lambda d: Shared().to(d), step, device, graph=layered("layers.0"), replays=2 * accumulation)


class ReachedTwice(nn.Module):
    """Uses one parameter as its attribute and through a list, and code outside uses it too."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8))
        self.also = [self.weight]

    def forward(self, x):
        return x @ self.weight + (x @ self.also[0].t()).tanh() + self.bias


def test_a_shared_parameter_that_is_reached_in_two_ways(device):
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8))) + side.model.weight.square().sum()
        loss.backward()
        gradient = side.model.weight.grad.clone()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return (gradient * 2**10).round()  # three terms, which eager adds in another order

    eager, graphed = make_sides(lambda d: ReachedTwice().to(d), device, wrapped())
    for i in range(12):
        expected, got = step(eager, i), step(graphed, i)
        torch.testing.assert_close(got, expected, rtol=0, atol=1.0)


class Slow(torch.autograd.Function):
    """Its backward keeps a GPU busy for some milliseconds."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(10_000_000)
        return grad


class SlowLinear(nn.Linear):
    def forward(self, x):
        return Slow.apply(super().forward(x))


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [wrapped(), layered("0")], ids=["whole", "layers"])
def test_eager_code_uses_a_parameter_whose_gradient_a_slow_graph_writes(graph):
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8))) + side.model[0].weight.square().sum()
        loss.backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss.detach()

    play(lambda d: nn.Sequential(SlowLinear(8, 8)).to(d), step, torch.device("cuda"), graph=graph)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([mlp("cpu")])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@ACCUMULATION
@pytest.mark.parametrize("graph", ["whole", "layers", "embedding and head"])
def test_tied_embeddings(graph, accumulation, device):
    patterns = {"layers": None, "embedding and head": ["embedding", "layers.*", "head"]}
    make = wrapped() if graph == "whole" else layered(patterns[graph])
    count = {"whole": 1, "layers": 1, "embedding and head": 3}[graph]
    step = accumulate(accumulation, lambda side, i, key: side.tokens(i, 2, 5, vocabulary=16, key=key))
    twins(lambda d: Tied().to(d), step, device, graph=make, replays=2 * count * accumulation)


def test_two_wrappers_of_one_module_in_one_backward(device):
    """Each is in a group of its own and knows nothing of the other."""

    def graph(side):
        side.graphs = side.calls = [CUDAGraphModule(side.model, config()) for _ in range(2)]

    def step(side, i):
        one, two = side.calls if side.graphed else (side.model, side.model)
        x = side.batch(i, 4, 8)
        (loss_of(one(x)) + loss_of(two(x + 1))).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(mlp, step, device, graph=graph, steps=14)


def critic():
    """Uses weights twice in each call, and is called three times in each step."""
    norm = nn.utils.parametrizations.spectral_norm
    return nn.ModuleDict({"all": nn.Sequential(norm(nn.Linear(8, 16)), nn.LeakyReLU(0.1), norm(nn.Linear(16, 1)))})


@pytest.mark.parametrize("seed", range(4))
def test_a_weight_used_twice_in_each_of_several_calls_is_summed_up_use_by_use(seed, device):
    def step(side, i):
        call, fake = side.model["all"], side.generator(side.batch(i, 4, 4, key=seed))
        side.optimizer.zero_grad()
        (-call(side.batch(i, 4, 8)).mean() + call(fake.detach()).square().mean()).backward()
        side.note_gradients()
        side.optimizer.step()
        (-call(fake).mean()).backward()
        side.note_gradients()

    def build(device):
        return {"generator": nn.Linear(4, 8).to(device), "model": critic().to(device)}

    twins(build, step, device, graph=layered(["all.0", "all.1", "all.2"], warmup_steps=3), replays=18, steps=14)


class InATuple(nn.Module):
    """Code may use what a tuple holds, in whose place nothing can be put for a capture."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.held = (self.layer.weight,)

    def forward(self, x):
        return self.layer(x) @ self.held[0]


def test_a_parameter_of_a_module_and_a_tuple_that_code_outside_uses_too_is_told_of_and_has_eagers_gradient(device):
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8))) + loss_of(side.model.layer.weight)
        loss.backward()
        side.note_gradients()
        side.optimizer.zero_grad()
        return side.call.last_failure if side.graphed else None

    told = []
    play(lambda d: InATuple().to(d), lambda side, i: told.append(step(side, i)), device)
    assert any("uses a parameter that code outside uses too" in one for one in told if one)
