"""A capture that fails costs one eager call and nothing else: not the numbers, not the random stream, not memory."""

import gc
import threading

import pytest
import torch
from harness import config, layered, loss_of, mlp, play, wrapped
from torch import nn

from graphmod import CUDAGraphModule

REASONS = {
    "an exception": lambda x: (_ for _ in ()).throw(ValueError("the injected one")),
    "a host read": lambda x: x.sum().item(),
    "no memory": lambda x: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory (injected)")),
}


class Trap:
    """Springs while it is armed: `calls` counts, and `springs_at` says at which calls."""

    def __init__(self):
        self.calls, self.springs_at, self.way = 0, frozenset(), REASONS["an exception"]

    def __call__(self, x):
        self.calls += 1
        if self.calls in self.springs_at:
            self.way(x)


class TrapBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trap):
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.trap(grad)
        return grad * 1, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = mlp("cpu"), nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.forward_trap, self.backward_trap = Trap(), Trap()

    def forward(self, x):
        x = self.dropout(self.norm(self.body(x)))
        self.forward_trap(x.detach())
        return TrapBackward.apply(torch.tanh(x), self.backward_trap)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def run(side, i):
    x = side.batch(i, 6, 8).requires_grad_()
    output = side.call(x)
    loss = loss_of(output)
    loss.backward()
    side.note(output=output, x=x.grad)
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad()


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layer", [0, 1, 2], ids=["first layer", "middle layer", "last layer"])
def test_a_capture_that_fails_leaves_eagers_numbers_and_is_tried_again(layer, where, reason, device):
    def graph(side):
        layered()(side)
        trap = getattr(side.model.layers[layer], f"{where}_trap")
        trap.springs_at, trap.way = {3}, REASONS[reason]  # two warm-up calls, then the capture

    side, history = play(lambda d: Model().to(d), run, device, graph=graph)
    assert history[-1][3] >= 1, "nothing failed"
    assert sum(g.stats.failures for i, g in enumerate(side.graphs) if i != layer) == 0
    assert [g.stats.state for g in side.graphs] == ["captured"] * 3
    growth = history[-1][0] - history[-2][0], history[-1][1] - history[-2][1]
    assert growth == (6, 0), f"(replays, eager calls) of the last step: {growth}"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_three_failures_in_a_row_disable_the_layer_alone(where, device):
    def graph(side):
        layered()(side)
        trap = getattr(side.model.layers[1], f"{where}_trap")
        trap.springs_at = set(range(3, 100, 2))  # every capture; each is followed by the eager call that repairs it

    side, history = play(lambda d: Model().to(d), run, device, graph=graph, steps=16)
    states = [g.stats.state for g in side.graphs]
    assert states == ["captured", "disabled", "captured"]
    assert side.graphs[1].stats.failures == 3
    assert "the injected one" in side.graphs[1].last_failure


def test_force_enable_lets_a_disabled_module_be_captured_again(device):
    module = CUDAGraphModule(Layer().to(device), config(), name="layer")
    module.root.forward_trap.springs_at = set(range(3, 12))
    module.root.forward_trap.way = REASONS["a host read"]
    x = torch.randn(6, 8, device=device)
    for _ in range(6):
        if module.stats.state != "disabled":
            module(x)
        else:
            break
        module.root.forward_trap.calls = 2  # the eager call that repairs springs no trap
        module.root.forward_trap.springs_at = {3}
    assert module.stats.state == "disabled" and module.stats.failures == 3
    module.root.forward_trap.springs_at = set()
    module(x)
    assert module.stats.state == "disabled"
    before = module.stats.replays
    module.force_enable()
    for _ in range(3):
        module(x).sum().backward()
    assert module.stats.state == "captured" and module.stats.replays > before


def test_a_success_in_between_sets_the_count_of_failures_back(device):
    """Two failures, a success, two more: never three in a row."""
    module = CUDAGraphModule(Layer().to(device).eval(), config())
    trap = module.root.forward_trap
    trap.springs_at = {3, 5}
    x = torch.randn(6, 8, device=device)
    with torch.no_grad():
        for _ in range(8):
            module(x)
        assert module.stats.failures == 2 and module.stats.state == "captured"
        module.root.norm.running_mean = torch.ones(8, device=device)  # moved: captured anew, with two failures again
        trap.springs_at = {trap.calls + 1, trap.calls + 2}
        for _ in range(12):
            module(x)
    assert module.stats.state == "captured"


@pytest.mark.parametrize("graph", [wrapped, layered])
def test_an_error_that_eager_raises_too_reaches_the_user(graph, device):
    def step(side, i):
        side.model.layers[0].forward_trap.springs_at = set(range(1, 99)) if 2 <= i < 4 else set()
        try:
            run(side, i)
        except ValueError as error:
            side.optimizer.zero_grad()
            return str(error)

    _, history = play(lambda d: Model().to(d), step, device, graph=graph(), steps=16)
    assert history[-1][0] > history[-2][0]


