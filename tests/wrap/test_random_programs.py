"""Random modules under random orders of calls stay bitwise equal to their eager twins after every single operation.

Each program is a list of operations that a user's loop may do. Both twins do each of them; results, gradients,
parameters, buffers and the random state are compared after each.
"""

import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.harness import Pair, layered, loss_of, make_sides, wrapped

WIDTH = 6


class Residual(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Branch(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x):
        return self.left(x) * torch.sigmoid(self.right(x))


class Sliced(nn.Module):
    """Views, concatenation and a reduction."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        first, second = self.body(x).chunk(2, dim=-1)
        return torch.cat([second, first - x[:, : WIDTH // 2].mean(-1, keepdim=True)], dim=-1)


PARTS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "relu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "tanh": nn.Tanh,
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.3),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "identity": nn.Identity,
}


leaf = st.sampled_from(sorted(PARTS)).map(lambda name: (name,))


part = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.tuples(st.just("residual"), inner),
        st.tuples(st.just("sliced"), inner),
        st.tuples(st.just("branch"), inner, inner),
        st.tuples(st.just("sequence"), inner, inner),
    ),
    max_leaves=3,
)


shapes = st.lists(part, min_size=1, max_size=3)


def build_part(spec):
    kind, *inner = spec
    if kind in PARTS:
        return PARTS[kind]()
    makers = {"residual": Residual, "sliced": Sliced, "branch": Branch, "sequence": nn.Sequential}
    return makers[kind](*map(build_part, inner))


class Stack(nn.Module):
    """Layers between two eager ones; `order` may name a layer more than once."""

    def __init__(self, specs, order):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(build_part(spec), nn.Linear(WIDTH, WIDTH)) for spec in specs)
        self.order = [index % len(specs) for index in order] or list(range(len(specs)))

    def forward(self, x):
        x = self.first(x)
        for index in self.order:
            x = self.layers[index](x)
        return x


# -- what a loop may do ----------------------------------------------------------------------------------------------


def forward(side, i, key=0):
    x = side.batch(i, side.rows, WIDTH, key=key)
    if side.input_grads:
        side.xs.append(x.requires_grad_())
    output = side.call(x)
    side.note(output=output)
    if side.keep:
        side.kept += [output, output.detach()[:, 1:]]
    return loss_of(output) * 0.1


def backward(side, loss):
    loss.backward()
    side.note_gradients()
    side.note(inputs=[x.grad for x in side.xs])
    side.xs.clear()


def update(side):
    nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=side.to_none)


def train_step(side, i):
    backward(side, forward(side, i))
    update(side)


def accumulate(side, i):
    for key in range(3):
        backward(side, forward(side, i, key))
    update(side)


def half_a_step(side, i):
    backward(side, forward(side, i))


def zero_between(side, i):
    loss = forward(side, i)
    side.optimizer.zero_grad(set_to_none=side.to_none)
    backward(side, loss)
    update(side)


def two_in_flight(side, i):
    losses = [forward(side, i, key) for key in range(2)]
    for loss in losses:
        backward(side, loss)
    update(side)


def three_in_flight_reversed(side, i):
    losses = [forward(side, i, key) for key in range(3)]
    for loss in reversed(losses):
        backward(side, loss)
    update(side)


def one_backward_for_two(side, i):
    backward(side, forward(side, i, 0) + forward(side, i, 1))
    update(side)


def evaluate(side, i):
    side.model.eval()
    with torch.no_grad():
        side.note(evaluated=side.call(side.batch(i, side.rows, WIDTH, key=5)))
    side.model.train()


def evaluate_with_gradients(side, i):
    side.model.eval()
    forward(side, i, 6)
    side.xs.clear()
    side.model.train()


def evaluate_in_the_middle(side, i):
    loss = forward(side, i)
    evaluate(side, i)
    backward(side, loss)
    update(side)


def skip_backward(side, i):
    forward(side, i)
    side.xs.clear()


def skip_backward_and_hold(side, i):
    side.held = forward(side, i)
    side.xs.clear()


def let_go(side, i):
    side.held = None
    # It takes as long as many operations: not on the side without graphs, nor where nothing came in between.
    if side.graphed and side.let_go_at != i - 1:
        gc.collect()
    side.let_go_at = i


def error_in_the_middle(side, i):
    forward(side, i)
    side.xs.clear()
    side.optimizer.zero_grad(set_to_none=True)


def retain(side, i):
    loss = forward(side, i)
    loss.backward(retain_graph=True)
    side.note_gradients()
    backward(side, loss)
    update(side)


def gradient_of_input(side, i):
    x = side.batch(i, side.rows, WIDTH).requires_grad_()
    side.note(found=torch.autograd.grad(loss_of(side.call(x)), [x]))


def other_batch_size(side, i):
    side.rows = {4: 3, 3: 4}[side.rows]


def load_weights(side, i):
    state = side.model.state_dict()
    side.model.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in state.items()})


def move_weights(side, i):
    for parameter in side.model.parameters():
        parameter.data = parameter.data.clone()


def toggle_zeroing(side, i):
    side.to_none = not side.to_none


def toggle_keeping(side, i):
    side.keep = not side.keep
    side.kept.clear()


def toggle_input_gradients(side, i):
    side.input_grads = not side.input_grads


def toggle_frozen(side, i):
    first = next(side.model.layers[0].parameters())
    first.requires_grad_(not first.requires_grad)


def toggle_dropout(side, i):
    layer = side.model.layers[-1]
    layer.train(not layer.training)


def forget_gradients(side, i):
    side.optimizer.zero_grad(set_to_none=True)


def reset_graphs(side, i):
    for graph in side.graphs:
        graph.reset()


OPERATIONS = [
    train_step, train_step, train_step, accumulate, half_a_step, zero_between, two_in_flight, three_in_flight_reversed,
    one_backward_for_two, evaluate, evaluate_with_gradients, evaluate_in_the_middle, skip_backward,
    skip_backward_and_hold, let_go, error_in_the_middle, retain, gradient_of_input, other_batch_size, load_weights,
    move_weights, toggle_zeroing, toggle_keeping, toggle_input_gradients, toggle_frozen, toggle_dropout,
    forget_gradients, reset_graphs,
]  # fmt: skip
# Each operation is done several times, so that what it does becomes the usual and is captured.
programs = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 6)), min_size=4, max_size=14)
orders = st.one_of(st.just([]), st.lists(st.integers(0, 2), min_size=2, max_size=4))


def run_program(device, specs, order, program, graph):
    def build(device):
        return {
            "model": Stack(specs, order).to(device), "rows": 4, "to_none": True, "keep": False, "kept": [], "xs": [],
            "input_grads": False, "held": None, "let_go_at": None,
        }  # fmt: skip

    eager, graphed = make_sides(build, device, graph)
    pair = Pair(eager, graphed)

    def operation(function):
        def step(side, i):
            function(side, i)
            side.note(kept=side.kept[-12:])

        return step

    index = 0
    for _ in range(4):
        pair.run(operation(train_step), index)
        index += 1
    assert graphed.counters()[0] > 0, [g.last_failure for g in graphed.graphs]
    toggles = {toggle_zeroing, toggle_keeping, toggle_input_gradients, toggle_frozen, toggle_dropout, other_batch_size}
    for function, times in program:
        for _ in range(1 if function in toggles else times):
            try:
                pair.run(operation(function), index)
            except Exception as error:
                error.add_note(f"in {function.__name__}, operation {index}; module:\n{eager.model}")
                raise
            index += 1


SEARCH = settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SEARCH
@given(specs=shapes, program=programs)
def test_a_random_module_as_one_graph(device, specs, program):
    run_program(device, specs, [], program, wrapped(warmup_steps=1))


@SEARCH
@given(specs=shapes, program=programs)
def test_random_layers_in_place(device, specs, program):
    run_program(device, specs, [], program, layered(warmup_steps=1))


@SEARCH
@given(specs=shapes, order=orders, program=programs)
def test_random_layers_used_in_any_order(device, specs, order, program):
    run_program(device, specs, order, program, layered(warmup_steps=1))


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS), key=lambda f: f.__name__), ids=lambda f: f.__name__)
@pytest.mark.parametrize("graph", [pytest.param(wrapped, marks=pytest.mark.slow), layered])
def test_each_operation_again_and_again_between_training_steps(operation, graph, device):
    specs = [("sequence", ("dropout",), ("tanh",)), ("residual", ("layer norm",))]
    program = [(operation, 5), (train_step, 3)] * 3
    run_program(device, specs, [], program, graph())


FOUND = {
    "a gradient waits for a graph that adds none": (
        [("dropout",)],
        [(op, 1) for op in (half_a_step, other_batch_size, three_in_flight_reversed, train_step, one_backward_for_two)],
    ),
}


@pytest.mark.parametrize("graph", [wrapped, layered])
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_a_longer_search_found(name, graph, device):
    specs, program = FOUND[name]
    run_program(device, specs, [], program, graph(warmup_steps=1))
