"""What loops do besides a plain step, beside an eager twin. Names of `HABITS` are run by `as_eager`."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from graphmod import CUDAGraphModule, check, graph_layers
from graphmod.step import gradients
from graphmod.train.settings import TrainGraphConfig
from graphmod.train.step import TrainStep
from tests.ranks.programs import Net


class Checkpointed(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Twice(Checkpointed):
    def forward(self, x):
        return super().forward(super().forward(x))


def plain(**more):
    return lambda: DistributedDataParallel(Net(dropout=0.0), **more)


def with_unused(**more):
    inner = Net(dropout=0.0)
    inner.unused = nn.Linear(2, 2)
    return DistributedDataParallel(inner, **more)


def without_head(kind, **more):
    inner = kind(dropout=0.0)
    del inner.head
    return DistributedDataParallel(inner, **more)


def unfrozen():
    inner = Net(dropout=0.0)
    inner.head.requires_grad_(False)
    model = DistributedDataParallel(inner)
    inner.head.requires_grad_(True)
    return model


def stepped(model):
    """Trained before, so that its own reducer has made its buckets."""
    for _ in range(2):
        loss_of(model, torch.ones(4, 16)).backward()
        model.zero_grad()
    return model


def embedded():
    inner = nn.Sequential(nn.Linear(16, 1), nn.Flatten(0), Rounded(), nn.Embedding(50, 4, sparse=True))
    inner[0].requires_grad_(False)
    return DistributedDataParallel(inner)


class Rounded(nn.Module):
    def forward(self, x):
        return x.abs().long().clamp(max=49)


def replicated():
    from torch.distributed._composable.replicate import replicate

    return replicate(Net(dropout=0.0))


def loss_of(model, x):
    return model(x).square().mean()


def looks_meanwhile(model, x):
    """A forward without gradients between another and its backward, and one that is not averaged."""
    result = model(x)
    with torch.no_grad():
        seen = model(x + 1)
    with model.no_sync():
        more = model(x - 1)
    return (result - seen - more).square().mean()


def halve(parameter):
    parameter.grad.mul_(0.5)


def hooked(model, x):
    """In the first step, between forward and backward, it gets hooks that change gradients."""
    loss = loss_of(model, x)
    if not hasattr(model, "hooked"):
        model.hooked = True
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
    return loss


def accumulated(model, x):
    """After its first step, each second one adds up two microbatches, of which the first is not averaged."""
    model.steps = getattr(model, "steps", 0) + 1
    if model.steps > 1 and model.steps % 2:
        with model.no_sync():
            loss_of(model, x - 1).backward()
    return loss_of(model, x)


HABITS = {
    "static accumulated": (plain(static_graph=True), accumulated),
    "hooked": (plain(bucket_cap_mb=0.001), hooked),
    "terms": (lambda: DistributedDataParallel(Terms(), bucket_cap_mb=0.0001), loss_of),
    "terms in one bucket": (lambda: DistributedDataParallel(Terms()), loss_of),
    "looks meanwhile": (plain(), looks_meanwhile),
    "reentrant": (lambda: without_head(Checkpointed), lambda model, x: loss_of(model, x.clone().requires_grad_())),
    "reentrant twice": (
        lambda: without_head(Twice, static_graph=True),
        lambda model, x: loss_of(model, x.clone().requires_grad_()),
    ),
    "static unused": (lambda: with_unused(static_graph=True), loss_of),
    "unfrozen": (unfrozen, loss_of),
    "sparse": (embedded, loss_of),
    "replicate": (replicated, loss_of),
    "small buckets": (lambda: stepped(plain(bucket_cap_mb=0.001)()), loss_of),
}


def as_eager(device, rank, habit, layers):
    """Whether losses and parameters are eager's; replays and what the first wrapper said."""
    make, loss_with = HABITS[habit]

    def run(graphs):
        torch.manual_seed(0)
        with device:
            model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            loss = loss_with(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        called, wrappers = step, []
        if graphs and layers:
            wrappers = graph_layers(model)
        elif graphs:
            called = CUDAGraphModule(step)
            wrappers = [called]
        generator = torch.Generator().manual_seed(7 + rank)
        losses = [float(called(torch.randn(4, 16, generator=generator).to(device))) for _ in range(12)]
        return losses, [one.detach() for one in model.parameters()], wrappers

    losses, kept, _ = run(False)
    again, others, wrappers = run(True)
    equal = losses == again and all(map(torch.equal, kept, others))
    return equal, wrappers[0].stats.replays, wrappers[0].last_failure


def looks_alone(device, rank, grads):
    """The first rank alone has a callable that uses the module inside. Whether training is eager's, and what is said
    of it; then its layers get graphs on all ranks."""
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        with device:
            model = DistributedDataParallel(Net(dropout=0.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def look(x, model=model):
            return model.module(x).mean()

        look = CUDAGraphModule(look) if graphs else look
        for index in range(8):
            x = torch.full((4, 16), float(index + rank), device=device)
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                with torch.set_grad_enabled(grads):
                    found.append(float(look(x).detach()))
        found += [one.detach() for one in model.parameters()]
    if rank == 0:
        assert look.stats.state == "captured" if not grads else "its own reducer" in look.last_failure
    layers = graph_layers(model)
    for _ in range(6):
        loss_of(model, x).backward()
    assert all(one.stats.state == "captured" for one in layers), layers[0].last_failure
    half = len(found) // 2
    pairs = zip(found[:half], found[half:], strict=True)
    return all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in pairs)


def joins(device, rank, how):
    """Ranks that make different numbers of steps: whether numbers are eager's, and what was said."""
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net(dropout=0.0).to(device))

        def step(x, model=model):
            loss = model(x).square().mean()
            loss.backward()
            model.zero_grad()
            return loss.detach()

        called = CUDAGraphModule(step) if graphs else step
        if how == "late":
            called(torch.ones(4, 16, device=device))
            if graphs:
                try:
                    model.join()
                except RuntimeError as error:
                    return True, str(error)
        with model.join():
            found.append([float(called(torch.full((4, 16), float(i), device=device))) for i in range(6 + rank)])
    return found[0] == found[1], called.last_failure


def sends(device, rank):
    """Messages around a ring, which all ranks begin before any waits. Whether they are eager's, and the state."""
    ranks = distributed.get_world_size()

    def step(x):
        sent = x * 2
        came = torch.empty_like(x)
        ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
        if device.type == "cuda":  # where NCCL runs one after the other what is not in one batch
            messages = (distributed.irecv, came, behind), (distributed.isend, sent, ahead)
            works = distributed.batch_isend_irecv([distributed.P2POp(*one) for one in messages])
        else:
            works = [distributed.irecv(came, behind), distributed.isend(sent, ahead)]
        more = x + 1
        for work in works:
            work.wait()
        sent.zero_()
        total = distributed.all_reduce(x.clone(), async_op=True).get_future().wait()[0]
        return came + more, total.clone()

    wrapper = CUDAGraphModule(step)
    equal = True
    for index in range(8):
        x = torch.full((100_000,), float(index + rank), device=device)
        equal &= all(map(torch.equal, wrapper(x), step(x)))
    return equal, wrapper.stats.state


class Terms(nn.Module):
    """The gradient of a sum is that of each term, and that of a view of a parameter shares its memory."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.delta, self.bias = nn.Parameter(torch.randn(256) / 9), nn.Parameter(torch.randn(64) / 9)
        self.a, self.b = nn.Parameter(torch.randn(16, 2) / 9), nn.Parameter(torch.randn(2, 16) / 9)

    def forward(self, x):
        hidden = self.blocks[0](x) + self.bias.view(4, 16)
        return self.blocks[1](hidden @ (self.delta.view(16, 16) + self.a @ self.b))


def compiles(device, rank, kind):
    """A step whose model, or its blocks, torch.compile compiles: whether its numbers are those of the same step without
    graphs; state, replays and what is said."""

    def run(graphs):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Net(dropout=0.0).to(device)
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        if kind in ("fully_shard", "tensor parallelism"):
            for block in model.blocks:
                if kind == "fully_shard":
                    block.compile(backend="aot_eager")
                    fully_shard(block, mesh=mesh)
                else:
                    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
                    block.compile(backend="aot_eager")
            if kind == "fully_shard":
                fully_shard(model, mesh=mesh)
        elif kind == "around":
            model = torch.compile(DistributedDataParallel(model), backend="aot_eager")
        else:
            model = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

        def step(x):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        called = CUDAGraphModule(step) if graphs else step
        generator = torch.Generator().manual_seed(7 if kind == "tensor parallelism" else 7 + rank)
        losses = [float(called(torch.randn(4, 16, generator=generator).to(device))) for _ in range(10)]
        return losses, called

    losses, _ = run(False)
    again, called = run(True)
    return losses == again, called.stats.state, called.stats.replays, called.last_failure


def pieces_behind(loss):
    """How many pieces of compiled code the backward of a loss has."""
    found, queue = set(), [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in found:
            found.add(node)
            queue += [after for after, _ in node.next_functions]
    return sum("CompiledFunction" in node.name() for node in found)


def compiles_in_pieces(device, rank, kind):
    """How many pieces the backward of a compiled model has in the calls without graphs, and in those with them; whether
    numbers are equal."""

    def own_loop(graphs, pieces):
        inside = torch.compile(Net(192, dropout=0.0).to(device), backend="aot_eager")
        model = DistributedDataParallel(inside, bucket_cap_mb=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

        def step(x):
            loss = loss_of(model, x)
            pieces.add(pieces_behind(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return CUDAGraphModule(step) if graphs else step

    def train_step(graphs, pieces):
        net = Net(192, dropout=0.0).to(device)
        step = TrainStep(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1, foreach=False),
            loss_fn=lambda model, x: loss_of(model, x),
            compile="default",
            config=TrainGraphConfig(scope=scope if graphs else "none"),
            process_group=distributed.group.WORLD,
        )
        around = step.iteration.parallel._replicated
        around.bucket_bytes_cap = 2**20
        around.register_forward_hook(lambda module, inputs, loss: pieces.add(pieces_behind(loss)))
        return lambda x: step(x[None])

    make, scope = (own_loop, None) if kind == "own loop" else (train_step, kind)
    losses, pieces = [], (set(), set())
    for graphs, seen in enumerate(pieces):
        torch.manual_seed(0)
        torch._dynamo.reset()
        called = make(bool(graphs), seen)
        generator = torch.Generator().manual_seed(7 + rank)
        losses.append([float(called(torch.randn(4, 192, generator=generator).to(device))) for _ in range(10)])
    return *pieces, losses[0] == losses[1]


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 32, bias=False)

    def forward(self, x):
        hidden = self.embedding(x)
        return self.head(hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden)))))


def splits_the_vocabulary(device, rank):
    """A model with split layers, embedding, head and loss: whether its numbers are eager's; state, replays and what is
    said."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))

    def run(graphs):
        torch.manual_seed(0)
        model = Tokens().to(device)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel(use_local_output=False)}
        parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate()), **plan})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)

        def step(x, targets):
            with loss_parallel():
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), targets.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.full_tensor().detach()

        called = CUDAGraphModule(step) if graphs else step
        generator = torch.Generator().manual_seed(7)
        batches = [torch.randint(0, 32, (4, 8), generator=generator).to(device) for _ in range(10)]
        return [float(called(x, (x + 1) % 32)) for x in batches], called

    losses, _ = run(False)
    again, called = run(True)
    return losses == again and losses[-1] < losses[0], called.stats.state, called.stats.replays, called.last_failure


