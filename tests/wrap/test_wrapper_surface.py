"""A wrapper is the module that it wraps: for whoever sets its attributes, copies it, or hands it to other tools."""

import copy
import pickle
import time

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphmod import CUDAGraphModule, graph_layers, ungraph
from tests.support.harness import config, mlp

CALLS = 6


class Scaled(nn.Module):
    """A layer with settings of every kind."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), 1.0
        self.register_buffer("offset", torch.zeros(8))

    @property
    def doubled(self):
        return 2 * self.scale

    @doubled.setter
    def doubled(self, value):
        self.scale = value / 2

    def forward(self, x):
        shift = self.extra if hasattr(self, "extra") else 0.0
        return self.layer(x) * self.scale + self.offset + shift


def used(device, module=None):
    """A module, a wrapper around it that has graphs, and a batch."""
    module = (module or Scaled()).to(device)
    wrapper = CUDAGraphModule(module, config())
    x = torch.linspace(-1, 1, 32, device=device).view(4, 8)
    with torch.no_grad():
        for _ in range(CALLS):
            wrapper(x)
    assert wrapper.stats.captures
    return module, wrapper, x


SET = {
    "a number": lambda w: setattr(w, "scale", 0.5),
    "a module": lambda w: setattr(w, "layer", nn.Linear(8, 8, device=w.offset.device)),
    "a buffer": lambda w: setattr(w, "offset", torch.ones_like(w.offset)),
    "a new attribute": lambda w: setattr(w, "extra", 3.0),
    "a property": lambda w: setattr(w, "doubled", 5.0),
    "a registered buffer": lambda w: w.register_buffer("extra", torch.full_like(w.offset, 2.0)),
    "a registered parameter": lambda w: w.register_parameter("extra", nn.Parameter(torch.ones_like(w.offset))),
    "a forward": lambda w: setattr(w, "forward", lambda x: x * 7),
}


@pytest.mark.parametrize("how", SET)
def test_what_is_set_through_the_wrapper_reaches_the_module(how, device):
    module, wrapper, x = used(device)
    SET[how](wrapper)
    with torch.no_grad():
        for _ in range(CALLS):
            assert torch.equal(wrapper(x), module(x))


def test_attributes_are_deleted_through_the_wrapper(device):
    module, wrapper, x = used(device)
    wrapper.extra = 3.0
    assert module.extra == 3.0 and hasattr(wrapper, "extra")
    del wrapper.extra
    assert not hasattr(module, "extra") and not hasattr(wrapper, "extra")
    with torch.no_grad():
        assert torch.equal(wrapper(x), module(x))


def test_the_machinery_of_modules_works_at_the_wrapper(device):
    module, wrapper, x = used(device)
    names = [name for name, _ in wrapper.named_parameters()]
    assert names == [f"module.{name}" for name, _ in module.named_parameters()]
    wrapper.training = False
    assert not module.training
    assert wrapper.train() is wrapper and module.training and module.layer.training
    wrapper.load_state_dict(wrapper.state_dict())
    wrapper.to(torch.float64)
    assert module.layer.weight.dtype is torch.float64
    fired = []
    handle = wrapper.register_forward_hook(lambda *_: fired.append(1))
    with torch.no_grad():
        assert torch.equal(wrapper(x.double()), module(x.double()))
    handle.remove()
    assert fired == [1]
    wrapper.apply(lambda m: setattr(m, "visited", True) if isinstance(m, Scaled) else None)
    assert module.visited


def test_another_module_cannot_be_put_into_a_wrapper():
    wrapper = CUDAGraphModule(nn.Linear(8, 8))
    with pytest.raises(AttributeError, match="wrap the other one"):
        wrapper.module = nn.Linear(8, 8)


class Doubles(nn.Module):
    """Does something in `__call__` that is not in `forward`."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x * 2)

    def forward(self, x):
        return self.layer(x)


class OnlyCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def __call__(self, x):
        return self.layer(x * 3)


def instance_forward():
    module = nn.Linear(8, 8)
    module.forward = lambda x: x * 5
    return module


@pytest.mark.parametrize("make", [Doubles, OnlyCall, instance_forward])
def test_what_is_called_is_what_the_module_calls(make, device):
    module, wrapper, x = used(device, make())
    with torch.no_grad():
        assert torch.equal(wrapper(x), module(x))


def test_code_in_an_own_call_runs_in_every_call(device):
    module, _, _ = used(device, Doubles())
    assert module.calls == CALLS


