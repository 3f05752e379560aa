"""What a wrapper looks at around the tensors: modes of unusual modules, hooks that were put away."""

import weakref

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config


class Moody(nn.Linear):
    """Decides itself whether it trains."""

    frozen = False

    @property
    def training(self):
        return self.__dict__["training"] and not self.frozen

    @training.setter
    def training(self, value):
        self.__dict__["training"] = value

    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


def agree(module, net, device, calls=5):
    for _ in range(calls):
        x = torch.randn(3, 4, device=device)
        assert torch.equal(module(x), net(x))


def test_a_property_named_training_is_asked_each_time(device):
    net = Moody(4, 4).to(device)
    module = CUDAGraphModule(net, config())
    for net.frozen in (False, True, False):
        agree(module, net, device)
    assert module.stats.replays > 4


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if self.training else y.relu()


@pytest.mark.parametrize("compile", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(3, 4))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_captured_in_each_of_its_modes(compile, device):
    net = nn.Sequential(nn.Linear(4, 4), compile(Inner())).to(device)
    module = CUDAGraphModule(net, config())
    for training in (True, False, True):
        net.train(training)
        agree(module, net, device)
    if device.type == "cuda" and torch._C._jit_can_fuse_on_gpu():  # its own kernels are not seen
        assert "torch.jit" in module.last_failure
    else:
        assert module.stats.replays > 4 and module.stats.failures == 0


def test_hooks_that_were_put_away_for_the_capture_and_put_back_are_noticed(device):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    module = CUDAGraphModule(net, config())
    calls = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    away = dict(net[0]._forward_hooks)
    net[0]._forward_hooks.clear()
    agree(module, net, device)
    assert module.stats.replays > 0 and not calls
    net[0]._forward_hooks.update(away)
    for _ in range(3):
        module(torch.randn(3, 4, device=device))
    assert len(calls) == 3


@pytest.mark.parametrize("post", [False, True])
def test_a_gradient_hook_that_comes_after_many_replays_runs(post, device):
    net = nn.Linear(4, 4).to(device)
    module = CUDAGraphModule(net, config())
    calls = []

    def step():
        net.zero_grad()
        module(torch.randn(3, 4, device=device)).sum().backward()

    for _ in range(6):
        step()
    net.bias.register_hook(print).remove()  # a handle was made, and nothing is there
    step()
    register = net.bias.register_post_accumulate_grad_hook if post else net.bias.register_hook
    handle = register(lambda _: calls.append(1))
    for _ in range(5):
        step()
    assert len(calls) == 5
    handle.remove()
    for _ in range(5):
        step()
    assert len(calls) == 5


class _List(list):
    pass


class _Dict(dict):
    pass


@pytest.mark.parametrize("made", [_List, _Dict])
@pytest.mark.parametrize("gone", [False, True])
def test_a_weak_proxy_in_a_closure_is_no_error(made, gone):
    layer = nn.Linear(4, 4)
    kept = made([("layer", layer)])
    proxy, x = weakref.proxy(kept), torch.ones(2, 4)
    if gone:
        del kept

    def step(x):
        return layer(x) if proxy is not None else x

    wrapped = CUDAGraphModule(step)
    for _ in range(4):
        assert torch.equal(wrapped(x), step(x))
