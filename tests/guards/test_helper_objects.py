"""Objects that the captured code uses besides modules and tensors: what their methods read is watched, and no more."""

import sys
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config

CHANGES = (8, 16)


def play(graphed, expected, change, device, steps=24):
    """Calls both with new inputs and `change()`s things in between; the last steps must come from graphs."""
    replays = []
    for step in range(steps):
        if step in CHANGES:
            change(step)
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), expected(x)), step
        replays.append(graphed.stats.replays)
    assert replays[-1] > replays[-4], graphed.last_failure or graphed.stats


class Schedule:
    """Every way to get at a number."""

    def __init__(self):
        self.k = 1.5

    def value(self):
        return self.k

    def through_another(self):
        return self.value()

    @property
    def as_property(self):
        return self.k

    @staticmethod
    def of(other):
        return other.k

    def __call__(self):
        return self.k

    def __getitem__(self, _):
        return self.k

    def __mul__(self, other):
        return self.k * other


class Slotted(Schedule):
    __slots__ = ()


FACTOR = 2.0

WAYS = {
    "method": lambda x, s: x * s.value(),
    "method_of_method": lambda x, s: x * s.through_another(),
    "property": lambda x, s: x * s.as_property,
    "static": lambda x, s: x * s.of(s),
    "call": lambda x, s: x * s(),
    "item": lambda x, s: x * s[0],
    "operator": lambda x, s: s * x,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Schedule, Slotted])
@pytest.mark.parametrize("where", ["closure", "module", "submodule"])
def test_a_number_behind_a_method_is_watched(way, kind, where, device):
    class Inner(nn.Module):
        def __init__(self, schedule):
            super().__init__()
            self.schedule = schedule

        def forward(self, x):
            return WAYS[way](x, self.schedule)

    class Outer(nn.Module):
        def __init__(self, schedule):
            super().__init__()
            self.inner = Inner(schedule)

        def forward(self, x):
            return self.inner(x)

    schedule = kind()
    call = {"closure": lambda x: WAYS[way](x, schedule), "module": Inner(schedule), "submodule": Outer(schedule)}[where]
    play(CUDAGraphModule(call, config()), lambda x: WAYS[way](x, schedule), lambda n: setattr(schedule, "k", n), device)


class WithGlobal(nn.Module):
    def forward(self, x):
        return x * FACTOR


def test_a_global_that_a_module_names_is_watched(device, monkeypatch):
    here = sys.modules[__name__]
    change = lambda n: monkeypatch.setattr(here, "FACTOR", float(n))  # noqa: E731
    play(CUDAGraphModule(WithGlobal(), config()), lambda x: x * FACTOR, change, device)


