"""Models whose linear layers have weights of 8 bits."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod.decode import DecodeEngine, quantize_weights
from graphmod.decode.weights import ScaledLinear
from graphmod.errors import ConfigError
from graphmod.fuse.program import Compiled, cut, graph_of
from graphmod.train.model import load_weights
from tests.support.decode_models import ARCHITECTURES, prompts_of, tiny_model
from tests.support.step_programs import program_of


@pytest.mark.parametrize("weights, most", [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_each_number_is_that_which_is_nearest(weights, most, device):
    torch.manual_seed(0)
    layer = nn.Linear(40, 24).to(device)
    with torch.no_grad():
        layer.weight[3] = 0
    model = nn.Sequential(layer, nn.Tanh())
    before = layer.weight.detach().clone()
    quantize_weights(model, weights)
    scaled = model[0]
    assert (
        scaled.qweight.itemsize == 1
        and scaled.scale.dtype == torch.float32
        and not [*scaled.qweight[3].float().nonzero()]
    )
    error = (scaled.qweight.float() * scaled.scale.unsqueeze(1) - before).abs()
    # Of int8 half a step, which is a 127th of the largest; of fp8 half of the last of its three bits.
    largest = (
        before.abs().amax(1, keepdim=True)
        if weights == "int8"
        else before.abs() + before.abs().amax(1, keepdim=True) / 2**9
    )
    assert (error <= largest * most * 1.001).all() and error.max() > 0
    x = torch.randn(5, 40, device=device)
    expected = (
        x.double() @ (scaled.qweight.double() * scaled.scale.double().unsqueeze(1)).T + layer.bias.double()
    ).tanh()
    torch.testing.assert_close(model(x).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_the_model_with_these_weights(architecture, weights, device):
    model = tiny_model(architecture, device)
    quantize_weights(model, weights)
    prompts = prompts_of(5, 9, 3)
    found = [
        DecodeEngine(model, max_batch_size=4, max_seq_len=64, graphs=graphs).generate(prompts, max_new_tokens=20)
        for graphs in (True, False)
    ]
    for captured, eager, prompt in zip(*found, prompts, strict=True):
        assert captured.tokens == eager.tokens and captured.logprobs == eager.logprobs
        whole = torch.tensor([prompt + captured.tokens], device=device)
        with torch.no_grad():
            logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, whole[0, len(prompt) :].unsqueeze(1)).squeeze(1).cpu()
        torch.testing.assert_close(torch.tensor(captured.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_the_loss_of_a_trained_model_stays(device):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    following = torch.randint(0, 64, (64, 4), device=device)  # which tokens come after each, equally often

    def batch(rows):
        tokens = [torch.randint(0, 64, (rows,), device=device)]
        for _ in range(31):
            tokens.append(following[tokens[-1], torch.randint(0, 4, (rows,), device=device)])
        return torch.stack(tokens, 1)

    for _ in range(80):
        tokens = batch(32)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens = batch(256)
    with torch.no_grad():
        expected = model(tokens, labels=tokens).loss.item()
        assert expected < 2.5  # of 4.2 before; ln 4 is the least
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for weights in ("int8", "fp8"):
            again = LlamaForCausalLM(config).to(device)
            again.load_state_dict(state)
            quantize_weights(again, weights)
            assert again(tokens, labels=tokens).loss.item() == pytest.approx(expected, rel=0.005)


def test_what_shares_its_weight_or_is_no_linear_layer_stays():
    model = tiny_model("qwen3", torch.device("cpu"))
    model.lm_head.weight = model.get_input_embeddings().weight
    quantize_weights(model, "int8")
    assert type(model.lm_head) is nn.Linear
    assert sum(isinstance(one, ScaledLinear) for one in model.modules()) == 7 * 2


def test_adapters_stay_and_are_added_to_their_layers(device):
    peft = pytest.importorskip("peft")
    model = tiny_model("llama", device)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    tokens = torch.tensor(prompts_of(9), device=device)
    with torch.no_grad():
        expected = adapted(tokens).logits
        quantize_weights(model, "int8")
        assert (adapted(tokens).logits - expected).abs().max() < 0.05 * expected.abs().max()
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer.lora_A["default"]) is nn.Linear and type(layer.base_layer) is ScaledLinear


def test_a_layer_keeps_its_hooks_its_places_and_its_mode():
    layer = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": layer, "b": layer, "other": nn.Linear(8, 8, device="meta")}).eval()
    layer.register_forward_hook(lambda module, given, result: result * 100)
    x = torch.randn(2, 8)
    expected = layer(x)
    quantize_weights(model, "int8")
    assert model["a"] is model["b"] is layer and type(layer) is ScaledLinear and not layer.training
    assert model["other"].qweight.is_meta and model["other"](x.to("meta")).is_meta
    torch.testing.assert_close(model["b"](x), expected, rtol=0.05, atol=2)


def test_a_layer_that_cannot_be_quantized_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8, device="meta"))
    with pytest.raises(NotImplementedError):
        quantize_weights(model, "int8", "cpu")
    assert type(model[0]) is nn.Linear and model[0].weight.shape == (8, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_not_that_of_scales(dtype):
    model = nn.Sequential(nn.Linear(40, 24))
    again = copy.deepcopy(model)
    quantize_weights(model, "int8")
    torch.set_default_dtype(dtype)
    try:
        quantize_weights(again, "int8")
    finally:
        torch.set_default_dtype(torch.float32)
    assert again[0].scale.dtype == torch.float32 and torch.equal(again[0].qweight, model[0].qweight)


def test_a_layer_with_a_forward_of_its_own_stays():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].forward = lambda x: x * model[0].weight
    quantize_weights(model, "int8")
    assert [type(one) for one in model] == [nn.Linear, ScaledLinear]


def test_a_saved_model_of_8_bits_is_not_taken_for_another(tmp_path):
    model = tiny_model("llama", torch.device("cpu"))
    quantize_weights(model, "int8")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="lacks 15 weights of its model"):
        load_weights(tmp_path, None, "auto")
    assert not hasattr(model.lm_head, "weight")  # which code may multiply by


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_another_dtype_of_a_model_leaves_the_weights_as_they_are(weights, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24)).to(device)
    quantize_weights(model, weights)
    before = model[0].qweight, model[0].scale
    model.to(torch.bfloat16)
    for old, now in zip(before, (model[0].qweight, model[0].scale), strict=True):
        assert old.dtype == now.dtype and torch.equal(old.double(), now.double())
    assert model(torch.randn(2, 40, device=device, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_is_no_number_stays_one():
    model = nn.Sequential(nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    quantize_weights(model, "int8")
    assert model(torch.ones(1, 8)).isnan().tolist() == [[True, False]]


def test_autocast_is_in_a_step_that_is_repeated_without_it():
    torch.manual_seed(0)
    model, x, result = nn.Sequential(nn.Linear(128, 64)), torch.randn(4, 128), torch.zeros(4, 64)
    quantize_weights(model, "int8")

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            result.copy_(model(x))

    program, inputs = program_of(step)
    expected = result.clone()
    pieces = cut(program)
    Compiled(pieces, [graph_of(piece) for piece in pieces], inputs)()
    assert torch.equal(result, expected) and torch.equal(result, result.bfloat16().float())


@pytest.mark.parametrize(
    "dtype, sizes, count",
    [(torch.bfloat16, (128, 64), 0), (torch.float32, (128, 64), 1), (torch.bfloat16, (64, 64), 1)],
)
def test_layers_that_no_kernel_reads_are_counted(dtype, sizes, count, caplog):
    with caplog.at_level("INFO", "graphmod"):
        quantize_weights(nn.Sequential(nn.Linear(*sizes, dtype=dtype)), "int8")
    assert (f"{count} of them copy their weights in each call, and so are slower" in caplog.text) is bool(count)


def test_what_cannot_be_is_said():
    for model, weights, said in (
        (nn.Linear(2, 2), "int4", "weights='int4' is not known; choose one of: saved, int8, fp8"),
        (nn.Linear(2, 2), "saved", "weights=saved leaves a model as it is"),
        (
            nn.Sequential(nn.Embedding(4, 4)),
            "int8",
            "weights=int8: Sequential has no linear layer with a weight of its own",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            quantize_weights(model, weights)
