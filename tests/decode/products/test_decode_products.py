"""Linear layers of one input as one operation: which are joined, and what the kernel computes."""

import subprocess
import sys

import pytest
import torch
from decode_models import VOCABULARY, prompts_of
from step_programs import program_of
from torch import library, nn
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from transformers import Qwen3Config, Qwen3ForCausalLM

from graphmod.decode import DecodeEngine
from graphmod.decode.products.joining import _has_kernel, join_products
from graphmod.decode.products.operations import divided_product, gated_product, products
from graphmod.decode.step.compile import by_inductor
from graphmod.decode.step.pieces import cut, description, graph_of

FEATURES = 128
ROUNDED_OTHERWISE = {torch.ops.graphmod.divided_product.default, torch.ops.graphmod.gated_product.default}


def linear(width, bias=False, features=FEATURES):
    return nn.Linear(features, width, bias=bias, dtype=torch.bfloat16)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (linear(width) for width in (2048, 1024, 1024, 3072))
        self.gate, self.up = (linear(3072, features=1024) for _ in range(2))
        self.e, self.down = linear(3072), linear(1024, features=3072)
        self.biased, self.narrow, self.wide = linear(3072, bias=True), linear(3080), linear(2112)
        self.large = linear(2**16)
        self.deep, self.turned = linear(3072, features=96), linear(3072)
        self.long, self.longer = linear(1024, features=1024), linear(6144, features=1024)
        self.turned.weight = nn.Parameter(self.turned.weight.detach().T.contiguous().T)


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
        given.copy_(x)
        graph(*[inputs[number] for number in piece.inputs])
        for one, other in zip(results, module(x.clone()), strict=True):
            nodes += graph.graph.nodes
            if ROUNDED_OTHERWISE & {node.target for node in nodes}:
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
    "large_ones": (lambda m, x: (m.large(x), m.large(x)), 0),
    "used_in_between": (lambda m, x: (m.a(x).sum() + m.b(x), m.c(x)), 1),
    "bias": (lambda m, x: (m.biased(x), m.biased(x)), 0),
    "width": (lambda m, x: (m.narrow(x), m.narrow(x)), 0),
    "depth": (lambda m, x: apart(x[..., :96], m.deep, m.deep), 0),
    "strides": (lambda m, x: (m.turned(x), m.turned(x)), 0),
    "autocast": (autocast_inside, 0),
    "keywords": (lambda m, x: (m.a(x), nn.functional.linear(x, weight=m.b.weight)), 1),
    "made_weight": (lambda m, x: (m.a(x), nn.functional.linear(x, m.b.weight * 2)), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_joined(case):
    torch.manual_seed(0)
    call, expected = CASES[case]

    class Module(Parts):
        def forward(self, x):
            return call(self, x)

    assert joined(Module(), torch.randn(3, 1, FEATURES, dtype=torch.bfloat16)) == expected


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


def test_the_operations_are_there_for_who_compiles_alone():
    code = """
from graphmod.decode.step import compile
print([hasattr(torch.ops.graphmod, name) for name in ("products", "gated_product", "divided_product")])
"""
    done = subprocess.run([sys.executable, "-c", "import torch\n" + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, True, True]"


SILU = nn.functional.silu
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
    class Module(Parts):
        def forward(self, x):
            return self.a(x), self.b(x)

    dtype = dtype or torch.float32
    assert joined(Module().to(dtype), torch.randn(rows, FEATURES, dtype=dtype)) == expected


class Pair(Parts):
    def forward(self, x):
        return self.a(x), self.b(x)


ALONE = {
    "large": (lambda m, x: (m.large(x),), 1),
    "narrow": (lambda m, x: (m.b(x),), 1),
    "two": (lambda m, x: (m.b(x), m.large(x)), 1),
    "four": (lambda m, x: apart(x, m.a, m.b, m.c, m.d), 2),
    "deep": (lambda m, x: apart(torch.cat(8 * [x], -1), m.long), 1),
    "width": (lambda m, x: (m.narrow(x),), 0),
    "made_weight": (lambda m, x: (nn.functional.linear(x, m.b.weight * 2),), 0),
}


@pytest.mark.parametrize("case", ALONE)
def test_all_products_of_one_row_are_operations(case):
    torch.manual_seed(0)
    call, expected = ALONE[case]

    class Module(Parts):
        def forward(self, x):
            return call(self, x)

    assert joined(Module(), torch.randn(1, 1, FEATURES, dtype=torch.bfloat16)) == expected


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
    monkeypatch.setattr("graphmod.decode.products.joining.find_spec", lambda name: there[name])
    monkeypatch.setattr(torch.version, "hip", there["hip"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there["gpu"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: there["capability"])
    assert not _has_kernel()


@pytest.mark.gpu
def test_this_gpu_has_a_kernel():
    assert _has_kernel() == (torch.cuda.get_device_capability() >= (8, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "features, widths",
    [
        (128, [64, 64]),
        (1024, [2048, 1024, 1024]),
        (1024, [3072, 3072]),
        (896, [896, 128]),
        (3072, [1024]),
        (640, [64]),
        (128, [1024, 2048]),
        (896, [64, 3072, 128]),
    ],
)
def test_products_are_those_of_linear_layers(features, widths, dtype, device):
    assert_products_are_right(features, widths, dtype, device, rows=(1, 2, 7, 16, 17, 33, 64, 65, 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features, widths", [(4096, [64, 128]), (5120, [128, 64, 64]), (12288, [64])])
def test_a_row_may_be_longer_than_what_is_loaded_at_once(features, widths, dtype, device):
    assert_products_are_right(features, widths, dtype, device, rows=(1,))


def assert_products_are_right(features, widths, dtype, device, rows):
    torch.manual_seed(0)
    weights = [torch.randn(width, features, device=device, dtype=dtype) for width in widths]
    for count in rows:
        x = torch.randn(count, 1, features, device=device, dtype=dtype)
        for got, weight in zip(products(x, weights), weights, strict=True):
            exact = x.double() @ weight.double().T
            assert got.shape == (count, 1, len(weight)) and got.dtype == dtype
            # Half a unit of the last place, and what a sum of float32 loses.
            allowed = exact.abs() * torch.finfo(dtype).eps / 2 + features * 2.0**-23
            assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features, width, parts", [(3072, 1024, 8), (2048, 1024, 4), (640, 64, 5), (256, 192, 2)])
def test_the_parts_of_a_divided_product_add_up(features, width, parts, dtype, device):
    torch.manual_seed(0)
    weight = torch.randn(width, features, device=device, dtype=dtype)
    for rows in (1, 2, 17, 128):
        x = torch.randn(rows, 1, features, device=device, dtype=dtype)
        got = divided_product(x, weight, parts)
        assert got.shape == (parts, rows, 1, width) and got.dtype == torch.float32
        for part, some, other in zip(got, x.chunk(parts, -1), weight.chunk(parts, -1), strict=True):
            torch.testing.assert_close(part.double(), some.double() @ other.double().T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features, width", [(1024, 3072), (128, 64), (640, 192)])
def test_a_gated_product_is_exact_up_to_its_last_rounding(features, width, dtype, device):
    torch.manual_seed(0)
    gate, up = (torch.randn(width, features, device=device, dtype=dtype) / 4 for _ in range(2))
    for rows in (1, 2, 16, 17, 32, 33, 100, 128):
        x = torch.randn(rows, 1, features, device=device, dtype=dtype) / 4
        got = gated_product(x, gate, up)
        exact = nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
        assert got.shape == (rows, 1, width) and got.dtype == dtype
        allowed = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-4
        assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_weights_may_lie_anywhere(rows):
    torch.manual_seed(0)
    memory = torch.randn(128 * 1024 + 1, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    weight = memory[1:].view(128, 1024)
    (found,), (expected,) = products(x, [weight]), products(x, [weight.clone()])
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [[2048, 1024, 1024], [1024]])
def test_a_row_does_not_depend_on_the_others(widths):
    device = "cuda"
    torch.manual_seed(0)
    weights = [torch.randn(width, 1024, device=device, dtype=torch.bfloat16) for width in widths]
    x = torch.randn(128, 1024, device=device, dtype=torch.bfloat16)
    for fewer, more in ((3, 16), (17, 32), (33, 64), (65, 128)):
        for some, all_of_it in zip(products(x[:fewer], weights), products(x[:more], weights), strict=True):
            assert torch.equal(some, all_of_it[:fewer])
    whole = products(x, weights)
    x[1:] = float("nan")
    for alone, all_of_it in zip(products(x, weights), whole, strict=True):
        assert torch.equal(alone[0], all_of_it[0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 64, 100])
def test_kernels_that_are_launched_early_wait_for_each_other(rows):
    """Each of a chain needs what the one before makes; what is left of the replay before is wrong everywhere."""
    torch.manual_seed(0)
    settings = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [[torch.randn(width, 1024, **settings) / 32 for width in (1024, 3072, 3072)] for _ in range(12)]
    down = [torch.randn(1024, 3072, **settings) / 64 for _ in weights]
    given = torch.randn(rows, 1024, **settings)

    def chain():
        x = given
        for (first, gate, up), last in zip(weights, down, strict=True):
            (x,) = products(x, [first])
            x = gated_product(x, gate, up)
            x = products(x, [last])[0] if rows == 1 else divided_product(x, last, 4).sum(0).to(x.dtype)
        return x

    chain()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for _ in range(8):
        given.normal_()
        graph.replay()
        assert torch.equal(result, chain())


@pytest.mark.gpu
@pytest.mark.parametrize("compile_mode", ["default", "max"])
def test_compiled_decode_steps_use_them(compile_mode, monkeypatch):
    from graphmod.decode.products import kernels

    torch.manual_seed(0)
    device = "cuda"
    config = Qwen3Config(
        hidden_size=256, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device, torch.bfloat16).eval()
    calls = []
    multiply = kernels.multiply

    def counted(x, weights, *given, **named):
        calls.append(len(weights))
        multiply(x, weights, *given, **named)

    monkeypatch.setattr(kernels, "multiply", counted)
    engine = DecodeEngine(model, max_batch_size=4, max_seq_len=128, compile=compile_mode)
    prompts = prompts_of(12, 12, 5, 9)
    found = engine.generate(prompts, max_new_tokens=24)
    # Of each layer: query, key and value; the output of attention; gate and up, which are gated; down.
    assert calls and calls.count(3) == calls.count(2) and calls.count(1) == 2 * calls.count(2) > 0
    for prompt, done in zip(prompts, found, strict=True):
        whole = torch.tensor([prompt + done.tokens], device=device)
        with torch.no_grad():
            logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logits.gather(1, whole[0, len(prompt) :].unsqueeze(1)).squeeze(1).cpu()
        assert (torch.tensor(done.logprobs) - expected).abs().max() < 0.05
