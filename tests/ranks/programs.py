"""What ranks run. Each function returns what the test compares; numbers are compared where they are made."""

import contextlib
import functools
import logging

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from graphmod import CUDAGraphConfig, CUDAGraphModule, graph_layers
from graphmod.ranks.reducer import Bucket
from graphmod.trace.dispatch import current

STEPS = 12  # of a training that is compared with eager's


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks with dropout between them, and a buffer."""

    def __init__(self, width=16, blocks=3, dropout=0.1):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x * self.scale.to(x.dtype))


def shared(kind, model, device):
    """The model as ranks share it, and an optimizer for it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    settings = {"lr": torch.tensor(1e-2, device=device), "fused": True, "capturable": device.type == "cuda"}
    if kind.startswith("ddp"):
        more = {"device_ids": [device.index]} if device.type == "cuda" else {}
        model = DistributedDataParallel(model, broadcast_buffers=kind != "ddp_own_buffers", **more)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    if kind.startswith("fsdp"):
        more = {"reshard_after_forward": False} if kind == "fsdp_whole" else {}
        if kind == "fsdp_bf16":
            more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block.up if kind == "fsdp_inside" else block, mesh=mesh, **more)
        fully_shard(model, mesh=mesh, **more)
    if kind == "tp":
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model, torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    return model, torch.optim.AdamW(model.parameters(), **settings)


def without_sync(kind, model, last):
    if kind.startswith("fsdp"):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext() if last or not kind.startswith("ddp") else model.no_sync()


def train(device, rank, kind, how, microbatches, steps):
    """Losses and parameters of some steps, and the wrappers."""
    torch.manual_seed(0)
    dropout = 0.0 if kind == "tp" else 0.1
    model, optimizer = shared(kind, Net(dropout=dropout).to(device), device)

    def step(x):
        total = 0
        for index, part in enumerate(x.chunk(microbatches)):
            with without_sync(kind, model, index == microbatches - 1):
                loss = model(part).float().square().mean() / microbatches
                loss.backward()
            total = total + loss.detach()
        if kind == "own":
            for parameter in model.parameters():
                distributed.all_reduce(parameter.grad)
        if kind != "tp":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return total

    called, wrappers = step, []
    if how == "step":
        called = CUDAGraphModule(step)
        wrappers = [called]
    elif how == "layers":
        wrappers = graph_layers(model)
    elif how is not None:
        wrappers = graph_layers(model, layers=how)
    generator = torch.Generator().manual_seed(7 if kind == "tp" else 7 + rank)
    torch.manual_seed(5 + rank)
    losses = [called(torch.randn(6, 16, generator=generator).to(device)) for _ in range(steps)]
    parameters = [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in model.parameters()]
    return [float(one) for one in losses], parameters, wrappers


def trains_as_eager(device, rank, kind, how, microbatches):
    """Whether losses and parameters are eager's, and what the wrappers did."""
    losses, parameters = eagerly(device, rank, kind, microbatches)
    again, others, wrappers = train(device, rank, kind, how, microbatches, STEPS)
    equal = losses == again and all(map(torch.equal, parameters, others))
    stats = [(one.stats.state, one.stats.replays, one.last_failure) for one in wrappers]
    return equal, len(set(losses)) > STEPS // 2, stats


@functools.cache
def eagerly(device, rank, kind, microbatches):
    """The losses and parameters that graphs of a step and of layers are both compared with."""
    losses, parameters, _ = train(device, rank, kind, None, microbatches, STEPS)
    return losses, [one.clone() for one in parameters]


def averages(device, rank):
    """The gradients of DistributedDataParallel in a graph, and the mean over ranks of those of a plain model."""
    torch.manual_seed(0)
    plain = Net(dropout=0.0).to(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(dropout=0.0).to(device))

    def step(x):
        model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    wrapper = CUDAGraphModule(step)
    for index in range(6):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * index + rank)).to(device)
        grads = [grad.clone() for grad in wrapper(x)]
        model.zero_grad()
    plain(x).square().mean().backward()
    for parameter, grad in zip(plain.parameters(), grads, strict=True):
        distributed.all_reduce(parameter.grad)
        assert torch.equal(parameter.grad / distributed.get_world_size(), grad)
    return wrapper.stats.state


