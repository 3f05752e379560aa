"""Candidates for generated kernels are timed in graphs, with weights of several layers."""

from types import SimpleNamespace

import pytest
import torch

from graphmod.fuse.inductor import _LAUNCHES, _sets, timed_in_graphs


def test_only_what_is_large_and_read_has_copies():
    large, small = torch.ones(2**20, dtype=torch.float32), torch.ones(8)
    sets = _sets((large, small, large, 7), [True, True, False, True])
    assert len(sets) == _LAUNCHES
    assert len({given[0].data_ptr() for given in sets}) == _LAUNCHES
    assert all(given[1] is small and given[2] is large and given[3] == 7 for given in sets)
    assert len(_sets((small, 7), [True, True])) == 1
    huge = torch.empty(2**27, dtype=torch.float32, device="meta")
    assert len(_sets((huge,), [True])) == 1


@pytest.mark.gpu
def test_a_kernel_that_does_more_takes_longer_and_one_that_fails_is_left_to_inductor():
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    before = CachingAutotuner.bench
    kernel = SimpleNamespace(mutated_arg_names=("out",), fn=SimpleNamespace(arg_names=("x", "out")))
    x = torch.ones(2**22, device="cuda")
    out = torch.zeros(2**22, device="cuda")

    def launcher(x, out, times, stream):
        for _ in range(times):
            out.add_(x)

    with timed_in_graphs():
        once, often = (CachingAutotuner.bench(kernel, launcher, x, out, times=times) for times in (1, 8))
        assert 0 < 4 * once < often < 12 * once
        with pytest.raises(AttributeError):  # of inductor, which is given this kernel
            CachingAutotuner.bench(kernel, lambda *given, stream: 1 / 0, x, out)
    assert CachingAutotuner.bench is before
