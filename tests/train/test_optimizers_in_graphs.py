"""An optimizer inside a captured iteration steps as it does in eager, or is refused."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from graphmod import CUDAGraphModule
from tests.support.harness import config, iteration_of, loss_of, mlp, play


@pytest.mark.parametrize("parts", [True, False])
def test_an_optimizer_that_counts_its_steps_in_python_steps_between_graphs_or_is_refused(parts, device, caplog):
    def build(device):
        model = mlp(device)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), foreach=False)}

    def graph(side):
        side.run = CUDAGraphModule(iteration_of(side), config(eager_parts=parts))
        side.graphs = [side.run]

    def step(side, i):
        return (side.run if side.graphed else iteration_of(side))(side.batch(i, 4, 8))

    side, history = play(build, step, device, graph=graph)
    assert (history[-1][0] > 0) is parts is not ("fused=True" in side.run.last_failure), side.run.last_failure
    assert "AdamW with fused=True" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, foreach=True),
        lambda p: torch.optim.Adagrad(p, lr=0.05),
        lambda p: torch.optim.RMSprop(p, lr=0.05),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), fused=True),
        lambda p: torch.optim.NAdam(p, lr=0.05),
    ],
    ids=["nesterov", "foreach", "adagrad", "rmsprop", "adam fused", "nadam"],
)
def test_any_optimizer_inside_an_iteration_is_right_however_it_runs(make, device):
    def build(device):
        model = mlp(device)
        return {"model": model, "optimizer": make(model.parameters())}

    def iteration_of(side):
        def iteration(x):
            loss = loss_of(side.model(x))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
            side.optimizer.step()
            side.optimizer.zero_grad()
            return loss.detach(), norm

        return iteration

    def graph(side):
        side.run = CUDAGraphModule(iteration_of(side), config())
        side.graphs = [side.run]

    def step(side, i):
        return (side.run if side.graphed else iteration_of(side))(side.batch(i, 4, 8))

    play(build, step, device, graph=graph)


@pytest.mark.parametrize("when", [0, 6])
def test_step_hooks_of_an_optimizer_run_in_every_step(when, device, steps_of):
    """Those that come after a capture, too. While there is one, the optimizer steps between graphs."""

    def build(device):
        model = mlp(device)
        rate, capturable = torch.tensor(0.05, device=device), device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=capturable)
        return {"model": model, "optimizer": optimizer, "run": None}

    hearing, heard, ran = None, [], []

    def step(side, i):
        nonlocal hearing
        if side.run is None:
            side.run = iteration_of(side)
            if side.graphed:
                side.run = CUDAGraphModule(side.run, config())
                side.graphs = [side.run]
        if i == when and side.graphed:
            hearing = side.optimizer
            steps_of(lambda optimizer: heard.append(i) if optimizer is hearing else None)
        loss = side.run(side.batch(i, 4, 8))
        if side.graphed and i >= when:
            ran.append(bool(heard))
            heard.clear()
        return loss

    side, history = play(build, step, device, graph=lambda side: None, steps=14)
    assert all(ran) and len(ran) == 14 - when
    assert side.run.stats.eager_parts > 0 and history[-1][0] > history[-3][0]
    if when:
        assert history[when - 1][0] > 0, "it never had a graph"


@pytest.fixture
def steps_of():
    """Has a function called with each optimizer that has stepped."""
    handles = []
    yield lambda call: handles.append(register_optimizer_step_post_hook(lambda optimizer, *_: call(optimizer)))
    for handle in handles:
        handle.remove()


def test_a_step_hook_of_one_optimizer_comes_after_a_capture(device):
    model = mlp(device)
    rate, capturable = torch.tensor(0.05, device=device), device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=capturable)

    def iteration(x):
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    graphed = CUDAGraphModule(iteration, config())
    x = torch.ones(4, 8, device=device)
    for _ in range(5):
        graphed(x)
    assert graphed.stats.replays > 0
    steps = torch.zeros((), device=device)
    handle = optimizer.register_step_post_hook(lambda *_: steps.add_(1))
    for _ in range(5):
        graphed(x)
    assert float(steps) == 5
    handle.remove()
    graphed.force_enable()
    before = graphed.stats.replays
    for _ in range(5):
        graphed(x)
    assert graphed.stats.replays > before
