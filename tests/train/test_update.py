"""The compiled update computes what torch's fused optimizers do, leaves out what it must, knows what it cannot do."""

import copy
import math

import pytest
import torch

from graphmod.train.compile import CompiledUpdate
from graphmod.train.run import train
from graphmod.train.step import TrainStep
from tests.support.harness import assert_same
from tests.support.harness import config as graph_config
from tests.support.train_steps import build, language_model

FEW = [(6, 4), (6, 4), (5,), (3, 2, 2), (4, 4)]
SHAPES = [*FEW, *[(4, 4)] * 18]  # which are updated some at a time: each number of tensors takes seconds to compile


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def parameters(device, dtype=torch.float32, shapes=FEW):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(device, dtype)) for size in shapes]


def optimizer_of(params, kind=torch.optim.AdamW, **settings):
    device = params[0].device
    settings = {"lr": torch.tensor(0.01, device=device), "fused": True, "capturable": device.type == "cuda"} | settings
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
    return kind(groups, **settings)


def gradients(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)


def everything(optimizer):
    state = optimizer.state
    return [t.clone() for p in state for t in (p.detach(), *(v for v in state[p].values() if torch.is_tensor(v)))]


# Each is compiled for seconds: all optimizers and both dtypes of models by default, other pairs with the slow tests.
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
OPTIMIZERS = {
    "adamw": ({}, DTYPES[:1]),
    "adam": ({"kind": torch.optim.Adam}, DTYPES[:1]),
    "maximize": ({"maximize": True, "betas": (0.8, 0.95), "eps": 1e-4}, DTYPES[1:2]),
}


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        pytest.param(settings, dtype, id=f"{name}-{dtype}", marks=[] if dtype in quick else pytest.mark.slow)
        for name, (settings, quick) in OPTIMIZERS.items()
        for dtype in DTYPES
    ],
)
def test_it_takes_the_steps_of_the_fused_optimizer(device, dtype, settings):
    shapes = FEW if settings else SHAPES
    ours, theirs = (optimizer_of(parameters(device, dtype, shapes), **settings) for _ in range(2))
    sides = [[p for group in side.param_groups for p in group["params"]] for side in (ours, theirs)]
    update = CompiledUpdate(ours, "default")
    for step in range(6):
        for side in sides:
            gradients(side, step)
        torch.nn.utils.clip_grad_norm_(sides[1], 2.0)
        theirs.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in sides[0]])
        assert update.ready() is (step > 0), "an optimizer makes its own state"
        if step:
            update(norm, 2.0)
        else:
            torch.nn.utils.clip_grad_norm_(sides[0], 2.0)
            ours.step()
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"].mul_(0.9)
    # Each rounds to the parameters' dtype at its own places; the rest is the same arithmetic.
    close = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float64: 1e-6}[dtype]
    for mine, other in zip(everything(ours), everything(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=close, atol=close)
    assert {float(ours.state[p]["step"]) for p in ours.state} == {6.0}


def test_what_is_blocked_on_the_device_changes_nothing(device):
    params = parameters(device)
    optimizer = optimizer_of(params)
    gradients(params, 0)
    optimizer.step()
    optimizer.found_inf = torch.zeros((), device=device)
    update = CompiledUpdate(optimizer, "default")
    for step, blocked in enumerate((0.0, 1.0, 0.0)):
        gradients(params, step, math.nan if blocked else 1.0)
        optimizer.found_inf.fill_(blocked)
        before = everything(optimizer)
        update(torch.nn.utils.get_total_norm([p.grad for p in params]), 1.0)
        after = everything(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) is bool(blocked)
        assert all(torch.isfinite(tensor).all() for tensor in after)
    assert {float(optimizer.state[p]["step"]) for p in params} == {3.0}


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_it_takes_the_same_steps_where_nothing_may_be_compiled(device, dtype):
    sides = [optimizer_of(parameters(device, dtype)) for _ in range(2)]
    for step in range(4):
        for stance, optimizer in zip(("default", "force_eager"), sides, strict=True):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            gradients(params, step)
            if step == 0:
                optimizer.step()
                continue
            with torch.compiler.set_stance(stance):
                CompiledUpdate(optimizer, "default")(torch.nn.utils.get_total_norm([p.grad for p in params]), 2.0)
    close = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    for one, other in zip(*map(everything, sides), strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_parameters_without_gradient_stay_as_they_are(device):
    params = parameters(device)
    optimizer = optimizer_of(params)
    gradients(params, 0)
    optimizer.step()
    gradients(params, 1)
    params[3].grad = None
    kept = [params[3].detach().clone(), *(v.clone() for v in optimizer.state[params[3]].values())]
    update = CompiledUpdate(optimizer, "default")
    before = params[4].detach().clone()
    update(None, None)
    assert all(torch.equal(a, b) for a, b in zip(kept, [params[3], *optimizer.state[params[3]].values()], strict=True))
    assert not torch.equal(params[4], before)


@pytest.mark.parametrize("scope", ["none", "per_layer", "full_iteration"])
def test_a_step_with_another_optimizer_is_its_own(scope, device):
    torch.manual_seed(0)
    made = build(device)["model"]
    sides = []
    for compile in ("none", "default"):
        model = copy.deepcopy(made)
        torch.manual_seed(1)  # for dropout
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1, device=device), fused=True)
        # The model itself is not compiled: its numbers would differ.
        step = TrainStep(model, optimizer, max_grad_norm=0.5, config=graph_config(scope=scope))
        if compile != "none":
            step.iteration.compiled_update = CompiledUpdate(optimizer, compile)
        for index in range(6):
            step(torch.randint(0, 30, (1, 2, 7), generator=torch.Generator().manual_seed(index)))
        sides.append(dict(model.named_parameters()))
    assert_same(*sides, "")


