"""`CUDAGraphModule` is a module with all that belongs to it, and says clearly what it cannot do."""

import copy
import pickle

import pytest
import torch
from torch import nn

from graphmod import ConfigError, CUDAGraphModule, GraphStats, eager, graph_layers, mark_static, ungraph
from tests.step.test_isolation import model
from tests.support.harness import config, iteration_of, mlp, train, twins


def test_a_wrapper_is_a_module_with_everything_that_belongs_to_it(device):
    module = model(device)
    wrapper = CUDAGraphModule(module, config())
    x = torch.randn(4, 8, device=device)
    for _ in range(5):
        wrapper(x).sum().backward()
    assert wrapper.module is module
    assert isinstance(wrapper, nn.Module)
    assert list(map(id, wrapper.parameters())) == list(map(id, module.parameters()))
    assert list(wrapper.state_dict()) == list(module.state_dict())
    wrapper.load_state_dict(wrapper.state_dict())
    assert wrapper.hint == "an attribute" and wrapper.describe() == "an attribute of a Model"
    assert "Linear" in repr(wrapper)
    assert list(dict(wrapper.named_modules())) != []


@pytest.mark.parametrize("inside", [False, True], ids=["wrapper", "in a model"])
def test_what_was_saved_of_a_module_loads_into_its_wrapper_and_back(inside, device):
    torch.manual_seed(0)
    plain, other = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device) for _ in range(2))
    saved = {key: value.clone() for key, value in plain.state_dict().items()}
    wrapper = CUDAGraphModule(other, config())
    loads, prefix = (nn.Sequential(wrapper), "0.") if inside else (wrapper, "")
    x = torch.randn(4, 8, device=device)
    for _ in range(5):
        wrapper(x).sum().backward()
    loads.load_state_dict({prefix + key: value for key, value in saved.items()})
    assert torch.equal(wrapper(x), plain(x)) and wrapper.stats.replays > 3
    loads.load_state_dict(loads.state_dict())
    assert loads.state_dict().keys() == {prefix + key for key in saved}
    loads.load_state_dict({f"{prefix}module.{key}": value for key, value in saved.items()})
    plain.load_state_dict(wrapper.module.state_dict())
    with pytest.raises(RuntimeError, match="another"):
        loads.load_state_dict({prefix + "another": x})


@pytest.mark.parametrize("saved_as", ["", "module."], ids=["own names", "module. in front"])
def test_a_module_that_names_a_part_module_loads_what_was_saved_of_it(saved_as):
    """Its names with `module.` in front are names of its own, too."""

    class Around(nn.Linear):
        def __init__(self):
            super().__init__(4, 4, bias=False)
            self.module = nn.Linear(4, 4, bias=False)

    one, other = Around(), Around()
    saved = {name: value.clone() for name, value in one.state_dict().items()}
    CUDAGraphModule(other, config()).load_state_dict({saved_as + name: value for name, value in saved.items()})
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in saved.items())


def test_a_wrapper_switches_its_module_between_training_and_evaluation(device):
    def step(side, i):
        side.call.train(i % 4 != 3)
        assert side.model.training is side.call.training
        train(side, i)

    twins(model, step, device, replays=2, steps=20, settled=8)


def test_a_wrapper_zeroes_and_moves_its_module(device):
    wrapper = CUDAGraphModule(model(device), config())
    x = torch.randn(4, 8, device=device)
    for _ in range(5):
        wrapper(x).sum().backward()
    wrapper.zero_grad()
    assert all(p.grad is None for p in wrapper.module.parameters())
    wrapper.double()
    assert wrapper(x.double()).dtype is torch.float64


def test_an_attribute_that_is_not_there_is_an_attribute_error(device):
    wrapper = CUDAGraphModule(model(device), config())
    with pytest.raises(AttributeError, match="nowhere"):
        _ = wrapper.nowhere


