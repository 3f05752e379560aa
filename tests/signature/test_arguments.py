"""Arguments of every kind reach the graph; whatever a graph would freeze is part of its key."""

import dataclasses
import gc
import weakref
from collections import OrderedDict, namedtuple
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphmod import CUDAGraphModule, mark_static
from tests.support.harness import config, layered, loss_of, mlp, play, twins

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Bundle:
    x: Tensor
    factor: float = 1.0
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor


class Kind(Enum):
    double = 2
    triple = 3


class Anything(nn.Module):
    """Adds up every number and tensor it is given, in any nesting, so that none may be ignored or frozen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def total(self, value, x):
        if isinstance(value, Tensor):
            return x + value.to(x.dtype).sum()
        if isinstance(value, Enum):
            return x * value.value
        if isinstance(value, (bool, int, float)):
            return x * (value + 0.5)
        if isinstance(value, str):
            return x + len(value)
        if isinstance(value, dict):
            value = list(value.values())
        if dataclasses.is_dataclass(value):
            value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        for item in value if isinstance(value, (tuple, list, set)) else ():
            x = self.total(item, x)
        return x if value is not None else x - 0.25

    def forward(self, x, *args, **kwargs):
        return self.total(kwargs, self.total(args, self.linear(x))).tanh()


ARGUMENTS = {
    "tensors": lambda t, i: ((t(4, 8), t(8)), {}),
    "keywords": lambda t, i: ((), {"a": t(4, 8), "b": t(8)}),
    "None": lambda t, i: ((None, t(8)), {"mask": None}),
    "numbers and strings": lambda t, i: ((2, 0.5, True, "sum"), {"other": -1}),
    "tuples and lists": lambda t, i: (((t(8), (t(4, 8), 3)),), {"more": [t(8), [t(8), None]]}),
    "dicts": lambda t, i: (({"a": t(8), "b": {"c": t(4, 8)}},), {"o": OrderedDict(z=t(8), y=1.5)}),
    "a dataclass": lambda t, i: ((Bundle(t(8), 2.0, (t(8), None)),), {}),
    "a frozen dataclass": lambda t, i: ((Frozen(t(8)),), {}),
    "a named tuple": lambda t, i: ((Point(t(8), 3),), {}),
    "an enum": lambda t, i: ((Kind.triple,), {}),
    "a dtype": lambda t, i: ((torch.float32, torch.Size([2])), {}),
    "a slice": lambda t, i: ((slice(0, 2), ...), {}),
    "integers and booleans": lambda t, i: ((t(8) > 0, (t(8) * 10).long(), t(8).int()), {}),
    "float64": lambda t, i: ((t(8).double(), t(4, 8).half()), {}),
    "a 0-d tensor": lambda t, i: ((t(1)[0], t(1).sum()), {}),
    "an empty tensor": lambda t, i: ((t(0, 8), t(8)[:0]), {}),
    "a transposed tensor": lambda t, i: ((t(8, 4).T, t(4, 16)[:, ::2]), {}),
    "an expanded tensor": lambda t, i: ((t(1, 8).expand(4, 8), t(4, 1).expand(4, 8), t(1).expand(4, 8)), {}),
    "overlapping windows": lambda t, i: ((t(10).unfold(0, 4, 1),), {}),
    "the same tensor twice": lambda t, i: ((*[t(8)] * 2,), {}),
    "two views of one tensor": lambda t, i: (tuple(t(4, 8).chunk(2, 1)), {}),
    "a part of a larger tensor": lambda t, i: ((t(6, 8)[i % 3],), {}),
    "a tensor that requires grad": lambda t, i: ((t(8).requires_grad_(), t(8)), {}),
    "a complex tensor": lambda t, i: ((torch.complex(t(8), t(8)).abs(),), {}),
}


def given(side, i, name):
    keys = iter(range(1, 99))
    return ARGUMENTS[name](lambda *shape: side.batch(i, *shape, key=next(keys)), i)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_every_kind(name, device):
    def step(side, i):
        args, kwargs = given(side, i, name)
        output = side.call(side.batch(i, 4, 8), *args, **kwargs)
        loss_of(output).backward()
        side.note(output=output, gradients=[a.grad for a in args if isinstance(a, Tensor) and a.is_leaf])
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(lambda d: Anything().to(d), step, device, replays=2)


def test_a_mutable_object_whose_content_changes(device):
    class Options:
        factor = 1.0

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, options):
            return self.linear(x) * options.factor

    def step(side, i):
        side.options = getattr(side, "options", Options())
        side.options.factor = 1.0 + i // 6
        output = side.call(side.batch(i, 4, 8), side.options)
        loss_of(output).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(lambda d: Uses().to(d), step, device, steps=18)


def test_objects_given_once_are_not_kept_alive(device):
    """A cache that is made anew for each call holds much memory; a key must not hold it for long."""

    class Cache:
        def __init__(self, values):
            self.values = values

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, cache):
            return self.linear(x) + cache.values

    module = CUDAGraphModule(Uses().to(device), config())
    given = []
    for _ in range(30):
        cache = Cache(torch.randn(4, 8, device=device))
        module(torch.randn(4, 8, device=device), cache).sum().backward()
        given.append(weakref.ref(cache))
    del cache
    gc.collect()
    assert sum(ref() is not None for ref in given) <= 4


def test_an_argument_that_the_module_changes_in_place(device):
    """Eager changes the caller's tensor."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, cache):
            cache.add_(x.detach())
            return self.linear(x) + cache

    def step(side, i):
        if i == 0:
            side.cache = torch.zeros(4, 8, device=side.device)
        output = side.call(side.batch(i, 4, 8), side.cache)
        loss_of(output).backward()
        side.note(output=output, cache=side.cache)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(lambda d: Writes().to(d), step, device)