@pytest.mark.parametrize("scope", [pytest.param("per_layer", marks=pytest.mark.slow), "full_iteration"])
def test_the_compiled_update_in_a_graph_is_that_without_graphs(scope, device):
    """With a gradient that is not finite in the middle, which leaves out one update, and a weight that moves."""
    torch.manual_seed(0)
    made = language_model(device, layers=1)
    weights, skipped = [], []
    for kind in ("none", scope):
        model = copy.deepcopy(made)
        torch.manual_seed(1)  # for dropout
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(0.01, device=device), fused=True, capturable=device.type == "cuda"
        )
        # The first step makes the state, the second compiles, and the third is what the capture is compared with.
        config = graph_config(scope=kind, warmup_steps=3)
        step = TrainStep(model, optimizer, max_grad_norm=0.5, nonfinite="skip", config=config)
        step.iteration.compiled_update = CompiledUpdate(optimizer, "default")
        for index in range(12):
            if index == 9:
                model.lm_head.weight.data = model.lm_head.weight.data.clone()
            if index == 6:
                with torch.no_grad():
                    kept = model.lm_head.weight.clone()
                    model.lm_head.weight.fill_(math.inf)
            step(torch.randint(0, 30, (1, 2, 7), generator=torch.Generator().manual_seed(index)))
            if index == 6:
                with torch.no_grad():
                    model.lm_head.weight.copy_(kept)
        if kind != "none":
            assert step.stats.failures == 0 and step.stats.replays > 0
        weights.append(dict(model.named_parameters()))
        skipped.append(int(step.skipped))
    assert skipped == [1, 1]
    assert_same(*weights, "")


@pytest.mark.parametrize("scope", ["full_iteration"])
@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_numbers(tiny, tmp_path, stop_after, scope):
    settings = ["graph.compile=default", "data.max_bytes=20000", f"graph={scope}"]
    whole = train(tiny(*settings), tmp_path / "whole")
    stop_after(5)
    train(tiny(*settings), tmp_path / "run")
    resumed = train(tiny(*settings, "train.resume=auto"), tmp_path / "run")
    assert resumed.resumed_at_step == 5 and resumed.losses == whole.losses
