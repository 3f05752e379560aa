"""What is compared of the tensors that a call reads."""

import contextlib

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, torch_private
from graphmod.guards import guards as watched
from tests.support.harness import config


def other_memory(p):
    p.data = p.data.clone()


def another_shape(p):
    p.data = p.data.view(4, 16)


def other_strides(p):
    p.data = p.data.t()


def no_gradient(p):
    p.requires_grad_(not p.requires_grad)


def another_dtype(p):
    p.data = p.data.view(torch.int32)


def reads(p, x):
    """Something of everything that may change."""
    return x * (p.shape[0] + p.stride(0) / 100 + p.requires_grad / 10 + (p.dtype is torch.int32)), p.detach().float()


@pytest.mark.parametrize("change", [other_memory, another_shape, other_strides, no_gradient, another_dtype])
@pytest.mark.parametrize("with_torchs", [True, False], ids=["the guards of torch.compile", "without them"])
def test_a_change_of_a_tensor_is_noticed(change, with_torchs, device, monkeypatch):
    if not with_torchs:
        monkeypatch.setattr(watched, "alike", lambda tensors: None)
    p = nn.Parameter(torch.arange(64.0, device=device).view(8, 8))
    if change is another_dtype:
        p = p.detach()
    wrapper = CUDAGraphModule(lambda x: reads(p, x), config())
    for step in range(12):
        if step == 6:
            change(p)
        x = torch.full((2,), float(step), device=device)
        assert all(map(torch.equal, wrapper(x), reads(p, x))), step
        assert step != 5 or wrapper.stats.replays
    assert wrapper.stats.replays > 4


@pytest.mark.parametrize("mode", ["autocast", "inference", "no gradients"])
def test_modes_in_turn_change_no_tensor(mode, device):
    """The function that compares them depends on modes."""
    entered = {
        "autocast": lambda: torch.autocast(device.type, torch.bfloat16),
        "inference": torch.inference_mode,
        "no gradients": torch.no_grad,
    }[mode]
    module = nn.Linear(8, 8, device=device)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(2, 8, device=device)
    for step in range(20):
        with entered() if step % 2 else contextlib.nullcontext():
            assert torch.equal(wrapper(x).detach(), module(x).detach())
    assert wrapper.stats.captures == 2 and wrapper.stats.eager_calls <= 8


def test_the_guards_of_torch_compile_do_what_is_asked_of_them():
    assert torch_private._guards_work()
    tensors = [torch.zeros(2, 3), torch.zeros(()), torch.zeros(0, 4), torch.zeros(3).expand(2, 3)]
    check = torch_private.alike(tensors)
    assert check(*tensors)
    for index, other in enumerate((torch.zeros(3, 2), torch.zeros(1), torch.zeros(0, 5), torch.zeros(2, 3))):
        assert not check(*tensors[:index], other, *tensors[index + 1 :]), index


def test_a_torch_without_them_is_served_as_well(monkeypatch):
    monkeypatch.setattr(torch_private, "_guards", None)
    torch_private._guards_work.cache_clear()
    try:
        assert torch_private.alike([torch.zeros(2)]) is None
    finally:
        torch_private._guards_work.cache_clear()


def test_a_network_that_is_frozen_in_turn_has_a_graph_for_both(device):
    network = nn.Linear(4, 1, device=device)
    wrapper, x = CUDAGraphModule(network, config()), torch.ones(2, 4, device=device, requires_grad=True)
    for step in range(60):
        network.requires_grad_(step % 2 == 1)
        wrapper(x).sum().backward()
    assert wrapper.stats.captures == 4 and wrapper.stats.eager_calls < 12
