"""Layers whose capture fails on demand, in the forward or in the backward."""

import ctypes

import torch
from torch import nn

from tests.support.harness import loss_of, mlp

FAILING = {"an exception": ValueError, "no memory": torch.OutOfMemoryError, "a host read": None}


class Trap:
    """Springs while it is armed and the code around it is being captured, where alone a host read is refused.

    What arms it lies in memory of C, so that arming it is no change of anything that graphs guard.
    """

    def __init__(self):
        self._state = (ctypes.py_object * 2)(None, None)

    @property
    def armed(self):
        return self._state[0]

    @armed.setter
    def armed(self, value):
        self._state[0] = value

    @property
    def error(self):
        return self._state[1]

    @error.setter
    def error(self, value):
        self._state[1] = value

    def __call__(self, x):
        if self.armed:
            try:
                x.sum().item()
            except RuntimeError:
                if self.error is not None:
                    raise self.error("the injected one") from None
                raise


class TrapBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trap):
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.trap(grad)
        return grad * 1, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = mlp("cpu"), nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.forward_trap, self.backward_trap = Trap(), Trap()

    def forward(self, x):
        x = self.dropout(self.norm(self.body(x)))
        self.forward_trap(x.detach())
        return TrapBackward.apply(torch.tanh(x), self.backward_trap)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def run(side, i):
    x = side.batch(i, 6, 8).requires_grad_()
    output = side.call(x)
    loss = loss_of(output)
    loss.backward()
    side.note(output=output, x=x.grad)
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad()


CAPTURES_AT = 2  # the first step after two warm-up steps


def armed(trap, reason, steps):
    """The plain step, with a trap that is armed in some of the steps."""

    def step(side, i):
        found = trap(side)
        found.armed, found.error = i in steps, FAILING[reason]
        run(side, i)

    return step
