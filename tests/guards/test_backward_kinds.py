"""Python that only a backward runs: what it reads and changes, from where, and when. Each program is one of all
combinations, and gives eager's numbers, call for call, whether its graph serves or it stays eager."""

import collections
import contextlib
import functools
import itertools
import logging
import queue
import random
import threading
import types

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, graph_layers
from graphmod.trace.recorder import Recorder
from tests.support.harness import config
from tests.support.sweeps import sweep

STEPS = 16
FACTOR = 3.0


class State:
    scale = 1.0

    def __init__(self):
        self.number, self.items, self.named = 1.0, [1.0], {"scale": 1.0}
        self.tensor, self.inner = torch.ones(()), types.SimpleNamespace(scale=1.0)
        self.count, self.queue, self.calls = itertools.count(), collections.deque([1.0]), 0
        self.random = random.Random(0)
        self.log = []


# -- what is read, and how the program sets it -------------------------------------------------------------------------
def set_attribute(state, value):
    state.number = value


def set_item(state, value):
    state.items[0] = value


def set_named(state, value):
    state.named["scale"] = value


def set_class(state, value):
    type(state).scale = value


def set_inner(state, value):
    state.inner = types.SimpleNamespace(scale=value)


def set_tensor(state, value):
    state.tensor = torch.full((), value)


READS = {
    "attribute": (lambda state: state.number, set_attribute),
    "item": (lambda state: state.items[0], set_item),
    "key": (lambda state: state.named["scale"], set_named),
    "class": (lambda state: state.scale, set_class),
    "object": (lambda state: state.inner.scale, set_inner),
    "tensor": (lambda state: state.tensor, set_tensor),
}


# -- what is changed ---------------------------------------------------------------------------------------------------
def counts(state):
    state.calls += 1
    return 1.0 + state.calls % 2


def draws(state):
    return random.random()


def draws_of_its_own(state):
    return state.random.random()


def advances(state):
    return 1.0 + next(state.count) % 3


def turns(state):
    state.queue.rotate()
    state.queue.append(state.queue[0] + 1.0)
    return state.queue[0]


def remembers(state):
    state.log.append(len(state.log))
    return 1.0 + len(state.log) % 2


CHANGES = {one.__name__: one for one in (counts, draws, draws_of_its_own, advances, turns, remembers)}


# -- where -------------------------------------------------------------------------------------------------------------
class Base(nn.Module):
    def __init__(self, state, look):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.state, self.look = state, look


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, look, state):
        ctx.look, ctx.state = look, state
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.look(ctx.state), None, None


class InFunction(Base):
    def forward(self, x):
        return self.last(Scale.apply(self.first(x), self.look, self.state))


class InHook(Base):
    def forward(self, x):
        y = self.first(x)
        y.register_hook(lambda grad: grad * self.look(self.state))
        return self.last(y)


class AtResult(Base):
    def forward(self, x):
        y = self.last(self.first(x))
        y.register_hook(lambda grad: grad * self.look(self.state))
        return y


class InModuleHook(Base):
    def __init__(self, state, look):
        super().__init__(state, look)
        self.last.register_full_backward_hook(lambda _, given, got: (given[0] * look(state),))

    def forward(self, x):
        return self.last(self.first(x))


class InPacked(Base):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * self.look(self.state)):
            return self.last(self.first(x).tanh())


class InNode(Base):
    def forward(self, x):
        y = self.first(x)
        y.grad_fn.register_prehook(lambda grads: (grads[0] * self.look(self.state),))
        return self.last(y)


PLACES = {one.__name__: one for one in (InFunction, InHook, AtResult, InModuleHook, InPacked, InNode)}
WHEN = ("between, once", "between, each step", "between, alternating", "after, once", "never")


def play(kind, look, change, when, graph):
    State.scale = 1.0
    torch.manual_seed(0)
    random.seed(0)
    state = State()
    model = kind(state, look)
    call = graph(model)
    parameters = list((call if isinstance(call, nn.Sequential) else model).parameters())
    seen = []
    for step in range(STEPS):
        x = torch.full((2, 3), 1.0 + step / 8)
        loss = call(x).square().sum()
        if when == "between, once" and step == 9:
            change(state, FACTOR)
        if when == "between, each step":
            change(state, 1.0 + step)
        if when == "between, alternating":
            change(state, FACTOR if step % 2 else 1.0)
        loss.backward()
        if when == "after, once" and step == 9:
            change(state, FACTOR)
        seen.append([p.grad.clone() for p in parameters])
        seen[-1].append(torch.tensor([float(state.calls), len(state.log), random.getstate()[1][0] % 1000]))
        for p in parameters:
            p.grad = None
    return seen, call


def whole(model):
    return CUDAGraphModule(model, config())


def in_layers(model):
    """Two layers that do it, each with graphs of its own."""
    two = nn.Sequential(model, type(model)(model.state, model.look))
    two.graphs = graph_layers(two, config(), layers=["0", "1"])
    return two


def twice(model):
    return nn.Sequential(model, type(model)(model.state, model.look))


def assert_same(eager, graphed):
    for step, (a, b) in enumerate(zip(eager, graphed, strict=True)):
        for one, other in zip(a, b, strict=True):
            assert torch.equal(one, other), step


