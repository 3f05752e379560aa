"""`compiled_update`: clipping and Adam's step in one's own loop, in and outside of a captured step."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, check, compiled_update
from graphmod.errors import ConfigError
from tests.support.harness import config

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
RATE = 0.02


def build(device, kind=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(device)
    return model, kind(model.parameters(), lr=torch.tensor(RATE, device=device), fused=True)


def train(device, update_of, graph=False, scheduled=False, steps=12):
    """Losses, norms and weights of a loop of one's own."""
    model, optimizer = build(device)
    update = update_of(optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3) if scheduled else None

    def step(x):
        loss = (model(x) - x).square().mean() * 50
        loss.backward()
        norm = update()
        optimizer.zero_grad()
        return loss.detach(), norm

    run = CUDAGraphModule(step, config()) if graph else step
    found = []
    for index in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index)).to(device)
        found += [one.clone() for one in run(x) if one is not None]
        if scheduler is not None:
            scheduler.step()
    return [*found, *(p.detach().clone() for p in model.parameters())], run


def ours(optimizer, model):
    return compiled_update(optimizer, max_grad_norm=1.0)


def torchs(optimizer, model):
    def update():
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return norm

    return update


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
def test_it_has_the_numbers_of_torch_and_of_its_own_graph(device, scheduled):
    expected, _ = train(device, torchs, scheduled=scheduled)
    eager, _ = train(device, ours, scheduled=scheduled)
    captured, step = train(device, ours, graph=True, scheduled=scheduled)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(eager, expected, strict=True))
    assert all(map(torch.equal, captured, eager))
    assert step.stats.replays > 4 and not step.stats.failures


def test_a_check_finds_nothing_in_it(device):
    model, optimizer = build(device)
    update = compiled_update(optimizer, max_grad_norm=1.0)

    def step(x):
        model(x).square().mean().backward()
        update()
        optimizer.zero_grad()

    report = check(step, torch.ones(2, 8, device=device))
    assert report.captured, report


def test_without_a_norm_nothing_is_clipped_or_returned(device):
    _, optimizer = build(device)
    assert compiled_update(optimizer)() is None


def test_a_step_that_somebody_hooks_is_the_optimizers_own(device):
    model, optimizer = build(device)
    update, steps = compiled_update(optimizer, 1.0), []
    for index in range(4):
        model(torch.ones(1, 8, device=device)).sum().backward()
        if index == 2:
            optimizer.register_step_post_hook(lambda *_: steps.append(1))
        update()
    assert steps == [1, 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "Adam or AdamW, got torch.optim.sgd.SGD"),
        (lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), "tensor on cpu as its lr, got 0.1"),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), fused=True, amsgrad=True), "amsgrad=False"),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False), "capturable=True or fused=True"),
    ],
    ids=["kind", "rate", "amsgrad", "capturable"],
)
def test_what_it_is_not_for_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        compiled_update(make([nn.Parameter(torch.zeros(2))]))


def test_a_mode_that_is_not_known_is_refused():
    _, optimizer = build(torch.device("cpu"))
    with pytest.raises(ConfigError, match="'none' is not known; choose one of: default, max"):
        compiled_update(optimizer, compile="none")
