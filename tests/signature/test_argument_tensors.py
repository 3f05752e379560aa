"""Tensors among the arguments: their history, what a call does to them as objects, memory that they share, and kinds of
which no graph can have a copy."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from graphmod import CUDAGraphModule, mark_static
from tests.support.harness import config, mlp, twins, wrapped

CALLS = 10


def states(x):
    return (x.requires_grad, x.shape, x.stride(), x.retains_grad, sorted(x.__dict__), x.grad_fn is None)


def requires_grad(x, module):
    return torch.autograd.grad(module(x.requires_grad_()).sum(), x)[0]


def transposes(x, module):
    return module(x.t_()).sum()


def resizes(x, module):
    result = module(x).sum()
    x.resize_(2, 8)
    return result


def rebinds(x, module):
    result = module(x).sum()
    x.data = torch.zeros_like(x)
    return result


def sets(x, module):
    result = module(x).sum()
    x.set_(torch.zeros(8, 8, device=x.device))
    return result


def marks(x, module):
    x.seen = True
    return module(x).sum()


def hooks(x, module):
    x.requires_grad_().register_hook(lambda grad: grad * 2)
    return module(x).sum()


def writes(x, module):
    x.mul_(2)
    return module(x).sum()


@pytest.mark.parametrize("warmup", [1, 2])
@pytest.mark.parametrize(
    "change", [requires_grad, transposes, resizes, rebinds, sets, marks, hooks, writes], ids=lambda c: c.__name__
)
def test_what_a_call_does_to_a_tensor_as_an_object_is_done(change, warmup, device, caplog):
    module = mlp(device)
    wrapper = CUDAGraphModule(lambda x: change(x, module), config(warmup_steps=warmup))
    for step in range(CALLS):
        eager = torch.full((8, 8), float(step), device=device)
        graphed = eager.clone()
        assert torch.equal(change(eager, module), wrapper(graphed))
        assert states(eager) == states(graphed)
        assert torch.equal(eager, graphed)
    assert "argument x" in caplog.text or "argument 'x'" in caplog.text


@pytest.mark.parametrize("warmup", [1, 2])
def test_a_backward_inside_that_reaches_an_argument_runs_in_eager_calls(warmup, device, caplog):
    def build(device):
        return {"model": nn.ModuleDict({"encoder": nn.Linear(8, 8), "head": mlp(device)}).to(device)}

    def graph(side):
        side.head_step = CUDAGraphModule(head_step(side), config(warmup_steps=warmup))
        side.graphs = [side.head_step]

    def head_step(side):
        def step(h):
            loss = side.model["head"](h).pow(2).mean()
            loss.backward()
            return loss.detach()

        return step

    def step(side, i):
        call = side.head_step if side.graphed else head_step(side)
        loss = call(side.model["encoder"](side.batch(i, 4, 8)))
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss

    twins(build, step, device, graph=graph, replays=0, eager_calls=1, failures=3)
    assert "goes on into its argument 'h'" in caplog.text or "gradient of its argument 'h'" in caplog.text


def test_parameters_as_arguments_get_their_gradients(device):
    def build(device):
        return {"model": mlp(device)}

    def functional(side):
        def step(parameters, x):
            loss = torch.func.functional_call(side.model, parameters, (x,)).pow(2).mean()
            loss.backward()
            return loss.detach()

        return step

    def graph(side):
        side.run = CUDAGraphModule(functional(side), config())
        side.graphs = [side.run]

    def step(side, i):
        call = side.run if side.graphed else functional(side)
        loss = call(dict(side.model.named_parameters()), side.batch(i, 4, 8))
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss

    twins(build, step, device, graph=graph, replays=0, eager_calls=1, failures=3)


def test_parameters_as_arguments_of_a_forward_are_captured(device):
    def build(device):
        return {"model": mlp(device)}

    def graph(side):
        side.run = CUDAGraphModule(lambda p, x: torch.func.functional_call(side.model, p, (x,)), config())
        side.graphs = [side.run]

    def step(side, i):
        call = side.run if side.graphed else lambda p, x: torch.func.functional_call(side.model, p, (x,))
        loss = call(dict(side.model.named_parameters()), side.batch(i, 4, 8)).pow(2).mean()
        loss.backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss.detach()

    twins(build, step, device, graph=graph, replays=2)


def test_a_gradient_with_respect_to_an_argument_can_be_taken_inside(device):
    def penalty(side):
        def call(x):
            grad = torch.autograd.grad(side.model(x).sum(), x, create_graph=True)[0]
            return (grad.norm() - 1).pow(2)

        return call

    def graph(side):
        side.run = CUDAGraphModule(penalty(side), config())
        side.graphs = [side.run]

    def step(side, i):
        call = side.run if side.graphed else penalty(side)
        x = side.batch(i, 4, 8).requires_grad_()
        loss = call(x * 2 if i % 2 else x)
        loss.backward()
        side.note_gradients()
        side.note(x=x.grad)
        side.optimizer.zero_grad()
        return loss.detach()

    twins(mlp, step, device, graph=graph, replays=None, steps=8, settled=0)


@pytest.mark.parametrize("reads", [True, False])
def test_the_gradient_of_an_argument_is_there_for_code_that_reads_it(reads, device):
    def call(p):
        if p.grad is None:
            return p * 2
        return p - p.grad if reads else p * 3

    wrapper = CUDAGraphModule(call, config())
    with torch.no_grad():
        for step in range(16):
            p = nn.Parameter(torch.full((4,), float(step), device=device))
            if step // 4 % 2:
                p.grad = torch.full_like(p, 0.5 * step)
            assert torch.equal(wrapper(p), call(p))
    assert wrapper.stats.captures == (1 if reads else 2)


def test_a_parameter_that_is_an_argument_of_its_own_module(device):
    """Both uses are summed up before the sum is added to a gradient that is there already."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, weight):
            return self.layer(x) + x @ weight.tanh()

    def step(side, i):
        for part in range(2):
            side.call(side.batch(i, 4, 8, key=part), side.model.layer.weight).pow(2).sum().backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(lambda device: Tied().to(device), step, device, graph=wrapped(), replays=None, settled=0)


