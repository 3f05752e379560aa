"""A graph starts before everything about it has been checked. Where the check then fails, nothing has happened."""

import gc
import weakref

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, mark_static
from tests.support.harness import config, loss_of, mlp, play


def whole(side):
    """Graphs `side.function`, a callable that is no module."""
    side.graphs = [CUDAGraphModule(side.function, config())]
    side.call = side.graphs[0]


@pytest.mark.parametrize("why", ["gradients are there", "another mode", "a weight moved"])
def test_gradients_that_a_callable_left_behind_survive(why, device):
    """They lie in memory of the graph, and whoever runs in its place adds to them."""

    def build(device):
        model = mlp(device)

        def function(x):
            loss = loss_of(model(x))
            loss.backward()
            return loss.detach()

        return {"model": model, "function": function, "call": function}

    def step(side, i):
        loss = side.call(side.batch(i, 4, 8))
        side.note_gradients()
        if i % 6 < 4:
            side.optimizer.step()
            side.optimizer.zero_grad()
        elif why == "another mode":
            side.model.train(not side.model.training)
        elif why == "a weight moved":
            side.model[0].weight.data = side.model[0].weight.data.clone()
        return loss

    play(build, step, device, graph=whole, steps=18)


def test_random_numbers_go_on_where_they_were(device):
    """A dropout that started in vain, and one that was interrupted, have drawn nothing."""

    def build(device):
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to(device)

    @torch.no_grad()
    def step(side, i):
        if i % 4 == 3:
            side.model[2].bias = nn.Parameter(side.model[2].bias + 1)
        return side.call(side.batch(i, 4, 8))

    play(build, step, device, steps=20)


def test_a_static_argument_written_before_a_failed_check_is_written_once(device):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, total):
            total.mul_(2).add_(self.scale)

    graphed, eager = CUDAGraphModule(Counts().to(device), config()), Counts().to(device)
    total, expected = mark_static(torch.ones(3, device=device)), torch.ones(3, device=device)
    with torch.no_grad():
        for i in range(16):
            if i % 5 == 4:
                for module in (graphed.module, eager):
                    module.scale = nn.Parameter(module.scale * 1.5)
            graphed(total)
            eager(expected)
            assert torch.equal(total, expected)
    assert graphed.stats.replays > 4


def test_a_static_argument_changed_by_a_replay_is_noticed_by_autograd(device):
    def increment(total):
        total.add_(1)

    graphed = CUDAGraphModule(increment, config())
    total, weight = mark_static(torch.zeros(2, device=device)), torch.ones(2, device=device, requires_grad=True)
    for _ in range(5):
        graphed(total)
    product = (weight * total).sum()
    graphed(total)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_disabled_signature_does_not_stand_in_the_way_of_another_mode(device, monkeypatch):
    module = CUDAGraphModule(nn.Dropout(0.0).to(device), config(max_failures=1))
    x = torch.ones(4, device=device)
    for _ in range(4):
        module(x)
    (graph,) = {graph.graph for entry in module._context.entries for graph in entry.graphs}
    with monkeypatch.context() as patch:
        fails = property(lambda _: lambda: (_ for _ in ()).throw(RuntimeError("injected")))
        patch.setattr(type(graph), "start", fails, raising=False)
        module(x)
    assert module.stats.state == "disabled"
    module.eval()
    for _ in range(4):
        module(x)
    assert module.stats.state == "captured"


def test_objects_given_as_arguments_are_let_go(device):
    """A cache that is made anew for each call is kept by no more signatures than may have graphs or wait for one."""

    class Cache:
        pass

    module = CUDAGraphModule(lambda x, cache: x * 2, config(max_graphs=2))
    made = []
    for _ in range(12):
        cache = Cache()
        made.append(weakref.ref(cache))
        for _ in range(5):
            module(torch.ones(3, device=device), cache)
    del cache
    gc.collect()
    assert sum(one() is not None for one in made) <= 6


