"""Shared, tied, frozen and unused parameters, modules used twice, and gradients of inputs."""

import pytest
import torch
from harness import layered, loss_of, make_sides, mlp, play, train, twins, wrapped
from torch import nn

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
