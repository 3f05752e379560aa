"""How decode steps are compiled: what can be seen without a GPU."""

import pytest
import torch
from step_programs import program_of
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import IndentedBuffer
from torch._subclasses import FakeTensorMode

from graphmod.decode.step import compile as compiled
from graphmod.decode.step.pieces import cut, graph_of

WAIT, LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


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
        (["xoffset = 1", "tl.store(p, 0)"], ["xoffset = 1", "tl.store(p, 0)"]),
        (["x = tl.load(q)", WAIT, "y = tl.load(p)", WAIT, LAUNCH], ["x = tl.load(q)", "y = tl.load(p)"]),
        (["for i in range(2):", f"    {WAIT}", "    y = tl.load(p)"], ["for i in range(2):", "    y = tl.load(p)"]),
    ],
)
def test_a_kernel_that_is_launched_early_waits(lines, expected):
    assert filtered(lines) == [LAUNCH, WAIT, *expected]


def test_other_compilations_are_left_alone():
    before = TritonKernel._filter_pdl
    with pytest.raises(ZeroDivisionError), compiled.every_kernel_waits():
        raise ZeroDivisionError
    assert TritonKernel._filter_pdl is before


@pytest.mark.parametrize("tuned", [False, True])
def test_a_piece_computes_and_changes_what_it_does_uncompiled(tuned, monkeypatch):
    monkeypatch.setattr(compiled, "_can_launch_early", lambda: False)
    monkeypatch.setattr(compiled, "_LARGE_WEIGHT", 0)
    weight, x, out, count = (
        torch.randn(32, 16),
        torch.randn(1, 16),
        torch.zeros(1, 32),
        torch.zeros((), dtype=torch.int64),
    )

    def step():
        out.copy_(torch.nn.functional.linear(torch.nn.functional.silu(x), weight))
        count.add_(1)

    program, inputs = program_of(step)
    (piece,) = cut(program)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(inputs[number]) for number in piece.inputs]
    run = compiled.compile_graph(graph_of(piece), given, tuned)
    before = int(count)
    out.zero_()
    with torch.inference_mode():
        assert not run(*[inputs[number] for number in piece.inputs]), "it returns nothing"
    torch.testing.assert_close(out, torch.nn.functional.silu(x) @ weight.t())
    assert count == before + 1
