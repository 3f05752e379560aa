"""Models of many kinds, against what knows nothing of this package: their own forward, and `generate`."""

import copy

import pytest
import torch
from torch import nn
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import causal_models
from graphmod.attention import Unclear, rule_of
from graphmod.decode import DecodeEngine
from graphmod.decode.model import look_at
from graphmod.decode.types import DecodeError
from graphmod.errors import ConfigError
from tests.support.decode_models import prompts_of, reference, tiny_model

# Windows in all layers and in some, chunks, sinks, capped scores, ALiBi, positions that are counted, several queries to
# a head and one for all, keys and values of different size, experts, partial rotary embeddings.
RIGHT = {
    "bloom": "own",
    "deepseek_v3": "own",
    "falcon": "own",
    "gemma2": "own",
    "gemma3_text": "graphmod_sdpa",
    "gpt_bigcode": "graphmod_sdpa",
    "gpt_neo": "own",
    "gpt_neox": "graphmod_sdpa",
    "gpt_oss": "graphmod_sdpa",
    "llama4_text": "graphmod_sdpa",
    "mistral": "graphmod_sdpa",
    "mixtral": "graphmod_sdpa",
    "opt": "own",
    "qwen3_moe": "graphmod_sdpa",
}
REFUSED = {
    "mamba": "not every layer stores keys and values",
    "qwen3_next": "keeps a state of another kind",
    "roberta": "its logits differ by",
    "rwkv": "not every layer stores",
}


def small(kind, device):
    model = causal_models.small_model(kind).to(device)
    model.generation_config.eos_token_id = None
    if device.type == "cuda" and "mm" in str(getattr(model.config, "_experts_implementation", None)):
        model.set_experts_implementation("batched_mm")  # grouped products in fp32 read on the host
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def own_logprobs(model, done):
    """Of the chosen tokens, and of the best ones, by one forward over the whole text."""
    with torch.no_grad():
        whole = torch.tensor([done.prompt + done.tokens[:-1]], device=model.device)
        own = model(input_ids=whole, use_cache=False).logits[0, -len(done.tokens) :].float().log_softmax(-1).cpu()
    return own.gather(1, torch.tensor(done.tokens)[:, None])[:, 0], own.max(-1).values


@pytest.mark.parametrize("kind", RIGHT)
def test_tokens_and_logprobs_are_those_of_the_models_own_forward(kind, device):
    model = small(kind, device)
    engine = DecodeEngine(model, max_batch_size=4, max_seq_len=100, block_size=16)
    prompts = prompts_of(1, 7, 30, 64)
    for _ in range(2):
        for prompt, done in zip(prompts, engine.generate(prompts, max_new_tokens=24), strict=True):
            chosen, best = own_logprobs(model, done)
            assert float((best - chosen).max()) < 1e-3
            torch.testing.assert_close(chosen, torch.tensor(done.logprobs), rtol=1e-4, atol=1e-3)
            if device.type == "cpu" and model.config._attn_implementation == "sdpa":
                assert done.tokens == reference(model, prompt, 24)
    assert (engine.attention.name or "own") == RIGHT[kind] or device.type == "cuda"
    assert engine.stats.total("launches") > 0 and engine.stats.total("failures") == 0


@pytest.mark.parametrize("kind", REFUSED)
def test_what_keeps_another_state_is_refused_when_the_engine_is_made(kind):
    with pytest.raises(DecodeError, match=f"{REFUSED[kind]}.*Use model.generate"):
        DecodeEngine(small(kind, torch.device("cpu")), max_seq_len=100)


def test_a_prompt_longer_than_a_prefill_call_sees_through_its_windows(device):
    model = small("gemma3_text", device)
    engine = DecodeEngine(model, max_batch_size=2, max_seq_len=128, block_size=16, prefill_tokens=20)
    (done,) = engine.generate(prompts_of(90), max_new_tokens=30)
    chosen, best = own_logprobs(model, done)
    assert float((best - chosen).max()) < 1e-3
    torch.testing.assert_close(chosen, torch.tensor(done.logprobs), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "llama4_text"])
def test_the_models_own_attention_can_be_asked_for(kind, device):
    model = small(kind, device)
    engine = DecodeEngine(model, max_batch_size=4, max_seq_len=100, attention="own")
    for done in engine.generate(prompts_of(3, 40), max_new_tokens=20):
        chosen, best = own_logprobs(model, done)
        assert float((best - chosen).max()) < 1e-3
    assert engine.attention.name is None and engine.stats.total("failures") == 0


def test_an_attention_that_does_not_understand_the_model_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"attention=sdpa cannot be used with this model: .*use auto, or own"):
        DecodeEngine(small("bloom", torch.device("cpu")), max_seq_len=100, attention="sdpa")
    with pytest.raises(ConfigError, match=r"attention=sdpa cannot be used: SDPA caps no scores"):
        DecodeEngine(small("gemma2", torch.device("cpu")), max_seq_len=100, attention="sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt_oss", "gemma2", "llama4_text"])
@pytest.mark.parametrize("compiled", ["none", "default"])
def test_kernels_know_windows_chunks_caps_and_sinks(kind, compiled, monkeypatch):
    monkeypatch.setitem(causal_models._SIZES, "head_dim", 16)
    monkeypatch.setitem(causal_models._SIZES, "hidden_size", 64)
    model = small(kind, torch.device("cuda"))
    engine = DecodeEngine(model, max_batch_size=4, max_seq_len=128, block_size=16, attention="triton", compile=compiled)
    for done in engine.generate(prompts_of(1, 15, 17, 64), max_new_tokens=40):
        chosen, best = own_logprobs(model, done)
        assert float((best - chosen).max()) < 2e-2
        torch.testing.assert_close(chosen, torch.tensor(done.logprobs), rtol=1e-3, atol=2e-2)
    assert engine.stats.total("failures") == 0 and engine.stats.total("launches") > 0


