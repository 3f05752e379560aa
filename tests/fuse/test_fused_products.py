"""What the operations in place of linear layers compute."""

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from graphmod.decode import DecodeEngine, quantize_weights
from graphmod.decode.weights import ScaledLinear
from graphmod.fuse.operations import divided_products, gated_product, products, scaled_linear
from tests.support.decode_models import VOCABULARY, prompts_of


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
    whole = [weight.double().T for weight in weights]
    for count in rows:
        x = torch.randn(count, 1, features, device=device, dtype=dtype)
        sums = [(x.double() @ one, x.double().abs() @ one.abs()) for one in whole]
        for result in (dtype, torch.float32):
            for got, (exact, size) in zip(products(x, weights, result, []), sums, strict=True):
                assert got.shape == (count, 1, exact.shape[-1]) and got.dtype == result
                # Half a unit of the last place, and what a sum of float32 loses. Where it is not rounded after that,
                # one sees that tensor cores cut off what a sum has no room for, each time they add sixteen products.
                lost = features * 2.0**-23 if result is dtype else size * 2.0**-19
                allowed = exact.abs() * torch.finfo(result).eps / 2 + lost
                assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features, width, parts", [(3072, 1024, 8), (2048, 1024, 4), (640, 64, 5), (256, 192, 2)])
def test_the_parts_of_a_divided_product_add_up(features, width, parts, dtype, device):
    torch.manual_seed(0)
    weight = torch.randn(width, features, device=device, dtype=dtype)
    for rows in (1, 2, 17, 128):
        x = torch.randn(rows, 1, features, device=device, dtype=dtype)
        got = divided_products(x, [weight], parts, [])[0]
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
        got = gated_product(x, gate, up, [])
        exact = nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
        assert got.shape == (rows, 1, width) and got.dtype == dtype
        allowed = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-4
        assert ((got.double() - exact).abs() <= allowed).all()


def scaled(width, features, kind, device):
    """A weight of 8 bits, its scales, and what the two are together."""
    scale = torch.rand(width, device=device) / 64
    weight = torch.randn(width, features, device=device) * 32
    weight = weight.round().clamp(-127, 127).to(torch.int8) if kind == "int8" else weight.to(torch.float8_e4m3fn)
    return weight, scale, weight.double() * scale.double().unsqueeze(1)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("features, widths", [(1024, [2048, 1024, 1024]), (640, [192, 192]), (12288, [128])])
def test_products_of_8_bits(features, widths, kind, device):
    torch.manual_seed(0)
    weights, scales, whole = zip(*(scaled(width, features, kind, device) for width in widths), strict=True)
    for rows in (1, 2, 17, 65, 128):
        x = torch.randn(rows, 1, features, device=device, dtype=torch.bfloat16)
        size = x.double().abs() @ whole[0].abs().T
        exact = [x.double() @ one.T for one in whole]

        def close(got, expected, size=size):
            """As near as bfloat16 allows, of weights too where those are made anew; of sums the size of their parts."""
            allowed = expected.abs() * 2**-8 + size.max() * (2.0**-12 if got.is_cuda else 2.0**-9)
            assert ((got.double() - expected).abs() <= allowed).all()

        for got, expected in zip(products(x, [*weights], x.dtype, [*scales]), exact, strict=True):
            close(got, expected)
        close(scaled_linear(x, weights[0], scales[0]), exact[0])
        bias = torch.randn(widths[0], device=device, dtype=torch.bfloat16)
        close(scaled_linear(x, weights[0], scales[0], bias), exact[0] + bias.double())
        if features % 256 == 0:
            for got, expected in zip(divided_products(x, [*weights], 2, [*scales]), exact, strict=True):
                close(got.sum(0), expected)
        if len({*widths}) == 1 < len(widths):
            gated = nn.functional.silu(exact[0] / 64) * exact[1]
            got = gated_product(x, *weights, [scales[0] / 64, scales[1]])
            close(got, gated, size * (x.double().abs() @ whole[1].abs().T))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_many_rows_and_other_dtypes_multiply_by_a_copy(kind, device):
    torch.manual_seed(0)
    weight, scale, whole = scaled(96, 100, kind, device)
    for rows, dtype in ((300, torch.float32), (3, torch.float64), (200, torch.bfloat16)):
        x = torch.randn(rows, 100, device=device, dtype=dtype)
        tolerance = {"rtol": 2**-6, "atol": 2**-5} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
        torch.testing.assert_close(scaled_linear(x, weight, scale).double(), x.double() @ whole.T, **tolerance)


