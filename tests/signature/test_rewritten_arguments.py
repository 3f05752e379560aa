"""An argument whose memory was rewritten or exchanged between two calls is read anew; what a call writes there itself,
its replays write."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, graph_layers
from tests.support.harness import config, layered, loss_of, mlp, twins, wrapped

MEMORY = {
    "in place": lambda x, values: x.copy_(values),
    "through .data": lambda x, values: x.data.copy_(values),
    "through detach": lambda x, values: x.detach().copy_(values),
    "through a view": lambda x, values: x.view(-1).copy_(values.view(-1)),
    "by set_": lambda x, values: x.set_(values.clone()),
    "by .data =": lambda x, values: setattr(x, "data", values.clone()),
}


@pytest.mark.parametrize("way", MEMORY)
def test_an_argument_that_is_rewritten_between_calls(way, device):
    """One tensor object for all batches, as a loader with a buffer of its own hands out."""

    def step(side, i):
        if i == 0:
            side.x = side.batch(0, 4, 8)
        MEMORY[way](side.x, side.batch(i, 4, 8))
        loss_of(side.call(side.x)).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(mlp, step, device, replays=2)


def test_an_argument_whose_memory_numpy_rewrites():
    def step(side, i):
        if i == 0:
            side.array = side.batch(0, 4, 8).numpy()
            side.x = torch.from_numpy(side.array)
        side.array[...] = side.batch(i, 4, 8).numpy()
        with torch.no_grad():
            return side.call(side.x)

    twins(mlp, step, torch.device("cpu"), replays=1)


class Masked(nn.Module):
    """Layers that are all given the mask; `between` runs between the first two of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Masks() for _ in range(3))
        self.between = None

    def forward(self, x, mask):
        for index, layer in enumerate(self.layers):
            if index == 1 and self.between is not None:
                self.between()
            x = layer(x, mask)
        return x


class Masks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        return torch.tanh(self.linear(x) + mask)


UNSEEN = {
    "numpy": lambda mask, values: np.copyto(mask.detach().numpy(), values.numpy()),
    ".data": MEMORY["through .data"],
}


@pytest.mark.parametrize(("graph", "replays"), [(layered, 18), (wrapped, 6)], ids=["layers", "whole"])
@pytest.mark.parametrize("way", UNSEEN)
def test_an_argument_that_is_rewritten_unseen_between_two_microbatches(way, graph, replays):
    """The memory has no new version, and all backwards come at the end, so that it is one pass."""

    def build(_):
        model = Masked()
        return {"model": model, "mask": torch.ones(4, 8), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def step(side, i):
        losses = []
        for micro in range(3):
            UNSEEN[way](side.mask, side.batch(i, 4, 8, key=10 + micro))
            losses.append(loss_of(side.call(side.batch(i, 4, 8, key=micro), side.mask)))
        sum(losses).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    twins(build, step, torch.device("cpu"), replays=replays, graph=graph())


def test_an_argument_whose_memory_numpy_rewrites_between_two_layers():
    def build(_):
        return {"model": Masked(), "mask": torch.ones(4, 8)}

    def step(side, i):
        side.mask.copy_(side.batch(i, 4, 8))
        side.model.between = lambda: UNSEEN["numpy"](side.mask, side.batch(i, 4, 8, key=1))
        loss_of(side.call(side.batch(i, 4, 8, key=2), side.mask)).backward()
        side.note_gradients()
        side.model.zero_grad()

    twins(build, step, torch.device("cpu"), replays=6, graph=layered())


def test_layers_of_one_forward_share_the_copy_of_a_mask(device):
    model, mask = Masked().to(device), torch.ones(4, 8, device=device)
    graphs = graph_layers(model, config())
    copied = []
    for _ in range(8):
        for _ in range(2):
            model(torch.ones(4, 8, device=device), mask).sum().backward()
        copied.append(sum(graph.stats.copied_bytes for graph in graphs))
    assert all(graph.stats.replays for graph in graphs)
    # The input, the mask and the gradient of the sum, once in each forward and backward.
    assert copied[-1] - copied[-2] <= 2 * 3 * mask.nbytes


# -- arguments that the call itself writes -----------------------------------------------------------------------------
def out(x, into):
    return torch.mul(x, 2, out=into)


def in_part(x, into):
    into[1:] = x[1:]
    return into[:2]


def as_state(x, into):
    into.mul_(0.9).add_(x)
    return x - into


def reads_it_before(x, into):
    result = x * 2 if into.sum() > 0 else x * 3
    into.copy_(x)
    return result


WRITTEN = [out, in_part, as_state, reads_it_before]


def drawn(call, device):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(call)).to(device)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("layout", ["whole", "part", "turned"])
@pytest.mark.parametrize("use", WRITTEN, ids=lambda use: use.__name__)
def test_what_a_call_writes_into_its_arguments_is_written_by_replays(use, layout, mode, device):
    graphed = CUDAGraphModule(use, config())
    seen: list[list] = [[], []]
    for which, call in enumerate((use, graphed)):
        given = [drawn(k, device) for k in range(3)]  # which come again, as they were left
        for k in range(12):
            into = given[k % 3]
            x, into = drawn(100 + k, device), {"whole": into, "part": into[:, 1:3], "turned": into.t()}[layout]
            x = x if layout == "whole" else x[:, 1:3].contiguous() if layout == "part" else x.t().contiguous()
            version = into._version
            with mode():
                result = call(x, into)
            assert into._version > version and (result is into or use is not out)
            seen[which] += [result.tolist(), *(one.tolist() for one in given)]
    assert seen[0] == seen[1]
    assert graphed.stats.replays > 2 and not graphed.stats.failures, graphed.last_failure


def test_a_view_of_a_written_argument_that_is_returned_is_one(device):
    graphed = CUDAGraphModule(in_part, config())
    for k in range(8):
        into = torch.zeros(2, 4, device=device)
        graphed(drawn(k, device), into).fill_(7)
        assert into.tolist() == [[7.0] * 4] * 2
    assert graphed.stats.replays


def test_an_argument_that_shares_what_is_written_makes_a_call_eager(device):
    def run(x, into):
        into.add_(1)
        return x * 2

    graphed = CUDAGraphModule(run, config())
    for k in range(10):
        one, other = drawn(k, device).flatten(), drawn(k, device).flatten()
        shared = k > 5
        x, into = (one[:6], one[2:]) if shared else (one[:6], drawn(k, device).flatten()[2:])
        y, onto = (other[:6], other[2:]) if shared else (other[:6], drawn(k, device).flatten()[2:])
        assert torch.equal(run(x, into), graphed(y, onto)) and torch.equal(into, onto) and torch.equal(x, y)
    assert graphed.stats.replays == 4 and "shares" in graphed.last_failure


def test_memory_from_outside_that_is_a_written_argument_makes_a_call_eager(device):
    def made():
        held = torch.zeros(4, device=device)

        def run(x, into):
            into.add_(x)
            return held + x

        return run, held

    (eager, held), (graphed, kept) = made(), made()
    graphed = CUDAGraphModule(graphed, config())
    for k in range(10):
        x = drawn(k, device)[0]
        one, other = (held, kept) if k > 5 else (torch.zeros(4, device=device), torch.zeros(4, device=device))
        assert torch.equal(eager(x, one), graphed(x, other)) and torch.equal(held, kept) and torch.equal(one, other)
    assert graphed.stats.replays == 4 and "shares" in graphed.last_failure
