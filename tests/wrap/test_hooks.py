"""Hooks fire as often as in eager and see and change the same numbers, wherever they sit and whenever they come."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config, layered, loss_of, mlp, play, twins, two, wrapped

GRAPHS = {"whole": wrapped, "layers": layered}
graphs = pytest.mark.parametrize("graph", GRAPHS)


def counting(side, then=None):
    side.fired = getattr(side, "fired", 0)

    def hook(*args):
        side.fired += 1
        return then(*args) if then else None

    return hook


def run(side, i, count=True):
    x = side.batch(i, 4, 8).requires_grad_()
    output = side.call(x)
    loss = loss_of(output)
    loss.backward()
    side.note(output=output, x=x.grad)
    side.note_gradients()
    if count:
        side.note(fired=getattr(side, "fired", 0))
    side.optimizer.step()
    side.optimizer.zero_grad()


def triple(parameter):
    parameter.grad.mul_(3)


PARAMETER_HOOKS = {
    "register_hook": lambda side, p: p.register_hook(counting(side, lambda grad: grad * 2)),
    "post accumulate": lambda side, p: p.register_post_accumulate_grad_hook(counting(side, triple)),
}


@graphs
@pytest.mark.parametrize("kind", PARAMETER_HOOKS)
@pytest.mark.parametrize("first, last", [(0, 99), (6, 99), (0, 6), (4, 10)])
def test_gradient_hooks_of_parameters(kind, first, last, graph, device):
    """Hooks that are there before the capture, come after it, or go again."""

    def step(side, i):
        if i == first:
            side.handle = PARAMETER_HOOKS[kind](side, side.model.layers[0][0].weight)
        if i == last:
            side.handle.remove()
        run(side, i)

    layers = 1 if graph == "whole" else 2
    twins(two, step, device, graph=GRAPHS[graph](), replays=2 * layers, steps=20)


@graphs
def test_a_gradient_hook_that_moves_to_another_parameter(graph, device):
    def step(side, i):
        if i in (0, 8):
            if i:
                side.handle.remove()
            target = side.model.layers[0][2 if i else 0].weight
            side.handle = target.register_hook(counting(side, lambda grad: grad * 2))
        run(side, i)

    play(two, step, device, graph=GRAPHS[graph](), steps=16)


def test_a_gradient_hook_with_accumulation(device):
    def step(side, i):
        if i == 0:
            for parameter in side.model.parameters():
                parameter.register_hook(counting(side, lambda grad: grad * 0.5))
        for micro in range(3):
            loss_of(side.call(side.batch(i, 4, 8, key=micro))).backward()
        side.note(fired=side.fired)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(two, step, device, graph=layered(), replays=12)


MODULE_HOOKS = {
    "forward": lambda side, m: m.register_forward_hook(counting(side, lambda m, args, out: out * 1.5)),
    "forward pre": lambda side, m: m.register_forward_pre_hook(counting(side, lambda m, args: (args[0] * 0.5,))),
    "full backward": lambda side, m: m.register_full_backward_hook(
        counting(side, lambda m, grad_in, grad_out: tuple(None if g is None else g * 2 for g in grad_in))
    ),
    "full backward pre": lambda side, m: m.register_full_backward_pre_hook(
        counting(side, lambda m, grad_out: tuple(g * 2 for g in grad_out))
    ),
}


@pytest.mark.parametrize("kind", MODULE_HOOKS)
@pytest.mark.parametrize("first, last", [(0, 99), (6, 99), (4, 9)])
@pytest.mark.parametrize("graph, replays", [("whole", 2), ("layers", 4)])
def test_hooks_on_the_wrapped_module_itself_fire_around_the_graph(graph, replays, first, last, kind, device):
    def step(side, i):
        target = side.model if graph == "whole" else side.model.layers[0]
        if i == first:
            side.handle = MODULE_HOOKS[kind](side, target)
        if i == last:
            side.handle.remove()
        run(side, i)

    twins(two, step, device, graph=GRAPHS[graph](), replays=replays, steps=16)


@pytest.mark.parametrize("kind", MODULE_HOOKS)
@pytest.mark.parametrize("first, last", [(0, 99), (6, 99), (4, 9)])
def test_hooks_on_a_part_of_the_graph_never_stop_firing(first, last, kind, device):
    def step(side, i):
        if i == first:
            side.handle = MODULE_HOOKS[kind](side, side.model.layers[0][0])
        if i == last:
            side.handle.remove()
        run(side, i, count=False)

    side, _ = play(two, step, device, graph=layered(), steps=24)
    assert side.fired >= min(last, 24) - first  # a capture that was tried and refused may fire it once more
    assert side.graphs[1].stats.replays > 16, "the other layer has no hook and should run from its graphs"


def test_a_hook_on_a_part_that_is_exchanged_for_another(device):
    def step(side, i):
        if i in (4, 9):
            if i == 9:
                side.handle.remove()
            factor = float(i)
            part = side.model.layers[0][0]
            side.handle = part.register_forward_hook(counting(side, lambda m, args, out: out * factor))
        run(side, i, count=False)

    play(two, step, device, graph=layered(), steps=16)


@graphs
def test_hooks_on_results(graph, device):
    def step(side, i):
        output = side.call(side.batch(i, 4, 8))
        output.register_hook(counting(side, lambda grad: grad * 2))
        output.retain_grad()
        loss_of(output).backward()
        side.note(retained=output.grad, fired=side.fired)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(two, step, device, graph=GRAPHS[graph](), replays=2 if graph == "whole" else 4)


def test_a_hook_that_collects_what_the_layers_return(device):
    """The way features are read out of a model."""

    def step(side, i):
        if i == 0:
            side.features = []
            for layer in side.model.layers:
                layer.register_forward_hook(lambda m, args, out: side.features.append(out))
        side.features.clear()
        run(side, i)
        side.note(features=side.features)

    twins(two, step, device, graph=layered(), replays=4)


def test_an_optimizer_step_inside_gradient_hooks(device):
    """One optimizer per parameter, run as soon as its gradient is there."""

    def step(side, i):
        if i == 0:
            for parameter in side.model.parameters():
                optimizer = torch.optim.SGD([parameter], lr=0.01)

                def apply(p, optimizer=optimizer):
                    optimizer.step()
                    optimizer.zero_grad()

                parameter.register_post_accumulate_grad_hook(apply)
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        loss.backward()
        side.note(loss=loss)

    twins(two, step, device, graph=layered(), replays=4)


def test_a_hook_that_every_module_has(device):
    """torch.nn.modules.module.register_module_forward_hook: it must see the same calls, or the numbers stay eager's."""

    def step(side, i):
        handle = torch.nn.modules.module.register_module_forward_hook(
            counting(side, lambda m, args, out: out * 1.25 if isinstance(m, nn.GELU) else None)
        )
        try:
            output = side.call(side.batch(i, 4, 8))
        finally:
            handle.remove()
        loss_of(output).backward()
        side.note(output=output)
        side.note_gradients()

    play(two, step, device, graph=layered())


