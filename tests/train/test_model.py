"""Models have the sizes they were told, seeded weights, and attention that asks the host nothing."""

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from graphmod.errors import ConfigError
from graphmod.train.model import build_model, model_config
from graphmod.train.schema import Architecture, ModelConfig, Precision

CPU = torch.device("cpu")
ARCHITECTURES = [Architecture.llama, Architecture.qwen3, Architecture.gpt2]


def sizes(architecture: Architecture, **changes) -> ModelConfig:
    values = {"layers": 2, "hidden_size": 32, "heads": 4, "intermediate_size": 64, "max_positions": 64}
    if architecture is not Architecture.gpt2:
        values["kv_heads"] = 2
    return ModelConfig(architecture, **(values | changes))


def build(model: ModelConfig, precision=Precision.fp32, seed=0, vocab=256):
    return build_model(model, model_config(model, vocab, 16), precision, CPU, seed)


class HostReads(TorchDispatchMode):
    """Counts how often a value is read on the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_static_attention_gives_the_bits_of_sdpa_and_reads_nothing_on_the_host(architecture, precision):
    model = build(sizes(architecture), precision).eval()
    tokens = torch.randint(0, 256, (3, 16))
    mixed = precision is Precision.bf16_mixed
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed), HostReads() as reads:
        ours = model(input_ids=tokens).logits
    assert reads.count == 0
    model.set_attn_implementation("sdpa")
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed), HostReads() as reads:
        theirs = model(input_ids=tokens).logits
    assert reads.count > 0, "transformers' sdpa reads nothing any more: causal_sdpa can go"
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_those_of_sdpa(architecture):
    tokens = torch.randint(0, 256, (2, 16))
    gradients = []
    for implementation in ("causal_sdpa", "sdpa"):
        model = build(sizes(architecture))
        model.set_attn_implementation(implementation)
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_later_token_does_not_change_an_earlier_prediction(architecture):
    model = build(sizes(architecture)).eval()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    assert torch.equal(model(input_ids=tokens).logits[:, :-1], model(input_ids=changed).logits[:, :-1])


def test_an_attention_mask_is_refused_and_not_dropped():
    model = build(sizes(Architecture.llama))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ConfigError, match="attention_mask"):
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    model.set_attn_implementation("sdpa")
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens))


def test_a_cache_is_refused_because_the_mask_would_mean_something_else():
    model = build(sizes(Architecture.llama)).eval()
    first = model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=True)
    with pytest.raises(ConfigError, match="generate with a cache"):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=first.past_key_values)


def test_a_sliding_window_shorter_than_the_sequence_is_refused():
    from transformers import MistralConfig, MistralForCausalLM

    from graphmod.train.attention import use_static_causal_attention

    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        sliding_window=8,
    )
    model = use_static_causal_attention(MistralForCausalLM(config))
    model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False)
    with pytest.raises(ConfigError, match=r"data\.seq_len=8"):
        model(input_ids=torch.zeros(1, 9, dtype=torch.int64), use_cache=False)


def test_weights_depend_on_the_seed_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    first, again, other = (build(sizes(Architecture.llama), seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_bf16_weights_keep_rotary_frequencies_in_fp32():
    model = build(sizes(Architecture.llama), Precision.bf16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert {p.dtype for p in build(sizes(Architecture.llama), Precision.bf16_mixed).parameters()} == {torch.float32}


def test_the_vocabulary_fits_the_data_in_round_numbers():
    assert model_config(sizes(Architecture.llama), 256, 16).vocab_size == 256
    assert model_config(sizes(Architecture.llama), 257, 16).vocab_size == 320
    with pytest.raises(ConfigError, match=r"raise model\.vocab_size"):
        model_config(sizes(Architecture.llama, vocab_size=100), 256, 16)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_embeddings_share_their_weight(architecture):
    for tied in (True, False):
        model = build(sizes(architecture, tie_embeddings=tied))
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_dropout_reaches_gpt2():
    config = model_config(sizes(Architecture.gpt2, dropout=0.25), 256, 16)
    assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) == (0.25, 0.25, 0.25)


def test_a_saved_model_is_loaded_with_its_weights(tmp_path):
    saved = build(sizes(Architecture.llama), seed=5)
    saved.save_pretrained(tmp_path)
    local = ModelConfig(Architecture.local, path=str(tmp_path))
    loaded = build(local)
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)
    assert loaded.training and loaded.config.use_cache is False
    with pytest.raises(ConfigError, match="64 positions"):
        model_config(local, 256, 65)


def test_a_folder_without_usable_weights_is_named(tmp_path):
    saved = build(sizes(Architecture.llama))
    saved.save_pretrained(tmp_path)
    local = ModelConfig(Architecture.local, path=str(tmp_path))
    config = model_config(local, 256, 16)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="no weights transformers can read"):
        build_model(local, config, Precision.fp32, CPU, 0)
    weights = saved.state_dict()
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights.*model\.norm\.weight"):
        build_model(local, config, Precision.fp32, CPU, 0)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="no model transformers can read"):
        model_config(local, 256, 16)
