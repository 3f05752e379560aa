"""The programs of `benchmarks/hazards.py`: small training loops, each with one thing in it that a graph cannot repeat,
or that is said to be so.

A program is a function of a device. It returns a `Loop`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

PROGRAMS: dict[str, tuple[str, Callable]] = {}
CALLS = 12


@dataclass
class Loop:
    """One program.

    Attributes:
        model: whose parameters and buffers are compared at the end.
        body: `body(part, x)` is one iteration and returns a detached result; it gets `part`, or its graphed form.
        part: the module or function of one tensor that is to be graphed; None where the whole iteration is.
        before: called with the number of the call.
        batch: makes the input of a call from its number and a function `(shape...) -> tensor`.
        keeps: the loop keeps results, and looks at them when all calls are done.
    """

    model: nn.Module
    body: Callable[[Any, Tensor], Tensor]
    part: Any = None
    before: Callable[[int], None] = lambda index: None
    batch: Callable[[int, Callable], Tensor] = lambda index, random: random(4, 8)
    keeps: bool = False


def program(title: str) -> Callable:
    """Takes a program into the list under the words that the table shows."""

    def take(build: Callable) -> Callable:
        PROGRAMS[build.__name__] = title, build
        return build

    return take


def mlp(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(device)


def adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """One that can be captured, its rate apart."""
    device = next(model.parameters()).device
    more = {"capturable": True} if device.type == "cuda" else {}
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "fused": True, **more, **settings})


def trains(
    model: nn.Module, part: Any = None, optimizer: Any = None, loss: Callable | None = None, **more: Any
) -> Loop:
    """The usual iteration. With `part`, the optimizer stays outside of the graph."""
    optimizer = optimizer or adam(model)

    def body(part: Any, x: Tensor) -> Tensor:
        result = (loss or (lambda out: out.square().mean()))((part or model)(x))
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        return result.detach()

    return Loop(model, body, part, **more)


class Layer(nn.Module):
    """A layer around a function of its parts."""

    def __init__(self, device: torch.device, run: Callable) -> None:
        super().__init__()
        self.inner, self.run = nn.Linear(8, 8, device=device), run
        self.scale, self.calls = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.inner(x))


def layer(device: torch.device, run: Callable, before: Callable | None = None) -> Loop:
    """A model of one such layer, which is graphed; `before(layer, index)` runs before each call."""
    made = Layer(device, run)
    return trains(made, made, before=(lambda index: before(made, index)) if before else lambda index: None)


# -- nothing wrong ---------------------------------------------------------------------------------------------------


@program("a plain layer")
def plain(device):
    return layer(device, lambda self, x: torch.tanh(x))


@program("a whole step, AdamW with `fused=True, capturable=True`")
def whole_step(device):
    return trains(mlp(device))


@program("gradients clipped in a whole step")
def clips(device):
    model = mlp(device)
    optimizer = adam(model)

    def body(_, x):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Loop(model, body)


# -- values that the host reads --------------------------------------------------------------------------------------


@program("`if x.sum() > 0` in a forward")
def branch_on_a_value(device):
    return layer(device, lambda self, x: x * 2 if x.sum() > 0 else x)


@program("`.item()` in a forward")
def item(device):
    return layer(device, lambda self, x: x * x.abs().max().item())


@program("a boolean mask as index")
def mask(device):
    return layer(device, lambda self, x: x[x > 0].sum() + x.sum() * 0)


@program("`nonzero`, `unique` and others whose size depends on data")
def dynamic_size(device):
    return layer(device, lambda self, x: x.flatten()[(x > 0).nonzero(as_tuple=True)[0]].sum())


@program("`.cpu()` in a whole step")
def copies_to_the_host(device):
    model, seen = mlp(device), []
    return trains(model, loss=lambda out: seen.append(out.detach().cpu()) or out.square().mean())


@program("a host branch in a custom backward")
def branch_in_a_backward(device):
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 if grad.sum() > 0 else grad

    return layer(device, lambda self, x: Odd.apply(x))


@program("`torch.tensor([...], device=...)` in a forward")
def makes_a_tensor_of_a_list(device):
    return layer(device, lambda self, x: x * torch.tensor([1.0, 2.0] * 4, device=x.device))


# -- state in Python -------------------------------------------------------------------------------------------------


@program("a number in an attribute that the loop changes")
def attribute_changes(device):
    return layer(device, lambda self, x: x * self.scale, lambda self, index: setattr(self, "scale", 1.0 + index // 4))


@program("a class attribute that the loop changes")
def class_attribute_changes(device):
    class Config:
        scale = 1.0

    def before(self, index):
        Config.scale = 1.0 + index // 4

    return layer(device, lambda self, x: x * Config.scale, before)


@program("a closed-over variable that the loop changes")
def variable_changes(device):
    scale = 1.0

    def before(self, index):
        nonlocal scale
        scale = 1.0 + index // 4

    return layer(device, lambda self, x: x * scale, before)


@program("a counter in a forward")
def counts(device):
    def run(self, x):
        self.calls += 1
        return x * self.calls

    return layer(device, run)


@program("losses kept in a list inside the step")
def keeps_losses(device):
    model, seen = mlp(device), []

    def loss(out):
        seen.append(1)
        return out.square().mean() * len(seen)

    return trains(model, loss=loss)


@program("`next(iterator)` in the step")
def takes_from_an_iterator(device):
    model = mlp(device)
    data = iter([torch.full((4, 8), 0.1 * k, device=device) for k in range(4 * CALLS)])
    return trains(model, loss=lambda out: (out - next(data)).square().mean())


@program("`random.random()` decides")
def python_chance(device):
    return layer(device, lambda self, x: x * 2 if random.random() < 0.5 else x)


@program("`numpy.random` in a forward")
def numpy_chance(device):
    return layer(device, lambda self, x: x * float(numpy.random.rand()))


@program("`torch.manual_seed` in a forward")
def seeds_inside(device):
    def run(self, x):
        torch.manual_seed(3)
        return x * torch.rand_like(x)

    return layer(device, run)


@program("`train()` and `eval()` in the loop")
def mode_changes(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device)
    return trains(model, model, before=lambda index: model.train(index % 4 != 3))


@program("autocast switched on in the loop")
def autocast_changes(device):
    model = mlp(device)

    def body(part, x):
        body.calls += 1
        with torch.autocast(device.type, torch.bfloat16, enabled=body.calls > 7):
            return part(x).float().sum().detach()

    body.calls = 0
    return Loop(model, body, model)


# -- optimizers ------------------------------------------------------------------------------------------------------


@program("a rate that is a number, changed by the loop")
def rate_is_a_number(device):
    model = mlp(device)
    optimizer = adam(model)

    def before(index):
        optimizer.param_groups[0]["lr"] = 0.01 * 0.5 ** (index // 4)

    return trains(model, optimizer=optimizer, before=before)


@program("a rate that is a tensor, changed by a scheduler outside")
def rate_is_a_tensor(device):
    model = mlp(device)
    optimizer = adam(model, lr=torch.tensor(0.01, device=device))
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5 ** (epoch // 4))
    return trains(model, optimizer=optimizer, before=lambda index: scheduler.step() if index else None)


@program("a scheduler stepped inside")
def scheduler_inside(device):
    model = mlp(device)
    optimizer = adam(model)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.7**epoch)

    def body(_, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    return Loop(model, body)


@program("an optimizer that counts steps on the host (Adam as it comes)")
def steps_on_the_host(device):
    model = mlp(device)
    return trains(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))


@program("`GradScaler` in the step")
def grad_scaler(device):
    model = mlp(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler(device.type, 64.0)

    def body(_, x):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return Loop(model, body)


@program("`optimizer.load_state_dict` in the loop")
def optimizer_loaded(device):
    model = mlp(device)
    optimizer = adam(model)
    saved = {}

    def before(index):
        if index == 2:
            saved.update(optimizer.state_dict())
        if index == 8:
            optimizer.load_state_dict(saved)

    return trains(model, optimizer=optimizer, before=before)


# -- memory and structure --------------------------------------------------------------------------------------------


@program("`p.data = ...` in the loop")
def weights_exchanged(device):
    model = mlp(device)

    def before(index):
        if index == 7:
            model[0].weight.data = model[0].weight.data * 0.5

    return trains(model, model, before=before)


@program("a layer exchanged in the loop")
def layer_exchanged(device):
    model = mlp(device)
    other = nn.Linear(8, 16, device=device)

    def before(index):
        if index == 7:
            model[0] = other

    return Loop(model, lambda part, x: part(x).sum().detach(), model, before)


@program("results kept while the loop goes on")
def results_kept(device):
    model = mlp(device)
    return Loop(model, lambda part, x: part(x).detach(), model, keeps=True)


@program("another batch size for the last batch")
def other_shape(device):
    model = mlp(device)
    return trains(model, model, batch=lambda index, random: random(3 if index == 8 else 4, 8))


@program("a batch with other strides")
def other_strides(device):
    model = mlp(device)
    return trains(model, model, batch=lambda index, random: random(8, 4).t() if index > 7 else random(4, 8))


@program("a forward hook that is added later")
def hook_added(device):
    model = mlp(device)

    def before(index):
        if index == 7:
            model[0].register_forward_hook(lambda module, args, result: result * 2)

    return trains(model, model, before=before)


@program("a gradient hook that is added later, in a whole step")
def gradient_hook_added(device):
    model = mlp(device)

    def before(index):
        if index == 7:
            model[0].weight.register_hook(lambda grad: grad * 2)

    return trains(model, before=before)


@program("`requires_grad` set in the loop")
def freezes(device):
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return trains(model, optimizer=optimizer, before=lambda index: model[0].requires_grad_(index < 7))


@program("gradients accumulated over some calls")
def accumulates(device):
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def body(part, x):
        loss = part(x).square().mean()
        loss.backward()
        return loss.detach()

    def before(index):
        if index % 3 == 0 and index:
            optimizer.step()
            optimizer.zero_grad()

    return Loop(model, body, model, before)


@program("an embedding with `sparse=True`")
def sparse_gradient(device):
    model = nn.Embedding(16, 8, sparse=True, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = lambda index, random: (random(4, 8).abs() * 5).long().clamp(max=15)  # noqa: E731
    return trains(model, model, optimizer, batch=tokens)
