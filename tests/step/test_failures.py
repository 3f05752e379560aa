"""A capture that fails costs one eager call and nothing else: not the numbers, not the random stream, not memory."""

import gc
import io
import random
import threading
from queue import SimpleQueue

import numpy
import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, graph_layers, ungraph
from tests.support.harness import config, layered, loss_of, mlp, play, wrapped

FAILING = {"an exception": ValueError, "no memory": torch.OutOfMemoryError, "a host read": None}


class Trap:
    """Springs while it is armed and the code around it is being captured, where alone a host read is refused.

    What arms it lies where no guard looks, so that arming it is no change of anything that graphs guard.
    """

    _ERRORS = (None, ValueError, torch.OutOfMemoryError, KeyboardInterrupt)

    def __init__(self):
        self._state = io.BytesIO(bytes(2))

    @property
    def armed(self):
        return self._state.getvalue()[0]

    @armed.setter
    def armed(self, value):
        self._state.getbuffer()[0] = value

    @property
    def error(self):
        return self._ERRORS[self._state.getvalue()[1]]

    @error.setter
    def error(self, value):
        self._state.getbuffer()[1] = self._ERRORS.index(value)

    def __call__(self, x):
        if self.armed:
            try:
                x.sum().item()
            except RuntimeError:
                if self.error is not None:
                    raise self.error("the injected one") from None
                raise


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


CAPTURES_AT = 2  # the first step after two warm-up steps


def armed(trap, reason, steps):
    """The plain step, with a trap that is armed in some of the steps."""

    def step(side, i):
        found = trap(side)
        found.armed, found.error = i in steps, FAILING[reason]
        run(side, i)

    return step


@pytest.mark.parametrize("reason", FAILING)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layer", [0, 1, 2], ids=["first layer", "middle layer", "last layer"])
def test_a_capture_that_fails_leaves_eagers_numbers_and_is_tried_again(layer, where, reason, device):
    step = armed(lambda side: getattr(side.model.layers[layer], f"{where}_trap"), reason, {CAPTURES_AT})
    side, history = play(lambda d: Model().to(d), step, device, graph=layered())
    failures = [graph.stats.failures for graph in side.graphs]
    assert failures == [1 if index == layer else 0 for index in range(3)]
    assert [g.stats.state for g in side.graphs] == ["captured"] * 3
    growth = history[-1][0] - history[-2][0], history[-1][1] - history[-2][1]
    assert growth == (6, 0), f"(replays, eager calls) of the last step: {growth}"


class HeldOpen(Layer):
    def forward(self, x):
        held = self._in_16_bits(x.device.type)
        next(held)
        x = super().forward(x)
        next(held, None)
        return x.float()

    @staticmethod
    def _in_16_bits(kind):
        with torch.autocast(kind, torch.bfloat16):
            yield


@pytest.mark.parametrize("reason", FAILING)
def test_a_context_that_no_error_closes_is_closed_before_the_eager_call(reason, device):
    """As that of `checkpoint` up to torch 2.12, which a generator holds open."""
    step = armed(lambda side: side.model[0].forward_trap, reason, {CAPTURES_AT})
    side, _ = play(lambda d: nn.Sequential(HeldOpen(), HeldOpen()).to(d), step, device, graph=layered())
    assert [graph.stats.failures for graph in side.graphs] == [1, 0]


@pytest.mark.parametrize("reason", FAILING)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_three_failures_in_a_row_disable_the_layer_alone(where, reason, device):
    step = armed(lambda side: getattr(side.model.layers[1], f"{where}_trap"), reason, range(99))
    side, _ = play(lambda d: Model().to(d), step, device, graph=layered(), steps=24)
    assert [g.stats.state for g in side.graphs] == ["captured", "disabled", "captured"]
    assert [g.stats.failures for g in side.graphs] == [0, 3, 0]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_force_enable_lets_a_disabled_module_be_captured_again(where, device):
    tries = armed(lambda side: getattr(side.model.layers[1], f"{where}_trap"), "a host read", range(15))

    def step(side, i):
        if side.graphed and i == 15:
            assert side.graphs[1].stats.state == "disabled"
            side.graphs[1].force_enable()
        tries(side, i)

    side, history = play(lambda d: Model().to(d), step, device, graph=layered(), steps=26)
    assert side.graphs[1].stats.state == "captured"
    assert history[14][0] - history[13][0] == 4 and history[-1][0] - history[-2][0] == 6


