"""What any program carries along (loggers, compiled functions, decorators of libraries) is no state of what is
captured, however much of the program it leads to; what lies behind it is."""

import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import sys
import types
from dataclasses import asdict as as_dict
from typing import Generic, Protocol, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphmod import CUDAGraphModule
from tests.guards.test_helper_objects import play
from tests.support.harness import config

T = TypeVar("T")
LOG = logging.getLogger("graphmod_test.machinery")
FACTOR = 2.0


@torch.compile(backend="eager")
def compiled(x):
    return x * 3


@torch.no_grad()
def without_grad(x):
    return x * FACTOR


@torch.autocast("cpu", enabled=False)
def without_autocast(x):
    return x * FACTOR


@contextlib.contextmanager
def factor():
    yield FACTOR


class Logs(nn.Module):
    def forward(self, x):
        if not LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("not said")
        return x * 2


class Compiles(nn.Module):
    def forward(self, x):
        return compiled(x) if x.dim() > 3 else x * 2


def log_elsewhere(step):
    other = logging.getLogger(f"graphmod_test.other{step}")
    other.addHandler(logging.NullHandler())
    other.setLevel(logging.DEBUG)
    LOG.isEnabledFor(step)
    LOG.addFilter(lambda record: True)


def compile_elsewhere(step):
    torch.compile(lambda x: x + step, backend="eager")(torch.ones(step % 5 + 1))
    compiled(torch.ones(step % 5 + 1))


@pytest.mark.parametrize("module, elsewhere", [(Logs, log_elsewhere), (Compiles, compile_elsewhere)])
def test_machinery_at_work_elsewhere_changes_nothing(module, elsewhere, device):
    graphed = CUDAGraphModule(module(), config())
    for step in range(12):
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), x * 2)
        elsewhere(step)
    assert (graphed.stats.captures, graphed.stats.replays) == (1, 10), graphed.last_failure


ASKS_A_LOGGER = {
    "is_enabled": lambda: LOG.isEnabledFor(logging.DEBUG),
    "by_an_adapter": lambda: logging.LoggerAdapter(LOG, {}).isEnabledFor(logging.DEBUG),
    "effective_level": lambda: LOG.getEffectiveLevel() <= logging.DEBUG,
    "level": lambda: LOG.level <= logging.DEBUG,
}


@pytest.mark.parametrize("asks", ASKS_A_LOGGER)
def test_what_code_asks_a_logger_is_watched(asks, device, caplog):
    levels = itertools.cycle([logging.DEBUG, logging.INFO])

    def step(x):
        LOG.debug("not of interest")
        return x * 2 if ASKS_A_LOGGER[asks]() else x * 3

    caplog.set_level(logging.INFO, LOG.name)
    play(CUDAGraphModule(step, config()), step, lambda _: caplog.set_level(next(levels), LOG.name), device)


DECORATED = {
    "no_grad": lambda x: without_grad(x),
    "autocast": lambda x: without_autocast(x),
    "context": lambda x: _within(x),
}


def _within(x):
    with factor() as scale:
        return x * scale


@pytest.mark.parametrize("way", DECORATED)
def test_what_a_decorated_function_reads_is_watched(way, device, monkeypatch):
    change = lambda n: monkeypatch.setattr(sys.modules[__name__], "FACTOR", float(n))  # noqa: E731
    play(CUDAGraphModule(DECORATED[way], config()), DECORATED[way], change, device)


class Mode(enum.Enum):
    double, triple, quadruple = 2, 3, 4


class Choice:
    """What its step reads by a constant name, beside a counter that it does not read."""

    def __init__(self):
        self.mode, self.seen = Mode.double, 0

    def step(self, x):
        return x * getattr(self, "mode", Mode.triple).value


def test_a_member_of_an_enumeration_is_watched(device):
    choice = Choice()
    change = lambda n: setattr(choice, "mode", Mode.triple if n == 8 else Mode.quadruple)  # noqa: E731
    play(CUDAGraphModule(choice.step, config()), choice.step, change, device)


def test_a_constant_name_given_to_getattr_is_the_only_one_it_reads(device):
    choice = Choice()
    graphed = CUDAGraphModule(choice.step, config())
    for _ in range(12):
        choice.seen += 1
        assert torch.equal(graphed(torch.ones(3, device=device)), torch.full((3,), 2.0, device=device))
    assert graphed.stats.replays == 10, graphed.last_failure


class Labelled(Protocol):
    def label(self) -> str: ...


class Box(Generic[T]):
    def __init__(self, value: T):
        self.value = value

    def label(self) -> str:
        return "box"


class Declared(Box[T], Labelled):
    """Says that it is what a protocol asks for."""


