"""Results that the user changes in place, and tensors that the call does, give the numbers of eager, or its refusal."""

import pytest
import torch
from torch import nn

from graphmod import BackwardUnavailable, CUDAGraphModule, eager, graph_layers
from tests.support.harness import GRAPHS, Two, config, graphs, loss_of, mlp, play, twins, two


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


CHANGED = {
    "result": lambda model, output: output.detach().mul_(2),
    "weight": lambda model, output: model[2].weight.detach().mul_(2),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_a_captured_backward_reads_and_was_changed_since_is_an_error_as_in_eager(what, device):
    """A weight makes the gradient of the input of its product, a tanh its own of its result."""

    def step(side, i):
        output = side.call(side.batch(i, 4, 8))
        if i == 8:  # the backward has been replayed by then
            CHANGED[what](side.model, output)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss_of(output).backward()
        else:
            loss_of(output).backward()
        side.note_gradients()
        side.optimizer.zero_grad()

    build = lambda d: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).to(d)  # noqa: E731
    twins(build, step, device, replays=2, settled=2)


def test_a_parameter_changed_before_a_backward_that_fits_no_graph_is_told_of(device):
    """Eager needs no bias for the gradient of the input; the forward cannot run again with the one it had."""
    module, x = mlp(device), torch.ones(4, 8, device=device, requires_grad=True)
    wrapper = CUDAGraphModule(module, config())
    for _ in range(8):
        loss_of(wrapper(x)).backward()
    output = wrapper(x)
    module[0].bias.detach().mul_(2)
    with pytest.raises(BackwardUnavailable, match="was changed in place between its forward and this backward"):
        torch.autograd.grad(loss_of(output), x)
    assert wrapper.stats.replays > 8


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


# -- how often a tensor was changed ------------------------------------------------------------------------------------
def changes_with_a_part(model, optimizer, seen):
    part = eager(lambda: seen.append([p._version for p in model.parameters()]))

    def step(x):
        part()
        loss_of(model(x)).backward()
        optimizer.step()
        part()
        with torch.no_grad():
            model[0].weight.mul_(0.99)
            model[0].weight.view(-1)[1:].add_(0.01)
            model[0].bias.data.mul_(0.99)
        optimizer.zero_grad()
        return x * 2

    return step


def changes_alone(model, optimizer, seen):
    def step(x):
        loss_of(model(x)).backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.mul_(0.99)
            model[0].bias.detach().mul_(0.99)
        optimizer.zero_grad()
        return x * 2

    return step


@pytest.mark.parametrize("make", [changes_alone, changes_with_a_part])
def test_versions_are_those_of_eager(make, device):
    def side(graphed):
        torch.manual_seed(0)
        model, seen = mlp(device), []
        step = make(model, torch.optim.SGD(model.parameters(), lr=0.1), seen)
        module = CUDAGraphModule(step, config()) if graphed else step
        for number in range(10):
            module(torch.full((4, 8), float(number), device=device))
            seen.append([p._version for p in model.parameters()])
        assert not graphed or module.stats.replays > 4, module.last_failure
        return seen

    assert side(True) == side(False)


def test_a_backward_that_needs_what_a_replay_changed_is_eagers_error(device):
    torch.manual_seed(0)
    model = mlp(device)
    step = changes_alone(model, torch.optim.SGD(model.parameters(), lr=0.1), [])
    module = CUDAGraphModule(step, config())
    x = torch.ones(4, 8, device=device)
    for _ in range(8):
        before = model(x.requires_grad_())
        module(x.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.sum().backward()
        model.zero_grad()
    assert module.stats.replays > 4


def test_versions_of_the_buffers_of_layers_are_those_of_eager(device):
    def side(graphed):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))).to(device)
        wrapped = graph_layers(model, config()) if graphed else []
        seen = []
        for number in range(8):
            model(torch.full((4, 8), float(number), device=device)).sum().backward()
            seen.append([buffer._version for buffer in model.buffers()])
        assert all(one.stats.replays for one in wrapped)
        return seen

    assert side(True) == side(False)
