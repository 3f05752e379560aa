"""What the compiled update cannot do, or would compile again and again, the optimizer does itself."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphmod.train import compile as compile_module
from graphmod.train.compile import CompiledUpdate
from tests.train.test_update import gradients, optimizer_of, parameters

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)


def replaced(optimizer):
    original = optimizer.step
    optimizer.step = lambda: original()


def rate_elsewhere(optimizer):
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")


def step_elsewhere(optimizer):
    next(iter(optimizer.state.values()))["step"] = torch.empty((), device="meta")


def many(optimizer):
    params = [torch.nn.Parameter(torch.zeros(size)) for size in range(1, 40)]
    for p in params:
        p.grad = torch.zeros_like(p)
        optimizer.state[p] = {"step": torch.zeros(()), "exp_avg": p.detach().clone(), "exp_avg_sq": p.detach().clone()}
    optimizer.add_param_group({"params": params})


@pytest.mark.parametrize(
    ("kind", "settings", "change"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, None),
        (torch.optim.AdamW, {"lr": 0.01}, None),
        (torch.optim.SGD, {"capturable": None}, None),
        (type("Mine", (torch.optim.AdamW,), {}), {}, None),
        (torch.optim.AdamW, {}, hooked),
        (torch.optim.AdamW, {}, replaced),
        (torch.optim.AdamW, {}, rate_elsewhere),
        (torch.optim.AdamW, {}, step_elsewhere),
        (torch.optim.AdamW, {}, many),
    ],
    ids=[
        "amsgrad",
        "rate is a number",
        "sgd",
        "subclass",
        "hook",
        "step replaced",
        "rate elsewhere",
        "step elsewhere",
        "many kinds",
    ],
)
def test_what_it_cannot_do_the_optimizer_does(kind, settings, change):
    params = parameters("cpu")
    settings = dict(settings)
    if "capturable" in settings:
        optimizer = kind(params, lr=torch.tensor(0.01), fused=True)
    else:
        optimizer = optimizer_of(params, kind, **settings)
    gradients(params, 0)
    optimizer.step()
    if change is not None:
        change(optimizer)
    assert not CompiledUpdate(optimizer, "default").ready()


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_of_all_optimizers_run(register):
    params = parameters("cpu")
    optimizer = optimizer_of(params)
    gradients(params, 0)
    optimizer.step()
    update = CompiledUpdate(optimizer, "default")
    hook = register(lambda *_: None)
    try:
        assert not update.ready()
    finally:
        hook.remove()
    assert update.ready()


def test_many_groups_that_differ_in_their_rates_are_few_kinds():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(40)]
    groups = [{"params": [p], "lr": torch.tensor(0.1 * (index + 1))} for index, p in enumerate(params)]
    optimizer = torch.optim.AdamW(groups, fused=True)
    gradients(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    update = CompiledUpdate(optimizer, "default")
    assert update.ready()
    gradients(params, 0)
    update(None, None)
    steps = [float((a - p.detach()).abs().mean()) for a, p in zip(before, params, strict=True)]
    assert steps == sorted(steps) and steps[0] > 0


def test_a_group_may_be_empty():
    params = parameters("cpu")
    settings = {"lr": torch.tensor(0.01), "fused": True}
    optimizer = torch.optim.AdamW([{"params": []}, {"params": params}], **settings)
    gradients(params, 0)
    optimizer.step()
    update = CompiledUpdate(optimizer, "default")
    assert update.ready()
    before = params[0].detach().clone()
    update(None, None)
    assert not torch.equal(params[0], before)


def test_a_setting_that_changes_in_python_is_not_compiled_again_and_again():
    params = parameters("cpu")
    optimizer = optimizer_of(params)
    gradients(params, 0)
    optimizer.step()
    update, group = CompiledUpdate(optimizer, "default"), optimizer.param_groups[0]
    first = group["weight_decay"]
    for weight_decay, ready in ((first, True), (first / 2, False), (first, True)):
        group["weight_decay"] = weight_decay
        assert update.ready() is ready
    group["betas"] = (0.8, 0.9)
    assert not update.ready()


def test_many_optimizers_in_one_process_do_not_reach_the_limit_of_compilations(monkeypatch):
    monkeypatch.setattr(compile_module, "_RECOMPILES", 4)
    for weight_decay in torch.linspace(0, 1, 6).tolist():
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), fused=True, weight_decay=weight_decay)
        parameter.grad = torch.ones(3)
        optimizer.step()
        CompiledUpdate(optimizer, "default")(None, None)


def test_steps_around_one_optimizer_compile_once():
    params = parameters("cpu")
    optimizer = optimizer_of(params)
    gradients(params, 0)
    optimizer.step()
    CompiledUpdate(optimizer, "default")(None, None)
    with torch.compiler.set_stance("fail_on_recompile"):
        CompiledUpdate(optimizer, "default")(None, None)
