"""Which linear layers of a step become operations."""

import functools
import subprocess
import sys

import pytest
import torch
from torch import library, nn
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from graphmod.decode.weights import ScaledLinear
from graphmod.fuse.inductor import by_inductor
from graphmod.fuse.operations import _has_kernel, join_products, multiplies_row, scaled_linear
from graphmod.fuse.program import cut, description, graph_of
from tests.support.step_programs import program_of

FEATURES = 128
ROUNDED_OTHERWISE = {torch.ops.graphmod.divided_products.default, torch.ops.graphmod.gated_product.default}

SILU = nn.functional.silu


def rounds_otherwise(node):
    """What has a bias is added up in float32, of which the CPU's own product may lose some."""
    return node.target in ROUNDED_OTHERWISE or torch.float32 in node.args


def linear(width, bias=False, features=FEATURES):
    return nn.Linear(features, width, bias=bias, dtype=torch.bfloat16)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (linear(width) for width in (2048, 1024, 1024, 3072))
        self.gate, self.up = (linear(3072, features=1024) for _ in range(2))
        self.e, self.down = linear(3072), linear(1024, features=3072)
        self.biased, self.narrow, self.wide = linear(3072, bias=True), linear(3080), linear(2112)
        self.large, self.long_biased = linear(2**16), linear(1024, bias=True, features=1024)
        self.deep, self.turned = linear(3072, features=96), linear(3072)
        self.long, self.longer = linear(1024, features=1024), linear(6144, features=1024)
        self.scaled, self.scaled_too, self.scaled_large = (
            linear(2048, bias=True),
            linear(1024, bias=True),
            linear(2**16),
        )
        self.scales = torch.rand(3072)
        for name, weights in {"scaled": "int8", "scaled_too": "int8", "scaled_large": "fp8"}.items():
            one = getattr(self, name)
            setattr(self, name, ScaledLinear(one.weight.detach(), one.bias, weights, "cpu"))
        self.turned.weight = nn.Parameter(self.turned.weight.detach().T.contiguous().T)


@functools.cache
def layers():
    torch.manual_seed(0)
    return Layers()


class Parts(nn.Module):
    """The same layers in all tests, which take a second to make; none may change them."""

    def __init__(self):
        super().__init__()
        for name, layer in layers().named_children():
            setattr(self, name, layer)
        self.scales = layers().scales


def joined(module, x, **settings):
    """How many operations were made of a module's linear layers; what comes out must not change."""
    nodes = settings.pop("nodes", [])
    with torch.inference_mode():
        results = [torch.zeros_like(one) for one in module(x.clone())]
    given = x.clone()

    def step():
        for result, one in zip(results, module(given), strict=True):
            result.copy_(one)

    program, inputs = program_of(step)
    (piece,) = cut(program)
    graph = graph_of(piece)
    with torch.inference_mode():
        FakeTensorProp(graph).propagate(*[inputs[number].clone() for number in piece.inputs])
        count = join_products(graph, **{"device": "cpu", **settings})
        assert multiplies_row(graph) == (count > 0 and x.numel() == x.shape[-1])
        given.copy_(x)
        graph(*[inputs[number] for number in piece.inputs])
        for one, other in zip(results, module(x.clone()), strict=True):
            nodes += graph.graph.nodes
            if any(map(rounds_otherwise, nodes)):
                torch.testing.assert_close(one, other, rtol=2**-6, atol=4e-3)
            else:
                assert one.dtype == other.dtype and torch.equal(one, other)
    return count


def apart(x, *layers):
    return tuple(layer(x) for layer in layers)


def autocast_inside(m, x):
    with torch.autocast("cpu", dtype=torch.float16):
        other = m.a(x)
    return other, m.b(x)


