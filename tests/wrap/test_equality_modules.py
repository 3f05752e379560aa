"""A graphed module computes what the eager one computes, bit for bit, over many replays with changing inputs."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config, iteration_of, layered, loss_of, mlp, train, twins, wrapped


def encoder_layer(device):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True).to(device)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        mixed, weights = self.attention(x, x, x)
        return x + mixed, weights


class FusedAttention(nn.Module):
    """Whose kernels on a GPU keep a seed and an offset on the host, with dropout or without."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout, self.project = dropout, nn.Linear(32, 96)

    def forward(self, x):
        query, key, value = (
            self.project(x.to(self.project.weight.dtype)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        )
        return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(4 * 4 * 4, 5)

    def forward(self, x):
        return self.head(self.layers(x).flatten(1))


CASES = {
    "mlp": (mlp, (4, 8)),
    "mlp with dropout": (lambda d: nn.Sequential(mlp(d), nn.Dropout(0.3), mlp(d), nn.Dropout(0.1)), (4, 8)),
    "encoder layer": (encoder_layer, (2, 5, 8)),
    "self-attention": (lambda d: SelfAttention().to(d), (2, 5, 8)),
    "fused attention": (lambda d: FusedAttention(0.0).to(d), (2, 8, 32)),
    "fused attention in 16 bits": (lambda d: FusedAttention(0.0).to(d, torch.bfloat16), (2, 8, 32)),
    "fused attention with dropout": (lambda d: FusedAttention(0.2).to(d), (2, 8, 32)),
    "batch norm": (lambda d: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()).to(d), (6, 8)),
    "convolution": (lambda d: Convolution().to(d), (2, 3, 8, 8)),
    "weight norm": (lambda d: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)).to(d), (4, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_eager(name, device):
    build, shape = CASES[name]
    twins(build, lambda side, i: train(side, i, *shape), device, replays=2)


@pytest.mark.parametrize("name", ["mlp", "encoder layer", "self-attention", "fused attention"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_whole_iteration_in_one_graph_equals_eager(name, optimizer, device):
    build, shape = CASES[name]

    def make(device):
        model = build(device)
        if optimizer == "sgd":
            return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}
        capturable = device.type == "cuda"
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)}

    def graph(side):
        side.iteration = CUDAGraphModule(iteration_of(side), config(), name="iteration")
        side.graphs = [side.iteration]

    def step(side, i):
        if not side.graphed:
            side.iteration = iteration_of(side)
        return side.iteration(side.batch(i, *shape))

    twins(make, step, device, graph=graph, replays=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_equal_eager(dtype, device):
    def step(side, i):
        output = side.call(side.batch(i, 4, 8, dtype=dtype))
        loss = loss_of(output)
        loss.backward()
        side.note(output=output)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss

    twins(lambda d: mlp(d).to(dtype), step, device, replays=2)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.mark.parametrize("warmup", [1, 3])
def test_layers_in_place_equal_eager(warmup, device):
    step = lambda side, i: train(side, i, 2, 5, 8)  # noqa: E731
    twins(lambda d: Deep().to(d), step, device, graph=layered(warmup_steps=warmup), replays=6)


def test_only_the_named_parts_are_graphed(device):
    step = lambda side, i: train(side, i, 2, 5, 8)  # noqa: E731
    side = twins(lambda d: Deep().to(d), step, device, graph=layered("layers.*.linear1"), replays=6)
    assert [graph.graph_name for graph in side.graphs] == [f"layers.{i}.linear1" for i in range(3)]


def test_results_as_copies_equal_eager(device):
    twins(mlp, train, device, graph=wrapped(clone_outputs=True), replays=2)


def test_evaluation_alone_equals_eager(device):
    def step(side, i):
        with torch.no_grad():
            return side.call(side.batch(i, 4, 8))

    twins(lambda d: mlp(d).eval(), step, device, replays=1)


def test_inference_mode_equals_eager(device):
    def step(side, i):
        with torch.inference_mode():
            return side.call(side.batch(i, 4, 8)).clone().sum().item()

    twins(lambda d: mlp(d).eval(), step, device, replays=1)


def test_a_leaf_that_requires_grad_is_an_argument_in_inference_mode(device):
    """There it has no node in autograd's graph."""
    weight = nn.Parameter(torch.ones(4, device=device))
    module = CUDAGraphModule(lambda x: x * 2, config())
    for _ in range(6):
        with torch.inference_mode():
            assert module(weight).tolist() == [2.0] * 4
    assert module.stats.replays > 1, module.last_failure
