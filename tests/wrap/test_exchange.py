"""Other code in the place of a graph: when it takes over, and when the call's own code is back."""

import pytest
import torch

from graphmod import CUDAGraphModule
from graphmod.errors import SuccessorFailed
from graphmod.wrap.extension import exchange, serving


class Steps:
    """A step that adds `by` to `total`, and other code that does the same; `ran` tells which."""

    def __init__(self, device):
        self.total, self.by = torch.zeros(3, device=device), 2.0
        self.ran = []
        self.wrapper = CUDAGraphModule(self.step, warmup_steps=1)

    def step(self):
        self.total.add_(self.by)

    def other(self):
        self.ran.append(torch.is_inference_mode_enabled())
        self.total.copy_(self.total + 2.0)

    def call(self, times, expected):
        for _ in range(times):
            expected += self.by
            self.wrapper()
            assert self.total.tolist() == [expected] * 3
        return expected


def test_other_code_runs_once_itself_and_then_from_a_graph(device):
    steps = Steps(device)
    with torch.inference_mode():
        total = steps.call(4, 0.0)
        before = serving(steps.wrapper)
        assert exchange(steps.wrapper, steps.other) and not steps.ran
        total = steps.call(1, total)
        assert len(steps.ran) == 1
        total = steps.call(1, total)
        assert len(steps.ran) == 2, "captured"
        total = steps.call(5, total)
        assert steps.wrapper.replay(3) == 3
        assert steps.total.tolist() == [total + 6] * 3
    assert len(steps.ran) == 2 and serving(steps.wrapper) is before
    stats = steps.wrapper.stats
    assert (stats.captures, stats.eager_calls, stats.failures) == (1, 2, 0)


def test_what_python_reads_is_compared_as_before(device):
    steps = Steps(device)
    with torch.inference_mode():
        total = steps.call(4, 0.0)
        exchange(steps.wrapper, steps.other)
        total = steps.call(4, total)
        before = serving(steps.wrapper)
        steps.by = 3.0
        total = steps.call(6, total)
        assert serving(steps.wrapper) is not before and len(steps.ran) == 2
        exchange(steps.wrapper, steps.other)
        steps.by = 5.0
        steps.call(6, total)
    assert len(steps.ran) == 2, "it never did what the call does now"


def test_code_that_cannot_be_captured_leaves_the_graph(device, caplog):
    steps = Steps(device)

    def reads():
        steps.other()
        assert float(steps.total[0]) > 0

    with torch.inference_mode():
        total = steps.call(4, 0.0)
        exchange(steps.wrapper, reads)
        steps.call(6, total)
    assert "keeps the kernels it has" in caplog.text and steps.wrapper.stats.failures == 0


def test_code_that_fails_by_itself_is_an_error_and_is_dropped(device):
    steps = Steps(device)

    def fails():
        raise ValueError("no kernel")

    with torch.inference_mode():
        total = steps.call(4, 0.0)
        exchange(steps.wrapper, fails)
        with pytest.raises(SuccessorFailed, match="no kernel"):
            steps.wrapper()
        steps.call(4, total)


def test_what_returns_tensors_or_copies_arguments_keeps_its_code(device):
    kept, given = torch.zeros(3, device=device), torch.ones(3, device=device)

    def adds(x):
        kept.add_(x)

    for call, args in ((lambda: kept + 1, ()), (adds, (given,))):
        wrapper = CUDAGraphModule(call, warmup_steps=1)
        assert not exchange(wrapper, print), "nothing was captured"
        with torch.inference_mode():
            for _ in range(3):
                wrapper(*args)
        assert wrapper.stats.replays and not exchange(wrapper, print)