def test_a_reset_while_a_backward_is_pending_leaves_its_gradients(device):
    for bias in (True, False):
        layer = nn.Linear(4, 1, bias=bias).to(device)
        module = CUDAGraphModule(layer, config())
        x = torch.ones(2, 4, device=device)
        for _ in range(4):
            layer.zero_grad()
            module(x).sum().backward()
        layer.zero_grad()
        output = module(x)
        module.reset()
        with torch.no_grad():
            module(x)
        output.sum().backward()
        assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 2.0))


def test_a_forward_of_the_instance_stays_where_it_is(device):
    module = nn.Linear(2, 2).to(device)
    module.forward = lambda x: 100 * x
    module.register_forward_hook(lambda *_: None)
    graphed = CUDAGraphModule(module, config())
    x = torch.ones(1, 2, device=device)
    for _ in range(5):
        assert torch.equal(graphed(x), 100 * x)
        assert torch.equal(module(x), 100 * x)


def test_a_result_that_is_part_of_an_argument_keeps_its_value(device):
    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, k):
            return x[:, :2], self.linear(x) * k

    module = CUDAGraphModule(Passes().to(device), config())
    x = torch.ones(2, 3, device=device)
    with torch.no_grad():
        for _ in range(5):
            module(x, 1)
            module(x, 2)
        held = module(x * 10, 1)[0]
        module(x * 20, 2)
    assert torch.equal(held, torch.full((2, 2), 10.0, device=device))


@pytest.mark.parametrize("values", [(2, 2.0), (0.0, -0.0), (True, 1)])
def test_numbers_of_another_type_or_sign_are_others(values, device):
    class Scales(nn.Module):
        scale = None

        def forward(self, x):
            return torch.copysign(torch.full_like(x, 3).to(x.dtype) * self.scale, torch.full_like(x, self.scale))

    def step(side, i):
        side.model.scale = values[i // 5 % 2]
        with torch.no_grad():
            return side.call(torch.ones(3, dtype=torch.int64 if i < 0 else torch.float32, device=device) * i)

    play(lambda d: Scales(), step, device, steps=20)


def test_the_default_dtype_is_part_of_the_signature(device):
    module = CUDAGraphModule(lambda x: x * torch.ones(3, device=device), config())
    try:
        for dtype in (torch.float32, torch.float64) * 5:
            torch.set_default_dtype(dtype)
            assert module(torch.ones(3, device=device, dtype=torch.int64)).dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_starts_that_would_read_memory_which_is_gone(device, monkeypatch):
    """As a weight's is while FSDP has given it back."""
    module, other = nn.Linear(8, 8, device=device), nn.Linear(8, 8, device=device)
    wrapper = CUDAGraphModule(module, config())
    x = torch.ones(2, 8, device=device)
    with torch.no_grad():
        for _ in range(5):
            wrapper(x)
        graph = wrapper._context.served
        assert graph.starts_early and wrapper.stats.replays
        started = []
        kept, storage = module.weight.detach().clone(), module.weight.untyped_storage()
        storage.resize_(0)
        module.forward = lambda x: other(x)  # what runs in its place
        with monkeypatch.context() as patch:
            notes = property(lambda _: lambda: started.append(True))
            patch.setattr(type(graph.graph), "start", notes, raising=False)
            assert torch.equal(wrapper(x), other(x)) and not started
        storage.resize_(kept.nbytes)
        module.weight.copy_(kept)
        del module.forward
        for _ in range(4):
            assert torch.equal(wrapper(x), module(x))


def test_what_only_an_unseen_kernel_reads_is_looked_at_before_the_start(device):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("state", torch.ones(4))

        def forward(self, x):
            self.state.data_ptr()  # what is handed to a kernel that is launched by hand
            return self.linear(x)

    module = Holds().to(device)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(2, 4, device=device)
    with torch.no_grad():
        for _ in range(5):
            wrapper(x)
        graph = wrapper._context.served
        assert graph.starts_early and graph.unfit([x], careful=False) is None
        module.state.data = torch.zeros(4, device=device)
        assert graph.unfit([x], careful=False) is not None