def test_a_tensor_marked_static_is_read_where_it_is(device):
    def step(side, i):
        if i == 0:
            side.x = mark_static(side.batch(0, 4, 8))
        side.x.data.copy_(side.batch(i, 4, 8))
        loss_of(side.call(side.x)).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    side = twins(mlp, step, device, replays=2)
    assert side.call.stats.copied_bytes <= side.x.nbytes * 12  # gradients of the outputs at most, never the input


def test_several_tensors_marked_static_take_turns(device):
    def step(side, i):
        side.xs = getattr(side, "xs", None) or [mark_static(side.batch(k, 4, 8)) for k in range(2)]
        side.xs[i % 2].copy_(side.batch(i, 4, 8))
        loss_of(side.call(side.xs[i % 2])).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(mlp, step, device, steps=24)


def test_layers_that_get_one_tensor_by_keyword_copy_it_once_a_step(device):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, mask=None):
            return self.linear(x) * mask

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Masked() for _ in range(4))

        def forward(self, x, mask):
            for layer in self.layers:
                x = layer(x, mask=mask)
            return x

    def step(side, i):
        mask = side.batch(i, 4, 8, key=1).sigmoid()
        loss_of(side.call(side.batch(i, 4, 8), mask)).backward()
        side.note_gradients()
        side.copied = sum(graph.stats.copied_bytes for graph in side.graphs)
        side.history = [*getattr(side, "history", []), side.copied]
        side.optimizer.step()
        side.optimizer.zero_grad()

    side = twins(lambda d: Model().to(d), step, device, graph=layered(), replays=8)
    assert side.history[-1] - side.history[-2] <= 3 * 4 * 8 * 4  # x, mask, and the gradient of the last layer's output


def test_a_sparse_argument_after_dense_ones_runs_eagerly(device):
    module = CUDAGraphModule(lambda x: x + 1 if x.layout is torch.strided else x.to_dense() + 1, config())
    x = torch.eye(2, device=device)
    for _ in range(4):
        module(x)
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        for requires_grad in (False, True, True, True):
            assert torch.equal(module(sparse.requires_grad_(requires_grad)), x + 1)


def test_only_tensors_can_be_marked_static():
    with pytest.raises(TypeError, match="mark_static takes a tensor, got int"):
        mark_static(3)