class Subclass(Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result + result if function is torch.Tensor.mul else result


def complex_parts(x):
    return torch.view_as_complex(torch.stack([x, x + 1], -1))


KINDS = {
    "a subclass": lambda x: x.as_subclass(Subclass),
    "sparse": lambda x: x.relu().to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:2]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
    "conjugated": lambda x: complex_parts(x).conj(),
    "negated": lambda x: complex_parts(x).conj().imag,
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand(4, 8),
    "overlapping": lambda x: x.flatten().unfold(0, 8, 4),
    "with attributes": lambda x: setattr(x, "scale", 3.0) or x,
    "with an object": lambda x: setattr(x, "scale", torch.tensor(4.0, device=x.device)) or x,
    "a parameter": lambda x: nn.Parameter(x),
    "a buffer": lambda x: nn.Buffer(x),
    "requires grad": lambda x: x.requires_grad_(),
    "inference": lambda x: torch.inference_mode()(x.clone)(),
}


def look(x):
    """Computes something that depends on everything about its argument."""
    if x.is_nested:
        return x * 2
    scale = getattr(x, "scale", 2.0) * (7 if isinstance(x, nn.Parameter) else 1) * (5 if x.requires_grad else 1)
    if x.is_quantized:
        return x.dequantize() * scale
    if x.is_sparse:
        return x.mul(scale)
    return x.mul(scale) + (1 if x.is_conj() or x.is_neg() else 0)


