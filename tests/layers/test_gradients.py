"""Gradients are the user's as soon as they are in `.grad`: they do not change in his hands, and his own are not touched
but where eager would."""

import gc
import importlib
import random
import sys

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, graph_layers, ungraph
from graphmod.backend.cuda import CudaBackend
from graphmod.layers import capture
from graphmod.layers.graph import BackwardGraph
from graphmod.step import gradients, static_outputs
from tests.support.harness import config, layered, loss_of, mlp, play, train, twins, two, wrapped

HELD = {
    "the tensor": lambda grad: grad,
    "a view": lambda grad: grad.view(-1)[1:],
    "detached": lambda grad: grad.detach(),
}


@pytest.mark.parametrize("can_swap", [True, False], ids=["storages can be moved", "before torch 2.13"])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("graph", [wrapped, layered])
def test_gradients_that_are_kept_keep_their_values(graph, held, can_swap, device, monkeypatch):
    """Of two tasks, say, whose gradients are compared."""
    if can_swap and not gradients.can_swap():
        pytest.skip("this torch cannot exchange the memory of a storage")
    if not can_swap:
        monkeypatch.setattr(gradients, "can_swap", lambda: False)

    def step(side, i):
        side.kept = getattr(side, "kept", [])
        for key in range(2):
            side.model.zero_grad()
            loss_of(side.call(side.batch(i, 4, 8, key=key))).backward()
            side.kept.append([HELD[held](p.grad) for p in side.model.parameters()])
        side.note(kept=side.kept[-6:])
        side.optimizer.step()

    _, history = play(two, step, device, graph=graph())
    if can_swap:
        assert history[-1][1] == history[-4][1] and history[-1][2] == history[-4][2], "not replayed"


CHANGE = 6
"""The step from which a loop is another one, after its graphs were captured among gradients that nobody keeps."""


def accumulates(side, i):
    if i < CHANGE or not i % 3:
        side.model.zero_grad()
    loss_of(side.call(side.batch(i, 4, 8))).backward()
    if i < CHANGE or i % 3 == 2:
        side.optimizer.step()


def zeroes_later(side, i):
    if i < CHANGE:
        side.model.zero_grad()
    loss = loss_of(side.call(side.batch(i, 4, 8)))
    side.model.zero_grad()
    loss.backward()
    side.optimizer.step()


def fills_with_zeros(side, i):
    side.model.zero_grad(set_to_none=i < CHANGE)
    loss_of(side.call(side.batch(i, 4, 8))).backward()
    side.optimizer.step()


def evaluates_before_the_update(side, i):
    side.model.zero_grad()
    loss_of(side.call(side.batch(i, 4, 8))).backward()
    side.model.eval()
    with torch.no_grad():
        side.note(evaluation=side.call(side.batch(i, 4, 8, key=1)))
    side.model.train()
    side.optimizer.step()


def calls_before_the_update(side, i):
    side.model.zero_grad()
    loss_of(side.call(side.batch(i, 4, 8))).backward()
    if i >= CHANGE:
        side.note(another=side.call(side.batch(i, 4, 8, key=1)).detach())
    side.optimizer.step()


def takes_turns(side, i):
    side.model.zero_grad()
    loss_of(side.call(side.batch(i, 4 + i % 3, 8))).backward()
    side.optimizer.step()


def looks_late(side, i):
    side.note(gradients=getattr(side, "late", None))
    side.model.zero_grad()
    output = side.call(side.batch(i, 4, 8))
    side.note(gradients=getattr(side, "late", None))
    loss_of(output).backward()
    side.late = [p.grad.view(-1)[::2] for p in side.model.parameters()] if i % 4 else None
    side.optimizer.step()


