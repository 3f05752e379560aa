"""Graphs may die at any time."""

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
