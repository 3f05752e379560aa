"""Everything autograd offers works through a graph with eager's numbers, or says clearly that it cannot."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphmod import BackwardUnavailable, CUDAGraphModule, GraphmodError, graph_layers
from graphmod.train.activations import kept_draws
from tests.support.harness import config, layered, loss_of, mlp, play, twins, two, wrapped


def update(side):
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad()


class Checkpointed(nn.Module):
    def __init__(self, dropout=0.0, **settings):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(mlp("cpu"), nn.Dropout(dropout)) for _ in range(2))
        self.settings = settings

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **self.settings) + x
        return x


def checkpoint_step(side, i):
    x = side.batch(i, 4, 8).requires_grad_()
    loss_of(side.call(x)).backward()
    side.note(x=x.grad)
    update(side)


@pytest.mark.parametrize("settings", [{}, {"preserve_rng_state": False}], ids=["default", "random state not kept"])
def test_checkpointing_inside_a_graph(settings, device):
    twins(lambda d: Checkpointed(**settings).to(d), checkpoint_step, device, replays=2)


def test_checkpointing_with_dropout_whose_draws_are_kept(device):
    settings = {"preserve_rng_state": False, "context_fn": kept_draws}
    twins(lambda d: Checkpointed(dropout=0.3, **settings).to(d), checkpoint_step, device, replays=2)


def test_checkpointing_with_dropout_and_a_random_state_that_is_not_kept(device):
    """The recomputation draws other numbers than the forward did, in eager too: the same other numbers."""
    play(lambda d: Checkpointed(dropout=0.3, preserve_rng_state=False).to(d), checkpoint_step, device)


def test_checkpointing_with_dropout_inside_is_refused_and_stays_right(device):
    side, history = play(lambda d: Checkpointed(dropout=0.3).to(d), checkpoint_step, device)
    assert history[-1][3] > 0 and side.call.stats.state == "disabled"
    assert "random" in side.call.last_failure


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_graphed_layers(reentrant, dropout, device):
    """What transformers' gradient_checkpointing_enable() does."""

    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(mlp("cpu"), nn.Dropout(dropout)) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant) + x
            return x

    _, history = play(lambda d: Outside().to(d), checkpoint_step, device, graph=layered(), steps=16)
    assert history[-1][0] - history[-2][0] >= 2