@pytest.mark.parametrize("can_swap", [True, False], ids=["storages can be moved", "before torch 2.13"])
@pytest.mark.parametrize(
    "step",
    [
        accumulates,
        zeroes_later,
        fills_with_zeros,
        evaluates_before_the_update,
        calls_before_the_update,
        takes_turns,
        looks_late,
    ],
)
@pytest.mark.parametrize("graph", [wrapped, layered])
def test_gradients_among_activations_are_there_for_as_long_as_somebody_wants_them(
    graph, step, can_swap, device, monkeypatch
):
    if can_swap and not gradients.can_swap():
        pytest.skip("this torch cannot exchange the memory of a storage")
    if not can_swap:
        monkeypatch.setattr(gradients, "can_swap", lambda: False)
    graphed, history = play(two, step, device, graph=graph(), steps=30)
    if step is looks_late and not can_swap:
        return  # views that nobody can move keep the module eager in the end
    assert history[-1][0] > history[-7][0] and history[-1][1] == history[-7][1], "not replayed"
    arenas = [arena for one in graphed.graphs for arena in one._context.group.arenas]
    captured = [graph for arena in arenas for tape in arena.tapes if not tape.dropped for graph in tape.owners]
    among = {graph.backward.in_pool for graph in captured if graph.backward is not None}
    kept = step not in (evaluates_before_the_update, takes_turns, looks_late)
    assert (False in among) is kept


@pytest.mark.parametrize("graph", [wrapped, layered])
def test_gradients_after_an_evaluation_in_inference_mode_may_be_changed_in_place(graph, device):
    """It moves those that are there to a copy, and what takes their place is no tensor of that mode."""

    def evaluate(side, i, key):
        with torch.inference_mode():
            side.note(evaluation=side.call(side.batch(i, 4, 8, key=key)).clone())

    def step(side, i):
        side.model.zero_grad()
        evaluate(side, i, key=1)
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        evaluate(side, i, key=2)
        side.note(norm=nn.utils.clip_grad_norm_(side.model.parameters(), 0.01))
        side.optimizer.step()

    _, history = play(two, step, device, graph=graph())
    assert history[-1][0] > history[-4][0] and history[-1][1] == history[-4][1], "not replayed"


@pytest.mark.parametrize("graph", [wrapped, layered])
def test_gradients_of_which_some_are_kept_are_not_written_over(graph, device):
    """As of two optimizers with other intervals; graphs of several signatures lie in one pool."""

    def zero(side, everything):
        for parameter in list(side.model.parameters())[: None if everything else 1]:
            parameter.grad = None

    def evaluate(side, i):
        with torch.no_grad():
            side.note(evaluation=side.call(side.batch(i, 2, 8)))

    def train_on(side, i, rows):
        loss_of(side.call(side.batch(i, rows, 8, key=rows))).backward()
        side.note(gradients=[p.grad for p in side.model.parameters()])

    def step(side, i):
        zero(side, everything=True)
        if i < 4 or i >= 16:
            evaluate(side, i)
        if 4 <= i < 16:
            train_on(side, i, 4)
        if 8 <= i < 16:
            zero(side, everything=False)
        if i >= 8:
            train_on(side, i, 6)
        if i >= 16:
            zero(side, everything=False)
            train_on(side, i, 4)

    _, history = play(two, step, device, graph=graph(), steps=24)
    assert history[-1][1] == history[-3][1], "not replayed"


@pytest.mark.parametrize("graph", [wrapped, layered])
def test_gradients_that_have_exchanged_their_memory_are_not_written_over(graph, device):
    def step(side, i):
        if i != 5:
            side.model.zero_grad()
        for key in range(3 if i in (0, 5) else 1):
            loss_of(side.call(side.batch(i, 4, 8, key=key))).backward()
            side.note(gradients=[p.grad for p in side.model.parameters()])
        if i == 4:
            first, second = (layer[0].weight.grad for layer in side.model.layers)
            first.data, second.data = second.data, first.data

    def squares(device):
        model = two(device)
        model.layers[0] = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        return model.to(device)

    play(squares, step, device, graph=graph(), steps=8)