def evaluates(device, rank, inside):
    """What is said of a step and of an evaluation that take turns, through DistributedDataParallel or what it holds."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(dropout=0.0).to(device))

    def step(x):
        loss = loss_of(model, x)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    look = torch.no_grad()(lambda x: (model.module if inside else model)(x).sum())
    called = CUDAGraphModule(step), CUDAGraphModule(look)
    for index in range(8):
        x = torch.full((4, 16), float(index + rank), device=device)
        assert called[1](x).item() == look(x).item()
        called[0](x)
    return [(one.stats.state, one.last_failure) for one in called]


def is_looked_at(device, rank, settings, before):
    """Training after a check of its step, or of its layers: whether the model is what it was, and whether gradients
    are those of a twin that was called as often without being checked; then once more, captured."""

    def trained(checked, layers):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net(dropout=0.0).to(device), **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        def calls(count, called=step):
            inputs = [torch.full((4, 16), index + rank / 2, device=device) for index in range(count)]
            return [called(x) for x in inputs]

        calls(before)
        if checked and layers:
            check(model, torch.ones(4, 16, device=device), layers=True)
        elif checked:
            check(step, torch.ones(4, 16, device=device))
        elif not layers:
            for _ in range(3 if "static_graph" in settings else 2):  # which shows in one call more what it is
                step(torch.ones(4, 16, device=device))
        as_found = type(model) is DistributedDataParallel and model.reducer is not None
        numbers = [*calls(3), *(p.grad.clone() for p in model.parameters())]
        wrapper = CUDAGraphModule(step)
        return as_found, [*numbers, *calls(8, wrapper)], wrapper.stats.replays

    found = []
    for layers in (False, True):
        (_, expected, _), (as_found, got, replays) = trained(False, layers), trained(True, layers)
        found.append((as_found, all(map(torch.equal, got, expected)), replays))
    return found


def clears_sharded(device, rank, how):
    """Whether losses, and gradients of `fully_shard` that are kept for good, are those of an eager twin; replays, and
    how often gradients that nobody kept were moved."""

    def trained(graphed, keeps=True):
        torch.manual_seed(0)
        model = Net(dropout=0.0).to(device)
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            if "inside" in how:
                optimizer.zero_grad(set_to_none="none" in how)
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        called = CUDAGraphModule(step) if graphed else step
        found, kept = [], []
        for index in range(10):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * index + rank)).to(device)
            found.append(called(x).clone())
            kept += [p.grad for p in model.parameters() if p.grad is not None and keeps]
            if "outside" in how:
                optimizer.zero_grad(set_to_none="none" in how)
        return [*found, *(one.to_local().clone() for one in kept)], called

    (expected, _), (got, called) = trained(False), trained(True)
    before = []
    move = gradients.swap_for_copy
    gradients.swap_for_copy = lambda *moved: before.append(moved) or move(*moved)
    try:
        _, lean = trained(True, keeps=False)
    finally:
        gradients.swap_for_copy = move
    equal = len(got) == len(expected) and all(map(torch.equal, got, expected))
    return equal, min(called.stats.replays, lean.stats.replays), len(before), called.last_failure


class Asking(nn.Linear):
    """A layer whose own code looks at its weight."""

    def forward(self, x):
        assert self.weight.shape[1] == x.shape[1]
        return x @ self.weight.t()


def asks_of_sharded(device, rank):
    """Whether losses are those of an eager twin, and the replays, of a step with parameters of `fully_shard` that code
    looks at while they are whole."""

    def trained(graphed):
        torch.manual_seed(0)
        model = nn.Sequential(*(Asking(8, 8, bias=False) for _ in range(3))).to(device)
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh(device.type, (distributed.get_world_size(),)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        called = CUDAGraphModule(step) if graphed else step
        generator = torch.Generator().manual_seed(rank)
        return [called(torch.randn(4, 8, generator=generator).to(device)).clone() for _ in range(8)], called

    (expected, _), (got, called) = trained(False), trained(True)
    return all(map(torch.equal, got, expected)), called.stats.replays, called.last_failure
