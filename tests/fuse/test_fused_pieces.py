"""Captured steps in pieces: those that are alike are compiled once, others are not, and numbers stay."""

import ctypes
import sys
import types

import pytest
import torch
from torch import library
from torch.nn import functional as F

from graphmod import CUDAGraphModule
from graphmod.config import CUDAGraphConfig
from graphmod.fuse.compiler import StepCompiler
from graphmod.fuse.program import Unsupported, cut
from graphmod.wrap.extension import serving
from tests.support.step_programs import program_of


def attend(x, weight, scale=None):
    y = F.linear(x, weight).view(2, 1, 4, 8)
    return F.scaled_dot_product_attention(y, y, y, scale=scale).reshape(2, 4, 8).reshape(-1, 8)


def drawn(*size, seed=1):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


WEIGHTS = [drawn(8, 8, seed=number) for number in range(5)]


def compare(layers, *given):
    """How many pieces are compiled for `layers(x, *given)`, which computes and changes what it does uncompiled.

    `x` and what is `given` stay where they are; `x` is something else in each call.
    """
    sizes = []

    def compile(graph, inputs, tuned):
        assert len(inputs) == sum(node.op == "placeholder" for node in graph.graph.nodes)
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    x, others = torch.empty(8, 8), [one.clone() for one in given]
    results = [torch.zeros_like(one) for one in layers(drawn(8, 8), *[one.clone() for one in given])]

    def step():
        for result, one in zip(results, layers(x, *others), strict=True):
            result.copy_(one)

    wrapper, compiler = CUDAGraphModule(step, CUDAGraphConfig(warmup_steps=1)), StepCompiler(False, False, compile)
    plain = [one.clone() for one in given]
    with torch.inference_mode():
        for call in range(7):
            x.copy_(drawn(8, 8, seed=call))
            expected = layers(x.clone(), *plain)
            compiler.call(wrapper)
            torch.testing.assert_close(tuple(results), tuple(expected), rtol=0, atol=0)
            for one, other in zip(others, plain, strict=True):
                assert torch.equal(one, other), "it changes what uncompiled code changes"
    stats = wrapper.stats
    assert (stats.replays, stats.eager_calls, stats.failures) == (5, 2, 0), "recorded, captured, compiled, captured"
    return len(sizes)


def test_layers_that_are_alike_are_compiled_once():
    def layers(x, *weights):
        for weight in weights:
            x = x + attend(x, weight)
        return (x.sum(), x)

    assert compare(layers, *WEIGHTS) == 3, "up to the first attention, between two, and after the last"


def test_what_is_changed_in_place_and_what_is_kept_for_later_pass_through_pieces():
    def layers(x, kept, *weights):
        first = x * 2
        for number, weight in enumerate(weights):
            x = x + attend(x, weight) * first
            kept[number].add_(x)
            x = x + kept[number].view(-1).view(8, 8)
        return x, first

    assert compare(layers, torch.zeros(5, 8, 8), *WEIGHTS) == 6, "each writes to another place of one tensor"


@pytest.mark.parametrize("what", ["constant", "scale", "kind", "size", "order", "shared", "strides", "result", "dtype"])
def test_layers_that_differ_in_anything_are_not_taken_for_one(what):
    def layers(x, *weights):
        kept = []
        for number, weight in enumerate(weights):
            odd = number == 2
            if odd and what == "size":
                weight = torch.cat((weight, weight))[4:12]
            if odd and what == "strides":
                weight = weight.t()
            y = attend(x, weight, scale=0.25 if odd and what == "scale" else None)
            y = F.relu(y) if odd and what == "kind" else F.silu(y)
            y = y.double().float() if odd and what == "dtype" else y
            y = y * (0.5 if odd and what == "constant" else 0.25)
            y = x - y if odd and what == "order" else y - x
            x = x + (y * y if odd and what == "shared" else y * x)
            if odd and what == "result":
                kept.append(y)
        return (x, *kept)

    assert compare(layers, *WEIGHTS) > 3


def test_views_are_taken_again_where_they_are_used():
    def layers(x, kept, *weights):
        row, column = kept[0], kept[:, 0]
        for weight in weights:
            x = x + attend(x, weight) + row
            row.add_(1)
            column.mul_(2)
        return (x, column, kept.sum(0))

    assert compare(layers, torch.ones(8, 8), *WEIGHTS) == 3


def test_a_copy_is_not_made_again_once_what_it_was_made_of_has_changed():
    def layers(x, kept, *weights):
        before = kept.t().contiguous().view(64)
        for weight in weights:
            x = x + attend(x, weight)
            kept.add_(x)
        return (x, before)

    assert compare(layers, torch.ones(8, 8), *WEIGHTS) == 3


def test_parts_of_what_an_operation_returns():
    def layers(x, *weights):
        parts = torch.split(x, 4)
        for weight in weights:
            values, places = (x + attend(x, weight)).max(dim=0)
            x = x + values + places
        return (x[:4] + parts[0],)

    assert compare(layers, *WEIGHTS) == 3


def test_python_numbers_are_constants():
    def layers(x, *weights):
        for weight in weights:
            x = x + attend(x, weight)
            x[0] = 3
        return (x,)

    assert compare(layers, *WEIGHTS) == 3


def test_memory_that_would_be_changed_in_two_ways_is_not_compiled():
    whole = torch.ones(8, 8)
    part = whole[:4].detach()
    out = torch.zeros(())

    def step():
        part.add_(1)
        out.copy_(whole.sum())

    with pytest.raises(Unsupported, match="as two tensors"):
        cut(program_of(step)[0])