def dense(value):
    if value.is_nested:
        return torch.cat([part.detach() for part in value.unbind()])
    return value.detach().to_dense() if value.layout is not torch.strided else value.detach().as_subclass(Tensor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_arguments_of_every_kind_before_and_after_plain_ones(kind, device):
    if device.type == "cuda" and kind == "quantized":
        pytest.skip("there are no kernels for that")
    wrapper = CUDAGraphModule(look, config())
    for step in range(16):
        x = torch.linspace(-1, 1, 32, device=device).view(4, 8) * step
        x = KINDS[kind](x) if step // 4 % 2 else x
        eager, graphed = look(x), wrapper(x)
        assert eager.is_nested == graphed.is_nested and eager.layout is graphed.layout
        assert type(eager) is type(graphed) and eager.requires_grad is graphed.requires_grad
        assert torch.equal(dense(eager), dense(graphed))
    assert wrapper.stats.captures


class Cache(nn.Module):
    """Writes into a buffer and reads an argument that may be a view of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, x, view):
        self.cache.add_(x)
        return view * 2


@pytest.mark.parametrize("first", ["a view", "another"])
def test_an_argument_that_shares_memory_which_the_call_changes(first, device):
    eager, graphed = Cache().to(device), Cache().to(device)
    wrapper = CUDAGraphModule(graphed, config())
    with torch.no_grad():
        for step in range(16):
            x = torch.full((4, 8), 1.0 + step, device=device)
            is_view = (step // 4 % 2 == 0) == (first == "a view")
            views = [m.cache[:2] if is_view else torch.ones(2, 8, device=device) for m in (eager, graphed)]
            assert torch.equal(eager(x, views[0]), wrapper(x, views[1]))
            assert torch.equal(eager.cache, graphed.cache)
    assert first == "a view" or wrapper.stats.replays


@pytest.mark.parametrize("first, step", [(0, 30), (1, 32), (0, 31), (3, 30)])
def test_an_argument_is_read_where_in_a_vector_it_begins(first, step, device):
    """Where it begins elsewhere, products and sums may be rounded otherwise."""
    torch.manual_seed(0)
    module, data = nn.Linear(6, 8).to(device), torch.randn(1000, device=device)
    graphed = CUDAGraphModule(module, config())
    replays = []
    with torch.no_grad():
        for index in range(24):
            x = data[first + step * index :][:30].view(5, 6)
            assert torch.equal(graphed(x), module(x)), index
            replays.append(graphed.stats.replays)
    assert replays[-1] == replays[-5] + 4


def test_an_argument_that_shares_memory_with_one_that_is_changed_in_place(device):
    def call(state, view):
        state.add_(1)
        return view * 2

    wrapper = CUDAGraphModule(call, config())
    states = [
        mark_static(torch.zeros(4, 8, device=device)) if kind else torch.zeros(4, 8, device=device) for kind in (0, 1)
    ]
    with torch.no_grad():
        for _ in range(CALLS):
            assert torch.equal(call(states[0], states[0][1:3]), wrapper(states[1], states[1][1:3]))
            assert torch.equal(*states)


def test_a_result_of_a_graph_that_is_changed_in_place_by_another_keeps_its_history(device):
    """Eager autograd goes through the change."""

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return x.mul_(2) + self.layer(x)

    def build(device):
        return {"model": nn.ModuleList([nn.Linear(8, 8), Adds()]).to(device)}

    def graph(side):
        side.calls = [CUDAGraphModule(m, config()) for m in side.model]
        side.graphs = side.calls

    def step(side, i):
        one, two = side.calls if side.graphed else side.model
        h = one(side.batch(i, 4, 8))
        loss = (two(h) + h).pow(2).mean()
        loss.backward()
        side.note_gradients()
        side.optimizer.zero_grad()
        return loss.detach()

    twins(build, step, device, graph=graph, replays=None, steps=10, settled=0, failures=3)


def test_a_meta_tensor_runs_eagerly(device):
    wrapper = CUDAGraphModule(look, config())
    for _ in range(CALLS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert wrapper(torch.ones(4, 8, device="meta")).is_meta
    assert wrapper.stats.captures == 0


def test_plain_arguments_are_still_captured(device):
    def step(side, i):
        return side.call(side.batch(i, 4, 8)).detach()

    twins(mlp, step, device, graph=wrapped(), replays=1)