def test_a_forward_that_is_exchanged_later_is_called(device, monkeypatch):
    module, wrapper, x = used(device)
    model = nn.Sequential(Scaled()).to(device)
    graph_layers(model, config(), layers="0")
    with torch.no_grad():
        for _ in range(CALLS):
            model(x)
        monkeypatch.setattr(Scaled, "forward", lambda self, x: self.layer(x) - 1)
        for _ in range(CALLS):
            assert torch.equal(wrapper(x), module.layer(x) - 1)
            assert torch.equal(model(x), model[0].layer(x) - 1)
        module.forward = lambda x: x + 4
        for _ in range(CALLS):
            assert torch.equal(wrapper(x), x + 4)
        del module.forward
        assert torch.equal(wrapper(x), module.layer(x) - 1)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_wrapper_wraps_a_copy_of_the_module(copied, device):
    module, wrapper, x = used(device)
    fired = []
    wrapper.register_forward_hook(lambda *_: fired.append(1))
    other = copied(wrapper)
    other.scale = 0.25
    assert module.scale == 1.0
    with torch.no_grad():
        for _ in range(CALLS):
            assert torch.equal(other(x), copied(module)(x) * 0.25 if copied is copy.copy else module(x) * 0.25)
    assert len(fired) == CALLS
    assert other.stats.captures == 1


def zeroed(layer):
    made = copy.copy(layer)
    made._parameters = {name: nn.Parameter(torch.zeros_like(p)) for name, p in layer._parameters.items()}
    return made


def test_a_shallow_copy_of_a_graphed_layer_is_itself(device):
    model = nn.Sequential(nn.Linear(8, 8)).to(device)
    x = torch.ones(4, 8, device=device)
    expected = model(x).detach()
    graphed = graph_layers(model, config(), layers="0")
    with torch.no_grad():
        for _ in range(CALLS):
            model(x)
        other = zeroed(model[0])
        for _ in range(CALLS):
            assert not other(x).any()
            assert torch.equal(model(x), expected)
        assert graphed[0].stats.captures == 1
        ungraph(model)
        assert not other(x).any()
        assert torch.equal(model(x), expected)


def test_a_layer_that_stands_several_times_in_a_list_has_one_wrapper(device):
    layer = nn.Linear(8, 8).to(device)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer] * 3)})
    assert len(graph_layers(model, config())) == 1
    ungraph(model)
    assert "forward" not in layer.__dict__
    assert len(graph_layers(model, config())) == 1


def test_ungraph_leaves_a_forward_that_was_assigned_since(device):
    model = nn.Sequential(nn.Linear(8, 8)).to(device)
    x = torch.ones(4, 8, device=device)
    expected = model(x) * 2
    wrapper = graph_layers(model, config(), layers="0")[0]
    graphed = model[0].forward
    model[0].forward = lambda x: graphed(x) * 2
    ungraph(model)
    with torch.no_grad():
        for _ in range(CALLS):
            assert torch.equal(model(x), expected)
    assert wrapper.stats.captures == 0


@pytest.mark.parametrize("save", [pickle.dumps, lambda w: torch.save(w, "/dev/null")])
def test_a_wrapper_says_why_it_cannot_be_pickled(save):
    with pytest.raises(TypeError, match="save state_dict"):
        save(CUDAGraphModule(nn.Linear(8, 8)))


def compiled(wrapper, x):
    return torch.compile(wrapper, backend="eager", fullgraph=True)


