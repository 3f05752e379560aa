"""Layers that ranks compute together (tensor parallelism) with graphs of their own have eager's numbers, and all ranks
replay them, or none does."""

import pytest
import torch

from tests.ranks import split_layers
from tests.support import pool


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("no two GPUs")
    with pool.Ranks(request.param) as ranks:
        yield ranks


REPLAYED = ("as it comes", "accumulates", "checkpoint", "sequence", "by hand", "two losses")
QUICK = (*REPLAYED, "backward only", "fails in a forward", "fails in a backward", "moves", "other settings", "twice")


@pytest.mark.parametrize(
    "habit", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in split_layers.HABITS]
)
def test_habits_have_the_numbers_of_eager(ranks, habit):
    found = ranks.run(split_layers.layers_as_eager, habit)
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
