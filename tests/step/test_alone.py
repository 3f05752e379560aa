"""A graph without a backward outside: what `step` does where nobody has loaded `layers`."""

import subprocess
import sys

PROGRAM = """
import sys

import torch

from graphmod.config import CUDAGraphConfig
from graphmod.signature.call import Call
from graphmod.step.context import Context
from graphmod.step.dispatch import run
from graphmod.step.group import Group


def trained():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def forward(x):
    return weight * x


weight = torch.ones(4, requires_grad=True)
step, eager = trained(), trained()
context = Context(step, step, CUDAGraphConfig(), "step", Group())
for number in range(8):
    x = torch.full((2, 4), float(number))
    assert torch.equal(run(context, Call(step, (x,), {})), eager(x))
assert context.stats.replays == 5, context.stats
context = Context(forward, forward, CUDAGraphConfig(), "forward", Group())
for _ in range(8):
    assert torch.equal(run(context, Call(forward, (torch.ones(4),), {})), torch.ones(4))
assert not context.stats.replays and "detached" in context.last_failure, context.last_failure
assert not [name for name in sys.modules if name.startswith("graphmod.layers")]
"""


def test_a_whole_iteration_is_captured_and_a_result_with_a_backward_refused():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