@pytest.mark.parametrize("kind", [Box, Declared])
@pytest.mark.parametrize("content", ["number", "tensor"])
def test_a_class_with_type_parameters_is_looked_into(kind, content, device):
    make = float if content == "number" else lambda n: torch.full((3,), float(n), device=device)
    box = kind(make(2))

    def call(x):
        return x * box.value

    play(CUDAGraphModule(call, config()), call, lambda n: setattr(box, "value", make(n)), device)


def elsewhere():
    """Functions of an imported module, which is not looked into."""
    module = types.ModuleType("graphmod_test_elsewhere")
    exec("def through(held, x):\n    return held.inner(x).detach()", vars(module))
    return module


ELSEWHERE = elsewhere()


@functools.singledispatch
def dispatched(x):
    raise TypeError(x)


@dispatched.register
def _(x: torch.Tensor):
    return x * FACTOR


class Doubled(contextlib.ContextDecorator):
    scale = 1.0

    def __init__(self):
        self.inside = 2.0

    def __enter__(self):
        Doubled.scale = self.inside

    def __exit__(self, *error):
        Doubled.scale = 1.0


DOUBLED = Doubled()


@DOUBLED
def within_state(x):
    return x * Doubled.scale


@contextlib.contextmanager
def amplified():
    yield FACTOR


@amplified()
def decorated_by_a_generator(x):
    return x * FACTOR


class Chatty(logging.Logger):
    def __init__(self):
        super().__init__("graphmod_test.chatty")
        self.k = 2.0


class Stateful(enum.Enum):
    only = 1

    def __init__(self, _):
        self.k = 2.0


@dataclasses.dataclass
class Settings:
    k: float = 2.0


Nameless = type("Nameless", (), {"__module__": None})


class Holder:
    def __init__(self, device):
        self.device, self.inner = device, nn.Linear(3, 3).to(device)
        self.chatty, self.settings, self.nameless = Chatty(), Settings(), Nameless()
        self.member = Stateful.only
        self.nameless.k = 2.0
        self.put_future(2)

    def put_future(self, n):
        self.future = concurrent.futures.Future()
        self.future.set_result(torch.full((3,), float(n), device=self.device))

    def put_inner(self, n):
        torch.manual_seed(n)
        self.inner = nn.Linear(3, 3).to(self.device)


def set_factor(held, n):
    global FACTOR
    FACTOR = float(n)


BEHIND = {
    "module_read_elsewhere": (lambda h, x: ELSEWHERE.through(h, x), Holder.put_inner),
    "dispatch": (lambda h, x: dispatched(x), set_factor),
    "state_of_a_decorator": (lambda h, x: within_state(x), lambda h, n: setattr(DOUBLED, "inside", float(n))),
    "generator_as_decorator": (lambda h, x: decorated_by_a_generator(x), set_factor),
    "renamed_asdict": (lambda h, x: x * sum(as_dict(h.settings).values()), lambda h, n: setattr(h.settings, "k", n)),
    "dict_by_getattr": (
        lambda h, x: x * sum(getattr(h.settings, "__dict__", {}).values()),
        lambda h, n: setattr(h.settings, "k", float(n)),
    ),
    "future": (lambda h, x: x * h.future.result(), Holder.put_future),
    "kind_of_logger": (lambda h, x: x * h.chatty.k, lambda h, n: setattr(h.chatty, "k", float(n))),
    "member_with_state": (lambda h, x: x * h.member.k, lambda h, n: setattr(Stateful.only, "k", float(n))),
    "nameless_class": (lambda h, x: x * h.nameless.k, lambda h, n: setattr(h.nameless, "k", float(n))),
}


@pytest.mark.parametrize("way", BEHIND)
def test_what_lies_behind_machinery_is_watched(way, device):
    held, (read, change) = Holder(device), BEHIND[way]
    play(CUDAGraphModule(lambda x: read(held, x), config()), lambda x: read(held, x), lambda n: change(held, n), device)


def test_a_backend_of_attention_that_the_call_chooses_is_no_change(device):
    """PyTorch makes the names of the functions that it asks for it, from all that `torch._C` has."""
    chosen = [SDPBackend.MATH]

    def attend(x):
        with sdpa_kernel(chosen[0]):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    graphed = CUDAGraphModule(attend, config())
    for step in range(16):
        chosen[0] = SDPBackend.MATH if step < 8 else SDPBackend.FLASH_ATTENTION
        x = torch.randn(1, 2, 8, 16, device=device, dtype=torch.bfloat16)
        assert torch.equal(graphed(x), attend(x))
    assert graphed.stats.replays > 10
