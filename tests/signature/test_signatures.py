"""Which calls share a graph, how many graphs there may be, and how a new one is explained."""

import logging

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.signature.test_arguments import Anything, Bundle, Kind
from tests.support.harness import config, loss_of, mlp, play, twins, wrapped

CONSTANTS = {
    "an integer": [1, 2],
    "an integer or a boolean": [1, True],
    "a number": [0.5, 1.5],
    "zero or none": [0, None],
    "a string": ["a", "bcd"],
    "an enum": [Kind.double, Kind.triple],
    "a tuple": [(1, 2), (1, 3)],
    "a list": [[1], [1, 1]],
    "a dict": [{"a": 1}, {"a": 2}],
    "a set": [{1, 2}, {1, 5}],
    "a dataclass": [Bundle(None, 1.0), Bundle(None, 2.0)],
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_another_constant_is_another_graph(name, device):
    def step(side, i):
        output = side.call(side.batch(i, 4, 8), CONSTANTS[name][i % 2], key=CONSTANTS[name][i // 2 % 2])
        loss_of(output).backward()
        side.note(output=output)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(lambda d: Anything().to(d), step, device, replays=2, steps=20)


def test_zero_and_minus_zero_are_different_constants(device):
    class Divides(nn.Module):
        def forward(self, x, divisor):
            return torch.copysign(x, torch.full_like(x, divisor))

    def step(side, i):
        with torch.no_grad():
            return side.call(side.batch(i, 4, 8), [0.0, -0.0][i % 2])

    play(lambda d: Divides().to(d), step, device, graph=wrapped(backend="auto"))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_than_max_graphs_signatures_have_graphs(most, device):
    """Three shapes in turn: the least recently used makes room, and the numbers stay eager's."""

    def step(side, i):
        loss_of(side.call(side.batch(i, 2 + i // 3 % 3, 8))).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    _, history = play(mlp, step, device, graph=wrapped(max_graphs=most), steps=36)
    assert history[-1][0] > 18 and (history[-1][2] == 6) is (most == 3)


def test_a_call_with_other_inputs_is_explained_once(device, caplog):
    module = CUDAGraphModule(Anything().to(device), config(), name="block")
    x = torch.randn(4, 8, device=device)
    with caplog.at_level(logging.INFO, "graphmod"):
        for _ in range(4):
            module(x, "sum", mask=None)
        caplog.clear()
        for _ in range(4):
            module(x[:3], "sum", mask=None)
        module(x, "mean", mask=x)
    lines = [r.getMessage() for r in caplog.records if "(3, 8)" in r.getMessage()]
    assert len(lines) == 1, caplog.text
    assert "'block'" in lines[0] and "x: was (4, 8) float32" in lines[0] and "is (3, 8)" in lines[0]
    assert "captured on its own, up to max_graphs: pad to a few lengths" in lines[0]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (0.1, 0.2, ": pass a number that changes as a tensor"),
        (True, False, "up to max_graphs"),
        (object(), object(), ": pass the same object, or tensors"),
    ],
)
def test_other_inputs_come_with_what_helps_and_nothing_is_called_captured_that_is_not(first, second, words, caplog):
    module = CUDAGraphModule(lambda x, other: x * 2, config(), name="block")
    for other in (first, second):
        module(torch.ones(2), other)
    said = caplog.records[-1].getMessage()
    assert said.endswith(words) and "other: was" in said and "captured " not in said.replace("captured on its own", "")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x: ((x.double(),), {}), ["x", "float32", "float64"]),
        (lambda x: ((x.T.contiguous().T,), {}), ["x", "strides", "(8, 1)", "(1, 4)"]),
        (lambda x: ((x.clone().requires_grad_(),), {}), ["x", "requires grad"]),
        (lambda x: ((x, 2), {}), ["2"]),
        (lambda x: ((x,), {"scale": 2.5}), ["scale", "2.5"]),
        (lambda x: ((x,), {"pair": (x, None)}), ["pair[0]", "pair[1]"]),
        (lambda x: ((x, Bundle(x, 3.0)), {}), [".factor", "3.0"]),
    ],
)
def test_the_explanation_names_the_argument_and_how_it_differs(change, words, device, caplog):
    module = CUDAGraphModule(Anything().to(device).double().float(), config())
    x = torch.randn(4, 8, device=device)
    for _ in range(4):
        module(x)
    args, kwargs = change(x)
    module.module.to(args[0].dtype)
    caplog.clear()
    with caplog.at_level(logging.INFO, "graphmod"):
        module(*args, **kwargs)
    text = " ".join(r.getMessage() for r in caplog.records)
    assert all(word in text for word in words), text
