"""Layers that ranks compute together (tensor parallelism) with graphs of their own have eager's numbers, and all ranks
replay them, or none does."""

import contextlib
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from graphmod import graph_layers, ungraph
from graphmod.trace.dispatch import current
from tests.ranks.programs import Net
from tests.support.ranks import Ranks

STEPS = 16


class Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient each rank has."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Given(torch.autograd.Function):
    """What all ranks have, whose gradient is the sum over them."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad)
        return grad


class ByHand(nn.Module):
    """A block split without DTensor; `one_way` communicates in the backward only."""

    def __init__(self, width, one_way):
        super().__init__()
        self.one_way = one_way
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        y = self.down(nn.functional.gelu(self.up(Given.apply(x))))
        return x + (y if self.one_way else Summed.apply(y))


class Split(Net):
    order, checkpoints = (0, 1, 2), False

    def forward(self, x):
        for index in self.order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x * self.scale.to(x.dtype))


HABITS = (
    *("as it comes", "accumulates", "checkpoint", "twice", "evaluates", "sequence", "by hand", "backward only"),
    *("fails in a forward", "fails in a backward", "moves", "resets", "exchanges a gradient", "two losses", "retains"),
    *("changes now and then", "other shapes", "other settings"),
)


def split(habit, device, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    torch.manual_seed(0)
    model = Split(dropout=0.0)
    if habit in ("by hand", "backward only"):
        model.blocks = nn.ModuleList(ByHand(16, habit == "backward only") for _ in range(3))
    model.to(device)
    model.checkpoints = habit == "checkpoint"
    model.order = (0, 1, 0, 2) if habit == "twice" else (0, 1, 2)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for block in model.blocks if habit not in ("by hand", "backward only") else ():
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if habit == "sequence":
            up, down = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
            plan = {"norm": SequenceParallel(sequence_dim=0), "up": up, "down": down}
        parallelize_module(block, mesh, plan)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


@contextlib.contextmanager
def other_settings():
    """Inside, a capture would not be what the backward is."""
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


class Fails:
    """Raises where a rank captures: in the forward of a block, or in its backward."""

    def __init__(self, model, habit, rank):
        self.wanted = habit if habit.startswith("fails") and rank == 1 else ""
        if habit.startswith("fails"):
            model.blocks[1].down.register_forward_hook(self._hook)

    def raise_at(self, place):
        recorder = current()
        if self.wanted == f"fails in a {place}" and recorder is not None and not recorder.watching:
            raise RuntimeError("injected")

    def _hook(self, module, args, result):
        self.raise_at("forward")
        if result.requires_grad:
            result.register_hook(lambda _: self.raise_at("backward"))


def layers_as_eager(device, rank, habit):
    """Whether losses and parameters are eager's, what the wrappers did in the second half, and what was said."""
    said = []

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    def run(graphs):
        model, optimizer = split(habit, device, rank)
        fails = Fails(model, habit, rank)
        wrappers = graph_layers(model) if graphs else []
        generator, losses, halfway = torch.Generator().manual_seed(7), [], []
        for index in range(STEPS):
            rows = 8 if habit != "other shapes" or index % 3 else 4
            x = torch.randn(rows, 16, generator=generator).to(device)
            if index == STEPS // 2:
                halfway = [(one.stats.replays, one.stats.eager_calls) for one in wrappers]
            if index == 5:
                fails.wanted = ""
            if habit == "moves" and rank == 1 and index in (6, 10):
                norm = model.blocks[1].norm
                norm.weight = nn.Parameter(norm.weight.detach().clone())
                optimizer.param_groups[0]["params"] = list(model.parameters())
            if habit == "changes now and then" and rank == 1:
                model.blocks[1].norm.eps = 1e-5 if index % 4 else 1e-5 + 1e-12
            if graphs and habit == "resets" and rank == 0 and index == 8:
                wrappers[0].reset()
            if habit == "evaluates" and index % 2:
                with torch.no_grad():
                    losses.append(float(model(x).sum()))
            parts = x.chunk(4 if habit in ("accumulates", "exchanges a gradient") else 1)
            for place, part in enumerate(parts):
                loss = model(part).square().mean()
                if habit == "two losses":
                    loss = loss + model(part * 2).mean()
                if habit == "retains":
                    loss.backward(retain_graph=True)
                with other_settings() if habit == "other settings" and rank == 1 and index % 4 == 3 else nullcontext():
                    loss.backward()
                losses.append(float(loss.detach()))
                if habit == "exchanges a gradient" and rank == 1 and place == 1 and index % 5 == 4:
                    norm = model.blocks[1].norm.weight
                    norm.grad = norm.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        kept = [getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for one in model.parameters()]
        now = [(one.stats.replays, one.stats.eager_calls) for one in wrappers]
        later = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(halfway, now, strict=True)]
        ungraph(model)
        return losses, kept, later

    losses, kept, _ = run(False)
    logging.getLogger("graphmod").addHandler(handler := Keep())
    again, others, later = run(True)
    logging.getLogger("graphmod").removeHandler(handler)
    return losses == again and all(map(torch.equal, kept, others)), len(set(losses)) > STEPS // 2, later, said


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("no two GPUs")
    with Ranks(request.param) as ranks:
        yield ranks


REPLAYED = ("as it comes", "accumulates", "checkpoint", "sequence", "by hand", "two losses")
QUICK = (*REPLAYED, "backward only", "fails in a backward", "other settings", "twice")


@pytest.mark.parametrize(
    "habit", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in HABITS]
)
def test_habits_have_the_numbers_of_eager(ranks, habit):
    found = ranks.run(layers_as_eager, habit)
    assert all(equal and changing for equal, changing, *_ in found), found
    replays = {tuple(one for one, _ in later) for *_, later, _ in found}
    assert len(replays) == 1, found  # of no rank alone
    assert habit == "backward only" or all(replays.pop()), found
    for *_, later, said in found:
        if habit in REPLAYED:
            assert not any(eager for _, eager in later), (later, said)
        if habit == "backward only":  # where ranks agree on nothing
            assert any("which its forward does not" in one for one in said), said
        if habit == "other settings":  # of a backward on one rank
            assert all(one % 2 == 0 and eager for one, eager in later), (later, said)
