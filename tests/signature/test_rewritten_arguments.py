"""An argument whose memory was rewritten or exchanged between two calls is read anew."""

import pytest
import torch
from harness import loss_of, mlp, twins

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