def test_small_scales_count_in_float16(device):
    weight, scale, whole = scaled(64, 128, "int8", device)
    x = torch.randn(4, 128, device=device, dtype=torch.float16) * 64
    found = scaled_linear(x, weight, scale * 1e-4).double()
    torch.testing.assert_close(found, x.double() @ whole.T * 1e-4, rtol=2e-3, atol=2e-4)


def test_an_input_of_no_rows_or_whole_numbers(device):
    weight, scale, _ = scaled(64, 128, "int8", device)
    for shape in ((0, 128), (2, 0, 128)):
        x = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        assert scaled_linear(x, weight, scale).shape == (*shape[:-1], 64)
    with pytest.raises(TypeError, match="takes an input in floating point, got"):
        scaled_linear(torch.ones(1, 128, device=device, dtype=torch.int8), weight, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_weights_may_lie_anywhere(rows):
    torch.manual_seed(0)
    memory = torch.randn(128 * 1024 + 1, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    weight = memory[1:].view(128, 1024)
    (found,), (expected,) = (products(x, [one], x.dtype, []) for one in (weight, weight.clone()))
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [[2048, 1024, 1024], [1024]])
def test_a_row_does_not_depend_on_the_others(widths):
    device = "cuda"
    torch.manual_seed(0)
    weights = [torch.randn(width, 1024, device=device, dtype=torch.bfloat16) for width in widths]
    x = torch.randn(128, 1024, device=device, dtype=torch.bfloat16)
    for fewer, more in ((3, 16), (17, 32), (33, 64), (65, 128)):
        for some, all_of_it in zip(
            *(products(x[:count], weights, x.dtype, []) for count in (fewer, more)), strict=True
        ):
            assert torch.equal(some, all_of_it[:fewer])
    whole = products(x, weights, x.dtype, [])
    x[1:] = float("nan")
    for alone, all_of_it in zip(products(x, weights, x.dtype, []), whole, strict=True):
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
            (x,) = products(x, [first], x.dtype, [])
            x = gated_product(x, gate, up, [])
            x = (
                products(x, [last], x.dtype, [])[0]
                if rows == 1
                else divided_products(x, [last], 4, [])[0].sum(0).to(x.dtype)
            )
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
@pytest.mark.parametrize(
    "compile_mode, weights", [("default", None), ("max", None), ("max", "int8"), ("default", "fp8")]
)
def test_compiled_decode_steps_use_them(compile_mode, weights, monkeypatch):
    from graphmod.fuse import operations

    torch.manual_seed(0)
    device = "cuda"
    config = Qwen3Config(
        hidden_size=256, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device, torch.bfloat16).eval()
    if weights is not None:
        quantize_weights(model, weights)
    calls = []
    multiply = operations.multiply

    def counted(x, weights, *given, **named):
        calls.append(len(weights))
        multiply(x, weights, *given, **named)

    monkeypatch.setattr(operations, "multiply", counted)
    engine = DecodeEngine(model, max_batch_size=4, max_seq_len=128, compile=compile_mode)
    prompts = prompts_of(12, 12, 5, 9)
    found = engine.generate(prompts, max_new_tokens=24)
    # Of each layer: query, key and value; the output of attention; gate and up, which are gated; down.
    own = sum(isinstance(one, ScaledLinear) for one in model.modules())
    assert calls and calls.count(3) == calls.count(2)
    assert calls.count(1) == 2 * calls.count(2) > 0 or own  # before it is compiled each layer of 8 bits is one, too
    for prompt, done in zip(prompts, found, strict=True):
        whole = torch.tensor([prompt + done.tokens], device=device)
        with torch.no_grad():
            logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logits.gather(1, whole[0, len(prompt) :].unsqueeze(1)).squeeze(1).cpu()
        assert (torch.tensor(done.logprobs) - expected).abs().max() < 0.05
