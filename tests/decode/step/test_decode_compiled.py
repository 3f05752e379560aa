"""How decode steps are compiled: what can be seen without a GPU."""

import pytest
import torch
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import IndentedBuffer

from graphmod.decode.step import compile as compiled

WAIT = "tl.extra.cuda.gdc_wait()"


def filtered(lines):
    code = IndentedBuffer()
    code.writelines(lines)
    kernel = TritonKernel.__new__(TritonKernel)
    with compiled.every_kernel_waits():
        kernel._filter_pdl(code)
    return list(map(str, code._lines))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["xoffset = 1", "tl.store(p, 0)"], [WAIT, "xoffset = 1", "tl.store(p, 0)"]),
        (["x = 1", WAIT, "y = tl.load(p)", WAIT], ["x = 1", WAIT, "y = tl.load(p)"]),
    ],
)
def test_a_kernel_that_is_launched_early_waits(lines, expected):
    assert filtered(lines) == expected


def test_other_compilations_are_left_alone():
    before = TritonKernel._filter_pdl
    with pytest.raises(ZeroDivisionError), compiled.every_kernel_waits():
        raise ZeroDivisionError
    assert TritonKernel._filter_pdl is before


@pytest.mark.parametrize("tuned", [False, True])
def test_compiled_for_decode_computes_the_same(tuned, monkeypatch):
    monkeypatch.setattr(compiled, "_can_launch_early", lambda: False)
    monkeypatch.setattr(compiled, "_LARGE_WEIGHT", 0)
    compiled._inductor.cache_clear()
    weight, x = torch.randn(32, 16), torch.randn(1, 16)

    def step(x):
        return torch.nn.functional.silu(x) @ weight.t()

    try:
        torch.testing.assert_close(compiled.for_decode(step, tuned)(x), step(x))
    finally:
        compiled._inductor.cache_clear()
