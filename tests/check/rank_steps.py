"""One of four ranks that communicate with nobody. Checks each step, and writes what the check says as JSON.

python rank_steps.py STORE OUTPUT
"""

import json
import os
import sys

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from graphmod.check.meeting import Meeting
from graphmod.check.one_rank import pretend
from graphmod.check.run import checked

RANK, RANKS = int(os.environ.get("RANK", 0)), 4
X = torch.ones(4, 8)


def sums(*shape):
    distributed.all_reduce(torch.ones(shape))  # of all


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step():
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def ddp(**settings):
    return trained(DistributedDataParallel(plain(), **settings))


def ddp_unused():
    return ddp(find_unused_parameters=True)


def shard(*modules):
    mesh = init_device_mesh("cpu", (RANKS,))  # where X is; else, where there is a GPU, they would be there
    for module in modules:
        fully_shard(module, mesh=mesh)


def fsdp():
    model = plain()
    shard(model[0], model)
    return trained(model)


def tensor_parallel():
    mesh = init_device_mesh("cpu", (RANKS,))
    return trained(parallelize_module(plain(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def mesh_of_two():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = parallelize_module(plain(), mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(fully_shard(model, mesh=mesh["data"]))


def subgroup_of_even_ranks():
    even = distributed.new_group([0, 2], backend="gloo")

    def step():
        sums(3)
        if RANK % 2 == 0:
            distributed.all_reduce(X.clone(), group=even)
        sums(3)

    return step


def ring():
    def step():
        there, here = X.clone(), X.clone()
        work = [distributed.isend(there, (RANK + 1) % RANKS), distributed.irecv(here, (RANK - 1) % RANKS)]
        for one in work if RANK % 2 else reversed(work):
            one.wait()

    return step


def uneven():
    def step():
        amounts = [1 + (RANK + other) % 3 for other in range(RANKS)]
        distributed.all_to_all_single(torch.ones(sum(amounts)), torch.ones(sum(amounts)), amounts, amounts)

    return step


def branch():
    def step():
        sums(16, 16)
        if RANK == 0:
            sums(16, 16)  # of rank 0
            sums(2)
        else:
            distributed.broadcast(torch.ones(4), 0)  # of others

    return step


def other_shape():
    return lambda: sums(4 if RANK == 2 else 8)


def other_operation():
    return lambda: distributed.all_reduce(X.clone(), distributed.ReduceOp.MAX if RANK else distributed.ReduceOp.SUM)


def other_root():
    return lambda: distributed.broadcast(X.clone(), RANK // 2)


def other_group():
    half = distributed.new_group([0, 1])

    def step():
        sums(3)
        distributed.all_reduce(X.clone(), group=half if RANK == 0 else None)

    return step


def another_group_of_all():
    again = distributed.new_group()
    return lambda: distributed.all_reduce(X.clone(), group=again if RANK == 0 else None)


def circle():
    """Each of two groups would wait for the other."""
    groups = [distributed.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]

    def step():
        for one in {0: (0, 2), 1: (1, 0), 2: (2, 1), 3: ()}[RANK]:
            distributed.all_reduce(X.clone(), group=groups[one])

    return step


def one_more():
    def step():
        sums(5)
        if RANK == 3:
            sums(5)

    return step


def send_without_recv():
    def step():
        sums(3)
        if RANK == 1:
            distributed.isend(X.clone(), 2)

    return step


def other_message():
    def step():
        if RANK == 0:
            distributed.isend(X.clone(), 1)
        elif RANK == 1:
            distributed.irecv(torch.ones(2), 0)

    return step


def unused_by_one():
    """A rank whose loss does not need the second layer."""
    model = plain()
    shard(model[0], model[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step():
        (model[0](X) if RANK == 1 else model(X)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


SAME = (ddp, ddp_unused, fsdp, tensor_parallel, mesh_of_two, subgroup_of_even_ranks, ring, uneven)
PARTED = (
    *(branch, other_shape, other_operation, other_root, other_group, another_group_of_all, circle, one_more),
    *(send_without_recv, other_message, unused_by_one),
)


def main(path, output):
    store = distributed.FileStore(path, RANKS)
    pretend(store, Meeting(store, RANK, RANKS, 60.0, waits=False))
    distributed.init_process_group("nccl")
    found = {}
    for make in (*SAME, *PARTED):
        meeting = Meeting(store, RANK, RANKS, 60.0, waits=False)
        report = checked(make(), (), {}, meeting=meeting)
        found[make.__name__] = [report.describe(), json.loads(report.to_json())]
    with open(output, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