def test_a_success_in_between_sets_the_count_of_failures_back(device):
    """Two failures, a success, two more: never three in a row."""

    def step(side, i):
        trap = side.model.forward_trap
        failed = side.graphs[0].stats.failures if side.graphed else 0
        trap.armed = side.graphed and i >= CAPTURES_AT and failed < (2 if i < 12 else 4)
        if i == 12:  # moved: soon captured anew
            for parameter in side.model.parameters():
                parameter.data = parameter.data.clone()
        run(side, i)

    side, history = play(lambda d: Layer().to(d), step, device, steps=30)
    assert side.call.stats.failures == 4
    assert side.call.stats.state == "captured" and history[-1][0] - history[-2][0] == 2


@pytest.mark.parametrize("graph", [wrapped, layered])
def test_an_error_that_eager_raises_too_reaches_the_user(graph, device):
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(mlp("cpu"), Checks()) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    class Checks(nn.Module):
        wrong = False

        def forward(self, x):
            if self.wrong:
                raise ValueError("an error of the user's")
            return x.tanh()

    def step(side, i):
        side.model.layers[1][1].wrong = 2 <= i < 4 or i == 9
        try:
            run(side, i)
        except ValueError as error:
            side.optimizer.zero_grad()
            return str(error)

    _, history = play(lambda d: Raises().to(d), step, device, graph=graph(), steps=20)
    assert history[-1][0] > history[-2][0]


def test_an_interrupt_during_a_capture_reaches_the_user_and_harms_nothing(device):
    model = Model().to(device)
    graphs = graph_layers(model, config())
    trap = model.layers[1].forward_trap
    x = torch.randn(6, 8, device=device)
    for _ in range(2):
        model(x).sum().backward()
    trap.armed, trap.error = True, KeyboardInterrupt
    before = [buffer.clone() for buffer in model.layers[1].buffers()]
    with pytest.raises(KeyboardInterrupt):
        model(x)
    trap.armed = False
    assert all(map(torch.equal, before, model.layers[1].buffers()))
    for _ in range(8):
        model(x).sum().backward()
    assert all(graph.stats.state == "captured" for graph in graphs)


def test_a_failed_capture_of_a_whole_iteration_steps_the_optimizer_once(device):
    def build(device):
        model = Model().to(device)
        capturable = device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)
        return {"model": model, "optimizer": optimizer, "trap": Trap()}

    def iteration_of(side):
        def iteration(x):
            loss = loss_of(side.model(x))
            loss.backward()
            side.optimizer.step()
            side.trap(x)
            side.optimizer.zero_grad()
            return loss.detach()

        return iteration

    def graph(side):
        side.run = CUDAGraphModule(iteration_of(side), config(), name="iteration")
        side.graphs = [side.run]

    def step(side, i):
        side.trap.armed = i == CAPTURES_AT
        return (side.run if side.graphed else iteration_of(side))(side.batch(i, 6, 8))

    _, history = play(build, step, device, graph=graph)
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

    def step(side, i):
        armed(lambda side: side.model.forward_trap, "an exception", {CAPTURES_AT})(side, i)
        side.note(generator=side.model.generator.get_state())

    _, history = play(build, step, device)
    assert history[-1][3] == 1 and history[-1][0] - history[-2][0] == 2


