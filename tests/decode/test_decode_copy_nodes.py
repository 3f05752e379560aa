"""Copies in captured graphs do what the host has said last."""

import pytest
import torch

from graphmod.backend.lifetime import capturing, launcher
from graphmod.decode.offload import CopyNodes

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    return torch.device("cuda")


def pair(count=4096):
    source = torch.randint(1, 255, (count,), dtype=torch.uint8).pin_memory()
    return source, torch.zeros(count, dtype=torch.uint8, device="cuda")


def captured(nodes, *pairs):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)
    seen = [torch.zeros_like(target) for _, target in pairs]
    with capturing(), torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        nodes.capture(pairs)
        for (_, target), copy in zip(pairs, seen, strict=True):
            copy.copy_(target)
        graph.capture_end()
        graph.instantiate()
        return launcher(graph), seen


def there(source, spans):
    expected = torch.zeros_like(source)
    for first, count in spans:
        expected[first : first + count] = source[first : first + count]
    return expected


def test_each_launch_copies_what_was_said_last(device):
    nodes, one, other = CopyNodes(3, device), pair(), pair()
    launch, seen = captured(nodes, one, other)
    for spans in ([], [(0, 1)], [(5, 100), (4000, 96), (200, 1)], [(0, 4096)], [(200, 8)], []):
        nodes.set(*one, spans)
        nodes.set(*other, spans[:1])
        for _ in range(2):
            one[1].zero_(), other[1].zero_()
            launch()
            assert torch.equal(seen[0].cpu(), there(one[0], spans))
            assert torch.equal(seen[1].cpu(), there(other[0], spans[:1]))


def test_before_anything_was_said_nothing_is_copied(device):
    nodes, one = CopyNodes(2, device), pair()
    launch, seen = captured(nodes, one)
    launch()
    assert not seen[0].any()


def test_what_was_launched_goes_on_as_it_was(device):
    nodes, one = CopyNodes(1, device), pair(2**26)
    launch, seen = captured(nodes, one)
    nodes.set(*one, [(0, 2**26)])
    launch()
    nodes.set(*one, [(0, 16)])
    torch.cuda.synchronize()
    assert torch.equal(seen[0].cpu(), one[0])
    one[1].zero_()
    launch()
    assert torch.equal(seen[0].cpu(), there(one[0], [(0, 16)]))


def test_graphs_follow_one_by_one_and_caches_stay_apart(device):
    nodes, one, others, two = CopyNodes(2, device), pair(), CopyNodes(2, device), pair()
    first, seen = captured(nodes, one)
    second, also = captured(nodes, one)
    third, apart = captured(others, two)
    nodes.set(*one, [(0, 9)])
    others.set(*two, [(7, 7)])
    first(), third()
    nodes.set(*one, [(100, 1)])
    one[1].zero_()
    second(), third()
    assert torch.equal(seen[0].cpu(), there(one[0], [(0, 9)]))
    assert torch.equal(also[0].cpu(), there(one[0], [(100, 1)]))
    assert torch.equal(apart[0].cpu(), there(two[0], [(7, 7)]))
    assert launcher_of_nothing().__self__.__class__ is torch.cuda.CUDAGraph


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_may_be_the_current_one():
    device = torch.device("cuda", 1)
    with torch.cuda.device(device):
        nodes, one = CopyNodes(2, device), pair()
        launch, seen = captured(nodes, one)
    for spans in ([(0, 9)], [(5, 100), (4000, 96)]):
        nodes.set(*one, spans)
        one[1].zero_()
        launch()
        torch.cuda.synchronize(device)
        assert torch.equal(seen[0].cpu(), there(one[0], spans))


def launcher_of_nothing():
    stream, graph, memory = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True), torch.zeros(4, device="cuda")
    with capturing(), torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        memory.add_(1)
        graph.capture_end()
        graph.instantiate()
        return launcher(graph)
