"""One of eight ranks, of which the others are not there: collectives do nothing. Prints what was captured."""

import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphmod import CUDAGraphModule
from tests.ranks.programs import Net


def main(shape):
    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    names = ("data", "model")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = Net(width=32, dropout=0.0)
    for block in model.blocks:
        if len(shape) > 1:
            parallelize_module(block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    wrapper = CUDAGraphModule(step)
    for _ in range(8):
        wrapper(torch.randn(4, 32))
    local = model.blocks[0].up.weight._local_tensor
    print(wrapper.stats.state, wrapper.stats.replays, tuple(local.shape), wrapper.last_failure)


main(tuple(map(int, sys.argv[1:])))