def test_statistics_tell_the_story_of_a_module(device):
    wrapper = CUDAGraphModule(mlp(device), config(), name="story")
    x = torch.randn(4, 8, device=device)
    states = [wrapper.stats.state]
    for _ in range(4):
        wrapper(x).sum().backward()
        states.append(wrapper.stats.state)
    assert states == ["eager", "warm-up", "warm-up", "captured", "captured"]
    stats = wrapper.stats
    assert isinstance(stats, GraphStats)
    assert (stats.captures, stats.replays, stats.eager_calls, stats.failures) == (2, 4, 2, 0)
    assert stats.capture_seconds > 0 and stats.pool_bytes > 0 and stats.copied_bytes > 0
    assert (stats + stats).replays == 8


def test_pickling_says_what_to_do_instead(device):
    module = model(device)
    wrapper = CUDAGraphModule(module, config(), name="my step")
    with pytest.raises(TypeError, match=r"'my step'.*state_dict\(\).*ungraph"):
        pickle.dumps(wrapper)
    graph_layers(module, config())
    with pytest.raises(TypeError, match=r"'layers.0'.*state_dict\(\).*ungraph"):
        pickle.dumps(module)
    ungraph(module)
    pickle.loads(pickle.dumps(module))


def test_a_wrapper_inside_a_wrapper(device):
    """The outer one captures everything; the inner ones are part of it."""

    def graph(side):
        side.inner = graph_layers(side.model, config())
        side.call = CUDAGraphModule(side.model, config(), name="outer")
        side.graphs = [side.call]

    twins(model, train, device, graph=graph, replays=2, steps=16)


def test_a_whole_iteration_around_graphed_layers(device):
    def graph(side):
        side.inner = graph_layers(side.model, config())
        side.run = CUDAGraphModule(iteration_of(side), config(), name="iteration")
        side.graphs = [side.run]

    def step(side, i):
        return (side.run if side.graphed else iteration_of(side))(side.batch(i, 4, 8))

    twins(model, step, device, graph=graph, replays=1, steps=16)


@pytest.mark.parametrize(("it", "got"), [(3, "int"), (nn.Linear, "the class Linear; wrap what it makes")])
def test_what_runs_nothing_cannot_be_wrapped(it, got):
    with pytest.raises(TypeError, match=f"wraps an nn.Module or a callable, got {got}"):
        CUDAGraphModule(it)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (graph_layers, "graph_layers takes an nn.Module, got Tensor"),
        (ungraph, "ungraph takes the nn.Module that graph_layers was given, got Tensor"),
        (eager, "eager takes a function, got Tensor"),
    ],
)
def test_what_is_no_module_or_function_is_named(function, said):
    with pytest.raises(TypeError, match=said):
        function(torch.ones(1))


@pytest.mark.parametrize(
    "wrong", [{"warmup_steps": -1}, {"max_graphs": 0}, {"backend": "metal"}, {"scope": "all"}, {"max_failures": True}]
)
def test_a_wrong_setting_is_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config(**wrong)


def test_a_pattern_that_matches_nothing_suggests_names(device):
    with pytest.raises(ConfigError, match=r"layers\.\*\.attn.*layers\.0"):
        graph_layers(model(device), config(), layers="layers.*.attn")


def test_a_pattern_that_matches_inside_another_match_is_refused(device):
    nested = nn.Sequential(nn.Sequential(mlp(device)))
    with pytest.raises(ConfigError, match=r"matches '0\.0' inside '0'"):
        graph_layers(nested, config(), layers=["0", "0.0"])


def test_attributes_of_the_wrapped_module_are_not_hidden(device):
    """A transformers model has a `config`; others have a `name`, a `group`, a `root`."""
    model = mlp(device)
    names = ["config", "name", "group", "root", "call", "run", "drop", "owned", "entries", "anchor"]
    for name in names:
        setattr(model, name, name)
    graphed = CUDAGraphModule(model, config())
    for _ in range(4):
        graphed(torch.ones(4, 8, device=device))
    assert [getattr(graphed, name) for name in names] == names


class Counter(nn.Module):
    """Keeps all that changes in a tensor."""

    def __init__(self, device):
        super().__init__()
        self.total = torch.zeros(3, device=device)

    def forward(self, step):
        self.total.mul_(2).add_(step)