PARTS = (
    *("shape", "many_shapes", "scale", "scale_each", "read", "read_late", "moved", "reset"),
    *("fails", "fails_inside", "fails_late"),
)


def parts_ways(device, rank, how, sharded):
    """One rank goes another way than the other in some calls. Whether all numbers are eager's, and what was said."""
    said = []

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    def run(graphs):
        torch.manual_seed(0)
        model, optimizer = shared("fsdp" if sharded else "ddp", Net(blocks=1, dropout=0.0).to(device), device)
        now = {"scale": 1.0, "reads": how == "read" and rank == 1, "fails": 0}
        if rank == 1 and how.startswith("fails"):
            now["fails"] = {"fails": 1, "fails_inside": 3, "fails_late": 2}[how]

        def fails(place):
            recorder = current()
            if now["fails"] == place and recorder is not None and not recorder.watching:
                raise RuntimeError("injected")

        def in_the_backward(module, args, result):
            result.register_hook(lambda _: fails(3))

        inner = model if sharded else model.module
        inner.blocks[0].register_forward_hook(in_the_backward)

        def step(x):
            fails(1)
            loss = model(x).square().mean() * now["scale"]
            if now["reads"] and float(loss) < -1:
                loss = loss * 2
            loss.backward()
            fails(2)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        called = CUDAGraphModule(step) if graphs else step
        generator, losses = torch.Generator().manual_seed(7 + rank), []
        for index in range(30):
            rows = 4
            if rank == 1:
                rows = 3 if (how == "shape" and index in (1, 8, 9, 20)) or (how == "many_shapes" and index % 3) else 4
                now["scale"] = {"scale": 1.0 + (index >= 10), "scale_each": float(index)}.get(how, 1.0)
                now["reads"] = now["reads"] or (how == "read_late" and index == 12)
                now["fails"] = 0 if index == 15 else now["fails"]
                if how == "moved" and index == 15:
                    with torch.no_grad():
                        inner.scale = inner.scale.clone()
            if graphs and rank == 0 and how == "reset" and index == 15:
                called.reset()
            if graphs and index == 17:
                called.force_enable()
            losses.append(float(called(torch.randn(rows, 16, generator=generator).to(device))))
        kept = [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in model.parameters()]
        return losses, kept, called

    losses, kept, _ = run(False)
    logging.getLogger("graphmod").addHandler(handler := Keep())
    again, others, wrapper = run(True)
    logging.getLogger("graphmod").removeHandler(handler)
    equal = losses == again and all(map(torch.equal, kept, others))
    return equal, wrapper.stats.replays, wrapper.stats.eager_calls, said


