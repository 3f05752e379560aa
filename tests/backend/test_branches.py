"""The launches of one multi-tensor operation run side by side where they do not depend on each other."""

import itertools
import sys
import types

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from graphmod.backend import cuda
from graphmod.backend import nodes as edited
from graphmod.backend.nodes import divisible, spread
from graphmod.cuda_driver import call, kernel_name, neighbours, nodes
from tests.support.harness import config

MANY = 400  # tensors, enough for several launches of any kind
LARGE = 70_000  # elements


def tensors(count, size=LARGE, device="cpu"):
    return [torch.randn(size, device=device) for _ in range(count)]


def test_lists_without_common_memory_are_divisible():
    flat = torch.zeros(5 * LARGE)
    assert divisible((tensors(5), tensors(5), [torch.zeros(())], 0.5, None))
    assert divisible(([flat[LARGE * i : LARGE * (i + 1)] for i in range(5)], tensors(5)))
    assert divisible(([torch.zeros(0), *tensors(5)], [torch.zeros(0)]))


def test_a_tensor_in_several_lists_at_one_place_is_no_dependency():
    some = tensors(5)
    assert divisible((some, some, some))


def test_what_is_small_stays_together():
    assert not divisible((tensors(MANY, 1),))


@pytest.mark.parametrize(
    "lists",
    [
        lambda a, b: ([a, b], [b, a]),
        lambda a, b: ([a, a],),
        lambda a, b: ([a, b], [a[1:], b[1:]]),
        lambda a, b: ([a, b], b),
        lambda a, b: ([a[:5], a[4:]],),
        lambda a, b: ([a.view(2, -1)[:, :3], a.view(2, -1)[:, 3:]],),
        lambda a, b: ([a, torch.eye(3).to_sparse()],),
    ],
    ids=["crossed", "twice", "shifted", "beside a list", "overlapping", "interleaved", "sparse"],
)
def test_common_memory_or_what_cannot_be_told_is_a_dependency(lists):
    a, b = tensors(2, 4 * LARGE)
    assert divisible(([a, b],)) and not divisible(lists(a, b))


class Graph:
    """A graph in place of the driver's: nodes are numbers from 1, `name` their kernels."""

    def __init__(self, monkeypatch, names):
        self.names, self.edges = dict(enumerate(names, 1)), set(itertools.pairwise(range(1, len(names) + 1)))
        self.kinds = {}
        monkeypatch.setattr(edited, "kernel_name", lambda node: self.names[node])
        monkeypatch.setattr(edited, "neighbours", self.neighbours)
        monkeypatch.setattr(edited, "edit", self.edit)

    def neighbours(self, query, node):
        ahead = query == edited._AHEAD
        found = [(a if ahead else b, self.kinds.get((a, b), 0)) for a, b in sorted(self.edges) if node in (a, b)]
        found = [(other, kind) for other, kind in found if other != node]
        return found

    def edit(self, verb, _, edges):
        changed = {*edges}
        if "Add" in verb:
            assert not changed & self.edges, "the driver refuses edges that are there"
            self.edges |= changed
        else:
            assert changed <= self.edges
            self.edges -= changed

    def before(self, node):
        """Everything a node waits for."""
        ahead = {a for a, b in self.edges if b == node}
        return ahead.union(*map(self.before, ahead)) if ahead else ahead


def chain_of(monkeypatch, *operations, first=()):
    """A graph of operations, each so many launches of a kernel of its own, and what `spread` is told of them."""
    names, told = list(first), []
    for index, launches in enumerate(operations):
        before = len(names)
        names += [f"multi_tensor_apply {index}"] * launches
        told.append((before, len(names)))
    return Graph(monkeypatch, names), told


@pytest.mark.parametrize("first", [(), ("norm",)], ids=["at the beginning", "behind another"])
@pytest.mark.parametrize(
    "operations",
    [(3,), (4,), (2,), (3, 5), (3, 3, 3), (5, 1, 4), (2, 12), (3, 12, 2)],
    ids=lambda o: "-".join(map(str, o)),
)
def test_launches_wait_for_all_that_comes_before_their_operation(monkeypatch, operations, first):
    graph, told = chain_of(monkeypatch, *operations, first=first)
    assert spread(1, told) == sum(launches >= 3 for launches in operations)
    for before, last in told:
        for place, node in enumerate(range(before + 1, last + 1)):
            waits = graph.before(node)
            assert waits >= set(range(1, before + 1)), "something that it reads may not be there yet"
            own = {other for other in waits if other > before}
            parted = last - before >= 3
            assert own == set(range(node - 2, before, -2) if parted else range(before + 1, node)), (place, own)


