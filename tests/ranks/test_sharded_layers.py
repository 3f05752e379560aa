"""Layers in `fully_shard` with graphs of their own have eager's numbers, whatever else programs do, and its memory."""

import pytest
import torch

from tests.ranks import sharded_layers
from tests.support import pool


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("no two GPUs")
    with pool.Ranks(request.param) as ranks:
        yield ranks


REPLAYED = ("as it comes", "checkpoint", "mixed", "frozen", "last stays whole", "saves", "prefetches")
QUICK = (*REPLAYED, "towers", "twice", "evaluates", "unshards in between", "moves", "raises", "another rank")


@pytest.mark.parametrize(
    "habit", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in sharded_layers.HABITS]
)
def test_habits_have_the_numbers_of_eager(ranks, habit):
    for equal, changing, later, said, moved in ranks.run(sharded_layers.layers_as_eager, habit):
        assert equal and changing, said
        if habit in REPLAYED or ranks.device == "cpu":
            assert all(replays for replays, _ in later), (later, said)
        if habit in REPLAYED:
            assert not any(eager for _, eager in later), (later, said)
        if habit == "moves":  # between a forward, which was replayed, and its backward
            assert moved and all(replays % 2 and eager for replays, eager in later), (later, said)


def test_gradients_of_all_layers_share_the_memory_of_one(ranks):
    for block, gradients, _, replays in ranks.run(sharded_layers.shares_memory, True):
        assert gradients == block and all(replays)


@pytest.mark.gpu
def test_the_memory_is_that_of_eager_and_of_two_layers(ranks):
    if ranks.device == "cpu":
        pytest.skip("emulated graphs share no memory")
    slack = 64 * 2**20  # workspaces of the capture stream, and rounding
    eager = [peaks for *_, peaks, _ in ranks.run(sharded_layers.shares_memory, False)]
    for (block, _, peaks, _), before in zip(ranks.run(sharded_layers.shares_memory, True), eager, strict=True):
        assert all(now <= then + 2 * block + slack for now, then in zip(peaks, before, strict=True)), (peaks, before)
