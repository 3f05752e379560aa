"""Any causal LM of transformers is built from the sizes that settings name, with the config one would write by hand."""

import json

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from graphmod.errors import ConfigError
from graphmod.train.model import transformers_config
from graphmod.train.run import train
from graphmod.train.settings import ModelConfig

SIZES = {"layers": 2, "hidden_size": 32, "heads": 4, "intermediate_size": 64, "max_positions": 64}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def llama_like(kind, theta=10000.0, **changed):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": theta}
    given = {"num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False}
    return kind(vocab_size=320, rope_parameters=rope, pad_token_id=None, **NO_TOKENS, **sizes, **given | changed)


def gpt2(dropout=0.0, **changed):
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 64, "n_positions": 64, "tie_word_embeddings": False}
    drops = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout)
    return GPT2Config(vocab_size=320, **NO_TOKENS, **sizes | changed, **drops)


@pytest.mark.parametrize(
    ("architecture", "given", "expected"),
    [
        ("llama", {}, llama_like(LlamaConfig)),
        (
            "llama",
            {"kv_heads": 2, "rope_theta": 5e5, "tie_embeddings": True},
            llama_like(LlamaConfig, 5e5, num_key_value_heads=2, tie_word_embeddings=True),
        ),
        ("qwen3", {"head_dim": 16, "kv_heads": 2}, llama_like(Qwen3Config, num_key_value_heads=2, head_dim=16)),
        ("gpt2", {}, gpt2()),
        ("gpt2", {"dropout": 0.1, "tie_embeddings": True}, gpt2(0.1, tie_word_embeddings=True)),
    ],
)
def test_the_config_is_the_one_that_is_written_out(architecture, given, expected):
    assert transformers_config(ModelConfig(architecture, **SIZES | given), 320).to_dict() == expected.to_dict()


def test_options_are_those_of_the_config_by_its_own_names():
    options = {"sliding_window": 16, "hidden_act": "gelu"}
    config = transformers_config(ModelConfig("mistral", options=options, **SIZES), 320)
    assert (config.sliding_window, config.hidden_act, config.num_key_value_heads) == (16, "gelu", 4)
    bare = {name: size for name, size in SIZES.items() if name != "heads"}
    config = transformers_config(ModelConfig("gpt2", options={"num_attention_heads": 2}, **bare), 320)
    assert config.n_head == 2


@pytest.mark.parametrize(
    ("architecture", "changed", "said"),
    [
        ("gpt2", {"kv_heads": 2}, r"model\.kv_heads does not exist in gpt2; drop it"),
        ("gpt2", {"rope_theta": 1e4}, r"model\.rope_theta does not exist in gpt2"),
        ("llama", {"dropout": 0.1}, r"model\.dropout does not exist in llama; .*model\.options\.attention_dropout"),
        ("llama", {"layers": None}, r"model\.layers is not set; model\.architecture=llama needs it"),
        ("mamba", {}, r"model\.heads does not exist in mamba"),
        ("lama", {}, r"model\.architecture=lama is not known; did you mean llama\?"),
        ("t5", {}, r"model\.architecture=t5 is a model of transformers that predicts no next token"),
        (
            "mistral",
            {"options": {"slidng_window": 3}},
            r"does not exist in mistral; did you mean model\.options\.sliding",
        ),
        ("gpt2", {"options": {"n_layer": 3}}, r"model\.options\.n_layer=3 and model\.layers=2 set the same"),
        ("llama", {"options": {"hidden_act": 3}}, r"transformers refuses these sizes of model\.architecture=llama: "),
        ("llama", {"head_dim": 7}, "need an even size of a head, got 7"),
        ("gemma3_text", {"rope_theta": 1e4}, r"set model\.options\.rope_parameters="),
    ],
)
def test_what_an_architecture_does_not_have_is_told(architecture, changed, said):
    with pytest.raises(ConfigError, match=said):
        transformers_config(ModelConfig(architecture, **SIZES | changed), 320)


@pytest.mark.parametrize("scope", ["per_layer", "full_iteration"])
def test_layers_with_windows_train_to_eagers_bits(tiny, tmp_path, scope):
    settings = ["data=synthetic", "train.checkpoint=false", "model.architecture=mistral"]
    settings += ["model.options.sliding_window=8", "train.steps=6"]
    runs = [train(tiny(f"graph={one}", *settings), tmp_path / one) for one in ("none", scope)]
    assert runs[0].losses == runs[1].losses and runs[1].graph["replays"] > 0


def test_a_model_whose_attention_cannot_be_exchanged_keeps_it(tiny, tmp_path, caplog):
    settings = ["data=synthetic", "train.checkpoint=false", "model.architecture=gemma2", "train.steps=6"]
    with caplog.at_level("INFO", "graphmod"):
        runs = [train(tiny(f"graph={scope}", *settings), tmp_path / scope) for scope in ("none", "full_iteration")]
    assert "Gemma2ForCausalLM keeps its own attention: " in caplog.text
    assert runs[0].losses == runs[1].losses
    with pytest.raises(ConfigError, match=r"data\.packing=true tells the attention"):
        train(tiny(*settings, "data.packing=true"), tmp_path / "packed")


def test_a_model_that_looks_ahead_is_refused(tiny, tmp_path):
    settings = ["data=synthetic", "model.architecture=bert", "model.kv_heads=null"]
    with pytest.raises(ConfigError, match="BertLMHeadModel looks ahead"):
        train(tiny(*settings), tmp_path)


def test_a_resumed_run_is_built_with_the_same_options(tiny, tmp_path, stop_after, monkeypatch):
    settings = ["data=synthetic", "model.architecture=mistral", "model.options.sliding_window=8"]
    whole = train(tiny(*settings), tmp_path / "whole")
    stop_after(3)
    train(tiny(*settings), tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"model\.options was .*8.* and is now .*4"):
        train(tiny(*settings[:2], "model.options.sliding_window=4", "train.resume=auto"), tmp_path / "run")
    resumed = train(tiny(*settings, "train.resume=auto"), tmp_path / "run")
    assert resumed.losses == whole.losses
    saved = json.loads((tmp_path / "run" / resumed.checkpoint / "config.json").read_text())
    assert saved["sliding_window"] == 8 and saved["model_type"] == "mistral"
    assert torch.isfinite(torch.tensor(resumed.losses)).all()