TOOLS = {
    "torch.compile": compiled,
    "torch.jit.trace": lambda wrapper, x: torch.jit.trace(wrapper, x),
    "torch.jit.script": lambda wrapper, x: torch.jit.script(wrapper),
    "torch.export": lambda wrapper, x: torch.export.export(wrapper, (x,)).module(),
    "torch.export, strict": lambda wrapper, x: torch.export.export(wrapper, (x,), strict=True).module(),
    "make_fx": lambda wrapper, x: make_fx(wrapper)(x),
    "vmap": lambda wrapper, x: lambda y: torch.vmap(wrapper)(torch.stack([y, y]))[1],
    "functional_call": lambda wrapper, x: (
        lambda y: torch.func.functional_call(wrapper, dict(wrapper.named_parameters()), (y,))
    ),
    "DataParallel": lambda wrapper, x: nn.DataParallel(wrapper, device_ids=[x.device] if x.is_cuda else None),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.filterwarnings("ignore")
def test_other_tools_take_a_wrapper_that_was_used_for_its_module(tool, device, fresh_dynamo):
    if tool == "DataParallel" and device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("it moves the module to the GPU")
    module, wrapper, x = used(device, mlp(device))
    before = time.perf_counter()
    made = TOOLS[tool](wrapper, x)
    for factor in (1, 2, 3):
        assert torch.allclose(made(x * factor), module(x * factor))
    assert time.perf_counter() - before < 20
    with torch.no_grad():
        assert torch.equal(wrapper(x * 4), module(x * 4))


def test_compiling_a_model_with_graphed_layers_compiles_the_layers(device, fresh_dynamo):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    x = torch.ones(4, 8, device=device)
    expected = model(x)
    graph_layers(model, config(), layers=["0", "1"])
    for _ in range(CALLS):
        model(x).sum().backward()
    assert torch.allclose(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapper", "graph_layers"])
@pytest.mark.parametrize("tool", ["torch.compile", "torch.jit.trace", "torch.jit.script", "torch.export", "make_fx"])
@pytest.mark.filterwarnings("ignore")
def test_a_tool_around_a_wrapper_is_told_of_once_with_what_to_write(tool, in_place, device, caplog, fresh_dynamo):
    if in_place and tool == "torch.jit.script":
        pytest.skip("TorchScript refuses redirected layers itself")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    x, expected = torch.ones(4, 8, device=device), model(torch.ones(4, 8, device=device))
    if in_place:
        graph_layers(model, config(), layers=["0", "1"])
    made = TOOLS[tool](model if in_place else CUDAGraphModule(model, config()), x)
    for _ in range(3):
        assert torch.allclose(made(x), expected)
    (said,) = [one for one in caplog.messages if "no graph" in one]
    assert "torch.compile(" in said or "CUDAGraphModule(t" in said


def test_transforms_of_torch_func_see_the_module(device):
    module, wrapper, x = used(device, mlp(device))
    for transformed in (
        lambda f: torch.func.grad(lambda y: f(y).pow(2).sum())(x),
        lambda f: torch.func.jvp(f, (x,), (x,))[1],
        lambda f: torch.func.jacrev(f)(x[0]),
        lambda f: torch.func.hessian(lambda y: f(y).sum())(x[0]),
    ):
        assert torch.equal(transformed(wrapper), transformed(module))


class SwitchesMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(self.drop(x))
        self.train(not self.training)
        return x


def test_a_mode_that_is_switched_inside_stays_switched(device, caplog):
    torch.manual_seed(0)
    eager, x = SwitchesMode().to(device), torch.ones(4, 8, device=device)
    wrapper = CUDAGraphModule(copy.deepcopy(eager), config())
    for step in range(12):
        results = []
        for call in (eager, wrapper):
            torch.manual_seed(step)
            results.append(call(x).detach().clone())
        assert torch.equal(*results)
        assert eager.training is wrapper.module.training
    assert "changes 'training' from" in caplog.text


def test_what_the_wrapper_keeps_for_itself_is_not_set_at_the_module():
    module = nn.Linear(8, 8)
    made = CUDAGraphModule(module)
    made._hooks_outside = True
    assert "_hooks_outside" not in module.__dict__


@pytest.mark.parametrize("name", ["forward", "act"])
def test_a_wrapper_that_is_assigned_to_a_method_takes_its_place(name, device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x)

        def act(self, x):
            return self.linear(x) * 2

    model = Model().to(device)
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    setattr(model, name, CUDAGraphModule(getattr(model, name), config()))
    for index in range(8):
        x = torch.full((4, 8), index / 8, device=device)
        for one in (model, plain):
            one.zero_grad()
            (one if name == "forward" else one.act)(x).pow(2).sum().backward()
        assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
    assert getattr(model, name).stats.replays and list(model.state_dict()) == names
    assert getattr(copy.deepcopy(model), name)._root.__self__ is not model


def test_a_wrapper_that_is_the_forward_of_a_sequential_is_none_of_its_layers(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
    plain = copy.deepcopy(model)
    model.forward = CUDAGraphModule(model.forward, config())
    for index in range(8):
        x = torch.full((4, 8), index / 8, device=device)
        assert torch.equal(model(x), plain(x))
    assert model.forward.stats.replays and list(model.state_dict()) == list(plain.state_dict())