def _random_step(draw):
    """What one step does: how gradients are zeroed, calls of two lengths, evaluations, and gradients that are kept."""
    zeroed = draw.choice(["all", "all", "first", "zeros", "late", "none"])
    calls = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        calls += [("evaluate", draw.choice([2, 3]))] * (draw.random() < 0.2) + [("train", draw.choice([4, 4, 4, 6]))]
    calls += [("evaluate", 2)] * (draw.random() < 0.15)
    return zeroed, calls, draw.choice(["hold", "drop", *[""] * 5]), draw.random() < 0.8


@pytest.mark.parametrize("can_swap", [True, False], ids=["storages can be moved", "before torch 2.13"])
@pytest.mark.parametrize("graph", [wrapped, layered])
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 80))])
def test_gradients_in_any_order_of_what_loops_do(seed, graph, can_swap, device, monkeypatch):
    if can_swap and not gradients.can_swap():
        pytest.skip("this torch cannot exchange the memory of a storage")
    if not can_swap:
        monkeypatch.setattr(static_outputs, "_can_swap", False)
    draw = random.Random(seed)
    kinds = [_random_step(draw) for _ in range(4)]
    steps = [draw.choice(kinds) if draw.random() < 0.2 else kinds[number // 9] for number in range(36)]

    def step(side, i):
        zeroed, calls, kept, updates = steps[i]
        parameters, held = list(side.model.parameters()), side.__dict__.setdefault("held", [])
        side.note(held=list(held))
        if zeroed in ("all", "zeros"):
            side.model.zero_grad(set_to_none=zeroed == "all")
        elif zeroed == "first":
            parameters[0].grad = None
        for number, (what, rows) in enumerate(calls):
            with torch.set_grad_enabled(what == "train"):
                output = side.call(side.batch(i, rows, 8, key=number))
            if what == "train":
                if zeroed == "late":
                    side.model.zero_grad()
                loss_of(output).backward()
            side.note(output=output.detach(), gradients=[p.grad for p in parameters], held=list(held))
        if kept:
            held.clear()
        if kept == "hold":
            held += [p.grad if place % 2 else p.grad.view(-1)[::2] for place, p in enumerate(parameters)]
        if updates:
            side.optimizer.step()

    play(two, step, device, graph=graph(), steps=len(steps))


def test_a_gradient_that_is_conjugated_when_it_is_read_has_its_values(device):
    class Conjugated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))

        def forward(self, x):
            return (self.weight.conj() * x).abs()

    def step(side, i):
        side.model.zero_grad()
        side.call(side.batch(i, 6, 4)).square().sum().backward()
        side.note(gradient=side.model.weight.grad.resolve_conj())

    _, history = play(lambda device: Conjugated().to(device), step, device)
    assert history[-1][0] > history[-4][0], "not replayed"


def test_a_capture_that_fails_leaves_a_backward_what_its_forward_saved(device, monkeypatch):
    """Also where a parameter that the backward does not read was changed since."""

    def fail(graph):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(BackwardGraph, "launch_first", fail)

    def step(side, i):
        side.model.zero_grad()
        output = side.call(side.batch(i, 3, 8))
        with torch.no_grad():
            side.model.bias.add_(1)
        output.square().sum().backward()
        side.note(gradients=[p.grad for p in side.model.parameters()])

    _, history = play(lambda device: nn.Linear(8, 8).to(device), step, device, graph=wrapped(max_failures=2))
    assert history[-1][3] == 2, "no capture failed"


def test_a_captured_backward_holds_nothing_that_its_forward_has_saved(device, monkeypatch):
    """Else its gradients could not lie there."""
    others, saved = capture._Capture._others, []

    def seen(one, guards):
        saved.append([where for where in one._captured.seen.outside if one._graph.graph.seen.made(where)])
        return others(one, guards)

    monkeypatch.setattr(capture._Capture, "_others", seen)
    graphed = CUDAGraphModule(two(device))
    for _ in range(6):
        graphed.zero_grad()
        loss_of(graphed(torch.randn(4, 8, device=device))).backward()
    assert saved == [[]]