def refuses(device, rank, settings):
    """What a wrapper says of a DistributedDataParallel with settings that are not supported."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(dropout=0.0).to(device), **settings)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return loss.detach(), grads

    wrapper = CUDAGraphModule(step, CUDAGraphConfig(max_failures=1))
    for index in range(6):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(index + rank)).to(device)
        loss, grads = wrapper(x)
        again, expected = step(x)
        assert torch.equal(loss, again) and all(map(torch.equal, grads, expected))
    return wrapper.stats.state, wrapper.last_failure


def votes(device, rank, hosts):
    """Votes of all ranks, as if they ran on so many machines."""
    from graphmod.ranks import agreement

    original = agreement._boot
    agreement._boot = lambda: f"machine {rank % hosts}"
    try:
        box = agreement.Ballot([0, 1], 30)
    finally:
        agreement._boot = original
    found = []
    for index in range(60):
        found.append(box.vote((index * (rank + 1)) % 3))
    return found


def comes_late(device, rank):
    """What the first rank is told where the second does not vote."""
    from graphmod.ranks import agreement

    box = agreement.Ballot([0, 1], 0.5)
    box.vote(1)
    if rank:
        return ""
    try:
        box.vote(1)
    except agreement.LateRanks as error:
        return str(error)


def ends_early(device, rank):
    """What the first rank is told where the process of the second is killed."""
    import os
    import signal

    from graphmod.ranks import agreement

    box = agreement.Ballot([0, 1], 60)
    box.vote(1)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        box.vote(1)
    except agreement.LateRanks as error:
        return str(error)


def copies(device, rank):
    """A copy of a model that was taken over trains as DistributedDataParallel does."""
    import copy

    torch.manual_seed(0)
    model = DistributedDataParallel(Net(dropout=0.0).to(device))
    wrapper = CUDAGraphModule(lambda x: model(x).square().mean())
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank)).to(device)
    wrapper(x).backward()
    twin = copy.deepcopy(model)
    assert type(twin) is DistributedDataParallel is not type(model)
    twin.zero_grad()
    twin(x).square().mean().backward()
    return all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def forgets_a_parameter(device, rank):
    """What is said where a parameter gets no gradient."""
    torch.manual_seed(0)
    inner = Net(dropout=0.0).to(device)
    inner.unused = nn.Linear(2, 2).to(device)
    model = DistributedDataParallel(inner)
    wrapper = CUDAGraphModule(lambda x: model(x).square().mean())
    x = torch.randn(4, 16).to(device)
    wrapper(x).backward()
    try:
        wrapper(x).backward()
    except RuntimeError as error:
        return str(error)


KEPT = []


def keeps_its_graphs(device, rank):
    """Leaves a captured step behind."""
    KEPT.append(train(device, rank, "ddp", "step", 1, 6))


def finds_shapes_anew(device, rank):
    """Steps in which DTensor has forgotten what it knew of operations; why they are not captured, and how often not."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.manual_seed(0)
    model, optimizer = shared("tp", Net(dropout=0.0).to(device), device)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    wrapper = CUDAGraphModule(step)
    for _ in range(6):
        _clear_sharding_prop_cache()
        wrapper(torch.ones(4, 16, device=device))
    return wrapper.stats.state, wrapper.stats.failures, wrapper.last_failure


def stays_away(device, rank):
    """What the first rank is told where the second does not make a call of the step that was kept."""
    (wrapper,) = KEPT[0][2]
    wrapper._context.agreement._ballot._timeout = 0.5
    if rank:
        return ""
    try:
        wrapper(torch.ones(8, 16, device=device))
    except RuntimeError as error:
        return str(error)


def keeps_gradients(device, rank):
    """Whether gradients lie where they lay in the step before, and whether those that are kept stay what they were."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(dropout=0.0).to(device))
    graph_layers(model)
    places, kept, copies = [], [], []
    for index in range(12):
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(index)).to(device)).sum().backward()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
        if index in (7, 9):
            kept += [parameter.grad for parameter in model.parameters()]
            copies += [grad.clone() for grad in kept[len(copies) :]]
        model.zero_grad()
    return places[5] == places[6] == places[7], all(map(torch.equal, kept, copies))


def computes_in_place(device, rank):
    """State of a step, which parameters' gradients its capture computed into their bucket, and which have a matrix."""
    torch.manual_seed(0)
    model, _ = shared("ddp", Net().to(device), device)
    aimed, part_for = [], Bucket.part_for

    def counted(bucket, member):
        aimed.append(bucket.members[member])
        return part_for(bucket, member)

    def call(x):
        model(x).square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return grads

    step, Bucket.part_for = CUDAGraphModule(call), counted
    try:
        for _ in range(6):
            step(torch.randn(4, 16, device=device))
    finally:
        Bucket.part_for = part_for
    return step.stats.state, sorted(aimed), [i for i, p in enumerate(model.parameters()) if p.dim() == 2]
