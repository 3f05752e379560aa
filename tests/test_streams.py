"""Nothing runs on the capture stream: kernels on a second stream slow every graph of the process down."""

import pytest
import torch
from harness import config
from test_train_step import build
from torch import nn

from graphmod import CUDAGraphModule
from graphmod.train.step import TrainStep

pytestmark = pytest.mark.gpu

A_WHILE = 4_000_000_000  # clock cycles, about two seconds


def keep_busy(stream):
    """Occupies a stream; returns an event that is there when it is free again."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(A_WHILE)
    return stream.record_event()


def runs_beside(graphed, call, monkeypatch):
    """Checks that warm-up, capture and replays are done before the capture stream has done anything."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)  # to free memory waits for the whole device
    call(0)
    free = keep_busy(graphed._group.backend.stream)
    waited, results = [], []
    for i in range(6):
        results.append(call(i))
        torch.cuda.current_stream().synchronize()
        waited.append(free.query())
    torch.cuda.synchronize()
    assert waited == [False] * 6
    assert graphed.stats.captures > 0 and graphed.stats.replays > 3 and graphed.stats.failures == 0
    assert all(bool(torch.isfinite(result).all()) for result in results)


def test_inference_needs_no_other_stream(monkeypatch):
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 16)).cuda()
    graphed = CUDAGraphModule(module, config())
    with torch.no_grad():
        runs_beside(graphed, lambda i: graphed(torch.full((4, 16), float(i), device="cuda")), monkeypatch)


def test_a_whole_iteration_needs_no_other_stream(monkeypatch):
    parts = build(torch.device("cuda"))
    step = TrainStep(parts["model"], parts["optimizer"], max_grad_norm=1.0, config=config(scope="full_iteration"))
    batch = torch.zeros(1, 2, 7, dtype=torch.int64, device="cuda")
    runs_beside(step._graphs[0], lambda i: step(batch), monkeypatch)