@pytest.mark.gpu
def test_gradients_take_no_memory_beside_that_of_activations(monkeypatch):
    def pool_bytes():
        layers = [nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(4)]  # 64 MiB of weights each
        graphed, x = CUDAGraphModule(nn.Sequential(*layers).cuda()), torch.randn(4096, 4096, device="cuda")
        for _ in range(6):
            graphed.zero_grad()
            graphed(x).sum().backward()
        assert graphed.stats.state == "captured"
        return graphed.stats.pool_bytes

    among = pool_bytes()
    held = CudaBackend.capture
    monkeypatch.setattr(CudaBackend, "capture", lambda *given, made_before=None, **how: held(*given, **how))
    assert among < pool_bytes() - 128 * 2**20


@pytest.mark.parametrize("can_swap", [True, False], ids=["storages can be moved", "before torch 2.13"])
def test_gradients_that_a_captured_step_leaves_behind_keep_their_values(can_swap, device, monkeypatch):
    """The backward lies inside, the optimizer outside."""
    if can_swap and not gradients.can_swap():
        pytest.skip("this torch cannot exchange the memory of a storage")
    if not can_swap:
        monkeypatch.setattr(gradients, "can_swap", lambda: False)

    def graph(side):
        model = side.model

        def run(x):
            loss = loss_of(model(x))
            loss.backward()
            return loss.detach()

        side.run = CUDAGraphModule(run, config())
        side.graphs = [side.run]

    def step(side, i):
        side.kept = getattr(side, "kept", [])
        x = side.batch(i, 4, 8)
        if side.graphed:
            side.run(x)
        else:
            loss_of(side.model(x)).backward()
        side.kept.append([p.grad.t() for p in side.model.parameters()])
        side.note(kept=side.kept)
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(mlp, step, device, graph=graph, replays=1)


def scaled(parameter, kept):
    parameter.grad.data = parameter.grad.data * 0.5


def scaled_and_held(parameter, kept):
    kept[parameter] = parameter.grad.data
    parameter.grad.data = parameter.grad.data * 0.5


def set_to_another(parameter, kept):
    parameter.grad.set_(torch.ones_like(parameter))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("give", [scaled, scaled_and_held, set_to_another])
@pytest.mark.parametrize("can_swap", [True, False], ids=["storages can be moved", "before torch 2.13"])
@pytest.mark.parametrize("graph", [wrapped, layered])
def test_a_gradient_may_be_given_other_memory(graph, can_swap, give, every, device, monkeypatch):
    if can_swap and not gradients.can_swap():
        pytest.skip("this torch cannot exchange the memory of a storage")
    if not can_swap:
        monkeypatch.setattr(gradients, "can_swap", lambda: False)

    def step(side, i):
        side.model.zero_grad()
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        side.note_gradients()
        side.kept = getattr(side, "kept", {})
        side.note(kept=list(side.kept.values()))
        for parameter in side.model.parameters() if i % every == every - 1 else ():
            give(parameter, side.kept)
        side.optimizer.step()

    _, history = play(two, step, device, graph=graph())
    assert history[-1][0] > history[-4][0]


def meant_strides(tensor):
    """Those of dimensions with one element mean nothing, and kernels of cuDNN give them what they like."""
    return [stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1]


def test_a_gradient_has_the_layout_that_its_parameter_has_by_now(device):
    def build(device):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).to(device)

    def step(side, i):
        if i == 14:
            side.model.to(memory_format=torch.channels_last)  # moves the gradients, too
        x = side.batch(i, 2, 3, 6, 6)
        x = x.to(memory_format=torch.channels_last) if i % 3 else x
        loss = loss_of(side.call(x.transpose(2, 3) if i % 4 == 3 else x))
        side.optimizer.zero_grad()
        loss.backward()
        side.note(strides=[meant_strides(parameter.grad) for parameter in side.model.parameters()])
        side.optimizer.step()

    _, history = play(build, step, device, graph=wrapped(warmup_steps=3), steps=30)
    assert history[-1][0] > history[15][0] + 8