CASES = {
    "two": (lambda m, x: (m.a(x), m.b(x)), 1),
    "three": (lambda m, x: (m.a(x), m.b(x), m.c(x)), 1),
    "four_are_three_and_one": (lambda m, x: (m.a(x), m.b(x), m.c(x), m.d(x)), 1),
    "five_are_three_and_two": (lambda m, x: (m.a(x), m.b(x), m.c(x), m.d(x), m.a(x)), 2),
    "two_inputs": (lambda m, x: (m.a(x), m.b(2 * x), m.c(x)), 1),
    "narrow_ones": (lambda m, x: (m.b(x), m.c(x)), 0),
    "one_alone": (lambda m, x: (m.a(x),), 0),
    "one_narrow_and_deep": (lambda m, x: apart(torch.cat(8 * [x], -1), m.long), 1),
    "one_wide_and_deep": (lambda m, x: apart(torch.cat(8 * [x], -1), m.longer), 0),
    "two_narrow_and_deep": (lambda m, x: apart(torch.cat(8 * [x], -1), m.long, m.long), 2),
    "wide_ones": (lambda m, x: (m.wide(x), m.wide(x)), 1),
    "8_bits": (lambda m, x: (m.scaled(x), m.a(x), m.scaled_too(x)), 1),
    "8_bits_of_another_kind": (lambda m, x: (m.scaled(x), m.scaled_large(x)), 0),
    "scales_of_more_than_8_bits": (lambda m, x: (scaled_linear(x, m.e.weight, m.scales), m.d(x), m.a(x)), 1),
    "large_ones_of_8_bits": (lambda m, x: (m.scaled_large(x), m.scaled_large(x)), 1),
    "large_ones": (lambda m, x: (m.large(x), m.large(x)), 0),
    "used_in_between": (lambda m, x: (m.a(x).sum() + m.b(x), m.c(x)), 1),
    "bias": (lambda m, x: (m.biased(x), m.biased(x)), 1),
    "some_with_a_bias": (lambda m, x: (m.biased(x), m.a(x), m.biased(x)), 1),
    "bias_of_its_own": (lambda m, x: (m.a(x), nn.functional.linear(x, m.b.weight, x[0, 0, :1].repeat(1024))), 1),
    "narrow_and_deep_with_a_bias": (lambda m, x: apart(torch.cat(8 * [x], -1), m.long_biased), 1),
    "width": (lambda m, x: (m.narrow(x), m.narrow(x)), 0),
    "depth": (lambda m, x: apart(x[..., :96], m.deep, m.deep), 0),
    "strides": (lambda m, x: (m.turned(x), m.turned(x)), 0),
    "autocast": (autocast_inside, 0),
    "keywords": (lambda m, x: (m.a(x), nn.functional.linear(x, weight=m.b.weight)), 1),
    "made_weight": (lambda m, x: (m.a(x), nn.functional.linear(x, m.b.weight * 2)), 0),
}
OF_ONE_ROW = {  # of which all are operations, large or narrow or alone
    "large": (lambda m, x: (m.large(x),), 1),
    "narrow": (lambda m, x: (m.b(x),), 1),
    "two": (lambda m, x: (m.b(x), m.large(x)), 1),
    "four": (lambda m, x: apart(x, m.a, m.b, m.c, m.d), 2),
    "deep": (lambda m, x: apart(torch.cat(8 * [x], -1), m.long), 1),
    "bias": (lambda m, x: (m.biased(x), m.b(x)), 1),
    "width": (lambda m, x: (m.narrow(x),), 0),
    "made_weight": (lambda m, x: (nn.functional.linear(x, m.b.weight * 2),), 0),
    "gated": (lambda m, x: (SILU(m.d(x)) * m.e(x),), 1),
    "8_bits": (lambda m, x: (m.scaled(x), m.a(x)), 2),
}


@pytest.mark.parametrize("rows, case", [*((3, case) for case in CASES), *((1, case) for case in OF_ONE_ROW)])
def test_what_is_joined(rows, case):
    torch.manual_seed(0)
    call, expected = (OF_ONE_ROW if rows == 1 else CASES)[case]

    class Module(Parts):
        def forward(self, x):
            return call(self, x)

    assert joined(Module(), torch.randn(rows, 1, FEATURES, dtype=torch.bfloat16)) == expected


@pytest.mark.slow  # which compiles C++
@pytest.mark.parametrize("tuned", [False, True])
def test_a_compiler_takes_all_of_them(tuned):
    torch.manual_seed(0)
    parts, result = Parts(), torch.zeros(4, 1024, dtype=torch.bfloat16)
    x = torch.randn(4, 1024, dtype=torch.bfloat16)

    def step():
        hidden = parts.long(x) + x
        normed = hidden * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True)).to(hidden.dtype)
        result.copy_(hidden + parts.down(SILU(parts.gate(normed)) * parts.up(normed)))

    program, inputs = program_of(step)
    (piece,) = cut(program)
    graph, mode = graph_of(piece), FakeTensorMode()
    fakes = [mode.from_tensor(inputs[number]) for number in piece.inputs]
    with torch.no_grad():
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*fakes)
        assert join_products(graph, device="cpu") == 3
        compiled = by_inductor(graph, fakes, tuned)
    with torch.inference_mode():
        step()
        expected = result.clone()
        compiled(*[inputs[number] for number in piece.inputs])
    torch.testing.assert_close(result, expected, rtol=2**-6, atol=4e-2)


