"""What a callable holds in places that are hard to look into, and on which device that says it works."""

import functools
import types
from collections import deque
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, mark_static
from tests.support.harness import config


@dataclass(slots=True)
class Settings:
    model: nn.Module
    scale: torch.Tensor
    factor: float


class More(Settings):
    """A slot, a dict and a private slot in one object."""

    __slots__ = ("__dict__", "__shift")

    def __init__(self, *values):
        super().__init__(*values)
        self.__shift = self.scale + 1
        self.other = self.scale + 2

    def shift(self):
        return self.__shift + self.other

    def exchange(self):
        self.__shift = self.__shift + 5


def exchange_scale(held):
    held.scale = held.scale + 3


def exchange_model(held):
    held.model = nn.Linear(4, 4, device=held.scale.device)


def exchange_factor(held):
    held.factor += 1


def exchange_private(held):
    held.exchange()


def exchange_other(held):
    held.other = held.other * 2


@pytest.mark.parametrize("change", [exchange_scale, exchange_model, exchange_factor, exchange_private, exchange_other])
def test_what_lies_in_slots_is_watched(change, device, caplog):
    held = More(nn.Linear(4, 4, device=device), torch.full((4,), 2.0, device=device), 0.5)

    def call(x):
        return (held.model(x) * held.scale * held.factor + held.shift()).detach()

    graphed = CUDAGraphModule(call, config())
    replays = []
    for step in range(24):
        if step in (8, 16):
            change(held)
        x = torch.randn(2, 4, device=device)
        assert torch.equal(graphed(x), call(x)), step
        replays.append(graphed.stats.replays)
    assert replays[7] > 3 and replays[15] > replays[7] + 2 and replays[-1] > replays[15] + 2
    assert "found neither" not in caplog.text


def test_a_queue_of_tensors_is_watched(device):
    queue = deque(torch.full((3,), float(n), device=device) for n in range(3))
    graphed = CUDAGraphModule(lambda x: x + queue[0], config())
    for step in range(16):
        if step == 8:
            queue.rotate()
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), x + queue[0]), step
    assert graphed.stats.captures == 2


def test_a_tensor_that_nothing_leads_to_is_refused(device):
    """Nobody would notice if another took its place."""
    hidden = torch.futures.Future()
    hidden.set_result(torch.ones(3, device=device))
    graphed = CUDAGraphModule(lambda x: x * hidden.wait(), config())
    for _ in range(8):
        assert torch.equal(graphed(torch.ones(3, device=device)), torch.ones(3, device=device))
    assert graphed.stats.replays == 0
    assert "float32 tensor of shape (3,) at " in graphed.last_failure and "Pass it as" in graphed.last_failure


def test_what_a_cache_returns_is_watched(device):
    """Also where the cache is cleared, or what it returned is changed."""
    factor = {"factor": 1.0}
    settings = functools.lru_cache(lambda: types.SimpleNamespace(scale=torch.ones(3, device=device), more=factor))
    settings()
    graphed = CUDAGraphModule(lambda x: x * settings().scale * settings().more["factor"], config())
    x = torch.ones(3, device=device)
    for step in range(24):
        if step == 8:
            settings.cache_clear()
            settings().scale.fill_(2.0)
        if step == 16:
            factor["factor"] = 3.0
        expected = (1.0 if step < 8 else 2.0) * (1.0 if step < 16 else 3.0)
        assert torch.equal(graphed(x), torch.full_like(x, expected)), step
    assert graphed.stats.replays > 15


def test_a_tensor_that_nothing_leads_to_may_be_marked_static(device):
    hidden = functools.cache(lambda: mark_static(torch.ones(3, device=device)))
    hidden()
    graphed = CUDAGraphModule(lambda x: x * hidden(), config())
    for step in range(8):
        hidden().fill_(step)
        assert torch.equal(graphed(torch.ones(3, device=device)), torch.full((3,), float(step), device=device))
    assert graphed.stats.replays == 6


class Hiding:
    """Keeps a tensor where only its own code finds it."""

    def __init__(self, tensor):
        self._held = {tensor}

    def add_one(self):
        for tensor in self._held:
            tensor.add_(1)


@pytest.mark.gpu
def test_work_on_a_gpu_that_nothing_shows_is_captured_there():
    tensor = torch.zeros(3, device="cuda")
    hiding = Hiding(tensor)
    graphed = CUDAGraphModule(lambda: hiding.add_one(), config())
    for step in range(8):
        graphed()
        assert tensor.tolist() == [step + 1.0] * 3
    assert graphed.stats.replays == 6 and graphed._context.group.backend.on_gpu


@pytest.mark.gpu
def test_compiled_work_on_a_gpu_that_nothing_shows_is_captured_there():
    tensor = torch.zeros(3, device="cuda")
    hiding = Hiding(tensor)
    compiled = torch.compile(lambda t: t.add_(1))
    hiding.add_one = lambda: [compiled(t) for t in hiding._held]
    graphed = CUDAGraphModule(lambda: hiding.add_one() is None, config())
    for step in range(8):
        graphed()
        assert tensor.tolist() == [step + 1.0] * 3


