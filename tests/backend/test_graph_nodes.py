"""Fills and copies inside a captured graph become kernels and write the same bytes."""

import collections
import ctypes

import pytest
import torch
from torch import nn

from graphmod.backend.nodes import use_kernels
from graphmod.cuda_driver import node_type, nodes
from tests.support.harness import loss_of, twins, wrapped

pytestmark = pytest.mark.gpu

KERNEL, MEMCPY, MEMSET = 0, 1, 2


def node_types(graph):
    """How many nodes of each type a graph has."""
    return dict(collections.Counter(map(node_type, nodes("cuGraphGetNodes", graph))))


def captured(run):
    """A graph of `run(stream)` that is not instantiated, and an idle stream."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        run(stream)
        graph.capture_end()
    return graph, stream


def memset(target, value, stream):
    """Fills a 1-d integer tensor by the driver."""
    bits = 8 * target.element_size()
    kind = {8: ctypes.c_ubyte, 16: ctypes.c_ushort, 32: ctypes.c_uint}[bits]
    fill = getattr(ctypes.CDLL("libcuda.so.1"), f"cuMemsetD{bits}Async")
    address, count = ctypes.c_size_t(target.data_ptr()), ctypes.c_size_t(target.numel())
    assert fill(address, kind(value), count, ctypes.c_void_p(stream.cuda_stream)) == 0


@pytest.mark.parametrize("dtype, value", [(torch.uint8, 0xA5), (torch.int16, 0xF00D), (torch.int32, 0xDEADBEEF)])
@pytest.mark.parametrize("count", [1, 7, 4096, 1 << 20])
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "not aligned"])
def test_a_fill_becomes_a_kernel(dtype, value, count, first):
    whole = torch.ones(count + 2, dtype=dtype, device="cuda")
    filled = slice(first, first + count)
    expected = whole.clone()
    seen = torch.empty_like(whole)

    def run(stream):
        memset(whole[filled], value, stream)
        torch.add(whole, 1, out=seen)

    graph, stream = captured(run)
    assert node_types(graph.raw_cuda_graph()) == {KERNEL: 1, MEMSET: 1}
    assert use_kernels(graph.raw_cuda_graph(), stream) == 1
    assert node_types(graph.raw_cuda_graph()) == {KERNEL: 2}
    for _ in range(2):
        whole.fill_(1)
        graph.replay()
        bits = 8 * expected.element_size()
        expected[filled] = value - (1 << bits if dtype.is_signed and value >> (bits - 1) else 0)
        assert torch.equal(whole, expected) and torch.equal(seen, expected + 1)


@pytest.mark.parametrize("count", [1, 3, 5, 4096, 1_000_001])
def test_a_copy_becomes_a_kernel(count):
    source, target = torch.arange(count, device="cuda").to(torch.uint8), torch.zeros(count, dtype=torch.uint8).cuda()
    seen = torch.empty_like(target)

    def run(_):
        target.copy_(source)
        torch.add(target, 1, out=seen)

    graph, stream = captured(run)
    kinds = node_types(graph.raw_cuda_graph())
    assert use_kernels(graph.raw_cuda_graph(), stream) == kinds.get(MEMCPY, 0) == 1
    graph.replay()
    source.add_(3)
    graph.replay()
    assert torch.equal(target, source) and torch.equal(seen, source + 1)


def test_fills_and_copies_that_follow_each_other_become_kernels():
    whole, others = torch.zeros(64, dtype=torch.uint8, device="cuda"), [torch.empty(64).byte().cuda() for _ in range(3)]

    def run(stream):
        memset(whole, 7, stream)
        for source, target in zip((whole, *others), others, strict=False):
            target.copy_(source)
        memset(whole, 8, stream)

    graph, stream = captured(run)
    assert node_types(graph.raw_cuda_graph()) == {MEMSET: 2, MEMCPY: 3}
    assert use_kernels(graph.raw_cuda_graph(), stream) == 5
    assert node_types(graph.raw_cuda_graph()) == {KERNEL: 5}
    graph.replay()
    assert whole.eq(8).all() and all(other.eq(7).all() for other in others)


def test_what_cannot_be_replaced_stays():
    host, device = torch.arange(100).pin_memory(), torch.zeros(100, dtype=torch.int64, device="cuda")
    flat = torch.zeros(64, 64, dtype=torch.uint8, device="cuda")

    def run(_):
        device.copy_(host, non_blocking=True)
        flat.add_(1)

    graph, stream = captured(run)
    assert use_kernels(graph.raw_cuda_graph(), stream) == 0
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), host) and flat.eq(1).all()


class Mixed(nn.Module):
    """A norm with a reduction over many rows (a memset of its semaphores) and a copy, forward and backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(768))
        self.linear = nn.Linear(768, 768)

    def forward(self, x):
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.linear(self.weight * x.clone())


def test_graphs_of_modules_have_none_left():
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 256, 768)))
        loss.backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss.detach()

    side = twins(lambda device: Mixed().to(device), step, torch.device("cuda"), replays=2, graph=wrapped())
    graphs = [graph for wrapper in side.graphs for entry in wrapper._context.entries for graph in entry.graphs]
    parts = [part for graph in graphs for half in (graph.graph, graph.backward.graph) for part in half._held.graphs]
    kinds = [node_types(part.raw_cuda_graph()) for part in parts]
    assert kinds and all(set(kind) == {KERNEL} for kind in kinds), kinds