class Trainer:
    """Keeps a window of losses that its step does not look at."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3).to(device)
        self.window = deque(maxlen=4)
        self.memory = deque(maxlen=4)

    def step(self, x):
        return self.model(x).detach()

    def log(self, value):
        self.window.append(value)
        self.memory.append((torch.tensor(value), value))


def test_queues_that_the_code_does_not_name_may_change(device):
    trainer = Trainer(device)
    graphed = CUDAGraphModule(trainer.step, config())
    for _ in range(20):
        x = torch.randn(3, device=device)
        found = graphed(x)
        assert torch.equal(found, trainer.step(x))
        trainer.log(found.sum().item())
    assert graphed.stats.replays == 18 and graphed.stats.captures == 1


@pytest.mark.parametrize("make", [list, deque])
def test_a_list_that_grows_between_calls_is_gone_through_anew(make, device):
    terms = make([torch.ones(3, device=device)])

    def total(x):
        for term in terms:
            x = x + term
        return x

    play(
        CUDAGraphModule(total, config()),
        total,
        lambda n: terms.append(torch.full((3,), 1.0 * n, device=device)),
        device,
    )


@pytest.mark.parametrize("make", [list, deque, lambda: deque(maxlen=50)])
def test_what_is_appended_inside_is_not_lost(make, device):
    losses = make()

    def step(x):
        losses.append(x.sum())
        return x * 2

    graphed = CUDAGraphModule(step, config())
    for _ in range(10):
        graphed(torch.ones(3, device=device))
    assert len(losses) == 10 and graphed.stats.replays == 0
    assert "changes the items of a" in graphed.last_failure


def test_a_number_in_the_code_is_no_tensor_from_outside(caplog):
    graphed = CUDAGraphModule(lambda x: x * torch.tensor(2.0) + x.new_tensor(3.0), config())
    for _ in range(8):
        assert torch.equal(graphed(torch.ones(3)), torch.full((3,), 5.0))
    assert "found neither" not in caplog.text


class Meter:
    def __init__(self):
        self.total, self.values = 0.0, []

    def update(self, value):
        self.total += value
        self.values.append(value)

    def __getitem__(self, index):
        return self.values[index]


class Average:
    def __init__(self, device):
        self.tensor, self.decay = torch.zeros(3, device=device), 0.5

    def update(self, x):
        self.tensor.mul_(self.decay).add_(x)


class Both:
    """Its step uses a method that an object beside it has too."""

    def __init__(self, device):
        self.meter, self.average = Meter(), Average(device)

    def step(self, x):
        self.average.update(x)
        return self.average.tensor * 2


def test_objects_that_the_code_does_not_get_to_may_change(device):
    graphed_side, eager = Both(device), Both(device)
    graphed = CUDAGraphModule(graphed_side.step, config())
    for step in range(30):
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), eager.step(x)), step
        graphed_side.meter.update(float(step))
    assert graphed.stats.replays == 28 and graphed.stats.captures == 1
    for side in (graphed_side, eager):
        side.average.decay = 0.25
    for step in range(12):
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), eager.step(x)), step


class Mean(nn.Module):
    """A metric as metric libraries make them: a module that counts."""

    def __init__(self):
        super().__init__()
        self.count, self.total = 0, 0.0

    def forward(self, value):
        self.count, self.total = self.count + 1, self.total + value
        return self.total / self.count


class WithMetric:
    def __init__(self, device):
        self.model, self.metric = nn.Linear(3, 3).to(device), Mean()

    def step(self, x):
        return self.model(x).detach()


def test_a_metric_beside_the_step_may_count(device):
    trainer = WithMetric(device)
    graphed = CUDAGraphModule(trainer.step, config())
    for step in range(12):
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), trainer.step(x))
        trainer.metric(float(step))
    assert (graphed.stats.captures, graphed.stats.replays) == (1, 10), graphed.last_failure


@pytest.mark.parametrize("loop", ["values", "items", "list"])
def test_objects_in_containers_that_are_gone_through_are_watched(loop, device):
    first, second = Schedule(), Schedule()
    parts = [first, second] if loop == "list" else {"first": first, "second": second}

    def total(x):
        if loop == "list":
            for part in parts:
                x = x * part.k
        elif loop == "values":
            for part in parts.values():
                x = x * part.value()
        else:
            for _, part in parts.items():
                x = x * part.as_property
        return x

    play(CUDAGraphModule(total, config()), total, lambda n: setattr(second, "k", float(n)), device)


class Base:
    def __init__(self):
        self.scale, self.parts = 1.5, {"one": 1.0, "two": 2.0}

    def value(self):
        return self.scale


class Derived(Base):
    def value(self):
        return super().value() + 1


INDIRECT = {
    "super": (lambda x, s: x * s.value(), lambda s, n: setattr(s, "scale", float(n))),
    "computed": (lambda x, s: x * getattr(s, "sca" + "le"[:2]), lambda s, n: setattr(s, "scale", float(n))),
    "f-string": (
        lambda x, s: x * getattr(s, f"scal{x.dim():x}".replace("1", "e")),
        lambda s, n: setattr(s, "scale", n),
    ),
    "default": (lambda x, s: x * getattr(s, "".join(("sca", "le")), s), lambda s, n: setattr(s, "scale", float(n))),
    "vars": (lambda x, s: x * next(iter(vars(s).values())), lambda s, n: setattr(s, "scale", float(n))),
    "items": (lambda x, s: x * sum(part for _, part in s.parts.items()), lambda s, n: s.parts.update(two=float(n))),
}


@pytest.mark.parametrize("way", INDIRECT)
def test_what_is_read_by_another_name_is_watched(way, device):
    held, (read, change) = Derived(), INDIRECT[way]
    play(CUDAGraphModule(lambda x: read(x, held), config()), lambda x: read(x, held), lambda n: change(held, n), device)


def test_a_container_of_modules_that_grows_is_noticed(device):
    blocks = nn.ModuleList([nn.Linear(3, 3).to(device)])

    def call(x):
        for block in blocks:
            x = block(x)
        return x.detach()

    play(CUDAGraphModule(call, config()), call, lambda n: blocks.append(nn.Linear(3, 3).to(device)), device)


@pytest.mark.parametrize("kind", ["_parameters", "_buffers"])
def test_a_dict_of_a_module_that_is_exchanged_is_noticed(kind, device):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("offset", torch.zeros(3))

        def forward(self, x):
            return x * self.weight + self.offset

    module = Scales().to(device).requires_grad_(False)
    graphed = CUDAGraphModule(module, config())

    def change(step):
        held = {name: nn.Parameter(value + step, requires_grad=False) for name, value in getattr(module, kind).items()}
        setattr(module, kind, held if kind == "_parameters" else {name: one.data for name, one in held.items()})

    play(graphed, module, change, device)


def test_parameters_that_are_others_during_the_call_are_no_change(device):
    """As `torch.func.functional_call` puts them in place: here per-sample gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    def gradients(x):
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)["0.weight"]

    def change(step):
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        model[2].weight = nn.Parameter(model[2].weight * step)

    graphed = CUDAGraphModule(lambda x: gradients(x[None]), config())
    play(graphed, lambda x: gradients(x[None]), change, device)


@pytest.mark.parametrize("value", [(4, 8), [1.0, 2.0], float("nan")])
def test_an_equal_value_in_the_place_of_another_changes_nothing(value, device):
    held = SimpleNamespace(value=value)
    graphed = CUDAGraphModule(lambda x: x * 2 if held.value else x, config())
    for _ in range(20):
        held.value = type(value)(value)
        assert torch.equal(graphed(torch.ones(3, device=device)), torch.full((3,), 2.0, device=device))
    assert graphed.stats.replays == 18, graphed.last_failure
