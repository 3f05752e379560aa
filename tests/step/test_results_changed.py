"""Results that the user changes in place give the numbers of eager, or its refusal."""

import pytest
import torch
from torch import nn

from tests.support.harness import GRAPHS, Two, graphs, loss_of, mlp, play, twins, two


@graphs
@pytest.mark.parametrize("change", ["add_", "mul_", "relu_", "index", "zero_"])
def test_results_changed_in_place_by_the_user(change, graph, device):
    """Where eager's own check stops this (a tanh needs its result), so must we; where it does not, numbers agree."""

    def modify(tensor):
        if change == "add_":
            return tensor.add_(1)
        if change == "mul_":
            return tensor.mul_(2)
        if change == "relu_":
            return torch.relu_(tensor)
        if change == "index":
            tensor[0, 1:3] = 7.0
            return tensor
        return tensor.zero_()

    class Modified(Two):
        def forward(self, x):
            x = modify(self.layers[0](x))
            return self.layers[1](x)

    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        output = side.call(x)
        if graph == "whole":
            modify(output)
        loss = loss_of(output)
        refused = False
        try:
            loss.backward()
        except RuntimeError:
            refused = True
        side.note(refused=refused, output=output, x=x.grad)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(lambda d: (Two() if graph == "whole" else Modified()).to(d), step, device, graph=GRAPHS[graph][0]())


def test_a_saved_result_changed_in_place_is_an_error_as_in_eager(device):
    def step(side, i):
        output = side.call(side.batch(i, 4, 8))  # a tanh, whose gradient needs its result
        output.mul_(2)
        try:
            loss_of(output).backward()
        except RuntimeError:
            side.optimizer.zero_grad()
            return "refused"
        return "accepted"

    play(lambda d: nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(d), step, device)


@graphs
def test_an_evaluation_result_changed_in_place_does_not_reach_the_next_replay(graph, device):
    def step(side, i):
        with torch.no_grad():
            output = side.call(side.batch(0, 4, 8))
            side.note(output=output)
            return output.mul_(3)

    make, replays = GRAPHS[graph]
    twins(two, step, device, graph=make(), replays=replays // 2)


def test_an_input_changed_in_place_between_forward_and_backward(device):
    """Eager refuses; what was copied in is safe, and so the gradient may also be that of the unchanged input."""

    def step(side, i):
        x = side.batch(i, 4, 8)
        output = side.call(x)
        if side.graphed and i >= 4:
            x.add_(1)
        loss_of(output).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(mlp, step, device, replays=2)