def test_what_follows_waits_for_both_branches(monkeypatch):
    graph, told = chain_of(monkeypatch, 4, first=("a",))
    graph.names |= {6: "b", 7: "c"}
    graph.edges |= {(5, 6), (6, 7)}
    assert spread(1, told) == 1
    assert graph.before(6) == {1, 2, 3, 4, 5} and graph.before(7) == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("edge", [(1, 2), (3, 4), (5, 6)])
def test_an_edge_of_another_kind_keeps_a_chain(monkeypatch, edge):
    """A programmatic one: a kernel that may begin before the one ahead of it has ended."""
    graph, told = chain_of(monkeypatch, 4, first=("a",))
    graph.names[6] = "b"
    graph.edges.add((5, 6))
    graph.kinds[edge] = 1
    assert spread(1, told) == 0 and graph.edges == set(itertools.pairwise(range(1, 7)))


def test_no_chain_is_left_alone(monkeypatch):
    graph, told = chain_of(monkeypatch, 4, first=("a", "b"))
    graph.edges.add((1, 4))  # a fork of the user's
    before = set(graph.edges)
    assert spread(1, told) == 0 and graph.edges == before
    assert spread(1, [(6, 6)]) == 0, "an operation without launches"


def test_other_kernels_stay_a_chain(monkeypatch):
    graph = Graph(monkeypatch, ["a", *["elementwise"] * 5])
    assert spread(1, [(1, 6)]) == 0 and graph.edges == set(itertools.pairwise(range(1, 7)))


def parted(module):
    """How many forks the module's graphs have, two roots counted as one."""
    found = 0
    for part in (
        part for entry in module._context.entries for graph in entry.graphs for part in graph.graph._held.graphs
    ):
        raw = part.raw_cuda_graph()
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

    # Two ends of the first are two forks into the second.
    assert parted(graphed_and_eager(function, tensors(MANY, device="cuda"))) >= 5


@pytest.mark.gpu
def test_few_launches_stay_a_chain():
    assert parted(graphed_and_eager(lambda state: torch._foreach_mul_(state, 1.01), tensors(5, device="cuda"))) == 0


@pytest.mark.gpu
def test_tensors_that_depend_on_each_other_stay_a_chain():
    # What launches do to such lists depends on chance, so there is nothing to compare with.
    state = tensors(MANY, device="cuda")
    module = CUDAGraphModule(lambda: torch._foreach_add_(state[:-1], state[1:]), config())
    for _ in range(5):
        module()
    assert module.stats.state == "captured" and parted(module) == 0


@pytest.mark.gpu
def test_an_operation_may_be_all_of_a_graph():
    module = graphed_and_eager(lambda state: torch._foreach_mul_(state, 1.01), tensors(MANY, device="cuda"))
    ((graph,),) = [
        [part for graph in entry.graphs for part in graph.graph._held.graphs] for entry in module._context.entries
    ]
    assert len(nodes("cuGraphGetRootNodes", graph.raw_cuda_graph())) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    "optimizer, settings",
    [(torch.optim.AdamW, {"capturable": True}), (torch.optim.Adam, {"capturable": True}), (torch.optim.SGD, {})],
)
def test_clipping_and_a_fused_step_over_many_parameters(optimizer, settings, clip):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(120))).cuda()
        return model, optimizer(model.parameters(), lr=torch.tensor(0.01, device="cuda"), fused=True, **settings)

    def iteration(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if clip else loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    sides = [build(), build()]
    graphed = CUDAGraphModule(lambda x: iteration(*sides[0], x), config())
    for i in range(10):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)).cuda()
        ours, theirs = graphed(x), iteration(*sides[1], x)
        assert all(map(torch.equal, ours, theirs))
        assert all(map(torch.equal, sides[0][0].parameters(), sides[1][0].parameters()))
    assert graphed.stats.replays >= 6 and parted(graphed) >= (3 if clip else 1)


@pytest.mark.parametrize("lacking", ["bindings", "function"])
def test_what_keeps_launches_in_one_chain_is_said_once_with_the_remedy(lacking, monkeypatch, caplog):
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = types.ModuleType("cuda.bindings.driver")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None if lacking == "bindings" else bindings)
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    cuda._say_unedited.cache_clear()
    for _ in range(3):
        assert cuda.CudaBackend._last_captured(types.SimpleNamespace(device=None, stream=stream)) is None
    (said,) = [one.getMessage() for one in caplog.records]
    assert "one after the other" in said and "pip install -U 'cuda-bindings" in said
    assert ("cuStreamGetCaptureInfo_v3" if lacking == "function" else "cuda.bindings") in said


@pytest.mark.parametrize("name", ["cuMemCreate", "cuStreamGetCaptureInfo_v3"])
def test_bindings_that_lack_a_function_are_an_error_that_callers_expect(name, monkeypatch):
    monkeypatch.setattr("graphmod.cuda_driver.bindings", lambda: types.ModuleType("driver"))
    with pytest.raises(RuntimeError, match=f"have no {name}; install"):
        call(name)
