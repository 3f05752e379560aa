"""Results come back in the structure, type and identity that the eager call gives."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from graphmod import CUDAGraphModule
from tests.support.harness import config, loss_of, mlp, play, twins

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Bundle:
    x: torch.Tensor
    label: str = "some"
    rest: Any = None


class Returns(nn.Module):
    """Returns what `make(hidden, layer, argument)` makes of a hidden state."""

    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(8, 8), make

    def forward(self, x):
        return self.make(torch.tanh(self.linear(x)), self.linear, x)


OUTPUTS = {
    "a tensor": lambda h, m, x: h,
    "a tuple": lambda h, m, x: (h, h * 2),
    "a tuple of one": lambda h, m, x: (h,),
    "a list in a dict": lambda h, m, x: {"h": [h, {"twice": h * 2}]},
    "an ordered dict": lambda h, m, x: OrderedDict(b=h, a=h + 1),
    "a named tuple": lambda h, m, x: Pair(h, right=h - 1),
    "a dataclass": lambda h, m, x: Bundle(h, "label", (h * 3, None)),
    "a model output": lambda h, m, x: BaseModelOutputWithPast(last_hidden_state=h, hidden_states=(h * 1, h * 2)),
    "another model output": lambda h, m, x: CausalLMOutputWithPast(loss=h.mean(), logits=h),
    "numbers, strings and None": lambda h, m, x: (h, 3, 0.5, None, "text", True, h.shape),
    "with and without gradients": lambda h, m, x: (h.detach() * 2, h, h.argmax(-1), h > 0),
    "None in between": lambda h, m, x: (None, h, None),
    "the same tensor twice": lambda h, m, x: (h, h),
    "views of one tensor": lambda h, m, x: h.chunk(2, dim=-1),
    "a transposed result": lambda h, m, x: h.T,
    "an expanded result": lambda h, m, x: h.mean(0, keepdim=True).expand(4, 8),
    "an input": lambda h, m, x: (h, x),
    "a view of an input": lambda h, m, x: (h, x[1:], x.T),
    "a parameter": lambda h, m, x: (h, m.weight),
    "a view of a parameter": lambda h, m, x: (h, m.weight[:2]),
    "a detached parameter": lambda h, m, x: (h, m.bias.detach()),
    "a 0-d result": lambda h, m, x: (h.sum(), h.detach().sum()),
    "an empty result": lambda h, m, x: (h, h[:0], h.detach()[:, :0]),
    "bfloat16 and float64": lambda h, m, x: (h.bfloat16(), h.double(), h.detach().half()),
    "integers": lambda h, m, x: (h, (h * 10).int(), (h * 10).to(torch.uint8)),
    "a complex result": lambda h, m, x: (h, torch.complex(h.detach(), h.detach())),
    "nothing that depends on the input": lambda h, m, x: (h, torch.ones(3, device=x.device), m.weight * 2),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain input", "input with gradient"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_results_of_every_kind(name, requires_grad, device):
    def step(side, i):
        x = side.batch(i, 4, 8).requires_grad_(requires_grad)
        output = side.call(x)
        side.note(output=output, kind=type(output).__name__)
        real = [v.abs() if v.is_complex() else v for _, v in leaves(output) if isinstance(v, torch.Tensor)]
        loss_of(real).backward()
        side.note(x=x.grad)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    twins(lambda d: Returns(OUTPUTS[name]).to(d), step, device, replays=2)


LAZY = {
    "conjugate": lambda h, m, x: torch.complex(h.detach(), h.detach()).conj(),
    "negative": lambda h, m, x: torch.complex(h.detach(), h.detach()).conj().imag,
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_views_are_right_however_they_run(name, device):
    def step(side, i):
        output = side.call(side.batch(i, 4, 8)).resolve_conj().resolve_neg()
        return torch.view_as_real(output) if output.is_complex() else output

    play(lambda d: Returns(LAZY[name]).to(d), step, device)


def leaves(value):
    from tests.support.harness import tensors_of

    return tensors_of(value)


@pytest.mark.parametrize("name", OUTPUTS)
def test_results_of_every_kind_without_gradients(name, device):
    def step(side, i):
        with torch.no_grad():
            return side.call(side.batch(i, 4, 8))

    twins(lambda d: Returns(OUTPUTS[name]).to(d), step, device, replays=1)


def captured(make, device, *, grad=True):
    module = CUDAGraphModule(Returns(make).to(device), config())
    x = torch.randn(4, 8, device=device)
    for _ in range(4):
        with torch.set_grad_enabled(grad):
            module(x)
    return module, x


def test_an_input_that_is_returned_is_the_very_tensor_that_came_in(device):
    module, x = captured(OUTPUTS["an input"], device)
    assert module(x)[1] is x


def test_a_parameter_that_is_returned_is_the_parameter(device):
    module, x = captured(OUTPUTS["a parameter"], device)
    assert module(x)[1] is module.module.linear.weight


def test_a_tensor_returned_twice_is_one_tensor(device):
    module, x = captured(OUTPUTS["the same tensor twice"], device)
    first, second = module(x)
    assert first is second


def test_an_output_keeps_its_memory_layout(device):
    module, x = captured(OUTPUTS["a transposed result"], device)
    assert module(x).stride() == module.module(x).stride()


def test_a_result_that_cannot_be_taken_apart_runs_eagerly(device):
    class Box:
        def __init__(self, value):
            self.value = value

    def step(side, i):
        return side.call(side.batch(i, 4, 8)).value

    side, history = play(lambda d: Returns(lambda h, m, x: Box(h.detach())).to(d), step, device)
    assert history[-1][0] == 0 and "Box" in side.call.last_failure


def test_a_python_number_in_the_result_is_never_stale(device):
    """The module counts its calls and returns the count beside its tensor."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(8, 8), 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x), self.calls

    def step(side, i):
        output, _ = side.call(side.batch(i, 4, 8))
        loss_of(output).backward()
        side.note_gradients()
        return output.detach()

    # The number itself may only advance where the code runs; what must not happen is a value from another call.
    _, history = play(lambda d: Counts().to(d), step, device)
    assert history[-1][0] == 0, "a module whose Python result changes from call to call was captured"


def test_memory_side_by_side_outputs_do_not_overwrite_each_other(device):
    def step(side, i):
        left, right = side.call(side.batch(i, 4, 8))
        with torch.no_grad():
            left.add_(1)
        side.note(left=left, right=right)

    play(lambda d: Returns(lambda h, m, x: (h.detach() + 0, h.detach() * 2)).to(d), step, device)


def test_a_loss_computed_inside_is_a_result_like_any_other(device):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp("cpu")

        def forward(self, x, target):
            prediction = self.body(x)
            return {"loss": nn.functional.mse_loss(prediction, target), "prediction": prediction.detach()}

    def step(side, i):
        output = side.call(side.batch(i, 4, 8), target=side.batch(i, 4, 8, key=1))
        output["loss"].backward()
        side.note(output=output)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return output["loss"].item()

    twins(lambda d: WithLoss().to(d), step, device, replays=2)
