"""Layers in `fully_shard` with graphs of their own have eager's numbers, whatever else programs do, and its memory."""

import gc

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from graphmod import graph_layers, ungraph
from tests.ranks.programs import Net
from tests.support.ranks import Ranks

STEPS = 16


class Reordered(Net):
    """Now and then its blocks run in another order, some twice, or some not at all."""

    order = (0, 1, 2)

    def forward(self, x):
        for index in self.order:
            x = self.dropout(self.blocks[index](x))
        return self.head(x * self.scale.to(x.dtype))


class Checkpointed(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Towers(Net):
    """Blocks beside each other, on inputs without gradient: their parameters stay whole to the backward's end."""

    def forward(self, x):
        return self.head(sum(block(x * index) for index, block in enumerate(self.blocks, 1)))


class Mixed(Net):
    """Blocks of several sizes."""

    def __init__(self, **more):
        super().__init__(**more)
        for index, width in enumerate((64, 16, 32)):
            self.blocks[index].up, self.blocks[index].down = nn.Linear(16, width), nn.Linear(width, 16)


KINDS = {"checkpoint": Checkpointed, "towers": Towers, "mixed": Mixed}
HABITS = (
    *("as it comes", "orders", "twice", "checkpoint", "towers", "mixed", "evaluates", "evaluates first", "saves"),
    *("frozen", "unshards", "unshards in between", "stays whole after the backward", "stays whole at times", "root"),
    *("pairs", "last stays whole", "syncs at times", "shapes", "another rank", "raises", "resets", "moves"),
    *("prefetches", "keeps what it saw", "two losses", "retains", "infers", "patched"),
    "wrapped first",
)


def sharded(habit, device, graphs):
    """A model, its optimizer, and the wrappers of its layers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, wrappers = KINDS.get(habit, Reordered)(dropout=0.0).to(device), []
    if graphs and habit == "wrapped first":
        wrappers = graph_layers(model)
    if habit == "frozen":
        for parameter in (*model.blocks[0].parameters(), *model.blocks[1].up.parameters()):
            parameter.requires_grad_(False)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    if habit == "pairs":
        fully_shard(list(model.blocks[:2]), mesh=mesh)
        fully_shard(model.blocks[2], mesh=mesh)
    for index, block in enumerate(model.blocks if habit not in ("root", "pairs") else ()):
        fully_shard(block, mesh=mesh, reshard_after_forward=habit != "last stays whole" or index < 2)
    fully_shard(model, mesh=mesh)
    if habit == "patched":
        for group in (block._get_fsdp_state()._fsdp_param_group for block in model.blocks):
            group.wait_for_unshard = group.wait_for_unshard
    if habit == "prefetches":
        for block, following in zip(model.blocks, model.blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    if graphs and not wrappers:
        wrappers = graph_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=torch.tensor(1e-2, device=device), fused=True), wrappers


def move(model):
    """Has all whole parameters come back somewhere else."""
    from graphmod.ranks.fully_shard import param_groups

    moved, kept = 0, []
    for group in param_groups():
        for parameter in group.fsdp_params:
            for tensor in parameter.all_gather_outputs:
                if parameter._module_info.module in set(model.modules()) and group.is_sharded:
                    storage, before = tensor.untyped_storage(), tensor.untyped_storage().data_ptr()
                    storage.resize_(0)
                    kept.append(torch.empty_like(tensor))
                    storage.resize_(tensor.nbytes)
                    moved += storage.data_ptr() != before
    return moved


class Steps:
    """The steps of one training."""

    def __init__(self, habit, device, graphs):
        self.habit, self.seen = habit, []
        self.model, self.optimizer, self.wrappers = sharded(habit, device, graphs)

    def step(self, index, x):
        habit, model = self.habit, self.model
        parts, total = x.chunk(4 if habit in ("stays whole after the backward", "syncs at times") else 1), 0
        if habit == "orders":
            model.order = ((0, 1, 2), (2, 1, 0), (1, 2))[index % 3 if index > 5 else 0]
        if habit == "twice":
            model.order = (0, 1, 0, 2)
        for place, part in enumerate(parts):
            last = place == len(parts) - 1
            if habit == "stays whole after the backward":
                model.set_reshard_after_backward(last)
                model.set_requires_gradient_sync(last)
            if habit == "syncs at times":
                model.set_requires_gradient_sync(last or (place + index) % 3 == 0)
            if habit == "stays whole at times" and not index % 4:
                model.set_reshard_after_forward(index % 8 == 0)
            loss = model(part).square().mean()
            if habit == "unshards in between" and index % 5 == 4:
                model.blocks[0].unshard()
            if habit == "moves" and index % 8 == 7:
                self.seen.append(move(model))
            if habit == "keeps what it saw":
                self.seen.append((loss, [one.detach() for one in (loss, part)]))
            if habit == "two losses":
                (model(part * 2).mean() + loss).backward()
            elif habit == "retains":
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)

    def before(self, index, x):
        """What the program does between two steps."""
        habit, model, found = self.habit, self.model, []
        if habit == "evaluates" or (habit == "evaluates first" and index < 8):
            with torch.no_grad():
                found = [float(model(x + step).sum()) for step in range(index % 3)]
        if habit == "infers" and index % 3 == 2:
            with torch.inference_mode():
                found = [float(model(x).sum())]
        if habit == "saves" and index % 4 == 2:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: value * 0.5 for name, value in state.items()})
            model.load_state_dict(state)
        if habit == "unshards" and index % 5 == 4:
            for block in model.blocks:
                block.unshard()
            found = [float(sum(one.detach().sum() for block in model.blocks for one in block.parameters()))]
            for block in model.blocks:
                block.reshard()
        if habit == "raises" and index % 6 == 5:
            hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
            try:
                model(x)
            except ZeroDivisionError:
                found = [-1.0]
            hook.remove()
            state = model._get_fsdp_state()
            reset = getattr(model, "reset_iter_state", None) or getattr(state, "_reset_iter_state", None)
            if reset is not None:  # else PyTorch goes on as if nothing had been raised
                reset()
        return found


def layers_as_eager(device, rank, habit):
    """Whether losses and parameters are eager's, what the wrappers did in the second half, and what was counted."""

    def run(graphs):
        steps = Steps(habit, device, graphs)
        wrappers = steps.wrappers
        generator, losses, halfway = torch.Generator().manual_seed(7 + rank), [], []
        for index in range(STEPS):
            rows = 4
            if habit == "shapes" and index % 3 == 2:
                rows = 3
            if habit == "another rank" and rank == 1 and index % 4 == 3:
                rows = 3 if index < 8 else 2
            if graphs and habit == "resets" and index == 8:
                wrappers[0].reset()
            if index == STEPS // 2:
                halfway = [(one.stats.replays, one.stats.eager_calls) for one in wrappers]
            x = torch.randn(4 * rows, 16, generator=generator).to(device)
            losses += steps.before(index, x)
            losses.append(steps.step(index, x))
        kept = [one.full_tensor().detach().clone() for one in steps.model.parameters()]
        later = [(one.stats.replays - then[0], one.stats.eager_calls - then[1])
                 for one, then in zip(wrappers, halfway, strict=True)]  # fmt: skip
        said = [one.last_failure for one in wrappers]
        ungraph(steps.model)
        losses.append(steps.step(0, x))
        return losses, kept, later, said, steps

    losses, kept, _, _, _ = run(False)
    again, others, later, said, steps = run(True)
    equal = losses == again and all(map(torch.equal, kept, others))
    return equal, len(set(losses)) > STEPS // 2, later, said, sum(one for one in steps.seen if isinstance(one, int))


def shares_memory(device, rank, graphs):
    """Bytes of a block's gradients; of all memory for gradients; the peak of some steps, on a GPU, beyond what was
    there before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    gc.collect()  # models of earlier tests, which are parts of circles
    there = (0, 0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        there = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.manual_seed(0)
    model = Net(width=16 if device.type == "cpu" else 2048, blocks=6, dropout=0.0).to(device)
    block = sum(one.nbytes for one in model.blocks[0].parameters())
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for one in model.blocks:
        fully_shard(one, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wrappers = graph_layers(model) if graphs else []
    x = torch.randn(64, model.head.in_features, device=device)
    for index in range(10):
        if index == 6 and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        model.zero_grad()
    replays = [one.stats.replays for one in wrappers]
    held = {one.memory.data_ptr(): one.memory.nbytes for w in wrappers for one in w._context.group.gradients.values()}
    peaks = ()
    if device.type == "cuda":
        torch.cuda.synchronize()
        peaks = torch.cuda.max_memory_allocated() - there[0], torch.cuda.max_memory_reserved() - there[1]
    ungraph(model)
    return block, sum(held.values()), peaks, replays


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("no two GPUs")
    with Ranks(request.param) as ranks:
        yield ranks


REPLAYED = ("as it comes", "checkpoint", "mixed", "frozen", "last stays whole", "saves", "prefetches")
QUICK = (*REPLAYED, "towers", "twice", "evaluates", "moves", "raises", "another rank")


@pytest.mark.parametrize(
    "habit", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in HABITS]
)
def test_habits_have_the_numbers_of_eager(ranks, habit):
    for equal, changing, later, said, moved in ranks.run(layers_as_eager, habit):
        assert equal and changing, said
        if habit in REPLAYED or ranks.device == "cpu":
            assert all(replays for replays, _ in later), (later, said)
        if habit in REPLAYED:
            assert not any(eager for _, eager in later), (later, said)
        if habit == "moves":  # between a forward, which was replayed, and its backward
            assert moved and all(replays % 2 and eager for replays, eager in later), (later, said)


def test_gradients_of_all_layers_share_the_memory_of_one(ranks):
    for block, gradients, _, replays in ranks.run(shares_memory, True):
        assert gradients == block and all(replays)


@pytest.mark.gpu
def test_the_memory_is_that_of_eager_and_of_two_layers(ranks):
    if ranks.device == "cpu":
        pytest.skip("emulated graphs share no memory")
    slack = 64 * 2**20  # workspaces of the capture stream, and rounding
    eager = [peaks for *_, peaks, _ in ranks.run(shares_memory, False)]
    for (block, _, peaks, _), before in zip(ranks.run(shares_memory, True), eager, strict=True):
        assert all(now <= then + 2 * block + slack for now, then in zip(peaks, before, strict=True)), (peaks, before)