def test_nothing_is_moved_in_the_usual_loop(device, monkeypatch):
    moved = []
    monkeypatch.setattr(gradients, "swap_for_copy", lambda *arguments: moved.append(arguments))
    twins(mlp, train, device, replays=2)
    assert not moved


def test_a_gradient_of_the_users_is_not_touched_once_he_has_taken_it_away(device):
    def step(side, i):
        if i % 8 == 0:
            side.mine = [torch.zeros_like(p) for p in side.model.parameters()]
        if i % 8 == 6:
            side.former, side.mine = side.mine, [torch.ones_like(p) for p in side.model.parameters()]
            for former in side.former:
                former.fill_(7.0)
        for parameter, grad in zip(side.model.parameters(), side.mine, strict=True):
            parameter.grad = grad
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        side.note(mine=side.mine, former=getattr(side, "former", None))

    play(mlp, step, device, steps=24)


class Ordered(nn.Module):
    """Two matrices, in the one order or the other, and two scalars."""

    def __init__(self, swap):
        super().__init__()
        self.swap = swap
        self.a, self.c = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.b, self.d = (nn.Parameter(torch.zeros(())) for _ in range(2))

    def forward(self, x):
        x = x + self.b + self.d
        first, second = (self.c, self.a) if self.swap else (self.a, self.c)
        first, second = x @ first, x @ second
        return second.tanh() + first if self.swap else first.tanh() + second


@pytest.mark.parametrize("there", ["ab", "bd", "b", "c", ""])
def test_gradients_that_are_there_already_hide_no_wrong_place(there, device):
    """Layers of one class and size, whose operations come in another order."""

    def step(side, i):
        side.optimizer.zero_grad()
        for name in there:
            parameter = getattr(side.model[0], name)
            parameter.grad = torch.zeros_like(parameter)
        loss_of(side.call(side.batch(i, 4, 4))).backward()
        side.note_gradients()

    build = lambda d: nn.Sequential(Ordered(True), Ordered(False)).to(d)  # noqa: E731
    play(build, step, device, graph=layered(["0", "1"]))


def test_a_parameter_that_the_backward_does_not_read_may_change_before_it(device):
    """A bias is not saved; eager does not mind."""

    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        with torch.no_grad():
            side.model[2].bias.add_(0.1)
        loss.backward()
        side.note_gradients()
        side.optimizer.zero_grad()

    twins(mlp, step, device, replays=2)


def test_a_backward_that_cannot_be_launched_is_made_eagerly(device):
    model = mlp(device)
    graphed = CUDAGraphModule(model, config())
    x = torch.randn(4, 8, device=device)
    for i in range(16):
        if i in (6, 9):
            (graph,) = next(iter(graphed._context.entries)).graphs

            def fails():
                raise RuntimeError("CUDA error")

            graph.backward.graph.replay = fails
        model.zero_grad()
        loss_of(graphed(x)).backward()
        gradient = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss_of(model(x)).backward()
        assert all(map(torch.equal, gradient, [p.grad for p in model.parameters()])), i
    assert graphed.stats.failures == 2 and "CUDA error" in graphed.last_failure
    assert graphed.stats.state == "captured"


def test_an_interrupt_while_a_backward_is_launched_leaves_gradients_as_they_were(device):
    model = mlp(device)
    graphed = CUDAGraphModule(model, config())
    x = torch.randn(4, 8, device=device)
    for _ in range(5):
        model.zero_grad()
        loss_of(graphed(x)).backward()
    (graph,) = next(iter(graphed._context.entries)).graphs
    replay = graph.backward.graph.replay

    def fails():
        raise KeyboardInterrupt

    graph.backward.graph.replay = fails
    model.zero_grad()
    with pytest.raises(KeyboardInterrupt):
        loss_of(graphed(x)).backward()
    assert all(p.grad is None for p in model.parameters())
    graph.backward.graph.replay = replay
    loss_of(graphed(x)).backward()
    assert all(p.grad is not None for p in model.parameters())


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)

    def forward(self, tokens):
        return self.table(tokens).tanh()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("scope", ["module", "step"])
