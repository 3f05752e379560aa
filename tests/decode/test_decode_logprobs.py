"""Log-probabilities of the most likely tokens and of prompts are those of the model's own forward."""

import random

import pytest
import torch

from graphmod.decode import DecodeEngine
from graphmod.decode.sampling import TOP
from graphmod.decode.types import RequestError, Sampling, events
from tests.support.decode_models import tiny_model
from tests.support.sweeps import sweep


def own(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens], device=model.device)).logits[0].float().log_softmax(-1).cpu()


def close(row, likely, count):
    """Whether these are the most likely tokens of a row, the likeliest first."""
    values = row.topk(count).values.tolist()
    assert [value for _, value in likely] == pytest.approx(values, abs=1e-5)
    assert [row[token].item() for token, _ in likely] == pytest.approx(values, abs=1e-5)


def asked(seed, vocabulary):
    chance = random.Random(seed)
    prompt = [chance.randrange(vocabulary) for _ in range(chance.choice([1, 2, 17, 40, 100]))]
    return prompt, Sampling(
        temperature=chance.choice([0.0, 0.8]),
        top_k=chance.choice([0, 5]),
        top_logprobs=chance.choice([0, 1, 5, 20]),
        prompt_logprobs=chance.random() < 0.6,
        max_new_tokens=chance.choice([1, 5, 20]),
        ignore_eos=True,
        seed=seed,
    )


@sweep(settings=[{}, {"graphs": False}, {"prefill_tokens": 16}], attention=["own", "sdpa"])
def test_they_are_those_of_the_models_own_forward(device, attention, settings):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=4, max_seq_len=128, block_size=16, attention=attention, **settings)
    handles = []
    for seed in range(12):
        prompt, sampling = asked(seed, model.config.vocab_size)
        handles.append((sampling, engine.submit(prompt, 1 + seed % 2, sampling)))
        if seed % 3 == 0:
            engine.step()
    while engine.unfinished:
        engine.step()
    for sampling, handle in handles:
        for done in handle.completions:
            table, first, top = own(model, done.prompt + done.tokens), len(done.prompt) - 1, sampling.top_logprobs
            wanted = [table[first + at, token].item() for at, token in enumerate(done.tokens)]
            assert done.logprobs == pytest.approx(wanted, abs=1e-5)
            assert (done.top_logprobs is None) == (not top)
            assert (done.prompt_logprobs is None) == (not sampling.prompt_logprobs)
            for at, likely in enumerate(done.top_logprobs or ()):
                close(table[first + at], likely, top)
            if sampling.prompt_logprobs:
                of_prompt = [table[at, token].item() for at, token in enumerate(done.prompt[1:])]
                assert done.prompt_logprobs == pytest.approx(of_prompt, abs=1e-5)
                assert (done.prompt_top_logprobs is None) == (not top)
                for at, likely in enumerate(done.prompt_top_logprobs or ()):
                    close(table[at], likely, top)


def test_only_batches_that_ask_compute_them(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2, max_seq_len=64)
    engine.generate([[5, 6, 7]], max_new_tokens=12)
    engine.generate([[5, 6, 7]], max_new_tokens=12, temperature=1.0)
    kinds = {kind for _, _, kind in engine.graphs.wrappers}
    assert not any(kind >= TOP for kind in kinds) and not any(key[2] for key in engine.prefill.wrappers)
    assert "_top" not in vars(engine.state)
    engine.generate([[5, 6, 7]], max_new_tokens=12, top_logprobs=2)
    assert {kind for _, _, kind in engine.graphs.wrappers} - kinds == {TOP}


def test_a_row_that_asks_changes_no_token_of_another(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=4, max_seq_len=64)
    prompts, settings = [[5, 6, 7], [9, 8]], {"temperature": 0.9, "seed": 3, "max_new_tokens": 20, "ignore_eos": True}
    alone = [done.tokens for done in engine.generate(prompts, **settings)]
    each = [Sampling(**settings), Sampling(**settings, top_logprobs=3, prompt_logprobs=True)]
    each[1].seed = None
    mixed = engine.generate(prompts, sampling=each)
    assert mixed[0].tokens == alone[0] and mixed[0].top_logprobs is None and len(mixed[1].top_logprobs) == 20


def test_streams_tell_them_with_each_token(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2, max_seq_len=64)
    asked = {"max_new_tokens": 12, "top_logprobs": 3, "ignore_eos": True}
    (whole,) = engine.generate([[5, 6, 7]], **asked)
    stream = engine.stream([[5, 6, 7]], **asked)
    streamed = [event.top_logprobs for event in stream]
    assert [[token for token, _ in one] for one in streamed] == [
        [token for token, _ in one] for one in whole.top_logprobs
    ]
    assert all(event.top_logprobs is None for event in engine.stream([[5]], max_new_tokens=3))
    runs = []
    engine.submit([5, 6, 7], on_run=runs.append, **asked)
    while engine.unfinished:
        engine.step()
    assert [one.top_logprobs for run in runs for one in events([run])] == streamed


def test_a_prompt_whose_beginning_is_known_is_scored_as_a_whole(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, max_seq_len=128, block_size=8, keep_prefixes=True)
    prompt = list(range(3, 43))
    engine.generate([prompt], max_new_tokens=4)
    (done,) = engine.generate([prompt], max_new_tokens=4, prompt_logprobs=True)
    wanted = [own(model, prompt)[at, token].item() for at, token in enumerate(prompt[1:])]
    assert done.prompt_logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("count", [-1, 21, 1.5, True])
def test_a_number_that_cannot_be_told_is_refused(device, count):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2, max_seq_len=64)
    with pytest.raises(RequestError, match="top_logprobs must be"):
        engine.generate([[5]], top_logprobs=count)
