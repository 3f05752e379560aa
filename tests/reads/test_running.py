"""A function that nobody was seen to look up is watched with all that it closes over."""

import functools
import sys

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from graphmod.reads.operand_stack import function_of
from tests.support.harness import config


def forward_of_a_module(layer, held):
    class Scaled(nn.Module):
        def forward(self, x):
            return layer(x) * held["factor"]

    return Scaled()


def assigned_forward(layer, held):
    module = nn.Identity()
    module.forward = lambda x: layer(x) * held["factor"]
    return module


def decorated_forward(layer, held):
    def scaled(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args) * held["factor"]

        return inner

    class Scaled(nn.Module):
        @scaled
        def forward(self, x):
            return layer(x)

    return Scaled()


def callable_object(layer, held):
    class Step:
        def __call__(self, x):
            return layer(x) * held["factor"]

    return Step()


def partial(layer, held):
    return functools.partial(lambda factor, x: layer(x) * factor * held["factor"], 2)


def property_of_a_module(layer, held):
    class Scaled(nn.Module):
        @property
        def factor(self):
            return held["factor"]

        def forward(self, x):
            return layer(x) * self.factor

    return Scaled()


def attribute_made_by_code(layer, held):
    class Scaled(nn.Module):
        def __getattr__(self, name):
            return held["factor"] if name == "factor" else super().__getattr__(name)

        def forward(self, x):
            return layer(x) * self.factor

    return Scaled()


def special_method(layer, held):
    class Factor:
        def __mul__(self, x):
            return x * held["factor"]

    factor = Factor()
    return lambda x: factor * layer(x)


def context(layer, held):
    class Block:
        def __enter__(self):
            return held["factor"]

        def __exit__(self, *_):
            pass

    block = Block()

    def call(x):
        with block as factor:
            return layer(x) * factor

    return call


KINDS = [
    *(forward_of_a_module, assigned_forward, decorated_forward, callable_object, partial, property_of_a_module),
    *(attribute_made_by_code, special_method, context),
]


def play(call, change, device):
    wrapper = CUDAGraphModule(call, config())
    for index in range(10):
        change(2.0 if index in (6, 7) else 1.0)
        x = torch.randn(2, 4, device=device)
        with torch.no_grad():
            assert torch.equal(wrapper(x), call(x)), index
    assert wrapper.stats.replays >= 5


@pytest.mark.parametrize("make", KINDS)
def test_what_a_function_closes_over_is_watched_whoever_calls_it(make, device):
    held = {"factor": 1.0}
    play(make(nn.Linear(4, 4).to(device), held), functools.partial(held.__setitem__, "factor"), device)


def test_a_variable_of_the_wrapped_forward_is_watched(device):
    factor = 1.0

    class Scaled(nn.Module):
        def forward(self, x):
            return x * factor

    def change(value):
        nonlocal factor
        factor = value

    play(Scaled(), change, device)


@pytest.mark.parametrize("assigns", [True, False])
def test_a_variable_that_the_wrapped_forward_changes_is_no_part_of_a_graph(assigns, device):
    calls, counts = 0, {"calls": 0}

    class Counting(nn.Module):
        def forward(self, x):
            nonlocal calls
            if assigns:
                calls += 1
            else:
                counts["calls"] += 1
            return x * 2

    wrapper = CUDAGraphModule(Counting(), config())
    for _ in range(8):
        wrapper(torch.ones(2, device=device))
    assert calls + counts["calls"] == 8
    assert "as it runs" in wrapper.last_failure


def test_the_function_of_a_frame_is_the_one_that_runs():
    def make(value):
        return lambda: (value, function_of(sys._getframe()))

    made = [make(index) for index in range(3)]
    for index, one in enumerate(made):
        assert one() == (index, one)

    def generator():
        yield function_of(sys._getframe())

    assert next(generator()) is generator
