"""Encoders, models of images and sound, and diffusion models: losses and weights after some steps are eager's."""

import functools
import random

import numpy
import pytest
import torch
from torch import nn

from benchmarks import other_models
from graphmod import ConfigError, CUDAGraphModule, graph_layers
from tests.support.harness import config

# TorchScript is not seen; sizes depend on what CTC finds.
EAGER_STEPS = {"DeBERTa", "wav2vec"}
# TorchScript; under autocast, weights with several uses, each of which would be cast for itself in a graph.
EAGER_LAYERS = {False: {"DeBERTa"}, True: {"DeBERTa", "ALBERT", "DiTTransformer2DModel"}}


def trained(model, task, way, bf16):
    """Losses, weights and wrappers after some steps."""
    device = next(model.parameters()).device
    rate = torch.tensor(1e-3, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=device.type == "cuda")

    def step(given):
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = task.loss(model, given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    wrapped = graph_layers(model, config()) if way == "layers" else []
    if way == "step":
        step = CUDAGraphModule(step, config())
        wrapped = [step]
    losses = []
    for number in range(6):
        for seed in (torch.manual_seed, numpy.random.seed, random.seed):
            seed(number)
        given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in task.batch(number).items()}
        losses.append(step(given).item())
    return losses, list(model.parameters()), wrapped


def made(name, device):
    torch.manual_seed(0)
    return other_models.OTHERS[name].make().to(device).train()


@functools.cache
def eagerly(name, bf16, device):
    """What graphs of a step and of layers are both compared with."""
    losses, weights, _ = trained(made(name, device), other_models.OTHERS[name], None, bf16)
    return losses, weights


@pytest.mark.parametrize(
    ("way", "bf16"),
    [
        pytest.param("layers", False, id="layers-fp32"),
        pytest.param("step", True, id="step-bf16"),
        pytest.param("layers", True, id="layers-bf16", marks=pytest.mark.slow),
        pytest.param("step", False, id="step-fp32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", other_models.OTHERS)
def test_training_is_that_of_eager(name, way, bf16, device):
    words = name.split()
    if words[0] in ("diffusers", "timm"):
        pytest.importorskip(words[0])
    if "CTC" in words and device.type == "cuda":
        pytest.skip("the gradient of CTC is not the same twice on a GPU")
    expected, weights = eagerly(name, bf16, device)
    losses, found, wrapped = trained(made(name, device), other_models.OTHERS[name], way, bf16)
    assert losses == expected
    assert all(map(torch.equal, found, weights))
    eager = {*words} & (EAGER_STEPS if way == "step" else EAGER_LAYERS[bf16])
    assert all((one.stats.replays == 0) is bool(eager) for one in wrapped), wrapped[0].last_failure


def test_what_computes_a_weight_is_no_layer():
    weighted = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="Sequential has no list of like layers"):
        graph_layers(nn.Sequential(weighted, nn.ReLU(), nn.Linear(4, 4)))


def test_a_pattern_means_no_part_that_computes_a_weight():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 4))
    assert [wrapper.graph_name for wrapper in graph_layers(model, layers=["0", "2"])] == ["0", "2"]


def test_layers_may_stand_in_a_sequence(device):
    def block():
        return nn.Sequential(nn.Linear(8, 8), nn.GELU())

    blocks = nn.Sequential(*[block() for _ in range(3)])
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))})
    assert len(graph_layers(model, config())) == 3 and all("forward" in one.__dict__ for one in blocks)
    with pytest.raises(ConfigError, match="Sequential has no list of like layers"):
        graph_layers(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