def test_an_interrupt_during_a_capture_reaches_the_user_and_harms_nothing(device):
    def interrupt(x):
        raise KeyboardInterrupt

    def step(side, i):
        trap = side.model.layers[1].forward_trap
        trap.way, trap.springs_at = interrupt, {trap.calls + 1} if i == 2 else set()
        state = side.random_state()
        buffers = [b.clone() for b in side.model.buffers()]
        try:
            run(side, i)
        except KeyboardInterrupt:
            side.set_random_state(state)  # how much of the step ran before differs by nothing the user can rely on
            for buffer, before in zip(side.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            side.optimizer.zero_grad()
            return "interrupted"

    _, history = play(lambda d: Model().to(d), step, device, graph=layered(), steps=16)
    assert history[-1][0] - history[-2][0] == 6


def test_a_failed_capture_of_a_whole_iteration_steps_the_optimizer_once(device):
    def build(device):
        model = Model().to(device)
        capturable = device.type == "cuda"
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)}

    def iteration_of(side):
        def iteration(x):
            loss = loss_of(side.model(x))
            loss.backward()
            side.optimizer.step()
            side.model.layers[0].forward_trap(x)
            side.optimizer.zero_grad()
            return loss.detach()

        return iteration

    def graph(side):
        side.run = CUDAGraphModule(iteration_of(side), config(), name="iteration")
        side.graphs = [side.run]
        trap = side.model.layers[0].forward_trap
        trap.springs_at, trap.way = {6}, REASONS["a host read"]  # twice a call: the end of the third, the capture

    def step(side, i):
        return (side.run if side.graphed else iteration_of(side))(side.batch(i, 6, 8))

    side, history = play(build, step, device, graph=graph)
    assert history[-1][3] == 1 and history[-1][0] - history[-2][0] == 1


def test_a_failed_capture_leaves_no_generator_advanced(device):
    """Also not one of the user's own."""

    class Noisy(Layer):
        def forward(self, x):
            x = x + torch.randn(x.shape, generator=self.generator, device=x.device)
            return super().forward(x)

    def build(device):
        model = Noisy().to(device)
        model.generator = torch.Generator(device).manual_seed(5)
        return model

    def graph(side):
        wrapped()(side)
        side.model.forward_trap.springs_at = {3}

    def step(side, i):
        run(side, i)
        side.note(generator=side.model.generator.get_state())

    _, history = play(build, step, device, graph=graph)
    assert history[-1][3] == 1 and history[-1][0] - history[-2][0] == 2


def test_reset_may_be_called_often_and_starts_over(device):
    def step(side, i):
        if side.graphed and i in (5, 6, 11):
            for graph in side.graphs:
                graph.reset()
                graph.reset()
        run(side, i)

    side, history = play(lambda d: Model().to(d), step, device, graph=layered(), steps=18)
    assert history[-1][0] - history[-2][0] == 6


def test_reset_between_a_forward_and_its_backward_is_right_or_an_error(device):
    def step(side, i):
        x = side.batch(i, 6, 8).requires_grad_()
        loss = loss_of(side.call(x))
        if side.graphed and i == 6:
            for graph in side.graphs:
                graph.reset()
        loss.backward()
        side.note(x=x.grad)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(lambda d: Model().to(d), step, device, graph=layered(), steps=14)


@pytest.mark.gpu
@pytest.mark.parametrize("reason", REASONS)
def test_memory_is_back_after_failed_captures_and_reset(reason):
    device = torch.device("cuda")

    def allocated():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    model = Model().to(device)
    x = torch.randn(512, 8, device=device)

    def step():
        model(x).sum().backward()
        model.zero_grad()

    step()
    before = allocated()
    graphs = layered_graphs(model)
    trap = model.layers[1].forward_trap
    trap.springs_at, trap.way = {4}, REASONS[reason]
    for _ in range(8):
        step()
    assert sum(graph.stats.failures for graph in graphs) == 1
    torch.cuda.synchronize()
    (x @ x.T).sum().item()  # the stream is usable
    for graph in graphs:
        graph.reset()
    assert allocated() <= before + 4096


def layered_graphs(model):
    from graphmod import graph_layers

    return graph_layers(model, config())


def test_a_capture_in_one_thread_does_not_disturb_another(device):
    """While a layer is captured, another thread reads the random state, calls a module with hooks and trains."""
    found = {}
    other = nn.Linear(4, 4).to(device)
    other.register_forward_hook(lambda m, args, out: found.update(hooked=True))

    def elsewhere():
        found["state"] = len(torch.get_rng_state())
        other(torch.randn(2, 4, device=device)).sum().backward()

    class Meets(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = mlp("cpu"), [0]

        def forward(self, x):
            self.calls[0] += 1
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return self.body(x)

    module = CUDAGraphModule(Meets().to(device), config())
    expected = len(torch.get_rng_state())
    for _ in range(4):
        found.clear()
        module(torch.randn(4, 8, device=device)).sum().backward()
        if found:
            assert found == {"state": expected, "hooked": True}
    assert module.stats.failures == 0, module.last_failure
