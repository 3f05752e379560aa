"""The launches of one multi-tensor operation run side by side where they do not depend on each other."""

from ctypes import c_void_p

import pytest
import torch
from harness import config
from torch import nn

from graphmod import CUDAGraphModule
from graphmod.backend.branches import independent
from graphmod.backend.driver import kernel_name, neighbours, nodes

MANY = 400  # tensors, enough for several launches of any kind


def tensors(count, size=8, device="cpu"):
    return [torch.randn(size, device=device) for _ in range(count)]


def test_lists_without_common_memory_are_independent():
    flat = torch.zeros(40)
    assert independent((tensors(5), tensors(5), [torch.zeros(())] * 1, 0.5, None))
    assert independent(([flat[8 * i : 8 * i + 8] for i in range(5)], tensors(5)))
    assert independent(([torch.zeros(0), torch.zeros(0)], [torch.zeros(0)]))


def test_a_tensor_in_several_lists_at_one_place_is_no_dependency():
    some = tensors(5)
    assert independent((some, some, some))


@pytest.mark.parametrize(
    "lists",
    [
        lambda a, b: ([a, b], [b, a]),
        lambda a, b: ([a, a],),
        lambda a, b: ([a, b], [a[1:], b[1:]]),
        lambda a, b: ([a, b], b),
        lambda a, b: ([a[:5], a[4:]],),
        lambda a, b: ([a.view(2, 4)[:, :3], a.view(2, 4)[:, 3:]],),
        lambda a, b: ([a, torch.eye(3).to_sparse()],),
    ],
    ids=["crossed", "twice", "shifted", "beside a list", "overlapping", "interleaved", "sparse"],
)
def test_common_memory_or_what_cannot_be_told_is_a_dependency(lists):
    a, b = tensors(2)
    assert not independent(lists(a, b))


def parted(module):
    """How many forks the module's graphs have, two roots counted as one."""
    found = 0
    for part in (part for entry in module._entries for graph in entry.graphs for part in graph.graph._graphs):
        raw = c_void_p(part.raw_cuda_graph())
        following = [nodes("cuGraphGetRootNodes", raw)]
        for node in nodes("cuGraphGetNodes", raw):
            following.append([one for one, _ in neighbours("cuGraphNodeGetDependentNodes_v2", node)])
        assert max(map(len, following)) < 3
        forks = [some for some in following if len(some) == 2]
        assert all("multi_tensor_apply" in kernel_name(node) for some in forks for node in some)
        found += len(forks)
    return found


def graphed_and_eager(function, state, steps=8):
    """Runs `function(state)` from graphs and eagerly on equal state; the graphed side."""
    ours, theirs = ([t.clone() for t in state] for _ in range(2))
    module = CUDAGraphModule(lambda: function(ours), config())
    for _ in range(steps):
        module()
        function(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    assert module.stats.state == "captured", module.last_failure
    return module


@pytest.mark.gpu
def test_launches_are_parted_and_joined_again():
    def function(state):
        torch._foreach_mul_(state, 1.01)
        torch._foreach_add_(state, 0.5)  # follows at once, on the same tensors
        norm = torch.stack(torch._foreach_norm(state)).sum()
        torch._foreach_div_(state, norm)
        state[-1].sub_(0.5)
        torch._foreach_copy_(state, [-t for t in state])

    assert parted(graphed_and_eager(function, tensors(MANY, 70_000, "cuda"))) >= 3


@pytest.mark.gpu
def test_few_launches_stay_a_chain():
    assert parted(graphed_and_eager(lambda state: torch._foreach_mul_(state, 1.01), tensors(5, 8, "cuda"))) == 0


@pytest.mark.gpu
def test_tensors_that_depend_on_each_other_stay_a_chain():
    # What launches do to such lists depends on chance, so there is nothing to compare with.
    state = tensors(MANY, 8, "cuda")
    module = CUDAGraphModule(lambda: torch._foreach_add_(state[:-1], state[1:]), config())
    for _ in range(5):
        module()
    assert module.stats.state == "captured" and parted(module) == 0


@pytest.mark.gpu
def test_an_operation_may_be_all_of_a_graph():
    module = graphed_and_eager(lambda state: torch._foreach_mul_(state, 1.01), tensors(MANY, 8, "cuda"))
    ((graph,),) = [[part for graph in entry.graphs for part in graph.graph._graphs] for entry in module._entries]
    assert len(nodes("cuGraphGetRootNodes", c_void_p(graph.raw_cuda_graph()))) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "optimizer, settings",
    [(torch.optim.AdamW, {"capturable": True}), (torch.optim.Adam, {"capturable": True}), (torch.optim.SGD, {})],
)
def test_clipping_and_a_fused_step_over_many_parameters(optimizer, settings):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(90))).cuda()
        return model, optimizer(model.parameters(), lr=torch.tensor(0.01, device="cuda"), fused=True, **settings)

    def iteration(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    sides = [build(), build()]
    graphed = CUDAGraphModule(lambda x: iteration(*sides[0], x), config())
    for i in range(10):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(i)).cuda()
        ours, theirs = graphed(x), iteration(*sides[1], x)
        assert all(map(torch.equal, ours, theirs))
        assert all(map(torch.equal, sides[0][0].parameters(), sides[1][0].parameters()))
    assert graphed.stats.replays >= 6 and parted(graphed) >= 1
