"""Models have the sizes they were told, seeded weights, and attention that asks the host nothing."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM

from benchmarks import causal_models
from graphmod import graph_layers
from graphmod.errors import ConfigError
from graphmod.train.attention import use_static_causal_attention
from graphmod.train.batches import block_mask
from graphmod.train.model import build_model, model_config
from graphmod.train.settings import LOCAL, ModelConfig, Precision

CPU = torch.device("cpu")
ARCHITECTURES = ["llama", "qwen3", "gpt2"]


def sizes(architecture: str, **changes) -> ModelConfig:
    values = {"layers": 2, "hidden_size": 32, "heads": 4, "intermediate_size": 64, "max_positions": 64}
    if architecture != "gpt2":
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
    model = build(sizes("llama"))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ConfigError, match="attention_mask"):
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    model.set_attn_implementation("sdpa")
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens))


def test_a_cache_is_refused_because_the_mask_would_mean_something_else():
    model = build(sizes("llama")).eval()
    first = model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=True)
    with pytest.raises(ConfigError, match="generate with a cache"):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=first.past_key_values)


def test_generate_names_the_ways_out_and_the_switch_of_attention_is_one():
    model = build(sizes("llama")).eval()
    tokens = torch.randint(3, 90, (2, 8))
    before = model(input_ids=tokens, use_cache=False).logits
    settings = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    with pytest.raises(ConfigError, match=r"DecodeEngine instead of generate.*set_attn_implementation\('sdpa'\)"):
        model.generate(tokens, **settings)
    model.set_attn_implementation("sdpa")
    assert model.generate(tokens, **settings).shape == (2, 14)
    model.set_attn_implementation("causal_sdpa")
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, before)
    with pytest.raises(ConfigError):
        model.generate(tokens, **settings)


def plain(kind):
    """A small model of transformers, and a copy of it, with its own SDPA."""
    model = causal_models.small_model(kind)
    model.set_attn_implementation("sdpa")
    return model, copy.deepcopy(model)


# Windows in all layers and in some, chunks, whole attention.
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "llama4_text", "gpt2"])
@pytest.mark.parametrize("length", [16, 40])
def test_it_computes_what_the_models_own_attention_does_bit_for_bit(kind, length):
    model, own = plain(kind)
    use_static_causal_attention(model)
    tokens = torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(0))
    losses = [one(input_ids=tokens, labels=tokens, use_cache=False).loss for one in (model, own)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma2", "does not compute softcap"),
        ("gpt_oss", "does not compute s_aux"),
        ("falcon", "FalconForCausalLM: it fails with an exchanged attention"),
        ("opt", "it makes a padding mask of its own"),
        ("mamba", "does not let its attention be chosen"),
    ],
)
def test_what_is_more_than_causal_is_refused_and_the_model_left_alone(kind, reason):
    model = causal_models.small_model(kind)
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=reason):
        use_static_causal_attention(model)
    assert model.config._attn_implementation == before and not model._forward_pre_hooks


def test_a_model_that_looks_ahead_is_refused():
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(ConfigError, match=r"neither causal, nor of a window|not causal|mask of its own"):
        use_static_causal_attention(BertForMaskedLM(config))


def test_positions_that_may_be_packed_and_unknown_keywords_are_refused():
    model, _ = plain("llama")
    use_static_causal_attention(model)
    tokens = torch.randint(3, 90, (1, 8))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ConfigError, match="position_ids, which may be those of packed sequences"):
        model(input_ids=tokens, position_ids=packed, use_cache=False)
    with pytest.raises(ConfigError, match="does not compute cu_seq_lens_q"):
        model(input_ids=tokens, cu_seq_lens_q=torch.tensor([0, 4, 8]), use_cache=False)


def test_a_window_and_a_block_mask_are_both_kept_to():
    model, own = plain("mistral")
    use_static_causal_attention(model)
    tokens = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 22 + [1] * 18])
    positions = torch.cat((torch.arange(22), torch.arange(18)))[None]
    mine = model(input_ids=tokens, position_ids=positions, block_mask=block_mask(documents), use_cache=False).logits
    theirs = own(input_ids=tokens, position_ids=positions, use_cache=False).logits
    assert torch.equal(mine, theirs)


def test_a_layer_that_came_later_is_told():
    model, other = plain("llama")
    use_static_causal_attention(model)
    model.model.layers[0] = other.model.layers[0]
    model.model.layers[0].self_attn.config = model.config
    with pytest.raises(ConfigError, match="came into the model after"):
        model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False)


def test_layers_with_windows_are_captured_and_equal_eager(device):
    model, own = plain("gemma3_text")
    results = []
    for one in (use_static_causal_attention(model), own):
        one.to(device).train()
        wrappers = graph_layers(one, body=False) if one is model else []
        optimizer = torch.optim.SGD(one.parameters(), lr=0.01)
        losses = []
        for step in range(7):
            tokens = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(step)).to(device)
            loss = one(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, [p.detach().clone() for p in one.parameters()]))
        assert all(wrapper.stats.replays > 0 for wrapper in wrappers)
    assert results[0][0] == results[1][0] and all(map(torch.equal, results[0][1], results[1][1]))


def test_weights_depend_on_the_seed_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    first, again, other = (build(sizes("llama"), seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_bf16_weights_keep_rotary_frequencies_in_fp32():
    model = build(sizes("llama"), Precision.bf16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert {p.dtype for p in build(sizes("llama"), Precision.bf16_mixed).parameters()} == {torch.float32}


def test_the_vocabulary_fits_the_data_in_round_numbers():
    assert model_config(sizes("llama"), 256, 16).vocab_size == 256
    assert model_config(sizes("llama"), 257, 16).vocab_size == 320
    with pytest.raises(ConfigError, match=r"raise model\.vocab_size"):
        model_config(sizes("llama", vocab_size=100), 256, 16)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_embeddings_share_their_weight(architecture):
    for tied in (True, False):
        model = build(sizes(architecture, tie_embeddings=tied))
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_dropout_reaches_gpt2():
    config = model_config(sizes("gpt2", dropout=0.25), 256, 16)
    assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) == (0.25, 0.25, 0.25)


def test_a_saved_model_is_loaded_with_its_weights(tmp_path):
    saved = build(sizes("llama"), seed=5)
    saved.save_pretrained(tmp_path)
    local = ModelConfig(LOCAL, path=str(tmp_path))
    loaded = build(local)
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)
    assert loaded.training and loaded.config.use_cache is False
    with pytest.raises(ConfigError, match="64 positions"):
        model_config(local, 256, 65)


def test_a_folder_without_usable_weights_is_named(tmp_path):
    saved = build(sizes("llama"))
    saved.save_pretrained(tmp_path)
    local = ModelConfig(LOCAL, path=str(tmp_path))
    config = model_config(local, 256, 16)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="no weights that transformers can read"):
        build_model(local, config, Precision.fp32, CPU, 0)
    weights = saved.state_dict()
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights.*model\.norm\.weight"):
        build_model(local, config, Precision.fp32, CPU, 0)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="not a model that transformers can read"):
        model_config(local, 256, 16)
