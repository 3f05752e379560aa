"""Captures and memory come to an end, whatever the pattern of calls."""

import gc

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, graph_layers
from graphmod.step.entry import Account
from tests.support.harness import config, layered, loss_of, mlp, play, twins, two, wrapped

STEPS = 120


def held(graphs):
    return sum(len(entry.graphs) for graph in graphs for entry in graph._context.entries)


def flat(graphs, run, steps=STEPS):
    """Runs steps, and demands of the second half that nothing is captured and no pool grows."""
    found = []
    for i in range(steps):
        run(i)
        if i in (steps // 2, steps - 1):
            found.append([(graph.stats.captures, graph.stats.pool_bytes) for graph in graphs] + [held(graphs)])
    assert found[0] == found[1]


@pytest.mark.parametrize("graph", [wrapped, layered])
@pytest.mark.parametrize("keeps", ["the last", "the last three", "all"])
def test_results_that_are_held_and_never_differentiated(keeps, graph, device):
    """Inference without `no_grad`."""

    def step(side, i):
        side.kept = [*getattr(side, "kept", []), side.call(side.batch(i, 4, 8))]
        side.kept = side.kept[{"the last": -1, "the last three": -3, "all": 0}[keeps] :]
        side.note(kept=side.kept[-3:])

    side, history = play(two, step, device, graph=graph(), steps=60)
    assert history[-1][2] == history[30][2], "captured again and again"
    assert held(side.graphs) <= 4 * len(side.graphs)
    if keeps == "the last":
        assert history[-1][1] == history[30][1], "not replayed"


def test_a_loss_that_a_step_returns_with_its_history(device):
    def graph(side):
        model, optimizer = side.model, side.optimizer

        def run(x):
            loss = loss_of(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        side.run = run if not side.graphed else CUDAGraphModule(run, config())
        side.graphs = [side.run]

    def build(d):
        model = mlp(d)
        capturable = d.type == "cuda"
        rate = torch.tensor(1e-2, device=d)
        return {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=capturable),
        }

    def step(side, i):
        if not hasattr(side, "run"):
            side.graphed or graph(side)
        side.loss = side.run(side.batch(i, 4, 8))
        side.note(loss=side.loss)

    twins(build, step, device, graph=graph, replays=1, steps=40)


def test_more_shapes_in_turn_than_may_have_graphs(device, caplog):
    module = mlp(device)
    graphed = CUDAGraphModule(module, config(max_graphs=3))

    def run(i):
        loss_of(graphed(torch.randn(2 + i % 4, 8, device=device))).backward()
        module.zero_grad()

    flat([graphed], run)
    assert graphed.stats.captures == 6 and graphed.stats.replays > STEPS
    assert caplog.text.count("Raise max_graphs") == 1


def test_a_shape_that_is_not_used_any_more_makes_room(device):
    graphed = CUDAGraphModule(mlp(device), config(max_graphs=2))
    with torch.no_grad():
        for rows in range(2, 6):
            for _ in range(20):
                graphed(torch.randn(rows, 8, device=device))
            assert next(iter(reversed(list(graphed._context.entries)))).graphs, rows


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_a_second_backward_onto_gradients_that_are_there(kind, device):
    """Fused optimizers leave version counters alone, so that these do not tell the one pass from the other."""
    module = mlp(device)
    graphed = CUDAGraphModule(module, config())
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, **{kind: True})

    def run(i):
        loss = loss_of(graphed(torch.randn(4, 8, device=device)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_of(graphed(torch.randn(4, 8, device=device))).backward()

    flat([graphed], run)
    assert graphed.stats.replays > 3 * STEPS


def test_two_players(device):
    one, two = mlp(device), mlp(device)
    graphs = [CUDAGraphModule(module, config()) for module in (one, two)]
    first, second = (torch.optim.Adam(module.parameters(), lr=1e-3, fused=True) for module in (one, two))

    def run(i):
        x = torch.randn(4, 8, device=device)
        fake = graphs[0](x).detach()
        loss = loss_of(graphs[1](x)) - loss_of(graphs[1](fake))
        second.zero_grad()
        loss.backward()
        second.step()
        loss = loss_of(graphs[1](graphs[0](x)))
        first.zero_grad()
        loss.backward()
        first.step()

    flat(graphs, run)
    assert all(graph.stats.replays > 2 * STEPS for graph in graphs)


class Moody(nn.Module):
    """Puts a tensor of its own in another place before each call."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = mlp("cpu"), torch.ones(8)

    def forward(self, x):
        return self.body(x) * self.scale


@pytest.mark.parametrize("every", [1, 2, 5, 7])
def test_a_tensor_that_moves_every_few_calls(every, device):
    module = Moody().to(device)
    graphed, places = CUDAGraphModule(module, config()), []
    for i in range(300):
        if i % every == 0:
            module.scale = torch.full((8,), float(i + 1), device=device)
            places.append(module.scale)  # so that it is another address each time
        with torch.no_grad():
            assert torch.equal(graphed(torch.ones(2, 8, device=device)), module(torch.ones(2, 8, device=device)))
    assert graphed.stats.captures <= 16 + graphed.stats.replays / 8


def test_an_account_allows_what_replays_have_paid_for():
    account = Account(3)
    made = 0
    for _ in range(10):
        if account.allows(0):
            account.spend(1)
            made += 1
    assert made == 3
    assert not account.allows(4) and account.allows(16)
    assert sum(account.allows(10_000) and account.spend(1) is None for _ in range(10)) == 3, "more than there ever was"


def test_a_backward_that_is_in_another_state_each_time_becomes_eager(device, caplog):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = mlp("cpu"), 1.0

        def forward(self, x):
            x = self.body(x)
            x.register_hook(lambda grad: grad * self.scale)
            return x

    def step(side, i):
        side.model[0].scale = 1.0 + i
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        side.note_gradients()
        side.model.zero_grad()

    side, history = play(lambda d: nn.Sequential(Scales()).to(d), step, device, steps=80)
    assert history[-1][2] == history[40][2], "captured again and again"
    assert side.graphs[0].stats.state == "disabled" and "'scale'" in side.graphs[0].last_failure
    assert caplog.text.count("stays eager") == 1 and "force_enable() tries again" in caplog.text
    side.graphs[0].force_enable()
    assert side.graphs[0].stats.state == "warm-up"


def test_layers_that_are_called_several_times_have_one_graph_for_each_call(device):
    """However many are in flight, as long as their backwards come."""

    class Often(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = mlp("cpu")

        def forward(self, x):
            for _ in range(3):
                x = self.layer(x) + x
            return x

    def step(side, i):
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(lambda d: Often().to(d), step, device, graph=layered("layer"), replays=6, steps=16)


def test_one_move_is_one_however_many_graphs_there_are(device):
    class Often(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(4):
                x = self.layer(x)
            return x

    model = Often().to(device)
    (graph,) = graph_layers(model, config(), layers="layer")
    x = torch.ones(2, 4, device=device)
    for i in range(60):
        if i in (12, 24, 36):
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        model.zero_grad()
        model(x).sum().backward()
    gc.collect()
    assert graph.stats.state == "captured"
    replays = graph.stats.replays
    model(x).sum().backward()
    assert graph.stats.replays == replays + 8


def test_a_result_that_a_grown_tape_holds_is_not_overwritten_by_an_older_one(device):
    """A tape that grew after another was captured lies in memory that the other uses in passing."""

    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return (x if self.training else (x + 1) * (x + 2)) @ self.weight

    def step(side, i):
        side.model.train()
        first = loss_of(side.call(side.batch(i, 64, 64)))
        second = side.call(side.batch(i, 64, 64, key=1))
        (first + loss_of(second)).backward()
        kept = second.detach()
        del first, second
        side.model.eval()
        with torch.no_grad():
            for key in range(3):
                side.note(evaluated=side.call(side.batch(i, 64, 64, key=key)))
        side.note(kept=kept)
        side.optimizer.zero_grad()

    play(lambda d: Kinds().to(d), step, device, steps=16)


@pytest.mark.parametrize("graph", [wrapped, layered])
def test_a_retained_graph_is_good_for_a_backward_after_later_calls(graph, device):
    def step(side, i):
        first = loss_of(side.call(side.batch(i, 4, 8)))
        first.backward(retain_graph=True)
        for key in range(1, 3):
            loss_of(side.call(side.batch(i, 4, 8, key=key))).backward()
        first.backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(two, step, device, graph=graph(), steps=20)


def test_a_loop_that_always_retains_comes_from_graphs(device):
    def step(side, i):
        side.loss = loss_of(side.call(side.batch(i, 4, 8)))
        side.loss.backward(retain_graph=True)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(mlp, step, device, replays=2, steps=30)


def test_a_list_of_losses_is_differentiated_in_the_end(device):
    """More calls in flight than were ever seen before."""

    def step(side, i):
        losses = [loss_of(side.call(side.batch(i, 4, 8, key=key))) for key in range(12 if i % 5 == 4 else 1)]
        for loss in losses:
            loss.backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(mlp, step, device, steps=30)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = mlp("cpu"), 1.0

    def forward(self, x):
        return self.body(x) * self.scale


def test_layers_that_changed_all_the_time_come_from_graphs_once_they_keep_still(device):
    """Also while a result of one of the wild calls is held, whose backward might still come."""
    model = nn.Sequential(*[Scaled() for _ in range(4)]).to(device)
    graphs = graph_layers(model, config(body=False))
    kept = []

    def run(rows):
        loss_of(model(torch.randn(rows, 8, device=device))).backward()
        model.zero_grad()

    for i in range(60):
        model[i % 4].scale = 1 / (i + 1)
        model[i % 3].body[0].weight.requires_grad_(i % 5 < 3)
        kept = kept or ([model(torch.randn(2, 8, device=device))] if i == 50 else [])
        run(2 + i % 3)
    for layer in model:
        layer.scale = 1.0
        layer.body[0].weight.requires_grad_(True)
    for _ in range(300):
        run(2)
    before = sum(graph.stats.replays for graph in graphs)
    for _ in range(10):
        run(2)
    assert sum(graph.stats.replays for graph in graphs) - before == 80