@sweep(pairs=True, kind=READS, place=PLACES, when=WHEN)
def test_layers_whose_backward_runs_python_give_eagers_numbers(kind, place, when):
    look, change = READS[kind]
    eager, _ = play(PLACES[place], look, change, when, twice)
    graphed, model = play(PLACES[place], look, change, when, in_layers)
    assert_same(eager, graphed)
    if when == "never" and place != "InPacked":
        assert all(one.stats.replays > STEPS for one in model.graphs)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", CHANGES)
def test_layers_whose_backward_changes_python_give_eagers_numbers(kind, place):
    eager, _ = play(PLACES[place], CHANGES[kind], None, "never", twice)
    assert_same(eager, play(PLACES[place], CHANGES[kind], None, "never", in_layers)[0])


@sweep(pairs=True, read=READS, place=PLACES, when=WHEN)
def test_what_only_the_backward_reads_is_compared_before_it_replays(read, place, when):
    look, change = READS[read]
    eager, _ = play(PLACES[place], look, change, when, lambda model: model)
    graphed, call = play(PLACES[place], look, change, when, whole)
    assert_same(eager, graphed)
    if when == "never" and place != "InPacked":
        assert call.stats.replays > STEPS
    if when in ("between, once", "after, once") and place != "InPacked":
        assert call.stats.captures == 4  # recorded and captured anew
        assert call.stats.state == "captured"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("changed", CHANGES)
def test_a_backward_that_changes_python_state_is_refused_before_its_capture(changed, place, caplog):
    look = CHANGES[changed]
    eager, _ = play(PLACES[place], look, None, "", lambda model: model)
    graphed, call = play(PLACES[place], look, None, "", whole)
    assert_same(eager, graphed)
    assert call.stats.captures == 0
    assert call.last_failure
    assert "its backward could not be captured" in caplog.text or place == "InPacked"


# -- what is read of gradients on the host -----------------------------------------------------------------------------
def reads_a_number(grad):
    return grad * (1.0 + grad.sum().item())


def branches(grad):
    return grad * 2 if grad.abs().sum() > 4 else grad * 3


def reads_with_numpy(grad):
    return grad * float(grad.detach().numpy().sum())


def finds_places(grad):
    return grad * (1.0 + len(grad.nonzero()))


HOST_READS = {one.__name__: one for one in (reads_a_number, branches, reads_with_numpy, finds_places)}
program = logging.getLogger("program")


class ByGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, read):
        ctx.read = read
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return ctx.read(grad), None


class GradientInFunction(Base):
    def forward(self, x):
        return self.last(ByGradient.apply(self.first(x), self.look))


class GradientInHook(Base):
    def forward(self, x):
        y = self.first(x)
        y.register_hook(self.look)
        return self.last(y)


class GradientInModuleHook(Base):
    def __init__(self, state, look):
        super().__init__(state, look)
        self.last.register_full_backward_hook(lambda _, given, got: (look(given[0]),))

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize("place", [GradientInFunction, GradientInHook, GradientInModuleHook])
@pytest.mark.parametrize("read", HOST_READS)
def test_a_backward_that_reads_a_gradient_on_the_host_is_refused_before_its_capture(read, place, caplog):
    caplog.set_level(logging.INFO)

    def look(grad):
        program.info("reads")
        return HOST_READS[read](grad)

    eager, _ = play(place, look, None, "", lambda model: model)
    graphed, call = play(place, look, None, "", whole)
    assert_same(eager, graphed)
    assert call.stats.captures == 0
    assert len([one for one in caplog.records if one.name == "program"]) == 2 * STEPS  # in no capture
    assert f"in {read} (in the backward pass)" in call.last_failure


@contextlib.contextmanager
def a_thread_that_records():
    begun, over = threading.Event(), threading.Event()

    def record():
        with Recorder():
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=record)
    thread.start()
    begun.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("place", [GradientInFunction, GradientInHook, GradientInModuleHook])
def test_a_backward_is_refused_before_its_capture_while_another_thread_records(place):
    eager, _ = play(place, reads_a_number, None, "", lambda model: model)
    with a_thread_that_records():
        graphed, call = play(place, reads_a_number, None, "", whole)
    assert_same(eager, graphed)
    assert call.stats.captures == 0
    assert "in reads_a_number (in the backward pass)" in call.last_failure


# -- hooks in C --------------------------------------------------------------------------------------------------------
KEEPERS = {
    "list": (list, lambda kept: kept.append, len),
    "queue": (queue.SimpleQueue, lambda kept: kept.put, queue.SimpleQueue.qsize),
    "dict": (dict, lambda kept: functools.partial(kept.__setitem__, "last"), lambda kept: id(kept["last"])),
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_function_in_c_as_a_hook_loses_no_gradient(kind):
    make, hook, told = KEEPERS[kind]
    kept, layer = make(), nn.Linear(4, 4)

    def forward(x):
        y = layer(x)
        y.register_hook(hook(kept))
        return y.tanh()

    call, seen = CUDAGraphModule(forward, config()), []
    for _ in range(8):
        call(torch.ones(2, 4)).sum().backward()
        seen.append(told(kept))
    assert kind == "dict" or seen == list(range(1, 9))
    assert not call.stats.replays
