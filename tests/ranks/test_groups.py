"""Process groups that overlap, and that come later: those that hang together vote together, and none waits for ever."""

import pytest
import torch
from torch import distributed

from graphmod import CUDAGraphModule
from graphmod.ranks.agreement import LateRanks, connected
from tests.support.ranks import Ranks

GROUPS = {
    "chain": ([0, 1], [1, 2]),
    "outer": ([0, 1], [0, 1, 2]),
    "first of each": ([0, 1], [0, 2]),
    "apart": ([0, 1], [2]),
}


def communicates(device, rank, kind):
    """Steps in whose groups sums are made, in each fourth call only in the last group but for a chain. One rank has
    another setting for some calls. Whether numbers are eager's; replays, and state."""
    groups = [(ranks, distributed.new_group(ranks)) for ranks in GROUPS[kind]]
    weight = torch.ones(4, device=device)
    now = {"call": 0, "scale": 1.0}

    def step(x):
        y = x * weight * now["scale"]
        for place, (ranks, group) in enumerate(groups):
            if rank in ranks and (kind in ("chain", "apart") or place == 0 or now["call"] % 4 == 3):
                distributed.all_reduce(y, group=group)
        weight.add_(y.mean() / 100)
        return y.clone()

    def run(called):
        weight.fill_(1.0)
        found = []
        for index in range(24):
            now.update(call=index % 4, scale=0.5 if rank == 2 and 12 <= index < 14 else 1.0)
            found.append(called(torch.full((4,), float(index + rank), device=device)).clone())
        return found

    wrapper = CUDAGraphModule(step)
    equal = all(map(torch.equal, run(step), run(wrapper)))
    return equal, wrapper.stats.replays, wrapper.stats.state, wrapper.last_failure


def meets_without_the_last(device, rank):
    """What ranks are told that wait for one that does not come."""
    try:
        return "" if rank == 2 else connected({(2, 1, 0)}, timeout=0.5)
    except LateRanks as error:
        return str(error)


@pytest.fixture(scope="module")
def ranks():
    with Ranks("cpu", 3) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", GROUPS)
def test_ranks_in_groups_of_any_kind_have_the_numbers_of_eager(ranks, kind):
    found = ranks.run(communicates, kind, timeout=60)
    assert all(equal for equal, *_ in found)
    assert all(replays > 3 and state == "captured" for _, replays, state, _ in found), found
    if kind != "apart":
        assert len({replays for _, replays, *_ in found}) == 1, found


def test_ranks_that_say_nothing_are_named(ranks):
    said = ranks.run(meets_without_the_last)
    assert "ranks [2, 1, 0] meet, and nothing came from [2]" in said[0] and "from [2]" in said[1]
