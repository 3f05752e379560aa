"""A graphed model is still the model it was, and two of them in one process do not meet."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from graphmod import ConfigError, CUDAGraphModule, graph_layers, ungraph
from tests.support.harness import config, layered, loss_of, make_sides, mlp, play, train, twins, wrapped


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(mlp("cpu"), nn.Dropout(0.1)) for _ in range(2))
        self.hint = "an attribute"

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def describe(self):
        return f"{self.hint} of a {type(self).__name__}"


def model(device):
    torch.manual_seed(0)
    return Model().to(device)


def traces(module):
    """What may betray that graphs were here."""
    return {name: sorted(part.__dict__) for name, part in module.named_modules()}


def test_graphed_layers_are_the_layers_they_were(device):
    plain, graphed = model(device), model(device)
    layers = list(graphed.layers)
    graph_layers(graphed, config())
    for index in range(4):
        train_once(graphed, index)
    assert list(graphed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in graphed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in graphed.named_modules()] == [name for name, _ in plain.named_modules()]
    assert all(now is before for now, before in zip(graphed.layers, layers, strict=True))
    assert isinstance(graphed.layers[0], nn.Sequential) and graphed.layers[0][1].p == 0.1
    assert repr(graphed) == repr(plain)


def train_once(module, index):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(4, 8, generator=generator).to(next(module.parameters()).device)
    loss_of(module(x)).backward()
    module.zero_grad()


def test_ungraph_leaves_no_trace(device):
    module = model(device)
    before = traces(module)
    wrappers = graph_layers(module, config())
    for index in range(4):
        train_once(module, index)
    assert wrappers[0].stats.state == "captured"
    assert ungraph(module) is module
    assert traces(module) == before
    assert "forward" not in module.layers[0].__dict__
    replays = wrappers[0].stats.replays
    train_once(module, 5)
    assert wrappers[0].stats.replays == replays
    ungraph(module)


def test_graphs_may_come_and_go_while_training(device):
    def step(side, i):
        if side.graphed and i in (5, 12):
            ungraph(side.model)
        if side.graphed and i == 8:
            side.graphs = graph_layers(side.model, config())
        train(side, i)

    play(model, step, device, graph=layered(), steps=16)


def test_the_graphs_of_a_dropped_model_are_freed(device):
    module = model(device)
    wrappers = graph_layers(module, config())
    for index in range(4):
        train_once(module, index)
    gone = [weakref.ref(module), weakref.ref(wrappers[0]), weakref.ref(module.layers[0])]
    del module, wrappers
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def captured_now(graphed, gone):
    """Takes in the graph behind the last call, weakly."""
    graph = graphed._context.served
    if graph is not None and all(one() is not graph.graph for one in gone):
        gone.append(weakref.ref(graph.graph))


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("when", ["reads", "writes_last", "trains", "evicts"])
@pytest.mark.parametrize("sizes", [[4], [4, 2, 3], [2, 4, 2]])
def test_a_reset_frees_graphs_without_the_garbage_collector(when, sizes, device, no_collector):
    """A server keeps the collector away, and another capture would need as much memory again."""
    layer, total = nn.Linear(8, 8).to(device), torch.zeros(8, device=device)

    def call(x):
        y = layer(x).relu()
        if when == "writes_last":
            total.add_(y.detach().sum(0))
        return y

    graphed, gone = CUDAGraphModule(call, config(max_graphs=1 if when == "evicts" else 8)), []
    for rows in sizes:
        for _ in range(5):
            with torch.set_grad_enabled(when == "trains"):
                result = graphed(torch.ones(rows, 8, device=device))
                if when == "trains":
                    result.sum().backward()
                del result
        captured_now(graphed, gone)
    assert len(gone) >= len({*sizes}) and graphed.stats.replays > 0
    assert sum(one() is not None for one in gone) == (1 if when == "evicts" else len({*sizes}))
    graphed.reset()
    assert all(one() is None for one in gone)


@pytest.mark.parametrize("when", ["reads", "trains"])
def test_a_recapture_frees_what_it_takes_the_place_of(when, device, no_collector):
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    layer = Scaled(8, 8).to(device)
    graphed, gone = CUDAGraphModule(layer, config(max_graphs=2)), []
    for layer.scale in (1.0, 2.0, 3.0, 4.0):
        for _ in range(5):
            with torch.set_grad_enabled(when == "trains"):
                result = graphed(torch.ones(4, 8, device=device))
                if when == "trains":
                    result.sum().backward()
                del result
        captured_now(graphed, gone)
    kept = {id(graph.graph) for entry in graphed._context.entries for graph in entry.graphs}
    assert len(gone) > 1 and {id(one()) for one in gone if one() is not None} <= kept


def test_a_second_graphing_of_the_same_layers_is_a_clear_error(device):
    module = model(device)
    graph_layers(module, config())
    with pytest.raises(ConfigError, match="ungraph"):
        graph_layers(module, config())


def test_two_models_interleaved_do_not_meet(device):
    def build(device):
        return {"model": nn.ModuleList([model(device), model(device)])}

    def graph(side):
        side.graphs = [wrapper for part in side.model for wrapper in graph_layers(part, config())]

    def step(side, i):
        first, second = side.model
        one = loss_of(first(side.batch(i, 4, 8)))
        two = loss_of(second(side.batch(i, 3, 8)))
        one.backward()
        side.note(one=one, two=two)
        three = loss_of(first(side.batch(i, 4, 8, key=1)))
        two.backward()
        three.backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    side = twins(build, step, device, graph=graph, replays=12)
    assert not {id(w._context.group) for w in side.graphs[:2]} & {id(w._context.group) for w in side.graphs[2:]}


def test_one_model_reset_leaves_the_other_alone(device):
    first, second = model(device), model(device)
    one, two = graph_layers(first, config()), graph_layers(second, config())
    for index in range(4):
        train_once(first, index)
        train_once(second, index)
    for wrapper in one:
        wrapper.reset()
    before = sum(wrapper.stats.replays for wrapper in two)
    train_once(second, 9)
    assert sum(wrapper.stats.replays for wrapper in two) == before + 4


def test_two_models_in_two_threads(device):
    """Without dropout, because threads share the random stream."""
    results = {}

    def work(name):
        eager, graphed = sides[name]
        try:
            for index in range(30):
                for side in (eager, graphed):
                    train(side, index)
            results[name] = all(
                torch.equal(a, b) for a, b in zip(eager.model.parameters(), graphed.model.parameters(), strict=True)
            )
        except BaseException as error:
            results[name] = error

    sides = {
        name: make_sides(lambda d: nn.Sequential(mlp(d), nn.Tanh(), mlp(d)), device, wrapped(), seed=seed)
        for name, seed in (("one", 1), ("two", 2))
    }
    threads = [threading.Thread(target=work, args=(name,)) for name in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"one": True, "two": True}
    assert all(graphed.call.stats.failures == 0 for _, graphed in sides.values())
    assert all(graphed.call.stats.replays > 20 for _, graphed in sides.values())


@pytest.mark.parametrize("graph", ["layers", "whole"])
def test_a_copy_of_a_graphed_model_is_a_model_of_its_own(graph, device):
    def build(device):
        return {"model": model(device), "copied": False}

    def step(side, i):
        train(side, i)
        if i == 5:
            side.call = copy.deepcopy(side.call)
            side.model = side.call.module if graph == "whole" and side.graphed else side.call
            side.optimizer = torch.optim.SGD(side.model.parameters(), lr=0.05)
            side.graphs = []

    side, _ = play(build, step, device, graph=layered() if graph == "layers" else wrapped())
    replays = (side.call if graph == "whole" else side.call.layers[0]._graphmod.graphed).stats.replays
    assert replays > 4, "the copy never ran from graphs of its own"
    if graph == "layers":
        ungraph(side.model)
        assert "forward" not in side.model.layers[0].__dict__
