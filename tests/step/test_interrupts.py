"""An exception that a signal handler or another thread raises, at any moment of a recorded call or of a capture."""

import ctypes
import gc
import random
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, graph_layers
from graphmod.reads.frames import Frames
from graphmod.trace import dispatch
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.undo import Undo, is_interrupt, undo_left, undoing

TRIALS = 15
RECORDED, CAPTURED = 2, 3  # which call is


class Alarm(Exception):
    """As programs raise it in a handler of SIGALRM."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.settings = {"scale": 0.5, "names": ["x", "y"]}

    def forward(self, x):
        h = torch.relu(self.first(x)) * self.settings["scale"]
        for name in self.settings["names"]:
            h = h + len(name)
        if random.random() > 1 or torch.rand(()) > 1:  # draws that choose a branch are made again
            h = -h
        return x + self.second(h)


class Program:
    """A step; `whole` is captured with its backward and its optimizer, else layer by layer."""

    def __init__(self, whole, graphs):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block() for _ in range(2)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.call, self.wrappers = self.step, []
        if graphs and whole:
            self.call = CUDAGraphModule(self.step, warmup_steps=RECORDED)
            self.wrappers = [self.call]
        elif graphs:
            self.wrappers = list(graph_layers(self.model, warmup_steps=RECORDED))
        self.before = [parameter.detach().clone() for parameter in self.model.parameters()]

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def begin_anew(self):
        with torch.no_grad():
            for parameter, before in zip(self.model.parameters(), self.before, strict=True):
                parameter.copy_(before)
        self.optimizer.zero_grad()


def batch(index):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


def settings():
    monitoring, patched = getattr(sys, "monitoring", None), (torch.get_rng_state, torch.Tensor.numpy, torch.bincount)
    return (
        *(gc.isenabled(), gc.get_freeze_count() > 10_000, sys.gettrace(), dispatch.current(), dispatch.by_key()),
        *(
            torch.is_grad_enabled(),
            torch._C._is_multithreading_enabled(),
            torch._C._len_torch_dispatch_stack(),
            patched,
        ),
        [] if monitoring is None else [monitoring.get_tool(tool) for tool in range(6)],
    )


class BySignal:
    def __init__(self, error):
        def raises(number, frame):
            self.came = True
            raise error

        self.came, self.before = False, signal.signal(signal.SIGALRM, raises)

    def arm(self, seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def disarm(self):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


class ByThread:
    def __init__(self, error):
        self.came, self.error, self.over = False, error, threading.Event()
        self.thread = threading.Thread(target=self.run, args=(threading.get_ident(),))

    def run(self, of):
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            time.sleep(0)
        if not self.over.is_set():
            self.came = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(of), ctypes.py_object(self.error))

    def arm(self, seconds):
        self.seconds = seconds
        self.thread.start()

    def disarm(self):
        self.over.set()
        self.thread.join()


@pytest.fixture(autouse=True)
def reported(monkeypatch):
    """The kinds of errors that Python only reports, and goes on: raised where an object dies. Nor are there callbacks
    of the collector, such as hypothesis puts there, of which it does likewise."""
    kept, kinds = gc.callbacks[:], []
    gc.callbacks.clear()
    monkeypatch.setattr(sys, "unraisablehook", lambda found: kinds.append(found.exc_type))
    yield kinds
    gc.callbacks[:] = kept


@pytest.mark.parametrize("at", [RECORDED, CAPTURED])
@pytest.mark.parametrize(
    ("whole", "source", "error"),
    [
        *((True, BySignal, KeyboardInterrupt), (False, ByThread, Alarm)),
        pytest.param(False, BySignal, Alarm, marks=pytest.mark.slow),
        pytest.param(True, ByThread, Alarm, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_at_any_moment_reaches_the_program_and_leaves_everything_as_it_was(
    whole, source, error, at, reported
):
    if source is BySignal and threading.current_thread() is not threading.main_thread():
        pytest.skip("signals interrupt the main thread")
    eager, chance, came = Program(whole, graphs=False), random.Random(at), 0
    expected = [eager.call(batch(index)) for index in range(8)]
    took = min(seconds(whole, at) for _ in range(3))  # the first in a process takes longer
    for trial in range(20 * TRIALS):
        if trial >= TRIALS and came > TRIALS / 5:  # on a busy machine calls may be done before most interrupts
            break
        program = begun(whole, at)
        before, interrupt, raised = settings(), source(error), False
        try:
            interrupt.arm(max(1e-6, chance.random() * took))
            program.call(batch(at))
            interrupt.disarm()
        except error:
            raised = True
            interrupt.disarm()
        assert settings() == before and raised + reported.count(error) == interrupt.came
        reported.clear()
        came += raised
        program.begin_anew()
        assert all(torch.equal(program.call(batch(index)), expected[index]) for index in range(8))
        assert {wrapper.stats.state for wrapper in program.wrappers} == {"captured"}
        assert all(wrapper.stats.replays for wrapper in program.wrappers)
    assert came > TRIALS / 5


def begun(whole, at):
    program = Program(whole, graphs=True)
    for index in range(at - 1):
        program.call(batch(index))
    return program


def seconds(whole, at):
    program = begun(whole, at)
    began = time.perf_counter()
    program.call(batch(at))
    return time.perf_counter() - began


def dies(x):
    def numbers():
        try:
            yield 1
        finally:
            closed.append(1)

    closed = []
    next(numbers())
    return x * len(closed)


@pytest.mark.parametrize("moment", ["entered", "left"])
def test_an_interrupt_while_a_generator_dies_reaches_the_program(moment, monkeypatch):
    """Python keeps to itself what is raised there."""
    original, times = getattr(Frames, moment), []

    def interrupted(self, frame, *code):
        if frame.f_code.co_name == "numbers":
            times.append(frame)
            if len(times) == 2:
                raise KeyboardInterrupt
        return original(self, frame, *code)

    monkeypatch.setattr(Frames, moment, interrupted)
    wrapper = CUDAGraphModule(dies, warmup_steps=1)
    before = settings()
    with pytest.raises(KeyboardInterrupt):
        wrapper(torch.ones(2))
    assert settings() == before
    for _ in range(4):
        assert wrapper(torch.ones(2)).tolist() == [1.0, 1.0]
    assert wrapper.stats.replays


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("at", [RECORDED, CAPTURED])
def test_no_guard_of_torch_outlives_the_call_in_an_error(whole, at, monkeypatch):
    """What is interrupted as it is left puts back what it found when the error that holds it dies."""
    leave, forward, left = torch.inference_mode.__exit__, Block.forward, []

    def inside(self, x):
        with torch.inference_mode(False):
            return forward(self, x)

    def interrupted(self, *given):
        left.append(1)
        if len(left) == interrupted.at:
            raise KeyboardInterrupt
        leave(self, *given)

    interrupted.__code__ = interrupted.__code__.replace(co_filename=leave.__code__.co_filename)
    monkeypatch.setattr(Block, "forward", inside)
    eager = Program(whole, graphs=False)
    expected = [eager.call(batch(index)) for index in range(6)]
    for interrupted.at in range(1, 100):
        program, before = begun(whole, at), settings()
        left.clear()
        with monkeypatch.context() as patched:
            patched.setattr(torch.inference_mode, "__exit__", interrupted)
            try:
                program.call(batch(at))
                break
            except KeyboardInterrupt:
                assert settings() == before
        assert settings() == before
        program.begin_anew()
        assert all(map(torch.equal, [program.call(batch(index)) for index in range(6)], expected))
    assert 2 < interrupted.at < 99


class Counted:
    """Interrupts its first ends."""

    def __init__(self, interrupts):
        self.interrupts, self.inside = interrupts, False

    def __enter__(self):
        self.inside = True

    def __exit__(self, *_):
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.inside = False


@pytest.mark.parametrize("interrupts", [0, 1, 2, 3])
def test_what_is_interrupted_in_undoing_is_undone_again_or_with_the_next_call(interrupts):
    first, second, third = Counted(0), Counted(interrupts), Counted(0)

    def body(undo):
        for one in (first, second, third):
            undo.enter(one)
        return first.inside, second.inside, third.inside

    if interrupts:
        with pytest.raises(KeyboardInterrupt):
            undoing(body)
    else:
        assert undoing(body) == (True, True, True)
    assert (first.inside, third.inside) == (False, False) and second.inside == (interrupts > 1)


def test_a_call_begins_by_undoing_what_is_left():
    left, running = Counted(0), Counted(0)

    class Interrupted(Undo):
        def run(self, error=None):
            raise KeyboardInterrupt

    def inside(undo):
        undo.enter(running)
        undo_left()
        return running.inside

    def body(undo):
        undo.enter(left)
        undo.__class__ = Interrupted
        undos.append(undo)

    undos = []
    with pytest.raises(KeyboardInterrupt):
        undoing(body)
    undos[0].__class__ = Undo
    assert left.inside and undoing(inside)
    assert not left.inside


def test_generators_are_put_back_where_drawing_again_is_interrupted():
    """Torch's own; of those in Python copies draw."""
    draws = HostDraws(on_gpu=True)
    draws.begin(torch.default_generator)
    torch.rand(1)

    def interrupted():
        torch.rand(2)
        raise KeyboardInterrupt

    draws._steps.append((False, interrupted))
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        draws.finish(None)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


class Raises:
    def __getitem__(self, key):
        raise Alarm


@pytest.mark.parametrize("raises", [Raises().__getitem__, [].__getitem__, int])
def test_errors_of_a_program_are_no_interrupts(raises):
    with pytest.raises((Alarm, TypeError, ValueError)) as found:
        raises("x")
    assert not is_interrupt(found.value)
