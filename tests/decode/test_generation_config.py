"""What a model's generation config says is the default of requests, and what is not supported of it is told."""

import logging

import pytest
import torch
from transformers import GenerationConfig

from graphmod.decode import DecodeEngine, RequestError
from graphmod.errors import ConfigError
from tests.support.decode_models import prompts_of, tiny_model

DRAWN = {"do_sample": True, "temperature": 0.7, "top_k": 7, "top_p": 0.9}
CHANGING = {
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]],
    "suppress_tokens": [5],
    "min_new_tokens": 3,
    "forced_eos_token_id": 5,
    "exponential_decay_length_penalty": (1, 2.0),
    "sequence_bias": [[[5], 1.0]],
    "num_beams": 3,
    "stop_strings": ["a"],
}
QUICK = ("repetition_penalty", "suppress_tokens", "num_beams", "stop_strings")


def engine_of(device, said, **settings):
    model = tiny_model("llama", device)
    model.generation_config = GenerationConfig(**said)
    return DecodeEngine(model, max_batch_size=2, **settings)


def tokens(engine, **settings):
    return [done.tokens for done in engine.generate(prompts_of(9), n=3, seed=5, max_new_tokens=12, **settings)]


def test_requests_that_say_nothing_are_drawn_by_it(device, caplog):
    engine = engine_of(device, DRAWN)
    assert "temperature=0.7, top_k=7, top_p=0.9" in caplog.text
    plain = engine_of(device, DRAWN, generation_config="none")
    settings = {name: DRAWN[name] for name in ("temperature", "top_k", "top_p")}
    assert tokens(engine) == tokens(plain, **settings) == tokens(engine, **settings)
    for said in ({"temperature": 0.2}, {"top_k": 0}, {"top_p": 1.0}, {"temperature": 0}):
        assert tokens(engine, **said) == tokens(plain, **settings | said)
    assert tokens(plain) == tokens(engine, temperature=0)


def test_penalty_and_min_p_are_those_of_transformers_own_generate(device, caplog):
    said = {"repetition_penalty": 1.5, "min_p": 0.5}
    engine = engine_of(device, said)
    assert "min_p=0.5, repetition_penalty=1.5" in caplog.text and "not supported" not in caplog.text
    given = torch.tensor(prompts_of(9), device=device)
    own = engine.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, pad_token_id=0)
    assert tokens(engine) == [own[0, 9:].tolist()] * 3
    plain = engine_of(device, said, generation_config="none")
    assert tokens(plain) == tokens(engine, repetition_penalty=1) != tokens(engine)
    assert tokens(plain, temperature=1.0, **said) == tokens(engine, temperature=1.0)
    assert tokens(engine, temperature=1.0) != tokens(engine, temperature=1.0, min_p=0)
    engine.warm_up(prefill=False)
    before = engine.stats.total("captures")
    assert tokens(engine) and engine.stats.total("captures") == before


def test_without_do_sample_the_most_likely_token_is_taken(device):
    engine = engine_of(device, {"do_sample": False})
    assert tokens(engine) == tokens(engine, temperature=0)
    assert len({tuple(one) for one in tokens(engine)}) == 1


def test_a_model_that_says_nothing_changes_nothing(device, caplog):
    engine = engine_of(device, {})
    assert "generation config" not in caplog.text
    assert tokens(engine) == tokens(engine_of(device, DRAWN, generation_config="none"))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in CHANGING]
)
def test_what_would_change_greedy_tokens_is_told_and_refused(name, caplog):
    engine = engine_of(torch.device("cpu"), DRAWN | {name: CHANGING[name]})
    assert name in caplog.text
    with pytest.raises(RequestError, match=f"{name}=.*generation_config=none"):
        tokens(engine, temperature=0)
    assert tokens(engine)
    assert tokens(engine_of(torch.device("cpu"), {name: CHANGING[name]}, generation_config="none"))


def test_what_changes_draws_alone_is_told(caplog):
    engine = engine_of(torch.device("cpu"), DRAWN | {"typical_p": 0.9})
    assert "typical_p=0.9" in caplog.text and tokens(engine, temperature=0)


def test_values_that_change_nothing_are_not_told(caplog):
    with caplog.at_level(logging.WARNING):
        engine_of(torch.device("cpu"), {"repetition_penalty": 1.0, "num_beams": 1, "min_p": 0.0, "suppress_tokens": []})
    assert "generation config" not in caplog.text


def test_a_value_that_cannot_be_used_is_an_error():
    model = tiny_model("llama", torch.device("cpu"))
    model.generation_config = GenerationConfig(do_sample=True)
    model.generation_config.top_p = 3.0
    with pytest.raises(ConfigError, match="top_p must be"):
        DecodeEngine(model)
    with pytest.raises(ConfigError, match="choose one of: auto, none"):
        DecodeEngine(model, generation_config="vllm")
