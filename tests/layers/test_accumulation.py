"""Gradients stay in graph memory and still accumulate, vanish and return as in eager, however zeroing is placed."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config, layered, loss_of, mlp, play, twins, wrapped


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([mlp("cpu"), mlp("cpu")])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


GRAPHS = {"whole": (wrapped, 1), "layers": (layered, 2)}


def program(accumulation, to_none, zeroing):
    def step(side, i):
        if zeroing == "before the forward":
            side.optimizer.zero_grad(set_to_none=to_none)
        for micro in range(accumulation):
            loss = loss_of(side.call(side.batch(i, 4, 8, key=micro)))
            if zeroing == "between forward and backward" and not micro:
                side.optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            side.note(loss=loss)
            side.note_gradients()
        nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
        side.optimizer.step()
        if zeroing == "after the step":
            side.optimizer.zero_grad(set_to_none=to_none)

    return step


@pytest.mark.parametrize("zeroing", ["before the forward", "between forward and backward", "after the step"])
@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("graph", GRAPHS)
def test_accumulated_gradients_equal_eager(graph, accumulation, to_none, zeroing, device):
    make_graph, layers = GRAPHS[graph]
    twins(
        lambda d: Two().to(d),
        program(accumulation, to_none, zeroing),
        device,
        graph=make_graph(),
        replays=2 * layers * accumulation,
    )


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_number_of_microbatches_may_change_from_step_to_step(graph, device):
    def step(side, i):
        program(1 + i % 3, True, "after the step")(side, i)

    make_graph, layers = GRAPHS[graph]
    _, history = play(lambda d: Two().to(d), step, device, graph=make_graph(), steps=18)
    assert history[-1][0] - history[-7][0] == 2 * layers * 12  # two periods of 1 + 2 + 3 microbatches
    assert history[-1][1] == history[-7][1]


@pytest.mark.parametrize("graph", GRAPHS)
def test_zeroing_may_change_its_ways(graph, device):
    """Every third step zeroes in place instead of dropping the gradients."""

    def step(side, i):
        program(2, i % 3 != 0, "after the step")(side, i)

    make_graph, layers = GRAPHS[graph]
    _, history = play(lambda d: Two().to(d), step, device, graph=make_graph(), steps=24)
    assert history[-1][0] > 10 * 4 * layers, "hardly anything was replayed"


def test_gradients_that_are_never_zeroed_keep_growing(device):
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        loss.backward()
        side.note_gradients()

    twins(mlp, step, device, replays=2)


def test_a_gradient_the_user_puts_in_place_is_added_to(device):
    def step(side, i):
        for index, parameter in enumerate(side.model.parameters()):
            parameter.grad = side.batch(i, *parameter.shape, key=index)
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(mlp, step, device, replays=2)


def test_gradients_set_to_none_for_some_parameters_only(device):
    def step(side, i):
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        side.note_gradients()
        for index, parameter in enumerate(side.model.parameters()):
            if index % 2:
                parameter.grad = None

    twins(mlp, step, device, replays=2)


def test_a_gradient_scaled_or_replaced_by_the_user_is_what_the_optimizer_sees(device):
    def step(side, i):
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        for index, parameter in enumerate(side.model.parameters()):
            if index % 2:
                parameter.grad.mul_(0.5)
            else:
                parameter.grad = parameter.grad * 2
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(mlp, step, device, replays=2)


@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.parametrize("graph", GRAPHS)
def test_gradients_of_some_parameters_may_keep_growing(graph, trained, device):
    """Those that no optimizer knows, as of a discriminator that only lends its gradient."""

    def step(side, i):
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        side.note_gradients()
        side.model.layers[trained].zero_grad()

    make, count = GRAPHS[graph]
    twins(lambda d: Two().to(d), step, device, graph=make(), replays=2 * count)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_zero_grad_of_the_model_works_as_well(accumulation, device):
    def step(side, i):
        side.model.zero_grad()
        for micro in range(accumulation):
            loss_of(side.call(side.batch(i, 4, 8, key=micro))).backward()
        side.note_gradients()
        torch.nn.utils.clip_grad_value_(side.model.parameters(), 0.01)
        side.optimizer.step()

    twins(mlp, step, device, replays=2 * accumulation)


@pytest.mark.gpu
def test_a_call_without_a_graph_adds_to_the_gradients_that_a_replay_adds_to():
    """In one backward, whatever the capture stream has been given to do."""
    torch.manual_seed(0)
    eager, model = (nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(2))
    model.load_state_dict(eager.state_dict())
    graphed = CUDAGraphModule(model, config(max_graphs=1))
    for module in (eager, model):
        module.weight.grad = torch.zeros_like(module.weight)
    x = torch.randn(4, 4096, device="cuda")
    for rows in range(5, 45):
        other = torch.randn(rows, 4096, device="cuda")  # a signature that was never seen: a warm-up call
        for module, call in ((eager, eager), (model, graphed)):
            call(x).square().sum().backward()
            module.weight.grad.zero_()
            loss = call(x).square().sum() + call(other).square().sum()
            if call is graphed:
                with torch.cuda.stream(graphed._context.group.backend.stream):
                    torch.cuda._sleep(10_000 * (rows - 5))  # so that in one of the turns the two coincide
            loss.backward()
        assert torch.equal(eager.weight.grad, model.weight.grad), rows
    assert graphed.stats.replays > 50
