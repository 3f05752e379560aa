"""Objects that the captured code uses besides modules and tensors: what their methods read, and how they are built."""

import functools
import sys
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from harness import config
from torch import nn

from graphmod import CUDAGraphModule

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


class Lazy:
    """Makes its table when it is first asked."""

    def __init__(self):
        self.table, self.by_size, self.recent = None, {}, deque(maxlen=1)

    def attribute(self, x):
        if self.table is None:
            self.table = torch.arange(3.0, device=x.device)
        return self.table

    def dictionary(self, x):
        if 3 not in self.by_size:
            self.by_size[3] = torch.arange(3.0, device=x.device)
        return self.by_size[3]

    def queue(self, x):
        if not self.recent:
            self.recent.append(torch.arange(3.0, device=x.device))
        return self.recent[0]

    @functools.cached_property
    def cached(self):
        return torch.arange(3.0, device=self.device)


class LazySlot(Lazy):
    __slots__ = ("made",)

    def attribute(self, x):
        try:
            return self.made
        except AttributeError:
            self.made = torch.arange(3.0, device=x.device)
            return self.made


def exchange(lazy, what, value):
    if what == "attribute":
        setattr(lazy, "made" if isinstance(lazy, LazySlot) else "table", value)
    elif what == "dictionary":
        lazy.by_size[3] = value
    elif what == "queue":
        lazy.recent.append(value)
    else:
        lazy.cached = value


@pytest.mark.parametrize("what", ["attribute", "dictionary", "queue", "cached"])
@pytest.mark.parametrize("kind", [Lazy, LazySlot])
@pytest.mark.parametrize("in_module", [False, True])
def test_what_is_made_in_the_first_call_is_watched(what, kind, in_module, device, caplog):
    lazy = kind()
    lazy.device = device
    read = (lambda x: lazy.cached) if what == "cached" else getattr(lazy, what)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.lazy = lazy

        def forward(self, x):
            return x + (self.lazy.cached if what == "cached" else getattr(self.lazy, what)(x))

    call = Module() if in_module else lambda x: x + read(x)
    change = lambda n: exchange(lazy, what, torch.full((3,), float(n), device=device))  # noqa: E731
    play(CUDAGraphModule(call, config()), lambda x: x + read(x), change, device)
    assert "found neither" not in caplog.text


def test_a_number_that_became_a_tensor_is_compared_as_one(device):
    lazy = SimpleNamespace(scale=None)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.lazy = lazy

        def forward(self, x):
            if self.lazy.scale is None:
                self.lazy.scale = torch.tensor(2.0, device=x.device)
            return x * self.lazy.scale

    graphed = CUDAGraphModule(Module(), config())

    def change(n):
        if n == CHANGES[0]:
            lazy.scale = torch.tensor(2.0, device=device)  # equal, and another
        else:
            lazy.scale.fill_(5)

    play(graphed, lambda x: x * lazy.scale, change, device)


class Odd:
    """Slots whose reading runs code, or fails."""

    __slots__ = ("scale", "unset")

    def __init__(self, device):
        Odd.scale.__set__(self, torch.full((3,), 2.0, device=device))


class RaisingProperty(Odd):
    __slots__ = ()

    @property
    def unset(self):
        raise NotImplementedError("use scale")


class RaisingLookup(Odd):
    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError(f"not connected: {name}")


class OddEquality(type):
    def __eq__(cls, other):
        return NotImplemented


class Unhashable(Odd, metaclass=OddEquality):
    __slots__ = ()

    def __call__(self):
        return self.scale


@pytest.mark.parametrize("kind", [Odd, RaisingProperty, RaisingLookup, Unhashable])
def test_looking_for_tensors_runs_no_code_of_the_user(kind, device):
    held = kind(device)
    graphed = CUDAGraphModule(lambda x: x * held.scale, config())
    for _ in range(12):
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), x * 2)
    assert graphed.stats.replays == 10 and graphed.stats.captures == 1


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
    assert "length of a list or dict" in graphed.last_failure


def test_a_number_in_the_code_is_no_tensor_from_outside(caplog):
    graphed = CUDAGraphModule(lambda x: x * torch.tensor(2.0) + x.new_tensor(3.0), config())
    for _ in range(8):
        assert torch.equal(graphed(torch.ones(3)), torch.full((3,), 5.0))
    assert "found neither" not in caplog.text


class Table:
    def __init__(self, tensor):
        self.tensor, self.hidden = tensor, {tensor.clone()}


class Looked(torch.autograd.Function):
    """A backward that reads a tensor its forward does not."""

    @staticmethod
    def forward(ctx, x, table):
        ctx.table = table
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.table.tensor, None


class Peeked(Looked):
    @staticmethod
    def backward(ctx, grad):
        return grad * next(iter(ctx.table.hidden)), None


@pytest.mark.parametrize("function", [Looked, Peeked])
def test_what_only_the_backward_reads_is_held_and_watched(function, device, caplog):
    table = Table(torch.full((3,), 2.0, device=device))

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.table = nn.Linear(3, 3), table

        def forward(self, x):
            return function.apply(self.linear(x), self.table)

    torch.manual_seed(0)
    module = Module().to(device)
    graphed = CUDAGraphModule(module, config())
    for step in range(20):
        if function is Looked and step == 8:
            table.tensor = torch.full((3,), 7.0, device=device)
        x = torch.randn(2, 3, device=device)
        gradients = []
        for call in (graphed, module):
            module.zero_grad()
            call(x).sum().backward()
            gradients.append(module.linear.weight.grad.clone())
        assert torch.equal(*gradients), step
    assert graphed.stats.replays > 15
    assert ("found neither" in caplog.text) is (function is Peeked)


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


@pytest.mark.parametrize("value", [(4, 8), [1.0, 2.0], float("nan")])
def test_an_equal_value_in_the_place_of_another_changes_nothing(value, device):
    held = SimpleNamespace(value=value)
    graphed = CUDAGraphModule(lambda x: x * 2 if held.value else x, config())
    for _ in range(20):
        held.value = type(value)(value)
        assert torch.equal(graphed(torch.ones(3, device=device)), torch.full((3,), 2.0, device=device))
    assert graphed.stats.replays == 18, graphed.last_failure


def test_a_container_that_raises_is_an_eager_call(device):
    class Strict(dict):
        def __missing__(self, key):
            raise AttributeError(key)

    held = Strict(a=2.0)
    graphed = CUDAGraphModule(lambda x: x * held["a"] if "a" in held else x * 5.0, config())
    for step in range(12):
        if step == 6:
            held.pop("a")
        found = graphed(torch.ones(3, device=device))
        assert torch.equal(found, torch.full((3,), 2.0 if step < 6 else 5.0, device=device)), step