class Shifted(nn.Module):
    """Adds what it saw in the call before, which no cache of keys and values holds."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.before = inner, None

    def forward(self, hidden):
        out = self.inner(hidden)
        last = torch.zeros_like(out[:, :1]) if out.shape[1] > 1 or self.before is None else self.before
        moved = torch.cat((last, out[:, :-1]), dim=1)
        self.before = out[:, -1:].mul(0.5).detach()
        return out + moved


def test_a_state_that_nothing_tells_of_is_found_by_comparison():
    model = small("llama", torch.device("cpu"))
    model.model.layers[0].mlp = Shifted(model.model.layers[0].mlp)
    with pytest.raises(DecodeError, match=r"its logits differ by \d.*keeps or counts something"):
        DecodeEngine(model, max_seq_len=100)


class Rounded(nn.Linear):
    """Multiplies int8, as those do that are quantized dynamically: the largest input of a call is 127."""

    def forward(self, hidden):
        scale = hidden.abs().amax().clamp(min=1e-9) / 127
        return nn.functional.linear((hidden / scale).round() * scale, self.weight, self.bias)


def test_an_engine_under_autocast_is_judged_as_one_of_16_bits():
    model = small("llama", torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        (done,) = DecodeEngine(model, max_seq_len=100).generate([[5, 6, 7]], max_new_tokens=4)
    assert done.error is None and len(done.tokens) == 4


def test_a_model_that_is_quantized_dynamically_is_told_so():
    model = small("llama", torch.device("cpu"))
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Rounded
    with pytest.raises(DecodeError, match=r"layers\.0\.\w+\.\w+ \(Rounded\) is quantized dynamically"):
        DecodeEngine(model, max_seq_len=100)


@pytest.mark.parametrize("graphs", [True, False])
def test_first_tokens_that_are_wrong_are_an_error_and_not_given_out(device, graphs):
    model = small("llama", device)
    engine = DecodeEngine(model, max_seq_len=100, attention="sdpa", graphs=graphs)
    right = ALL_ATTENTION_FUNCTIONS["graphmod_sdpa"]

    def wrong(*args, **kwargs):
        out, weights = right(*args, **kwargs)
        return out * 1.5, weights

    ALL_ATTENTION_FUNCTIONS.register("graphmod_sdpa", wrong)
    given = []
    try:
        with pytest.raises(DecodeError, match=r"log-probabilities differ by .* they are not returned"):
            engine.generate(prompts_of(20, 30), max_new_tokens=20, on_finish=given.append)
        with pytest.raises(DecodeError, match="log-probabilities"):
            given.extend(engine.stream(prompts_of(20), max_new_tokens=20))
    finally:
        ALL_ATTENTION_FUNCTIONS.register("graphmod_sdpa", right)
    assert not [one for one in given if getattr(one, "tokens", None)]


def test_a_layer_that_comes_later_and_attends_by_itself_is_an_error(device):
    """A copy of a layer has a config of its own, in which no engine exchanges the attention."""
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_seq_len=100, attention="sdpa")
    (prompt,) = prompts_of(20)
    engine.generate([prompt], max_new_tokens=8)
    layers = model.model.layers
    layers[1].mlp = copy.deepcopy(layers[0].mlp)
    assert engine.generate([prompt], max_new_tokens=8)[0].tokens == reference(model, prompt, 8)
    layers[1].self_attn = copy.deepcopy(layers[1].self_attn)
    for _ in range(2):
        with pytest.raises(DecodeError, match=r"log-probabilities differ by .* they are not returned"):
            engine.generate([prompt], max_new_tokens=8)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (masking_utils.causal_mask_function, (None, None)),
        (masking_utils.sliding_window_causal_mask_function(16), (16, None)),
        (masking_utils.sliding_window_causal_mask_function(1), (1, None)),
        (masking_utils.sliding_window_causal_mask_function(300), (None, None)),
        (masking_utils.sliding_window_causal_mask_function(199), (199, None)),
        (masking_utils.chunked_causal_mask_function(32, torch.zeros(1, dtype=torch.int64)), (None, 32)),
        (masking_utils.chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64)), (None, 64)),
        (masking_utils.chunked_causal_mask_function(199, torch.zeros(1, dtype=torch.int64)), (None, 199)),
        (masking_utils.chunked_causal_mask_function(256, torch.zeros(1, dtype=torch.int64)), (None, None)),
    ],
)
def test_the_rule_of_a_mask_is_found_by_asking_it(function, expected):
    assert rule_of(function, 200, torch.device("cpu")) == expected


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, kv: kv < 8),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, kv: kv % 7 != 3),
        masking_utils.sliding_window_bidirectional_mask_function(16),
    ],
)
def test_a_mask_of_another_rule_is_told(function):
    with pytest.raises(Unclear, match="neither causal, nor of a window, nor of chunks"):
        rule_of(function, 200, torch.device("cpu"))


def test_looking_at_a_model_leaves_it_and_transformers_as_they_were():
    model = small("gemma3_text", torch.device("cpu"))
    before = model.config._attn_implementation
    names = set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    with torch.inference_mode():
        anatomy = look_at(model, 100)
    assert {layer.rule.window for layer in anatomy.layers} >= {16} and not anatomy.own_reason
    assert model.config._attn_implementation == before
    assert set(ALL_ATTENTION_FUNCTIONS.valid_keys()) == names