@pytest.mark.parametrize("warmup_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_graphed_layers_after_any_warm_up(reentrant, warmup_steps, device):
    """Whatever number of calls is ordinary: a forward and its recomputation are of one kind."""

    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(mlp("cpu") for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant) + x
            return x

    graph = layered(warmup_steps=warmup_steps)
    _, history = play(lambda d: Outside().to(d), checkpoint_step, device, graph=graph, steps=16)
    assert history[-1][0] - history[-2][0] >= 2


@pytest.mark.parametrize("where", ["around", "inside", "forward only"])
def test_autocast(where, device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([mlp("cpu"), mlp("cpu")])

        def forward(self, x):
            for layer in self.layers:
                with torch.autocast(device.type, torch.bfloat16, enabled=where == "inside"):
                    x = layer(x).float() if where == "inside" else layer(x)
            return x

    def step(side, i):
        x = side.batch(i, 4, 8)
        with torch.autocast(device.type, torch.bfloat16, enabled=where != "inside"):
            output = side.call(x)
            loss = loss_of(output)
            if where == "around":
                loss.backward()
        if where != "around":
            loss.backward()
        side.note(output=output, loss=loss)
        update(side)

    graph = wrapped() if where == "inside" else layered()
    twins(lambda d: Model().to(d), step, device, graph=graph, replays=2 if where == "inside" else 4)


def test_autocast_switched_on_and_off(device):
    def step(side, i):
        with torch.autocast(device.type, torch.bfloat16, enabled=i % 2 == 0):
            output = side.call(side.batch(i, 4, 8))
        loss_of(output).backward()
        side.note(output=output)
        update(side)

    twins(mlp, step, device, replays=2, steps=16)


def test_a_second_backward_through_a_retained_graph(device):
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        loss.backward(retain_graph=True)
        side.note_gradients()
        loss.backward()
        update(side)

    play(lambda d: nn.Sequential(mlp(d), nn.Dropout(0.2)), step, device)


def test_a_second_backward_without_retaining_is_an_error_as_in_eager(device):
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        loss.backward()
        with pytest.raises(RuntimeError):
            loss.backward()
        update(side)

    twins(mlp, step, device, replays=2)


@pytest.mark.parametrize("graph", [wrapped, layered])
def test_autograd_grad_for_an_input_leaves_gradients_alone(graph, device):
    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        loss = loss_of(side.call(x))
        (found,) = torch.autograd.grad(loss, [x], retain_graph=i % 2 == 0)
        side.note(x=found)
        side.note_gradients()
        if i % 2 == 0:
            loss.backward()
        update(side)

    play(two, step, device, graph=graph())


@pytest.mark.parametrize("allow_unused", [False, True])
def test_autograd_grad_for_parameters_is_right_or_an_error(allow_unused, device):
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        parameters = list(side.model.parameters())
        try:
            found = torch.autograd.grad(loss, parameters, allow_unused=allow_unused)
        except (RuntimeError, GraphmodError):
            assert side.graphed
            assert all(parameter.grad is None for parameter in parameters)
            side.eager_loss = loss_of(side.model(side.batch(i, 4, 8)))
            found = torch.autograd.grad(side.eager_loss, parameters)
        side.note(found=found)
        side.note_gradients()

    play(mlp, step, device)


def test_backward_into_chosen_parameters_is_right_or_an_error(device):
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        chosen = [side.model[0].weight]
        try:
            loss.backward(inputs=chosen)
        except (RuntimeError, GraphmodError):
            assert side.graphed
            loss_of(side.model(side.batch(i, 4, 8))).backward(inputs=chosen)
        update(side)

    play(mlp, step, device)


def test_backward_into_a_chosen_input_leaves_parameters_alone(device):
    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        loss_of(side.call(x)).backward(inputs=[x])
        side.note(x=x.grad)
        side.note_gradients()

    play(mlp, step, device)


class Within(nn.Module):
    """Returns what it has computed its other result from."""

    def __init__(self, device):
        super().__init__()
        self.first, self.second = mlp(device), nn.Linear(8, 8).to(device)

    def forward(self, x):
        within = self.first(x)
        return self.second(within.tanh()), within


ASKS = {
    "nobody": lambda side, loss, within: None,
    "register_hook": lambda side, loss, within: within.register_hook(lambda grad: side.note(grad=grad) or grad * 0.5),
    "retain_grad": lambda side, loss, within: within.retain_grad(),
    "autograd.grad": lambda side, loss, within: side.note(
        grad=torch.autograd.grad(loss, within, retain_graph=True, allow_unused=True)[0]
    ),
}


def asks_within(kind, first, used):
    def step(side, i):
        output, within = side.call(side.batch(i, 4, 8))
        loss = loss_of(output) + (loss_of(within) if used else 0)
        if i >= first:
            ASKS[kind](side, loss, within)
        loss.backward()
        side.note(within=within.grad if within.retains_grad else None)
        update(side)

    return step


@pytest.mark.parametrize("used", [False, True], ids=["alone", "used outside"])
@pytest.mark.parametrize("kind", ASKS)
def test_who_asks_for_the_gradient_of_a_result_between_others_gets_all_of_it(kind, used, device):
    graphed, _ = play(Within, asks_within(kind, 0, used), device)
    said = "gradient of a result from which another result is computed" in graphed.graphs[0].last_failure
    assert said == (kind != "nobody") and (graphed.graphs[0].stats.state == "captured") == (kind == "nobody")


@pytest.mark.parametrize("kind", ["register_hook", "retain_grad"])
def test_who_asks_for_the_gradient_of_such_a_result_after_replays_gets_an_error(kind, device):
    with pytest.raises(GraphmodError, match="gradient of a result from which another result is computed"):
        play(Within, asks_within(kind, 6, True), device)


def test_all_layers_learn_of_it_by_one_error(device):
    model = nn.ModuleDict({"layers": nn.ModuleList(Within(device) for _ in range(2))})
    graphed, raised = graph_layers(model, config(), layers="layers.*"), 0
    for i in range(12):
        first, *within = model["layers"][0](torch.randn(4, 8, device=device))
        second, *more = model["layers"][1](first)
        for one in (*within, *more) if i > 5 else ():
            one.retain_grad()
        try:
            loss_of(second).backward()
        except GraphmodError:
            raised += 1
        model.zero_grad()
    assert raised == 1 and min(wrapper.stats.replays for wrapper in graphed) > 0


@pytest.mark.xfail(reason="autograd does not come to the graph for it", strict=True)
def test_autograd_grad_that_begins_later_for_such_a_result_gives_a_part(device):
    play(Within, asks_within("autograd.grad", 6, True), device)


def test_a_gradient_of_a_gradient_is_a_clear_error(device):
    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        if i < 5:
            loss_of(side.call(x)).backward()
        else:
            (first,) = torch.autograd.grad(loss_of(side.call(x)), [x], create_graph=True)
            first.pow(2).sum().backward()
        update(side)

    with pytest.raises(GraphmodError, match="gradient of its gradient"):
        play(mlp, step, device)


def test_a_call_whose_first_backward_is_differentiated_again_stays_eager(device):
    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        (first,) = torch.autograd.grad(loss_of(side.call(x)), [x], create_graph=True)
        first.pow(2).sum().backward()
        side.note(x=x.grad)
        update(side)

    graphed, _ = play(mlp, step, device)
    assert graphed.graphs[0].stats.captures == 0
    assert "create_graph" in graphed.graphs[0].last_failure


def test_a_call_that_is_differentiated_again_and_again_becomes_eager(device):
    graphed = CUDAGraphModule(mlp(device), config())
    raised = []
    for step in range(10):
        x = torch.randn(4, 8, device=device, requires_grad=True)
        try:
            torch.autograd.grad(loss_of(graphed(x)), [x], create_graph=step > 4)
        except GraphmodError:
            raised.append(step)
    assert raised and raised[0] == 5 and len(raised) <= 2, "calls are eager as soon as that is no exception"
    assert graphed.stats.state == "disabled" and "create_graph" in graphed.last_failure


def test_training_goes_on_after_the_error_of_a_double_backward(device):
    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        if side.graphed and i == 5:
            with pytest.raises(GraphmodError):
                torch.autograd.grad(loss_of(side.call(x)), [x], create_graph=True)
        loss_of(side.call(x)).backward()
        side.note(x=x.grad)
        update(side)

    twins(mlp, step, device, replays=2)


def test_a_custom_function_inside_a_graph(device):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight * 0.5, (grad * x).sum(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.body = nn.Parameter(torch.ones(8)), mlp("cpu")

        def forward(self, x):
            return Scale.apply(self.body(x), self.weight)

    def step(side, i):
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        update(side)

    twins(lambda d: Model().to(d), step, device, replays=2)


@pytest.mark.parametrize("reads", [False, True], ids=["not read", "read"])
def test_a_custom_function_that_gives_a_parameter_no_gradient(reads, device):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, shift):
            ctx.save_for_backward(x, weight)
            return x @ weight + shift if reads else x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight.t(), x.t() @ grad, None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
            self.body = mlp("cpu")

        def forward(self, x):
            return self.body(Product.apply(x, self.weight, self.shift))

    def step(side, i):
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        update(side)

    twins(lambda d: Model().to(d), step, device, replays=2)


@pytest.mark.parametrize("graph", [wrapped, layered])
def test_saved_tensor_hooks_of_the_user_around_the_forward(graph, device):
    def step(side, i):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = loss_of(side.call(side.batch(i, 4, 8)))
        loss.backward()
        update(side)

    play(two, step, device, graph=graph())


def test_gradients_of_different_layouts_take_turns(device):
    """`sum()` sends an expanded gradient, a matrix product a dense one, a transpose a strided one. Kernels may round
    otherwise for another layout, so a graph serves the one it was captured with."""

    def step(side, i):
        output = side.call(side.batch(i, 4, 8))
        kind = i % 3
        loss = output.sum() if kind == 0 else (output @ output.detach().T).mean() if kind == 1 else loss_of(output.T)
        loss.backward()
        update(side)

    _, history = play(mlp, step, device, steps=19)
    assert history[-1][0] - history[-4][0] == 4, "three forwards and one backward of three steps come from graphs"


class ChangesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x.clone(), scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        kept, scale = ctx.saved_tensors
        kept.mul_(2)
        return grad * scale, (grad * kept).sum(0)


def test_a_backward_that_changes_what_it_saved_is_no_error(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return ChangesWhatItSaved.apply(x, self.scale)

    one, eager = Model().to(device), Model().to(device)
    graphed = CUDAGraphModule(one, warmup_steps=2)
    for _ in range(10):
        x = torch.randn(4, 8, device=device)
        for module, call in ((one, graphed), (eager, eager)):
            module.zero_grad()
            call(x).sum().backward()
        assert torch.equal(one.scale.grad, eager.scale.grad)


def test_a_second_backward_after_later_calls_needs_the_first_to_retain_the_graph(device):
    """Where nothing is saved, eager allows it; a graph has the memory of the last call alone."""

    class Added(nn.Module):
        def forward(self, x):
            return x + 1

    wrapper, x = CUDAGraphModule(Added(), config()), torch.ones(3, device=device, requires_grad=True)
    for _ in range(6):
        x.grad = None
        wrapper(x).sum().backward()
    x.grad = None
    result = wrapper(x)
    result.sum().backward()
    for _ in range(2):
        wrapper(x.detach().requires_grad_()).sum().backward()
    with pytest.raises(BackwardUnavailable, match="overwritten by a later call"):
        result.sum().backward()
    assert wrapper.stats.replays > 6
