"""Reductions of long rows in two stages: what is found is what one stage finds."""

import pytest
import torch
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from graphmod.fuse.inductor import compile_graph
from graphmod.fuse.operations import _LENGTH, divide_reductions
from graphmod.fuse.program import cut, graph_of
from tests.support.step_programs import program_of

REDUCTIONS = {
    "argmax": (lambda x: x.argmax(dim=1), 1),
    "argmax_last": (lambda x: x.argmax(dim=-1, keepdim=True), 1),
    "logsumexp": (lambda x: x.logsumexp(dim=1), 1),
    "logsumexp_kept": (lambda x: x.logsumexp(dim=[-1], keepdim=True), 1),
    "both": (lambda x: x.logsumexp(1) + x.argmax(1), 2),
    "of_halves": (lambda x: x.half().logsumexp(1), 1),
    "widened": (lambda x: x.half().float().logsumexp(1) + x.half().float().argmax(1), 2),
    "of_doubles": (lambda x: x.double().argmax(1), 0),
    "of_a_view": (lambda x: x[:, 1:].argmax(1), 1),
    "of_all": (lambda x: x.argmax(), 0),
    "other_dim": (lambda x: x.argmax(dim=0), 0),
    "two_dims": (lambda x: x.logsumexp(dim=[0, 1]), 0),
    "of_one_number": (lambda x: x[0, 0].argmax(-1) + x[0, 0].logsumexp(-1), 0),
    "short": (lambda x: x[:, :4095].argmax(1), 0),
    "integers": (lambda x: x.nan_to_num().long().argmax(1), 0),
}


def graph_and_inputs(step):
    program, inputs = program_of(step)
    (piece,) = cut(program)
    return graph_of(piece), [inputs[number] for number in piece.inputs]


def rows_of(count, device, dtype=torch.float32):
    torch.manual_seed(count)
    values = torch.randint(50, (7, count), device=device).to(dtype)  # many ties
    values[1], values[2, : count - 1], values[3, 4] = float("-inf"), float("-inf"), float("inf")
    values[4] = torch.randn(count, device=device)
    values[5, 3] = float("nan")
    values[6] -= 1e4
    return values


@pytest.mark.parametrize("count", [4096, 5000, 50257])
@pytest.mark.parametrize("case", REDUCTIONS)
def test_two_stages_find_what_one_finds(case, count):
    call, expected = REDUCTIONS[case]
    values = rows_of(count, "cpu")
    with torch.inference_mode():
        result = torch.zeros_like(call(values))
    graph, inputs = graph_and_inputs(lambda: result.copy_(call(values)))
    with torch.inference_mode():
        FakeTensorProp(graph).propagate(*[one.clone() for one in inputs])
        divided = divide_reductions(graph)
        graph(*inputs)
    assert divided == (0 if case == "of_a_view" and count == 4096 else expected)
    torch.testing.assert_close(result, call(values), equal_nan=True)


def test_reductions_of_one_row_share_the_first_stage_until_something_is_written():
    values = rows_of(5000, "cpu", torch.bfloat16)
    results, kept = [torch.zeros(7) for _ in range(4)], values.clone()

    def step():
        wide = values.float()
        found = wide.logsumexp(1), wide.argmax(1)
        values.copy_(values.flip(1))
        found = *found, wide.argmax(1), values.float().argmax(1)
        for result, one in zip(results, found, strict=True):
            result.copy_(one)

    graph, inputs = graph_and_inputs(step)
    values.copy_(kept)
    with torch.inference_mode():
        FakeTensorProp(graph).propagate(*[one.clone() for one in inputs])
        assert divide_reductions(graph) == 4
        graph(*inputs)
    assert len([node for node in graph.graph.nodes if "reduce_parts" in str(node.target)]) == 3
    before, after = kept.float(), kept.float().flip(1)
    expected = before.logsumexp(1), before.argmax(1), before.argmax(1), after.argmax(1)
    for result, one in zip(results, expected, strict=True):
        torch.testing.assert_close(result, one.float(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [4096, 5000, 50257])
def test_what_is_found_of_parts(count, dtype, device):
    values = rows_of(count + 1, device, dtype)[:, 1:]  # of which no row but one begins at 16 bytes
    for rows in (values, values.T.contiguous().T, values.unsqueeze(1), values[0]):
        largest, place, total = torch.ops.graphmod.reduce_parts(rows)
        for number, part in enumerate(rows.float().split(_LENGTH, -1)):
            expected = part.amax(-1)
            assert torch.equal(largest[..., number].nan_to_num(7e7), expected.nan_to_num(7e7))
            own = place[..., number] - number * _LENGTH
            assert own.tolist() == part.cpu().numpy().argmax(-1).tolist()  # the first, and NaN before others
            both = total[..., number].log() + expected
            torch.testing.assert_close(both, part.logsumexp(-1), equal_nan=True)


@pytest.mark.slow  # which compiles C++
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_finds_the_same(dtype, device):
    values = rows_of(5000, device, dtype)
    most, total = torch.zeros(7, dtype=torch.int64, device=device), torch.zeros(7, device=device)

    def step():
        most.copy_(values.argmax(1))
        total.copy_(values.float().logsumexp(1))

    graph, inputs = graph_and_inputs(step)
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) for one in inputs]
    function = compile_graph(graph, fakes, tuned=False)
    with torch.inference_mode():
        function(*inputs)
    # Which of equal numbers a GPU's argmax finds is not said.
    found = values.gather(1, most.unsqueeze(1)).squeeze(1)
    assert torch.equal(found[[0, 1, 2, 3, 4, 6]], values.amax(1)[[0, 1, 2, 3, 4, 6]]) and int(most[5]) == 3
    if device.type == "cpu":
        assert torch.equal(most, values.argmax(1))
    torch.testing.assert_close(total, values.float().logsumexp(1), equal_nan=True)