@pytest.mark.gpu
def test_what_works_on_a_gpu_and_on_the_host_is_refused_and_right():
    tensor = torch.zeros(3, device="cuda")
    hiding, seen = Hiding(tensor), torch.zeros(())

    def call():
        hiding.add_one()
        return seen + 1

    graphed = CUDAGraphModule(call, config())
    for step in range(8):
        assert graphed().item() == 1
        assert tensor.tolist() == [step + 1.0] * 3
    assert graphed.stats.replays == 0
    assert "computes on the host" in graphed.last_failure or "works on cuda:0" in graphed.last_failure


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_a_module_tried_on_the_cpu_is_captured_on_the_gpu_once_it_is_there(backward):
    torch.manual_seed(0)
    graphed = CUDAGraphModule(nn.Sequential(nn.Linear(4, 4), nn.GELU()), config())
    for device in ("cpu", "cuda"):
        graphed.to(device)
        before = graphed.stats.replays
        for _ in range(8):
            x = torch.randn(2, 4, device=device)
            with torch.set_grad_enabled(backward):
                result = graphed(x)
                assert torch.equal(result, graphed.module(x))
            if backward:
                result.sum().backward()
                found = [p.grad.clone() for p in graphed.module.parameters()]
                graphed.zero_grad()
                graphed.module(x).sum().backward()
                assert all(map(torch.equal, found, [p.grad for p in graphed.module.parameters()]))
                graphed.zero_grad()
        assert graphed.stats.replays - before > 3
        assert graphed._context.group.backend.on_gpu is (device == "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_what_works_on_two_gpus_is_refused_and_right():
    first, second = nn.Linear(4, 4, device="cuda:0"), nn.Linear(4, 4, device="cuda:1")
    graphed = CUDAGraphModule(lambda x: second(first(x).to("cuda:1")).detach(), config())
    for _ in range(6):
        x = torch.randn(2, 4, device="cuda:0")
        assert torch.equal(graphed(x), second(first(x).to("cuda:1")))
    assert graphed.stats.replays == 0 and "cuda:1" in graphed.last_failure


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_module_moved_to_another_gpu_is_captured_there():
    graphed = CUDAGraphModule(nn.Linear(4, 4), config())
    for device in ("cuda:0", "cuda:1"):
        graphed.to(device)
        before = graphed.stats.replays
        for _ in range(6):
            x = torch.randn(2, 4, device=device)
            with torch.no_grad():
                assert torch.equal(graphed(x), graphed.module(x))
        assert graphed.stats.replays - before == 4


@pytest.mark.gpu
def test_a_callable_without_arguments_whose_tensors_moved_is_captured_on_the_gpu():
    held = Settings(nn.Linear(4, 4), torch.randn(2, 4), 2.0)
    graphed = CUDAGraphModule(lambda: held.model(held.scale).detach() * held.factor, config())
    for device in ("cpu", "cuda"):
        held.model.to(device)
        held.scale = held.scale.to(device)
        before = graphed.stats.replays
        for _ in range(14):
            assert torch.equal(graphed(), held.model(held.scale) * 2)
        assert graphed.stats.replays - before > 3 and graphed._context.group.backend.on_gpu is (device == "cuda")


@pytest.mark.gpu
def test_a_result_held_across_the_move_does_not_keep_the_emulator():
    module = nn.Linear(4, 4)
    graphed = CUDAGraphModule(module, config())
    for _ in range(4):
        graphed(torch.randn(2, 4)).sum().backward()
    held = graphed(torch.randn(2, 4))  # its backward may still come
    module.cuda()
    for step in range(12):
        if step == 4:
            del held
        x = torch.randn(2, 4, device="cuda")
        result = graphed(x)
        assert torch.equal(result, module(x))
        result.sum().backward()
        del result
    assert graphed._context.group.backend.on_gpu


@pytest.mark.gpu
@pytest.mark.parametrize("use", [lambda seen: seen + 1, lambda seen: seen.clone(), lambda seen: torch.stack([seen])])
@pytest.mark.parametrize("eager_parts", [True, False])
def test_what_is_computed_on_the_host_beside_a_gpu_is_never_frozen(eager_parts, use):
    tensor, seen = torch.zeros(3, device="cuda"), torch.zeros(())

    def call():
        tensor.add_(1)
        return use(seen)

    graphed = CUDAGraphModule(call, config(eager_parts=eager_parts))
    for step in range(8):
        seen.fill_(step)
        assert torch.equal(graphed(), use(seen))
        assert tensor.tolist() == [step + 1.0] * 3
    assert eager_parts or "computes on the host" in graphed.last_failure


@pytest.mark.gpu
def test_a_view_on_the_host_beside_a_gpu_is_that_of_eager():
    tensor, seen = torch.zeros(3, device="cuda"), torch.zeros(4)

    def call():
        tensor.add_(1)
        return seen.view(2, 2).t()

    graphed = CUDAGraphModule(call, config())
    for step in range(8):
        seen.fill_(step)
        assert torch.equal(graphed(), seen.view(2, 2).t())
        assert tensor.tolist() == [step + 1.0] * 3