def test_random_numbers_are_not_compiled(caplog):
    x = torch.zeros(4)

    def step():
        x.add_(torch.rand(4))

    compiler, wrapper = StepCompiler(False, False), CUDAGraphModule(step, CUDAGraphConfig(warmup_steps=1))
    with torch.inference_mode():
        for _ in range(4):
            compiler.call(wrapper)
    assert wrapper.stats.replays == 3 and "stays uncompiled: it draws random numbers" in caplog.text


def test_a_constant_that_is_changed_is_not_compiled():
    out = torch.zeros(3)

    def step():
        made = torch.tensor([1.0, 2.0, 3.0])
        made.add_(out)
        out.copy_(made)

    with pytest.raises(Unsupported, match="Python values"):
        program_of(step)


def test_a_constant_that_is_read_is_compiled():
    def layers(x, *weights):
        for weight in weights:
            x = x + attend(x, weight) * torch.tensor([0.5])
        return (x,)

    assert compare(layers, *WEIGHTS) == 3


def test_dropout_in_evaluation_is_compiled():
    def layers(x, *weights):
        for weight in weights:
            x = F.dropout(x + attend(x, weight), 0.5, training=False)
        return (x,)

    assert compare(layers, *WEIGHTS) == 3


def test_operations_keep_what_autocast_made_of_them():
    def layers(x, *weights):
        with torch.autocast("cpu", torch.bfloat16):
            for weight in weights:
                with torch.autocast("cpu", enabled=False):
                    y = x @ weight
                x = attend(x, weight).float() + y
        return (x,)

    with torch.autocast("cpu", torch.bfloat16):
        assert compare(layers, *WEIGHTS) == 3


def test_memory_that_no_operation_fills_is_not_compiled():
    source, out, copy = torch.arange(4.0), torch.zeros(4), ctypes.CDLL(None).memcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def step():
        made = torch.empty(4)
        copy(made.data_ptr(), source.data_ptr(), 16)  # as a kernel that is no operation would
        out.copy_(made)

    with pytest.raises(Unsupported, match="that no operation of PyTorch has launched"):
        program_of(step)


def test_memory_that_an_operation_fills_in_place_is_compiled():
    def layers(x, *weights):
        for weight in weights:
            made = torch.empty_like(x)
            made[:4].copy_(x[4:])
            made[4:].fill_(2.0)
            x = attend(made, weight)
        return (x,)

    assert compare(layers, *WEIGHTS) == 3


def test_tensors_that_are_turned_in_place_are_not_compiled():
    x, out = torch.randn(2, 3), torch.zeros(3, 2)

    def step():
        y = x * 2
        y.t_()
        out.copy_(y)

    with pytest.raises(Unsupported, match="looks at its memory"):
        program_of(step)


def test_parameters_in_one_buffer_are_inputs_of_their_own():
    flat = torch.cat([weight.flatten() for weight in WEIGHTS])
    parts = [part.view(8, 8) for part in flat.split(64)]

    def layers(x):
        for weight in parts:
            x = x + attend(x, weight)
        return (x,)

    assert compare(layers) == 6, "each begins at a place of its own"


LIBRARY = library.Library("graphmod_pieces", "FRAGMENT")
LIBRARY.define("count(Tensor x) -> ()")
LIBRARY.define("launch(Tensor x) -> Tensor")
LIBRARY.impl("count", lambda x: None, "CompositeExplicitAutograd")


def test_an_operation_that_may_write_anything_is_not_compiled():
    x = torch.zeros(3)

    def step():
        torch.ops.graphmod_pieces.count(x)
        x.add_(1)

    with pytest.raises(Unsupported, match="does not say what it writes"):
        program_of(step)


@pytest.mark.parametrize("within", [False, True])
def test_kernels_that_triton_launches_past_pytorch_are_not_compiled(within, monkeypatch, caplog):
    class JITFunction:
        def run(self, x):
            return x + 1

    module = types.ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    if within:
        LIBRARY.impl("launch", lambda x: JITFunction().run(x), "CompositeExplicitAutograd", allow_override=True)
    x = torch.zeros(3)

    def step():
        y = torch.ops.graphmod_pieces.launch(x) if within else JITFunction().run(x)
        x.copy_(y)

    compiler = StepCompiler(False, False, lambda graph, inputs, tuned: graph.forward)
    wrapper = CUDAGraphModule(step, CUDAGraphConfig(warmup_steps=1), name="step")
    with torch.inference_mode():
        for _ in range(5):
            compiler.call(wrapper)
    assert float(x[0]) == 5
    assert ("launches a Triton kernel" in caplog.text) is not within
    assert serving(wrapper).succeeded is within


ONLY_SHAPES = {
    "ones_like": lambda x: x.add_(torch.ones_like(torch.empty(8, 8))),
    "new_zeros": lambda x: x.add_(torch.empty(1).new_zeros(8, 8)),
    "nothing": lambda x: x.copy_(torch.cat([torch.empty(0), x * 1])),
    "no_features": lambda x: x.add_(torch.empty(8, 0) @ torch.empty(0, 8)),
}


@pytest.mark.parametrize("case", ONLY_SHAPES)
def test_memory_of_which_only_the_shape_is_read_need_not_be_filled(case):
    def layers(x, y):
        ONLY_SHAPES[case](y)
        return (y + x,)

    assert compare(layers, drawn(8, 8)) == 1


def test_an_input_without_elements_has_no_memory():
    rows = torch.zeros(0, 8)
    assert compare(lambda x: (x + rows.sum(),), *[]) == 1
