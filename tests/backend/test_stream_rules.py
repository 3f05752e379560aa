"""What would go wrong with gradient accumulators on a GPU is told on the CPU."""

import pytest
import torch

from graphmod import CUDAGraphModule
from tests.support.harness import WARMUP, config, loss_of, mlp

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the streams themselves tell")


def train(steps=8):
    """A loop that always holds the last loss, as most do; the wrapper."""
    graphed = CUDAGraphModule(mlp("cpu"), config())
    for _ in range(steps):
        loss = loss_of(graphed(torch.ones(4, 8)))
        loss.backward()
    return graphed


def test_a_loss_that_is_held_from_step_to_step_ties_no_capture_to_the_callers_stream(rules_of_streams):
    assert train().stats.failures == 0 and not rules_of_streams


def test_accumulators_that_are_not_made_anew_are_noticed(rules_of_streams, monkeypatch):
    monkeypatch.setattr("graphmod.step.graph.renew_gradient_accumulators", lambda _: None)
    train()
    assert all("forks to the caller's stream" in line for line in rules_of_streams) and rules_of_streams
    rules_of_streams.clear()


def test_a_gradient_that_would_be_lost_is_noticed(rules_of_streams):
    graphed = CUDAGraphModule(mlp("cpu"), config())
    for step in range(WARMUP + 1):
        loss = loss_of(graphed(torch.ones(4, 8)))
        for graph in [graph for entry in graphed._context.entries for graph in entry.graphs]:
            assert step == WARMUP and graph.edges
            graph.edges.clear()  # what tells the capture of the backward where that of the forward ends
        loss.backward()
    assert sum("is lost" in line for line in rules_of_streams) == 4
    rules_of_streams.clear()