def around_distributed(side):
    distributed = side.call
    side.call = CUDAGraphModule(lambda x: distributed(x), config())
    side.graphs = [side.call]


@pytest.mark.parametrize("graph", [layered(), around_distributed], ids=["inside", "around"])
def test_layers_inside_distributed_data_parallel_are_captured_and_its_forward_alone_is_not(graph):
    """A replay of its forward would not tell its reducer that a backward follows."""
    inside = graph is not around_distributed
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:

        def build(device):
            model = two(device)
            return {"model": model, "call": nn.parallel.DistributedDataParallel(model)}

        def step(side, i):
            loss = loss_of(side.call(side.batch(i, 4, 8)))
            loss.backward()
            side.note_gradients()
            side.optimizer.step()
            return loss.detach()

        counts = {"eager_calls": 1, "failures": 3}
        expected = {"replays": 4} if inside else {"replays": 0, **counts}
        side = twins(build, step, torch.device("cpu"), graph=graph, **expected)
        assert inside or "DistributedDataParallel" in side.graphs[0].last_failure
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_hook_fires_once_for_two_shapes_in_one_backward(kind, device):
    """The second shape is warmed up and captured while the backward of a replay of the first is to come."""

    def step(side, i):
        module = side.model
        if not hasattr(side, "fired"):
            getattr(module[0].weight, kind)(counting(side, lambda g: g.clamp(-0.1, 0.1) if g.grad is None else None))
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        if i >= 6:
            loss = loss + loss_of(side.call(side.batch(i, 7, 8, key=1)))
        loss.backward()
        side.note(fired=side.fired)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(mlp, step, device, steps=18)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["module", "callable"])
def test_a_parameter_hook_fires_once_for_a_graph_and_code_around_it(kind, autocast, device):
    """What eager code computed from the parameter before the call meets the capture in one backward."""

    def graph(side):
        side.call = CUDAGraphModule(side.model if kind == "module" else side.model.forward, config())
        side.graphs = [side.call]

    def step(side, i):
        weight = side.model[0].weight
        if not hasattr(side, "fired"):
            weight.register_hook(counting(side, lambda g: g.clamp(-0.1, 0.1)))
        penalty = weight.square().sum()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = penalty + loss_of(side.call(side.batch(i, 4, 8)).float())
        loss.backward()
        side.note(fired=side.fired)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(mlp, step, device, graph=graph, steps=10)


@pytest.mark.parametrize("warmup_steps", [1, 2])
def test_a_parameter_hook_and_a_backward_inside_one_graph(warmup_steps, device):
    """Code inside that walks the parameters meets their gradients, not those of something in their place."""

    def iteration_of(side):
        def iteration(x):
            side.model.zero_grad()
            loss = loss_of(side.model(x))
            loss.backward()
            nn.utils.clip_grad_norm_(side.model.parameters(), 0.01)
            return loss.detach()

        return iteration

    def graph(side):
        side.run = CUDAGraphModule(iteration_of(side), config(warmup_steps=warmup_steps))
        side.graphs = [side.run]

    def step(side, i):
        if i == 0:
            side.model[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
        loss = (side.run if side.graphed else iteration_of(side))(side.batch(i, 4, 8))
        side.note(loss=loss)
        side.note_gradients()
        side.optimizer.step()

    side, _ = play(mlp, step, device, graph=graph, steps=10)
    assert side.run.stats.failures == 0 and side.run.stats.replays >= 5


def test_a_hook_that_comes_between_two_calls_of_one_backward_is_told_of(device, caplog):
    """The first is replayed without it, the second is eager: each has a part of the gradient."""
    layer = nn.Linear(4, 4).to(device)
    call, seen = CUDAGraphModule(layer, config()), []

    def loss(value):
        return call(torch.full((2, 4), value, device=device)).square().mean()

    for _ in range(3):
        layer.zero_grad()
        loss(1.0).backward()
    layer.zero_grad()
    before = loss(1.0)
    layer.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    (before + loss(2.0)).backward()
    assert torch.equal(seen[-1], layer.bias.grad)
    assert len(seen) == 2 and "put hooks on parameters before the first call" in caplog.text
    caplog.clear()
    for _ in range(6):
        layer.zero_grad()
        seen.clear()
        (loss(1.0) + loss(2.0)).backward()
        assert len(seen) == 1 and "put hooks" not in caplog.text