def test_sparse_gradients_are_eagers(scope, accumulation, device, caplog):
    def run(side, tokens):
        loss = loss_of(side.model(tokens) if scope == "step" else side.call(tokens))
        loss.backward()
        return loss.detach()

    def build(d):
        model = Bag().to(d)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def graph(side):
        make = wrapped()
        if scope == "module":
            return make(side)
        side.run = CUDAGraphModule(lambda tokens: run(side, tokens), config())
        side.graphs = [side.run]

    def step(side, i):
        for key in range(accumulation):
            tokens = side.tokens(i, 2, 3, vocabulary=10, key=key)
            side.note(loss=side.run(tokens) if hasattr(side, "run") else run(side, tokens))
        side.note(gradient=side.model.table.weight.grad.to_dense())
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(build, step, device, graph=graph)
    assert "sparse" in caplog.text


class Sign(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where, self.weight = where, nn.Parameter(torch.randn(8))

    def forward(self, x):
        if self.where == "parameter":
            return x + torch.sgn(self.weight)
        y = torch.sgn(x) if self.where == "argument" else x
        return y * self.weight


@pytest.mark.parametrize("where", ["argument", "parameter", "outside"])
def test_gradients_that_are_zero_without_memory(where, device):
    """That of `sgn` is never computed. What it is multiplied by, PyTorch may look at on the meta device."""
    importlib.import_module("torch._refs")  # with which it does so in Python

    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        y = side.call(x)
        loss_of(torch.sgn(y) if where == "outside" else y).backward()
        side.note(x=x.grad + 0)
        side.note(gradient=None if side.model.weight.grad is None else side.model.weight.grad + 0)
        side.optimizer.zero_grad()

    twins(lambda d: Sign(where).to(d), step, device, replays=2)


def test_parameters_may_be_swapped_with_others(device):
    """As `module.to()` does under `set_swap_module_params_on_conversion`."""

    def step(side, i):
        if i == 6:
            other = nn.Parameter(torch.ones(16, 8, device=device))
            side.optimizer.zero_grad()
            torch.utils.swap_tensors(side.model[0].weight, other)
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        side.note_gradients()
        side.optimizer.zero_grad()

    twins(mlp, step, device, replays=2, steps=16)


def test_an_interrupt_never_leaves_a_weight_empty(device):
    """Not even one that comes in the middle of a line."""
    model = two(device)
    weights = [p.detach().clone() for p in model.parameters()]
    events = 0

    def interrupt(frame, event, argument):
        nonlocal events
        if "streams" not in frame.f_code.co_filename:
            return None
        events += 1
        if events == wanted:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    for wanted in range(1, 120, 3):
        graphs = graph_layers(model, config(warmup_steps=1))
        events = 0
        sys.settrace(interrupt)
        try:
            for _ in range(3):
                loss_of(model(torch.randn(4, 8, device=device))).backward()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert all(map(torch.equal, weights, model.parameters())), wanted
        for graph in graphs:
            graph.reset()
        ungraph(model)
    gc.collect()  # a graph that was interrupted ends the process here, if it is only half of one


@pytest.mark.parametrize("order", ["one", "two in flight", "last in first out", "twice", "other outputs"])
@pytest.mark.parametrize("graph", [wrapped, layered])
def test_a_forward_that_changes_what_it_reads_is_never_made_again_from_later_values(graph, order, device):
    """Spectral norm advances its vectors in each call; a backward of its own makes do with those of its forward."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            parts = (
                nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh()) for _ in range(2)
            )
            self.layers = nn.ModuleList(parts)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def step(side, i):
        outputs = [side.call(side.batch(i, 4, 8, key=key)) for key in range(1 + ("two" in order or "last" in order))]
        losses = [loss_of(output.T if order == "other outputs" and i % 2 else output) for output in outputs]
        for loss in losses[::-1] if "last" in order else losses:
            loss.backward(retain_graph=order == "twice")
        if order == "twice":
            loss.backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(lambda d: Normed().to(d), step, device, graph=graph(), steps=14)
