"""An optimizer inside a captured iteration steps as it does in eager, or is refused."""

import pytest
import torch
from harness import config, loss_of, mlp, play
from torch import nn

from graphmod import CUDAGraphModule


def test_an_optimizer_that_counts_its_steps_in_python_is_refused_with_the_remedy(device):
    def build(device):
        model = mlp(device)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), foreach=False)}

    def iteration_of(side):
        def iteration(x):
            loss = loss_of(side.model(x))
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
            return loss.detach()

        return iteration

    def graph(side):
        side.run = CUDAGraphModule(iteration_of(side), config())
        side.graphs = [side.run]

    def step(side, i):
        return (side.run if side.graphed else iteration_of(side))(side.batch(i, 4, 8))

    side, history = play(build, step, device, graph=graph)
    assert history[-1][0] == 0
    assert "fused=True" in side.run.last_failure, side.run.last_failure


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
