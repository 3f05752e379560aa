"""On which device a group of modules is captured."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from graphmod.config import BackendName
from graphmod.step import group as groups
from graphmod.step.group import Group
from tests.support.harness import config

GPU = torch.device("cuda", 0)


class OnGPU:
    """What of a backend `settle` looks at."""

    def __init__(self, device):
        self.device, self.on_gpu, self.device_type = device, device.type == "cuda", device.type


@pytest.fixture
def two_devices(monkeypatch):
    """As on a machine with a GPU, which is what a guess says."""
    monkeypatch.setattr(groups, "make_backend", lambda _, device: OnGPU(device))
    monkeypatch.setattr(groups, "default_device", lambda _: GPU)
    monkeypatch.setattr(groups, "key_reader", lambda _: tuple)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **how: empty(*size, **how))


def test_a_guess_that_was_wrong_is_corrected(two_devices):
    group = Group()
    group.settle(BackendName.auto, None)
    assert group.backend.on_gpu
    assert not group.settle(BackendName.auto, torch.device("cpu")) and group.backend.on_gpu, "nobody said it was wrong"
    assert group.settle(BackendName.auto, torch.device("cpu"), misguessed=True) and not group.backend.on_gpu
    assert not group.settle(BackendName.auto, torch.device("cpu"), misguessed=True)


def test_what_was_no_guess_is_not_corrected(two_devices):
    group = Group()
    group.settle(BackendName.auto, GPU)
    assert not group.settle(BackendName.auto, torch.device("cpu"), misguessed=True) and group.backend.on_gpu
    asked = Group()
    asked.settle(BackendName.cuda, None)
    assert not asked.settle(BackendName.cuda, torch.device("cpu"), misguessed=True) and asked.backend.on_gpu


def test_a_move_waits_for_results_that_are_held(two_devices):
    class Held:
        in_flight, tapes = 1, ()

        class pool:
            release = staticmethod(lambda: None)

    group = Group()
    group.settle(BackendName.auto, torch.device("cpu"))
    group.arenas = [Held()]
    assert not group.settle(BackendName.auto, GPU) and group.held_back and not group.backend.on_gpu
    assert not group.settle(BackendName.auto, torch.device("cpu")) and not group.held_back, "moved back"
    Held.in_flight = 0
    assert group.settle(BackendName.auto, GPU) and not group.held_back and group.backend.on_gpu


def test_what_is_held_back_is_eager_and_no_failure(monkeypatch):
    module = nn.Linear(4, 4)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(2, 4)
    held = []
    settle = Group.settle

    def held_back(group, *args, **how):
        changed = settle(group, *args, **how)
        group.held_back = bool(held)
        return changed

    monkeypatch.setattr(Group, "settle", held_back)
    held.append(True)
    for _ in range(6):
        assert torch.equal(wrapper(x), module(x))
    assert wrapper.stats.failures == wrapper.stats.captures == 0
    held.clear()
    for _ in range(6):
        wrapper(x).sum().backward()
    assert wrapper.stats.captures == 2


def test_a_tensor_that_a_function_names_tells_the_device():
    held = torch.ones(2)
    wrapper = CUDAGraphModule(lambda: held * 2, config())
    wrapper()
    assert wrapper._context.around.device([]) == torch.device("cpu") and not wrapper._context.group._guessed