def test_replay_repeats_the_last_call(device):
    step = mark_static(torch.ones(3, device=device))
    eager, graphed = Counter(device), CUDAGraphModule(Counter(device), config())
    with torch.inference_mode():
        for times in (1, 1, 1, 3, 1, 5):
            for _ in range(times):
                eager(step)
            graphed(step)
            ran = graphed.replay(times - 1)
            assert ran == (times - 1 if graphed.stats.captures else 0)
            for _ in range(times - 1 - ran):
                graphed(step)
            assert torch.equal(graphed.total, eager.total)
    assert graphed.stats.replays == 10


def test_replay_does_nothing_where_a_call_has_results_or_copies_arguments(device):
    graphed = CUDAGraphModule(mlp(device), config())
    with torch.no_grad():
        for _ in range(5):
            graphed(torch.ones(4, 8, device=device))
    assert graphed.stats.replays > 0 and graphed.replay(3) == 0
    graphed = CUDAGraphModule(Counter(device), config())
    for _ in range(5):
        graphed(torch.ones(3, device=device))
    assert graphed.stats.replays > 0 and graphed.replay(3) == 0
    graphed.reset()
    assert graphed.replay(3) == 0


def test_wrappers_show_their_name_and_state(device):
    layers = nn.ModuleDict({"body": mlp(device)})
    (graphed,) = graph_layers(layers, config(), layers="body")
    assert repr(graphed) == "CUDAGraphModule('body', eager)"
    layers["body"](torch.ones(4, 8, device=device))
    assert repr(graphed) == "CUDAGraphModule('body', warm-up)"


@pytest.mark.parametrize("wrong", ["blocks.*", {"max_graphs": 4}])
def test_what_is_no_config_is_named(wrong):
    for wrap in (graph_layers, CUDAGraphModule):
        with pytest.raises(TypeError, match=r"config must be a CUDAGraphConfig.* got ['{]"):
            wrap(mlp(torch.device("cpu")), wrong)


@pytest.mark.parametrize("wrong", [3, [], [nn.Linear(2, 2)]])
def test_what_is_no_pattern_is_named(wrong):
    with pytest.raises(ConfigError, match="layers must be one or more name patterns"):
        graph_layers(nn.ModuleList([mlp(torch.device("cpu"))]), layers=wrong)


def test_a_value_that_changes_in_python_is_refused_with_the_remedy(device):
    seen = {"calls": 0}

    def count(x):
        seen["calls"] += 1
        return x * seen["calls"]

    wrapper = CUDAGraphModule(count, config())
    assert [wrapper(torch.ones((), device=device)).item() for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert "changes 'calls' from" in wrapper.last_failure and "keep it in a tensor" in wrapper.last_failure


def test_what_is_no_module_is_named():
    with pytest.raises(TypeError, match="int"):
        graph_layers(3)
    with pytest.raises(TypeError, match="int"):
        CUDAGraphModule(3)


class Paired(nn.Module):
    """As in vit-pytorch: layers are lists, of which nobody calls any."""

    def __init__(self, kind):
        super().__init__()
        parts = lambda: (nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()), nn.Identity())  # noqa: E731
        named = lambda: nn.ModuleDict(dict(zip("abc", parts(), strict=True)))  # noqa: E731
        self.layers = nn.ModuleList(nn.ModuleList(parts()) if kind == "lists" else named() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            for part in layer.values() if isinstance(layer, nn.ModuleDict) else layer:
                x = x + part(x)
        return x


@pytest.mark.parametrize("kind", ["lists", "dicts"])
def test_of_lists_of_lists_the_modules_that_are_called_are_wrapped(kind, device):
    torch.manual_seed(0)
    model = Paired(kind).to(device)
    plain = copy.deepcopy(model)
    with pytest.raises(ConfigError, match="which nobody calls"):
        graph_layers(model, layers="layers.*")
    graphs = graph_layers(model, config())
    assert [type(graph.module) for graph in graphs] == [nn.Linear, nn.Sequential] * 2
    for index in range(10):
        x = torch.full((3, 8), index / 10, device=device)
        for one in (model, plain):
            one.zero_grad()
            one(x).pow(2).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(graph.stats.replays for graph in graphs)
