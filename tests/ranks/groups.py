"""Steps of three ranks that communicate in groups which not all of them are in."""

import torch
from torch import distributed

from graphmod import CUDAGraphModule
from graphmod.ranks.agreement import LateRanks, connected

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
