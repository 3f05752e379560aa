"""An error at any operation of a capture leaves nothing behind: numbers and gradients are eager's, weights are whole,
what was made for it is gone, and the next capture works."""

import gc
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from graphmod.trace.recorder import Follower
from tests.support.harness import config, loss_of

KINDS = {"an error": RuntimeError, "out of memory": torch.OutOfMemoryError, "an interrupt": KeyboardInterrupt}


class Small(nn.Module):
    """Writes to a buffer, draws random numbers, uses a weight twice."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return (self.body(x) * self.scale).tanh() + self.scale


class Fault:
    """Raises at one operation of the captures to come, counted over all of them."""

    def __init__(self, monkeypatch):
        self.arm(None, None)
        see = Follower.see

        def counted(recorder, *about):
            self.seen.put("forward" if torch._C._current_autograd_node() is None else "backward")
            if self.seen.qsize() == self.at:
                raise self.kind("thrown")
            return see(recorder, *about)

        # As code of the recorder's own, which no guard looks at.
        counted.__code__ = counted.__code__.replace(co_filename=see.__code__.co_filename)
        monkeypatch.setattr(Follower, "see", counted)

    def arm(self, at, kind):
        self.at, self.kind, self.seen = at, kind, SimpleQueue()


def random_state(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device, state):
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


class Run:
    """A model that is trained step by step; a step that is interrupted is made once more from where it began."""

    def __init__(self, device, wrap, whole):
        torch.manual_seed(0)
        self.device, self.model = device, Small().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.call = self.model
        if whole:
            self.graph = CUDAGraphModule(self.whole, config())
        else:
            self.graph = CUDAGraphModule(self.model, config())
        if wrap and not whole:
            self.call = self.graph
        self.step = self.graph if wrap and whole else self.whole if whole else self.apart

    def whole(self, x):
        loss = loss_of(self.model(x))
        loss.backward()
        return loss.detach()

    def apart(self, x):
        loss = loss_of(self.call(x))
        loss.backward()
        return loss.detach()

    def state(self):
        tensors = [*self.model.parameters(), *self.model.buffers(), *(p.grad for p in self.model.parameters())]
        return [None if tensor is None else tensor.detach().clone() for tensor in tensors]

    def __call__(self, i):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(3, 4, generator=generator).to(self.device)
        interrupted = False
        before = [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]
        states = random_state(self.device)
        try:
            loss = self.step(x)
        except KeyboardInterrupt:
            interrupted = True
        if interrupted:
            whole = [*self.model.parameters(), *self.model.buffers()]
            assert [(t.shape, t.dtype) for t in whole] == [(t.shape, t.dtype) for t in before]
            with torch.no_grad():
                for tensor, value in zip(whole, before, strict=True):
                    tensor.copy_(value)
            self.optimizer.zero_grad()
            set_random_state(self.device, states)
            loss = self.step(x)
        found = [loss.clone(), *self.state(), random_state(self.device)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def same(one, other):
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True))


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize(
    ("whole", "kind"),
    [
        *((True, "an error"), (False, "an interrupt")),
        # Errors in captures of layers, at fewer places: tests/step/test_failures.py
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((False, "an error"), (True, "an interrupt"))),
        *(pytest.param(whole, "out of memory", marks=pytest.mark.slow) for whole in (False, True)),
    ],
)
def test_a_fault_at_any_operation_of_a_capture(whole, kind, device, monkeypatch):
    fault = Fault(monkeypatch)
    steps = 10
    eager = Run(device, False, whole)
    expected = [eager(i) for i in range(steps)]
    undisturbed = Run(device, True, whole)
    assert all(same(undisturbed(i), expected[i]) for i in range(steps))
    pool, where = undisturbed.graph.stats.pool_bytes, [fault.seen.get() for _ in range(fault.seen.qsize())]
    count = len(where)
    assert {"forward", "backward"} == set(where)
    del undisturbed
    alive = []
    for at in range(1, count + 1):
        fault.arm(at, KINDS[kind])
        run = Run(device, True, whole)
        for i in range(steps):
            found = run(i)
            assert same(found, expected[i]), f"operation {at} of {count}, a {where[at - 1]}: step {i}"
        stats = run.graph.stats
        assert stats.state == "captured", f"operation {at} of {count}: {run.graph.last_failure}"
        assert stats.failures == (0 if kind == "an interrupt" else 1)
        replays = stats.replays
        run(steps)
        assert run.graph.stats.replays == replays + (1 if whole else 2), f"operation {at} of {count}: not replayed"
        if device.type == "cpu":
            assert run.graph.stats.pool_bytes <= 2 * pool
        del run, found, stats
        if at in (3, count):
            alive.append(tensors_alive())
    assert alive[1] <= alive[0] + 4, "what failed captures made is still there"
