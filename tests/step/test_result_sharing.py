"""Results that share memory with an argument, with a buffer or with each other: what is written into one is seen in the
other, as in eager; and results that are no plain tensors made by the call."""

import copy
import dataclasses
import time

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config, mlp, twins

CALLS = 12


class Holds(nn.Module):
    """Returns one of the things that `RESULTS` names."""

    def __init__(self, what):
        super().__init__()
        self.layer, self.what = nn.Linear(8, 8), what
        self.register_buffer("buffer", torch.zeros(8, 8))

    def forward(self, x):
        return self.what(self, x)


def of(*results):
    return results


RESULTS = {
    "the argument": lambda m, x: x,
    "a view of the argument": lambda m, x: x.view(-1)[3:],
    "the argument twice": lambda m, x: of(x, x),
    "the argument and a row": lambda m, x: of(x, x[1]),
    "a transposed argument": lambda m, x: of(m.layer(x), x.t()),
    "the buffer": lambda m, x: m.buffer,
    "the buffer, read": lambda m, x: of(m.buffer, m.layer(x) + m.buffer[:4]),
    "a view of the buffer": lambda m, x: of(m.layer(x), m.buffer[2:4]),
    "a changed buffer": lambda m, x: m.buffer.add_(1),
    "a view and its base": lambda m, x: (lambda y: of(y, y[1]))(m.layer(x)),
    "a view before its base": lambda m, x: (lambda y: of(y.view(-1), y))(m.layer(x)),
    "views that do not overlap": lambda m, x: m.layer(x).chunk(2, -1),
    "a detached result": lambda m, x: (lambda y: of(y, y.detach()))(m.layer(x)),
    "views of one view": lambda m, x: (lambda y: of(y[:3], y[1], y))(m.layer(x)[:, 1:].contiguous()),
    "views that overlap in part": lambda m, x: (lambda y: of(y[:3], y[1:]))(m.layer(x)),
    "the bits of a result": lambda m, x: (lambda y: of(y, y.view(torch.int32)))(m.layer(x).detach()),
    "a parameter": lambda m, x: of(m.layer.weight, m.layer(x)),
    "a row of a parameter": lambda m, x: m.layer.weight.detach()[1],
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("what", RESULTS)
def test_what_is_written_into_a_result_is_seen_as_in_eager(what, grad, device):
    torch.manual_seed(0)
    eager = Holds(RESULTS[what]).to(device)
    graphed = copy.deepcopy(eager)
    wrapper = CUDAGraphModule(graphed, config())
    for step in range(CALLS):
        seen = []
        for module, call in ((eager, eager), (graphed, wrapper)):
            x = torch.full((4, 8), float(step), device=device)
            with torch.set_grad_enabled(grad):
                results = call(x)
            results = results if isinstance(results, tuple) else (results,)
            values = [r.detach().clone() for r in results]
            for index, result in enumerate(results):
                if grad and result.requires_grad and "argument" in what:
                    continue  # `torch.autograd` would have to follow
                result.detach().add_(index + 1)
                values += [r.detach().clone() for r in (*results, x, module.buffer, module.layer.weight)]
            values += [
                torch.tensor([r is s for s in (*results, x, module.buffer, module.layer.weight)]) for r in results
            ]
            values += [torch.tensor(r.requires_grad) for r in results]
            seen.append(values)
        for one, other in zip(*seen, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "what", ["the argument and a row", "a view and its base", "a view before its base", "a detached result"]
)
def test_gradients_through_results_that_share_memory(what, device):
    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_()
        results = side.call(x * 2)
        loss = sum((r * w).pow(2).sum() for w, r in enumerate(results, 2) if r.requires_grad)
        loss.backward()
        side.note(x=x.grad, results=results)
        side.note_gradients()
        side.optimizer.zero_grad()
        return loss.detach()

    def build(device):
        return Holds(RESULTS[what]).to(device)

    def graph(side):
        side.call = CUDAGraphModule(side.model, config())
        side.graphs = [side.call]

    twins(build, step, device, graph=graph, replays=None, settled=0)


def test_a_gradient_has_the_bits_of_eager_where_results_share_memory(device):
    """It has three terms, one of them from inside the call."""

    def build(device):
        return Holds(lambda m, x: (lambda y: (y, y[:2], (y * x).sum(), y.view(-1)))(m.layer(x))).to(device)

    def step(side, i):
        whole, rows, total, flat = side.call(side.batch(i, 4, 8))
        loss = (flat * side.batch(i, 32, key=1)).sum() + (rows * side.batch(i, 2, 8, key=2)).sum()
        (loss + total * 0.3 + (whole * side.batch(i, 4, 8, key=3)).sum()).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    def graph(side):
        side.call = CUDAGraphModule(side.model, config())
        side.graphs = [side.call]

    twins(build, step, device, graph=graph, replays=2)


def test_a_returned_buffer_that_is_exchanged_or_updated(device):
    module = Holds(lambda m, x: (x * 2, m.buffer)).to(device)
    wrapper = CUDAGraphModule(module, config())
    with torch.no_grad():
        for step in range(CALLS):
            x = torch.ones(4, 8, device=device)
            if step == 6:
                module.buffer = torch.full((8, 8), 3.0, device=device)
            if step == 9:
                module.buffer.fill_(4.0)
            assert wrapper(x)[1] is module.buffer
            assert torch.equal(wrapper(x)[1], module(x)[1])


def test_a_view_that_is_kept_stays_a_view_of_its_base(device):
    module = Holds(lambda m, x: (lambda y: of(y, y[1]))(m.layer(x))).to(device)
    wrapper, kept = CUDAGraphModule(module, config()), []
    with torch.no_grad():
        for step in range(CALLS):
            kept.append(wrapper(torch.full((4, 8), float(step), device=device)))
        for step, (whole, row) in enumerate(kept):
            assert torch.equal(whole, module.layer(torch.full((4, 8), float(step), device=device)))
            row.add_(1)
            assert torch.equal(whole[1], row)
    assert wrapper.stats.replays


def test_an_object_made_over_a_buffer_is_another_in_each_call(device):
    module = Holds(lambda m, x: m.buffer[1:]).to(device)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(4, 8, device=device)
    with torch.no_grad():
        for _ in range(CALLS):
            result = wrapper(x)
            assert result.shape == (7, 8)
            result.resize_(2, 2)
            result.name_of_mine = 1


def with_attribute(y, value):
    y.scale = value
    return y


@pytest.mark.parametrize(
    "what",
    [
        lambda m, x: with_attribute(m.layer(x), 3.0),
        lambda m, x: with_attribute(m.layer(x), torch.ones(1)),
        lambda m, x: m.layer(x).relu().to_sparse(),
        lambda m, x: torch.zeros(3, device=x.device, requires_grad=True),
        lambda m, x: (m.layer(x), object),
        lambda m, x: iter([m.layer(x)]),
    ],
)
def test_a_result_that_no_replay_could_make_comes_from_eager_calls(what, device):
    module = Holds(what).to(device)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(4, 8, device=device)
    for _ in range(CALLS):
        eager, graphed = module(x), wrapper(x)
        assert type(eager) is type(graphed)
        if isinstance(eager, torch.Tensor):
            assert eager.layout is graphed.layout and eager.is_leaf == graphed.is_leaf
            assert getattr(eager, "scale", None) == getattr(graphed, "scale", None)
            assert torch.equal(eager.to_dense(), graphed.to_dense())
    assert wrapper.stats.captures == 0


def test_a_value_that_is_another_in_each_call_is_not_frozen(device):
    module = mlp(device)
    wrapper = CUDAGraphModule(lambda x: (module(x), time.perf_counter()), config())
    with torch.no_grad():
        times = [wrapper(torch.ones(4, 8, device=device))[1] for _ in range(CALLS)]
    assert len(set(times)) == CALLS


GRADIENTS = {
    "a gradient": lambda m: m.weight.grad,
    "a gradient twice": lambda m: of(m.weight.grad, m.weight.grad),
    "all gradients": lambda m: [p.grad for p in m.parameters()],
    "views of a gradient": lambda m: of(m.weight.grad[1:], m.weight.grad.detach(), m.weight.grad.t()),
    "what it binds": lambda m: setattr(m, "kept", m.weight.grad),
}


@pytest.mark.parametrize("clear", [True, False, None])
@pytest.mark.parametrize("what", GRADIENTS)
def test_what_is_written_into_a_gradient_that_was_returned_is_seen_as_in_eager(what, clear, device):
    def play(graphed):
        torch.manual_seed(0)
        model, seen = nn.Linear(3, 3).to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            if clear is not None:
                optimizer.zero_grad(set_to_none=clear)
            model(x).square().mean().backward()
            return GRADIENTS[what](model)

        call = CUDAGraphModule(step, config()) if graphed else step
        for index in range(CALLS):
            result = call(torch.full((2, 3), 1.0 + index, device=device))
            result = model.kept if what == "what it binds" else result
            results = [result] if isinstance(result, torch.Tensor) else result
            for one in results:
                one.mul_(0.5)
            seen += [torch.tensor([one is p.grad for one in results for p in model.parameters()])]
            seen += [one.clone() for one in results]
            optimizer.step()
            model.weight.grad.add_(1)
            seen += [one.clone() for one in (*results, *model.parameters())]
        assert not graphed or call.stats.replays, call.last_failure
        return seen

    for one, other in zip(play(False), play(True), strict=True):
        assert torch.equal(one, other)


@dataclasses.dataclass
class State:
    total: torch.Tensor

    def __post_init__(self):
        self.options = {"sizes": [3, 3]}
        self.kept, self.by_name = [self.total], {"total": self.total}


FOUND = {
    "an object": lambda s: s,
    "a list of tensors": lambda s: s.kept,
    "a dict of tensors, in another": lambda s: {"state": s.by_name},
    "a dict of numbers": lambda s: s.options,
    "a list of numbers": lambda s: of(s.options["sizes"], s.total),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("what", FOUND)
def test_a_container_that_was_there_before_is_returned_itself(what, grad, device):
    def play(graphed):
        torch.manual_seed(0)
        state, layer, seen = State(torch.zeros(3, device=device)), nn.Linear(3, 3).to(device), []

        def step(x):
            y = layer(x)
            state.total.add_(y.detach()[0])
            if what == "an object":
                state.mean = y.detach().mean()
            return FOUND[what](state), (y if grad else y.detach())

        call = CUDAGraphModule(step, config()) if graphed else step
        for index in range(CALLS):
            found, y = call(torch.full((2, 3), float(index), device=device))
            found = found["state"] if "in another" in what else found[0] if what == "a list of numbers" else found
            there = (state, state.kept, state.by_name, state.options, state.options["sizes"])
            seen += [torch.tensor([found is one for one in there]), state.total.clone(), y.detach().clone()]
            if what == "an object":
                seen.append(found.mean.clone())
        assert not graphed or bool(call.stats.replays) == ("number" in what or not grad), call.last_failure
        return seen

    for one, other in zip(play(False), play(True), strict=True):
        assert torch.equal(one, other)


LEFT = {
    "an argument": lambda flat: flat[0],
    "views of an argument": lambda flat: flat[0].view(3, 4)[:, 1:],
    "a detached argument": lambda flat: flat[0].detach().view(3, 4)[:, :3],
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("what", LEFT)
def test_an_argument_that_becomes_a_gradient_is_the_gradient(what, backward, device):
    """What is written into it after the call is in both, and no later call writes into a gradient that is kept."""

    def play(graphed):
        torch.manual_seed(0)
        layer, kept, seen = nn.Linear(3, 3, bias=False).to(device), [], []

        def step(x, *flat):
            layer.weight.grad = LEFT[what](flat)
            loss = layer(x).square().mean()
            if backward:
                loss.backward()
            return loss.detach()

        call = CUDAGraphModule(step, config()) if graphed else step
        for index in range(CALLS):
            shape = (3, 3) if what == "an argument" else (12,)
            flat = torch.full(shape, float(index), device=device)
            seen.append(call(torch.ones(2, 3, device=device), flat).clone())
            flat.add_(0.5)
            kept.append(layer.weight.grad)
            seen += [torch.tensor(layer.weight.grad is flat), flat.clone(), *(one.clone() for one in kept)]
        assert not graphed or call.stats.replays, call.last_failure
        return seen

    for one, other in zip(play(False), play(True), strict=True):
        assert torch.equal(one, other)


def test_two_parameters_may_be_left_with_one_gradient(device):
    def play(graphed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
        one, other, kept, seen = model[0].weight, model[1].weight, [], []

        def step(x):
            model.zero_grad()
            model(x).square().mean().backward()
            other.grad = one.grad

        call = CUDAGraphModule(step, config()) if graphed else step
        for index in range(CALLS):
            call(torch.full((2, 3), 1.0 + index, device=device))
            kept.append((one.grad, other.grad))
            kept[-2 if index else -1][index % 2].mul_(2)
            seen += [torch.tensor(one.grad is other.grad), *(grad.clone() for pair in kept for grad in pair)]
        assert not graphed or call.stats.replays, call.last_failure
        return seen

    for eager, replayed in zip(play(False), play(True), strict=True):
        assert torch.equal(eager, replayed)


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_that_go_from_one_parameter_to_another(shared, device):
    def play(graphed):
        torch.manual_seed(0)
        model, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device), []
        one, other = model[0].weight, model[1].weight

        def step(x):
            other.grad = one.grad
            one.grad = x
            return x * 2

        call = CUDAGraphModule(step, config()) if graphed else step
        for index in range(CALLS):
            x = torch.full((3, 3), 1.0 + index, device=device)
            if shared and index == 4:
                one.grad = other.grad = x
            call(x)
            seen += [torch.zeros(1) if grad is None else grad.clone() for grad in (one.grad, other.grad)]
        return seen

    for eager, replayed in zip(play(False), play(True), strict=True):
        assert torch.equal(eager, replayed)
