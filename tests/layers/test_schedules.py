"""The order of calls is the user's: microbatches in flight, evaluation anywhere, batches of other shapes."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import layered, loss_of, mlp, play, train, twins, wrapped


class Deep(nn.Module):
    """Layers that save much for their backward, with dropout, so that mixed-up memory or randomness shows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(mlp("cpu"), nn.Dropout(0.2), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x


def deep(device):
    return Deep().to(device)


GRAPHS = {"whole": (wrapped, 1), "layers": (layered, 2)}


def finish(side):
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad()


def losses_of(side, i, count, rows=4):
    losses = [loss_of(side.call(side.batch(i, rows, 8, key=micro))) for micro in range(count)]
    side.note(losses=losses)
    return losses


@pytest.mark.parametrize("backwards", ["first in first out", "last in first out", "from the middle"])
@pytest.mark.parametrize("flight", [2, 3])
@pytest.mark.parametrize("graph", GRAPHS)
def test_several_microbatches_in_flight(graph, flight, backwards, device):
    order = {"first in first out": range(flight), "last in first out": range(flight)[::-1]}
    order = list(order.get(backwards, [1, 0, 2][:flight]))

    def step(side, i):
        losses = losses_of(side, i, flight)
        for index in order:
            losses[index].backward()
            side.note_gradients()
        finish(side)

    make_graph, layers = GRAPHS[graph]
    twins(deep, step, device, graph=make_graph(), replays=2 * layers * flight)


@pytest.mark.parametrize("graph", GRAPHS)
def test_one_forward_one_backward_schedule(graph, device):
    """F0 F1 | B0 F2 | B1 F3 | B2 | B3, as a pipeline stage runs it."""

    def step(side, i):
        pending = []
        for micro in range(4):
            pending.append(loss_of(side.call(side.batch(i, 4, 8, key=micro))))
            if len(pending) == 2:
                pending.pop(0).backward()
        pending.pop(0).backward()
        finish(side)

    make_graph, layers = GRAPHS[graph]
    twins(deep, step, device, graph=make_graph(), replays=2 * layers * 4)


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_sum_of_several_microbatches_in_one_backward(graph, device):
    def step(side, i):
        sum(losses_of(side, i, 3)).backward()
        finish(side)

    make_graph, layers = GRAPHS[graph]
    twins(deep, step, device, graph=make_graph(), replays=2 * layers * 3)


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_number_in_flight_may_change_from_step_to_step(graph, device):
    def step(side, i):
        losses = losses_of(side, i, 1 + i % 3)
        for loss in losses if i % 2 else losses[::-1]:
            loss.backward()
        finish(side)

    _, history = play(deep, step, device, graph=GRAPHS[graph][0](), steps=24)
    assert history[-1][0] > 24 * GRAPHS[graph][1], "hardly anything was replayed"


@pytest.mark.parametrize("gradients", ["with no_grad", "without no_grad"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_evaluation_between_training_steps(graph, gradients, device):
    def step(side, i):
        train(side, i)
        side.model.eval()
        with torch.set_grad_enabled(gradients == "without no_grad"):
            values = [side.call(side.batch(i, 4, 8, key=9 + k)) for k in range(2)]
        side.model.train()
        return values

    make_graph, layers = GRAPHS[graph]
    twins(deep, step, device, graph=make_graph(), replays=4 * layers, steps=16)


@pytest.mark.parametrize("gradients", ["with no_grad", "without no_grad"])
@pytest.mark.parametrize("rows", [4, 3], ids=["same shape", "other shape"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_evaluation_between_a_forward_and_its_backward(graph, rows, gradients, device):
    def step(side, i):
        loss = losses_of(side, i, 1)[0]
        side.model.eval()
        with torch.set_grad_enabled(gradients == "without no_grad"):
            side.note(evaluated=side.call(side.batch(i, rows, 8, key=9)))
        side.model.train()
        loss.backward()
        finish(side)

    make_graph, layers = GRAPHS[graph]
    twins(deep, step, device, graph=make_graph(), replays=3 * layers, steps=20)


@pytest.mark.parametrize("graph", GRAPHS)
def test_evaluation_between_two_microbatches_in_flight(graph, device):
    def step(side, i):
        first = losses_of(side, i, 1)[0]
        side.model.eval()
        with torch.no_grad():
            side.note(evaluated=side.call(side.batch(i, 4, 8, key=9)))
        side.model.train()
        second = losses_of(side, i + 100, 1)[0]
        first.backward()
        second.backward()
        finish(side)

    _, history = play(deep, step, device, graph=GRAPHS[graph][0](), steps=16)
    assert history[-1][0] - history[-5][0] >= 4 * 4 * GRAPHS[graph][1]


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_smaller_last_batch_in_each_epoch(graph, device):
    def step(side, i):
        train(side, i, 3 if i % 4 == 3 else 4, 8)

    make_graph, layers = GRAPHS[graph]
    twins(deep, step, device, graph=make_graph(), replays=2 * layers, steps=20, settled=8)


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_smaller_batch_that_comes_once(graph, device):
    def step(side, i):
        train(side, i, 3 if i == 6 else 4, 8)

    make_graph, layers = GRAPHS[graph]
    twins(deep, step, device, graph=make_graph(), replays=2 * layers)


@pytest.mark.parametrize("graph", GRAPHS)
def test_shapes_that_alternate_within_a_step(graph, device):
    def step(side, i):
        for micro, rows in enumerate((4, 2, 4, 3)):
            loss_of(side.call(side.batch(i, rows, 8, key=micro))).backward()
        finish(side)

    make_graph, layers = GRAPHS[graph]
    twins(deep, step, device, graph=make_graph(), replays=2 * layers * 4, steps=16)


@pytest.mark.parametrize("graph", GRAPHS)
def test_two_shapes_in_flight_together(graph, device):
    def step(side, i):
        long, short = losses_of(side, i, 1, rows=4)[0], losses_of(side, i, 1, rows=2)[0]
        long.backward()
        short.backward()
        finish(side)

    make_graph, layers = GRAPHS[graph]
    twins(deep, step, device, graph=make_graph(), replays=2 * layers * 2, steps=16)


@pytest.mark.parametrize("graph", GRAPHS)
def test_schedules_that_take_turns(graph, device):
    """One after the other, together, and with evaluation in the middle: whatever does not fit runs eagerly."""

    def step(side, i):
        kind = (i // 3) % 3
        losses = losses_of(side, i, 2) if kind == 1 else losses_of(side, i, 1)
        if kind == 2:
            with torch.no_grad():
                side.note(extra=side.call(side.batch(i, 4, 8, key=5)))
        for loss in losses:
            loss.backward()
        finish(side)

    _, history = play(deep, step, device, graph=GRAPHS[graph][0](), steps=36)
    assert history[-1][0] > 36 * GRAPHS[graph][1], "hardly anything was replayed"


@pytest.mark.parametrize("length", [5, 12, 30])
def test_a_part_that_is_called_many_times_before_one_backward(length, device):
    """As a recurrent cell: in the first iteration, too, the gradients of all calls are added in eager's order."""

    def step(side, i):
        state = torch.zeros(2, 8, device=side.device)
        for time in range(length):
            state = side.call(state + side.batch(i, 2, 8, key=time))
        loss_of(state).backward()
        finish(side)

    twins(lambda device: mlp(device), step, device, replays=2 * length, steps=8)


def test_a_backward_is_captured_while_a_result_is_kept_whose_backward_never_comes(device):
    torch.manual_seed(0)
    layer, eager = mlp(device), mlp(device)
    eager.load_state_dict(layer.state_dict())
    graphed = CUDAGraphModule(layer, warmup_steps=2)
    kept = graphed(torch.randn(4, 8, device=device))
    for _ in range(20):
        x = torch.randn(4, 8, device=device)
        for module in (graphed, eager):
            module.zero_grad()
            module(x).square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(layer.parameters(), eager.parameters(), strict=True))
    assert kept.requires_grad and graphed.stats.replays > 10 and not graphed.stats.failures, graphed.last_failure