@pytest.mark.slow
def test_the_operations_are_there_for_who_compiles_alone():
    code = """
from graphmod.fuse import inductor
print([hasattr(torch.ops.graphmod, name) for name in ("products", "gated_product", "divided_products")])
"""
    done = subprocess.run([sys.executable, "-c", "import torch\n" + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, True, True]"


GATED = {
    "gate_first": (lambda m, x: SILU(m.d(x)) * m.e(x), True),
    "gate_last": (lambda m, x: m.d(x) * SILU(m.e(x)), True),
    "two_gates": (lambda m, x: SILU(m.d(x)) * SILU(m.e(x)), False),
    "one_weight": (lambda m, x: SILU(m.d(x)) * m.d(x), True),
    "in_float32": (lambda m, x: (SILU(m.d(x).float()) * m.e(x).float()).to(x.dtype), False),
    "one_number_a_row": (lambda m, x: SILU(m.d(x))[..., :1] * m.e(x), False),
    "a_number": (lambda m, x: SILU(m.d(x)) * 2 + m.e(x), False),
    "used_elsewhere": (lambda m, x: SILU(m.d(x)) * (h := m.e(x)) + h, False),
    "gate_used_elsewhere": (lambda m, x: SILU(h := m.d(x)) * m.e(x) + h, False),
    "opened_used_elsewhere": (lambda m, x: (h := SILU(m.d(x))) * m.e(x) + h, False),
    "another_function": (lambda m, x: nn.functional.gelu(m.d(x)) * m.e(x), False),
    "written": (lambda m, x: (lambda gate, up: SILU(gate.mul_(2)) * up)(m.d(x), m.e(x)), False),
    "written_after": (lambda m, x: (lambda gate, up: SILU(gate) * up.mul_(2))(m.d(x), m.e(x)), False),
    "input_written_after": (lambda m, x: (SILU(m.d(x)) * m.e(x), x.mul_(2))[0], True),
    "all_of_it": (lambda m, x: m.down(SILU(m.d(x)) * m.e(x)), True),
    "another_product": (lambda m, x: SILU(m.d(x)) * m.e(x) + m.d(x), False),
    "bias": (lambda m, x: SILU(m.biased(x)) * m.e(x), False),
    "other_bias": (lambda m, x: SILU(m.d(x)) * m.biased(x), False),
}


@pytest.mark.parametrize("case", GATED)
def test_what_is_gated(case):
    torch.manual_seed(0)
    call, expected = GATED[case]

    class Module(Parts):
        def forward(self, x):
            return (call(self, x),)

    found = []
    assert joined(Module(), torch.randn(3, 1, FEATURES, dtype=torch.bfloat16), nodes=found) == 1 + (case == "all_of_it")
    assert (torch.ops.graphmod.gated_product.default in {node.target for node in found}) == expected


def grow(x):
    x += 1
    return x


def put(x):
    x[0] = 0
    return x


LIBRARY = library.Library("graphmod_test", "FRAGMENT")
LIBRARY.define("scale(Tensor(a!) x, Tensor y) -> Tensor")  # writes, and its name does not say so
LIBRARY.impl("scale", lambda x, y: x.mul_(2).clone(), "CompositeExplicitAutograd")
library.register_fake("graphmod_test::scale", lambda x, y: torch.empty_like(x), lib=LIBRARY)

FIRST = torch.tensor([0])
WRITES = {
    "method": lambda x: x.add_(1),
    "operator": grow,
    "item": put,
    "inplace": lambda x: nn.functional.relu(x, inplace=True),
    "out": lambda x: torch.add(x, 1, out=x),
    "view": lambda x: x[:, 0].zero_(),
    "dunder": lambda x: x.__iadd__(1),
    "item_method": lambda x: x.__setitem__(0, 0),
    "operation": lambda x: torch.ops.aten.add_.Tensor(x, x),
    "packet": lambda x: torch.ops.graphmod_test.scale(x, x),
    "renormalize": lambda x: nn.functional.embedding(FIRST, x.view(3, FEATURES), max_norm=0.1),
}


@pytest.mark.parametrize("write", WRITES)
def test_an_input_that_is_written_in_between_is_two_inputs(write):
    torch.manual_seed(0)

    class Module(Parts):
        def forward(self, x):
            x = x * 1
            first = self.a(x)
            WRITES[write](x)
            return first, self.b(x)

    assert joined(Module(), torch.randn(3, 1, FEATURES, dtype=torch.bfloat16)) == 0


@pytest.mark.parametrize(
    "rows, dtype, expected", [(128, torch.bfloat16, 1), (129, torch.bfloat16, 0), (4, torch.float16, 1), (4, None, 0)]
)
def test_only_few_rows_of_half_precision(rows, dtype, expected):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(2048), linear(1024)

        def forward(self, x):
            return self.a(x), self.b(x)

    dtype = dtype or torch.float32
    assert joined(Module().to(dtype), torch.randn(rows, FEATURES, dtype=dtype)) == expected


WRITTEN = {
    "before": lambda m, x: m.a.weight.copy_(m.d.weight[:2048]),
    "view": lambda m, x: m.a.weight[0].copy_(m.d.weight[0]),
    "out": lambda m, x: torch.add(m.d.weight[:2048], 1, out=m.a.weight),
    "other_storage": lambda m, x: m.alias.fill_(1),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("write", WRITTEN)
def test_a_weight_that_the_step_writes_is_left_to_the_compiler(write, late):
    """The kernels read weights while what ran before may still run."""
    torch.manual_seed(0)

    class Module(Parts):
        def __init__(self):
            super().__init__()
            memory = torch.randn(2048, FEATURES, dtype=torch.bfloat16)
            self.a = linear(2048)
            self.a.weight = nn.Parameter(torch.from_dlpack(memory), requires_grad=False)
            self.alias = torch.from_dlpack(memory[3:5])

        def forward(self, x):
            if not late:
                WRITTEN[write](self, x)
            first = self.a(x) * 1
            if late:
                WRITTEN[write](self, x)
            return first, self.b(x)

    for rows, expected in ((1, 1), (3, 0)):
        nodes = []
        count = joined(Module(), torch.randn(rows, 1, FEATURES, dtype=torch.bfloat16), nodes=nodes)
        assert count == expected
        assert sum(node.target is torch.ops.aten.linear.default for node in {*nodes}) == 2 - expected


def test_what_a_norm_in_training_writes_is_written():
    """Its schema does not say so."""
    torch.manual_seed(0)
    square = torch.randn(4, FEATURES, dtype=torch.bfloat16)

    class Module(Parts):
        def forward(self, x):
            first = self.a(square[:1])
            nn.functional.batch_norm(square[2:], square[0], square[1], training=True, momentum=1.0)
            return first, self.b(square[:1])

    nodes = []
    joined(Module(), torch.zeros(1, FEATURES, dtype=torch.bfloat16), nodes=nodes)
    ours = [node for node in {*nodes} if node.target is torch.ops.graphmod.products.default]
    assert [len(node.args[1]) for node in ours] == [1, 1]


def test_a_weight_that_another_piece_writes_is_left_to_the_compiler():
    torch.manual_seed(0)
    layers = [linear(FEATURES) for _ in range(4)]
    x, out = torch.randn(1, FEATURES, dtype=torch.bfloat16), torch.zeros(1, FEATURES, dtype=torch.bfloat16)

    def step():
        y = x
        for layer in layers:
            z = layer(y).view(1, 1, 1, FEATURES)
            y = nn.functional.scaled_dot_product_attention(z, z, z).view(1, FEATURES) + 1
        layers[2].weight.mul_(2)
        out.copy_(y)

    program, inputs = program_of(step)
    pieces = cut(program)
    held = [
        {number for number in piece.weights if inputs[number] is layer.weight} for piece in pieces for layer in layers
    ]
    assert [len(one) for one in held] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    described = [description(piece, program) for piece in pieces]
    assert described[1] == described[3] != described[2], "one is the same but for who may write its weight"


@pytest.mark.parametrize(
    "there", [{"triton": None}, {"hip": "7.0"}, {"gpu": False}, {"capability": (7, 5)}], ids=lambda there: str(*there)
)
def test_other_devices_have_no_kernel(there, monkeypatch):
    there = {"triton": object(), "hip": None, "gpu": True, "capability": (9, 0)} | there
    monkeypatch.setattr("graphmod.fuse.operations.find_spec", lambda name: there[name])
    monkeypatch.setattr(torch.version, "hip", there["hip"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there["gpu"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: there["capability"])
    assert not _has_kernel()


@pytest.mark.gpu
def test_this_gpu_has_a_kernel():
    assert _has_kernel() == (torch.cuda.get_device_capability() >= (8, 0))
