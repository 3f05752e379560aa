"""Graphs may die at any time, and take no more memory than is needed at once."""

import pytest
import torch

from graphmod.backend.cuda import CudaBackend

pytestmark = pytest.mark.gpu


def test_a_graph_that_dies_in_a_capture_does_not_end_it():
    device = torch.device("cuda")
    backend = CudaBackend(device)
    x = torch.ones(8, device=device)
    held = [backend.capture(lambda: x * 2, backend.new_pool(), [x], [])[0]]

    def run():
        held.clear()
        return x + 1

    graph, result = backend.capture(run, backend.new_pool(), [x], [])
    graph.replay()
    assert result.tolist() == [2.0] * 8


def test_memory_that_a_capture_frees_serves_what_is_larger():
    """As gradients of weights are larger than the activations before them."""
    device, MiB = torch.device("cuda"), 2**20
    backend = CudaBackend(device)
    pool, x = backend.new_pool(), torch.ones(1, device=device)

    def run():
        small = [x.expand(24 * MiB // 4) * i for i in range(16)]
        ends = torch.stack([one[-1] for one in small])
        del small
        large = [x.expand(40 * MiB // 4) + i for i in range(8)]
        return ends, [one[-1:] for one in large]

    graph, (ends, large) = backend.capture(run, pool, [x], [])
    graph.replay()
    assert ends.tolist() == [*range(16)] and [one.item() for one in large] == [*range(1, 9)]
    assert pool.bytes() < 1.3 * 16 * 24 * MiB, "nothing of the one was used for the other"
