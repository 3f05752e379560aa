"""Modules that TorchScript made: captured like others, or eager with a reason."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config, layered, train, twins, wrapped


def loaded(module, x, folder):
    torch.jit.save(torch.jit.script(module), folder / "module.pt")
    return torch.jit.load(folder / "module.pt", map_location=x.device)


SCRIPTED = {
    "traced": lambda module, x, _: torch.jit.trace(module, x),
    "scripted": lambda module, x, _: torch.jit.script(module),
    "loaded": loaded,
}


@pytest.mark.parametrize("graph", [wrapped(), layered("scripted")], ids=["wrapper", "graph_layers"])
@pytest.mark.parametrize("kind", SCRIPTED)
@pytest.mark.filterwarnings("ignore")
def test_modules_of_torchscript_are_captured_or_on_a_gpu_eager_with_the_reason(kind, graph, device, tmp_path):
    def build(device):
        plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device)
        model = nn.Sequential()
        model.add_module("scripted", SCRIPTED[kind](plain, torch.randn(4, 8, device=device), tmp_path))
        return model

    on_gpu = device.type == "cuda"  # where kernels that TorchScript fuses are seen by nobody
    with torch.jit.optimized_execution(False):  # else twins share what it has learnt to rewrite
        side = twins(
            build,
            train,
            device,
            graph=graph,
            replays=0 if on_gpu else 2,
            eager_calls=1 if on_gpu else 0,
            failures=3 if on_gpu else 0,
        )
    assert not on_gpu or all("runs code of torch.jit" in one.last_failure for one in side.graphs)


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_script_is_eager_and_says_so(device):
    module = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device).eval()))
    wrapper = CUDAGraphModule(module, config())
    for scale in range(8):
        x = torch.full((4, 8), float(scale), device=device)
        assert torch.equal(wrapper(x), module(x))
    assert wrapper.stats.replays or wrapper.last_failure


class _Settings(nn.Module):
    factor: float
    powers: list[float]

    def __init__(self):
        super().__init__()
        self.factor, self.powers = 1.0, [2.0]

    def forward(self, x):
        return x * self.factor * self.powers[0]


@pytest.mark.parametrize("change", [lambda m: setattr(m, "factor", 3.0), lambda m: setattr(m, "powers", [5.0])])
@pytest.mark.filterwarnings("ignore")
def test_what_a_scripted_module_keeps_in_cpp_is_compared(change, device):
    module = torch.jit.script(_Settings())
    wrapper = CUDAGraphModule(module, config())
    for step in range(10):
        if step == 6:
            change(module)
        x = torch.full((3,), float(step), device=device)
        with torch.no_grad():
            assert torch.equal(wrapper(x), module(x)), step
    assert wrapper.stats.captures or device.type == "cuda"