def test_a_failed_capture_leaves_no_generator_of_the_host_advanced(device):
    """Also where the recorded call has drawn from none."""

    class DrawingTrap(Trap):
        def __call__(self, x):
            try:
                super().__call__(x)
            except RuntimeError:
                draws.append((random.random(), numpy.random.rand()))
                raise

    draws = []

    def build(device):
        model = Layer().to(device)
        model.forward_trap = DrawingTrap()
        return model

    def step(side, i):
        before = random.getstate(), str(numpy.random.get_state())
        armed(lambda side: side.model.forward_trap, "a host read", {CAPTURES_AT})(side, i)
        side.note(same=(random.getstate(), str(numpy.random.get_state())) == before)

    _, history = play(build, step, device)
    assert history[-1][3] == len(draws) == 1


def test_reset_may_be_called_often_and_starts_over(device):
    def step(side, i):
        if side.graphed and i in (5, 6, 11):
            for graph in side.graphs:
                graph.reset()
                graph.reset()
        run(side, i)

    _, history = play(lambda d: Model().to(d), step, device, graph=layered(), steps=18)
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
@pytest.mark.parametrize("reason", FAILING)
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

    trap = model.layers[1].forward_trap

    def round():
        graphs = graph_layers(model, config())
        for index in range(8):
            trap.armed, trap.error = index == CAPTURES_AT, FAILING[reason]
            step()
        assert sum(graph.stats.failures for graph in graphs) == 1
        torch.cuda.synchronize()
        (x @ x.T).sum().item()  # the stream is usable
        for graph in graphs:
            graph.reset()

    round()  # streams have workspaces from now on
    ungraph(model)
    before = allocated()
    round()
    assert allocated() <= before + 4096


def test_a_capture_in_one_thread_does_not_disturb_another(device):
    """While a layer is captured, another thread reads the random state, calls a module with hooks and trains."""
    # Of locks graphs compare only what a call asks of them. They do look at how long a queue is, which depends on how
    # fast the other thread is.
    found, asked, done, over = SimpleQueue(), threading.Lock(), threading.Lock(), threading.Event()
    asked.acquire()
    done.acquire()
    other = nn.Linear(4, 4).to(device)
    other.register_forward_hook(lambda m, args, out: found.put("hooked"))

    def elsewhere():
        while asked.acquire() and not over.is_set():
            found.put(len(torch.get_rng_state()))
            other(torch.ones(2, 4, device=device)).sum().backward()
            done.release()

    class Meets(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp("cpu")

        def forward(self, x):
            asked.release()
            done.acquire(timeout=60)
            return self.body(x)

    module = CUDAGraphModule(Meets().to(device), config())
    expected = len(torch.get_rng_state())
    thread = threading.Thread(target=elsewhere, daemon=True)
    thread.start()
    for _ in range(4):
        module(torch.randn(4, 8, device=device)).sum().backward()
        if not found.empty():
            assert [found.get(), found.get()] == [expected, "hooked"] and found.empty()
    over.set()
    asked.release()
    thread.join()
    assert module.stats.failures == 0 and module.stats.captures, module.last_failure


def test_an_exception_in_a_warm_up_call_does_not_end_the_warm_up(device):
    """The call that is compared with the capture must have come to its end."""
    numbers = iter(range(100))

    def scale(x):
        number = next(numbers)
        if number == 1:
            raise ValueError("a bad batch")
        return x * number

    module, found = CUDAGraphModule(scale, config(warmup_steps=2)), []
    for _ in range(6):
        try:
            found.append(module(torch.ones(1, device=device)).item())
        except ValueError:
            found.append(None)
    assert found[1] is None and len(set(found)) == 6, f"a number was frozen: {found}"


def test_a_value_that_changes_in_every_call_is_told_of_once(device, caplog):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    graphed = CUDAGraphModule(Counting().to(device), config())
    for _ in range(8):
        graphed(torch.ones(2, device=device))
    told = [message for message in caplog.messages if message.startswith("'Counting'")]
    assert graphed.stats.failures == 3
    assert [("could not be captured" in message, "stays eager" in message) for message in told] == [(1, 0), (0, 1)]
