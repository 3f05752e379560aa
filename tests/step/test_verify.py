"""Calls that are verified: what no guard notices is found by running them eagerly, in a thousandth of the time."""

import logging
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphmod import CUDAGraphModule, graph_layers
from graphmod.errors import ConfigError, VerificationFailed
from graphmod.step import group as verification
from tests.support.harness import WARMUP, config


class Clock:
    """The time of the process, set by hand; to look at it takes a millisecond."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1e-3
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(verification.time, "perf_counter", made)
    return made


@pytest.fixture
def file(tmp_path):
    """A number in a file, which no guard watches."""
    path = tmp_path / "scale"
    path.write_text("2")
    return path


def scaled(path, device):
    weight = torch.ones(3, device=device)

    def call(x):
        with open(path) as read:
            return x * weight * float(read.read())

    return call


def test_what_no_guard_notices_is_found_and_named(device, file, clock, caplog):
    graphed = CUDAGraphModule(scaled(file, device), config(verify="sampled"))
    x = torch.ones(3, device=device)
    for _ in range(80):
        assert graphed(x).tolist() == [2.0] * 3
    assert graphed.stats.verified == 0 and graphed.stats.replays > 60
    file.write_text("3")
    clock.now += 1e4
    with caplog.at_level(logging.WARNING, logger="graphmod"):
        results = [graphed(x).tolist() for _ in range(80)]
    stale = results.index([3.0] * 3)
    assert results == [[2.0] * 3] * stale + [[3.0] * 3] * (80 - stale) and stale <= 64
    assert graphed.stats.verified == 1
    said = [record.getMessage() for record in caplog.records if "no longer what was captured" in record.getMessage()]
    assert len(said) == 1 and "test_verify.py:" in said[0] and "passes 3.0 to mul" in said[0], said
    graphed.force_enable()
    assert [graphed(x).tolist() for _ in range(8)] == [[3.0] * 3] * 8
    assert graphed.stats.replays > 64


def test_always_raises_at_the_first_difference(device, file):
    graphed = CUDAGraphModule(scaled(file, device), config(verify="always"))
    x = torch.ones(3, device=device)
    for _ in range(12):
        assert graphed(x).tolist() == [2.0] * 3
    assert graphed.stats.verified == 9 and graphed.stats.replays == 1
    file.write_text("4")
    with pytest.raises(VerificationFailed, match=r"passes 4\.0 to mul"):
        graphed(x)


def test_off_never_looks(device, file, clock):
    graphed = CUDAGraphModule(scaled(file, device), config(verify="off"))
    x = torch.ones(3, device=device)
    for _ in range(200):
        graphed(x)
        clock.now += 1e4
    assert graphed.stats.verified == 0


def test_where_memory_would_not_do_none_is_verified(device, file, clock, monkeypatch):
    graphed = CUDAGraphModule(scaled(file, device), config(verify="sampled"))
    x = torch.ones(3, device=device)
    graphed(x)
    asked = []
    monkeypatch.setattr(type(graphed._context.group.backend), "has_room", lambda _, size: bool(asked.append(size)))
    for _ in range(400):
        graphed(x)
        clock.now += 1e4
    assert graphed.stats.verified == 0 and len(asked) >= 3


def test_all_layers_are_verified_in_one_pass_and_nothing_is_captured_again(device, clock, caplog):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).to(device)
    layers = list(graph_layers(model, config(layers=["0", "1", "2", "3", "4", "5"], verify="sampled")))
    twin = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).to(device)
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for _ in range(400):
        clock.now += 0.5
        x = torch.randn(2, 4, device=device)
        losses = []
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    verified = [layer.stats.verified for layer in layers]
    assert min(verified) == max(verified) and 3 <= max(verified) <= 400 // verification.LOOKS
    assert sum(layer.stats.captures for layer in layers) == 12
    assert all(layer.stats.eager_calls == WARMUP + layer.stats.verified for layer in layers)
    assert "runs eagerly" not in caplog.text


def test_layers_of_a_checkpoint_are_verified_too(device, clock):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    layers = list(graph_layers(model, config(layers=["0", "1"])))
    for _ in range(3 * verification.LOOKS):
        clock.now += 1e3
        x = torch.randn(2, 4, device=device)
        for part in model:
            x = checkpoint(part, x, use_reentrant=False)
        x.sum().backward()
        model.zero_grad()
    assert all(layer.stats.replays > 100 and layer.stats.verified for layer in layers)


def test_several_calls_in_one_backward_have_their_turns(device, clock):
    graphed = CUDAGraphModule(nn.Linear(4, 4).to(device), config())
    for _ in range(5 * verification.LOOKS):
        clock.now += 1e3
        x = torch.randn(2, 4, device=device)
        (graphed(x).sum() + graphed(x * 2).sum()).backward()
        graphed.zero_grad()
    assert graphed.stats.verified > 2 and graphed.stats.replays > 200


def test_it_takes_a_thousandth_of_the_time():
    budget = verification.Verification()
    budget.expect(1e-4)
    budget.expect(1e-4)
    spent = 0.0
    began = time.perf_counter()
    while time.perf_counter() - began < 1.0:
        if budget.begins():
            budget.took(1e-4)
            budget.took(1e-4)
            spent += 2e-4
    assert 0 < spent <= 1.1e-3


def test_a_setting_that_does_not_exist():
    with pytest.raises(ConfigError, match="verify='often' is not known; choose one of: off, sampled, always"):
        config(verify="often")
