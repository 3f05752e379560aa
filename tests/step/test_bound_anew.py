"""What calls bind anew is bound by replays too, in steps and layers; small programs are in `tests/guards`."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphmod import CUDAGraphModule
from tests.support.harness import WARMUP, config, graph_layers

pytestmark = pytest.mark.usefixtures("quiet")

CALLS = 12


class Block(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.linear, self.last = wrap(nn.Linear(8, 8)), {}

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.last = {"output": y.detach(), "mean": [y.detach().mean(0)]}
        return x + y


def train(wrap, device, graphed, layers=False):
    """What the blocks of a model are seen to hold, and to have held, in a training loop; and the wrappers."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(wrap), Block(wrap)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrappers = graph_layers(model, config=config()) if graphed and layers else []

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if graphed and not layers:
        step = CUDAGraphModule(step, config())
        wrappers = [step]
    held, seen = [], []
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(call)
        seen.append(step(torch.randn(3 + call % 2, 8, generator=generator).to(device)).item())
        for block in model:
            held.append(block.last)
            seen.append((block.linear.weight.requires_grad, block.linear.weight.is_leaf, block.linear.weight.tolist()))
        seen += [(one["output"].tolist(), one["mean"][0].tolist()) for one in held]
    return seen, copy.deepcopy(model.state_dict()), wrappers


@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=lambda wrap: wrap.__name__)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_step_with_hooks_that_bind_a_weight_in_each_call_is_captured(wrap, device):
    eager, graphed = (train(wrap, device, which) for which in (False, True))
    assert eager[0] == graphed[0]
    assert all(torch.equal(one, graphed[1][name]) for name, one in eager[1].items())
    (step,) = graphed[2]
    assert step.stats.replays == CALLS - 2 * WARMUP and step.stats.captures == 2, step.last_failure


def test_layers_bind_anew_what_the_loop_reads_and_holds(device):
    eager, graphed = (train(lambda module: module, device, which, layers=True) for which in (False, True))
    assert eager[0] == graphed[0]
    assert all(torch.equal(one, graphed[1][name]) for name, one in eager[1].items())
    assert all(layer.stats.replays == 2 * (CALLS - 2 * WARMUP) for layer in graphed[2]), graphed[2][0].last_failure


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_layer_that_binds_a_tensor_whose_backward_is_to_come_stays_eager_and_says_why(device):
    eager, graphed = (train(nn.utils.weight_norm, device, which, layers=True) for which in (False, True))
    assert eager[0] == graphed[0]
    assert not graphed[2][0].stats.replays
    assert "binds 'weight' to a tensor with a history" in graphed[2][0].last_failure
    assert "torch.nn.utils.parametrizations" in graphed[2][0].last_failure


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_forward_that_is_made_again_for_a_backward_leaves_what_eager_leaves(checkpointed, device):
    """Eager makes it again in a checkpoint, and then binds once more; a graph, where the order is another."""

    def run(graphed):
        torch.manual_seed(0)
        model = nn.Sequential(Block(lambda module: module), Block(lambda module: module)).to(device)
        layers = graph_layers(model, config=config()) if graphed else []
        seen = []
        for call in range(CALLS):
            inputs = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(call)).to(device)
            through = functools.partial(checkpoint, model, use_reentrant=False) if checkpointed else model
            losses = [through(one).square().mean() for one in inputs]
            for loss in reversed(losses) if call % 3 == 2 else losses:
                loss.backward()
                seen += [block.last["output"].tolist() for block in model]
        return seen, layers

    eager, graphed = run(False), run(True)
    assert eager[0] == graphed[0]
    assert all(bool(layer.stats.replays) != checkpointed for layer in graphed[1])
