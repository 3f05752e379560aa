"""The sampler: its distribution, its random numbers, and that a request owns them."""

import math

import numpy as np
import pytest
import torch

from graphmod.decode import DecodeEngine, Sampling
from graphmod.decode.sampling import FILTERED, GREEDY, PLAIN, gumbel, keep_likely, mix64, row_keys, sample
from tests.support.decode_models import prompts_of, tiny_model


def draw(logits, device, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, position=7, kind=FILTERED):
    count = len(logits)
    full = {"device": device}
    return sample(
        logits.to(device),
        torch.full((count,), temperature, **full),
        torch.full((count,), top_k, **full),
        torch.full((count,), top_p, **full),
        torch.full((count,), min_p, **full),
        (torch.arange(count) if seeds is None else seeds).to(device),
        torch.full((count,), position, **full),
        kind,
    )


def chi_squared(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Deviation of Pearson's statistic from its mean, in standard deviations of a chi-squared distribution."""
    expected = probabilities.double() * counts.sum()
    used = expected > 0
    assert not counts[~used].any(), "a token of probability 0 was drawn"
    statistic = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 10, "top_p": 0.7},
    {"temperature": 1.5, "min_p": 0.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_distribution(settings, device):
    draws, vocabulary = 20_000, 24
    row = torch.linspace(2.0, -2.0, vocabulary)[torch.randperm(vocabulary, generator=torch.Generator().manual_seed(3))]
    tokens = draw(row.expand(draws, -1), device, **settings).tokens.cpu()
    scaled = (row / settings["temperature"]).double()
    if settings.get("top_k"):
        scaled[scaled < scaled.topk(settings["top_k"]).values[-1]] = -math.inf
    probabilities = scaled.softmax(0)
    if settings.get("top_p"):
        ordered, places = probabilities.sort(descending=True)
        keep = ordered.cumsum(0) - ordered < settings["top_p"]
        probabilities[places[~keep]] = 0
        probabilities /= probabilities.sum()
    if settings.get("min_p"):
        probabilities[probabilities < settings["min_p"] * probabilities.max()] = 0
        probabilities /= probabilities.sum()
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert chi_squared(counts, probabilities) < 4


def test_the_test_of_the_distribution_notices_a_wrong_one():
    counts = torch.bincount(torch.arange(20_000) % 24, minlength=24)
    assert chi_squared(counts, torch.linspace(1, -1, 24).softmax(0)) > 50


def test_splitmix64_gives_its_published_first_numbers(device):
    # The stream of seed 1234567, as in the reference implementation's well-known test vector.
    gamma = 0x9E3779B97F4A7C15 - 2**64
    states = torch.tensor([1234567], device=device) + gamma * torch.arange(1, 4, device=device)
    got = [value % 2**64 for value in mix64(states).tolist()]
    assert got == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_gumbel_numbers_are_finite_and_have_the_mean_and_variance_of_gumbel(device):
    seeds = torch.arange(200, device=device)
    numbers = gumbel(row_keys(seeds, seeds * 3), 1000).double()
    assert torch.isfinite(numbers).all()
    assert abs(float(numbers.mean()) - 0.5772) < 0.02
    assert abs(float(numbers.var()) - math.pi**2 / 6) < 0.05


def test_a_row_draws_the_same_in_every_kind_and_any_batch(device):
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(64) * 7 - 100
    plain = draw(logits, device, seeds=seeds, kind=PLAIN).tokens
    filtered = draw(logits, device, seeds=seeds, kind=FILTERED).tokens
    alone = torch.cat([draw(logits[i : i + 1], device, seeds=seeds[i : i + 1], kind=PLAIN).tokens for i in range(64)])
    assert torch.equal(plain, filtered) and torch.equal(plain, alone)
    assert len(set(plain.tolist())) > 10
    zero = draw(logits, device, temperature=0.0, seeds=seeds, kind=FILTERED).tokens
    assert torch.equal(zero, draw(logits, device, kind=GREEDY).tokens)
    assert torch.equal(zero.cpu(), logits.argmax(1))


def test_logprobs_are_of_the_unmodified_distribution(device):
    logits = torch.randn(8, 50)
    choice = draw(logits, device, temperature=0.5, top_k=3)
    expected = logits.log_softmax(1).gather(1, choice.tokens.cpu().unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(choice.logprobs.cpu(), expected)


def test_top_k_and_top_p_keep_what_they_say(device):
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]], device=device).log().repeat(6, 1)
    kept = torch.isfinite(
        keep_likely(
            logits,
            torch.tensor([0, 2, 0, 1, 0, 2], device=device),
            torch.tensor([1.0, 1.0, 0.85, 0.01, 1.0, 1.0], device=device),
            torch.tensor([0.0, 0.0, 0.0, 0.0, 0.19, 0.5], device=device),
        )
    )
    assert kept.sum(dim=1).tolist() == [5, 2, 3, 1, 3, 2]
    assert torch.equal(kept, kept.sort(dim=1, descending=True).values), "the most likely ones are kept"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_flagged_for_their_row_alone(value, device):
    logits = torch.randn(3, 50)
    logits[1, 4] = value
    assert draw(logits, device).bad.tolist() == [False, True, False]
    logits[1, 4] = float("-inf")  # a token that is ruled out is nothing wrong
    assert draw(logits, device).bad.tolist() == [False, False, False]


def test_a_request_draws_the_same_tokens_whatever_else_is_in_the_batch(device):
    model = tiny_model("llama", device, scale=1.5)
    prompts = prompts_of(5, 9, 14, 3, 7)
    settings = [
        Sampling(temperature=1.0, seed=11, max_new_tokens=20),
        Sampling(temperature=0.8, top_k=12, seed=12, max_new_tokens=9),
        Sampling(max_new_tokens=16),
        Sampling(temperature=1.4, top_p=0.9, seed=2**40, max_new_tokens=13),
        Sampling(temperature=1.0, seed=-5, max_new_tokens=17),
    ]
    alone = DecodeEngine(model, max_batch_size=1)
    together = DecodeEngine(model, max_batch_size=8, steps_per_sync=3, block_size=8)
    few = DecodeEngine(model, max_batch_size=2, steps_per_sync=1)
    expected = [alone.generate([p], sampling=s)[0].tokens for p, s in zip(prompts, settings, strict=True)]
    assert [c.tokens for c in together.generate(prompts, sampling=settings)] == expected
    order = [3, 0, 4, 2, 1]
    mixed = few.generate([prompts[i] for i in order], sampling=[settings[i] for i in order])
    assert [c.tokens for c in mixed] == [expected[i] for i in order]


def test_samples_of_a_prompt_differ_and_other_seeds_differ(device):
    model = tiny_model("gpt2", device, scale=1.0)
    engine = DecodeEngine(model, max_batch_size=8)
    (prompt,) = prompts_of(6)
    first = engine.generate([prompt], n=5, temperature=1.0, max_new_tokens=12, seed=1)
    assert len({tuple(c.tokens) for c in first}) == 5
    assert engine.generate([prompt], n=5, temperature=1.0, max_new_tokens=12, seed=1) == first
    other = engine.generate([prompt], n=5, temperature=1.0, max_new_tokens=12, seed=2)
    assert not {tuple(c.tokens) for c in other} & {tuple(c.tokens) for c in first}


def test_prompts_that_share_a_seed_draw_numbers_of_their_own(device):
    model = tiny_model("llama", device, scale=0.0)  # all tokens alike, so that only the random numbers differ
    engine = DecodeEngine(model, max_batch_size=4)
    prompts = [[1, 2, 3], [9, 8, 7], [4, 4, 4]]
    asked = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}

    def tokens(found):
        return [c.tokens for c in found]

    first = tokens(engine.generate(prompts, seed=5, n=2, **asked))
    assert len(set(map(tuple, first))) == 6
    assert tokens(DecodeEngine(model, max_batch_size=1).generate(prompts, seed=5, n=2, **asked)) == first
    assert tokens(engine.generate(prompts[:1], seed=5, n=2, **asked)) == first[:2]
    own = tokens(engine.generate(prompts, sampling=[Sampling(seed=5, **asked)] * 3))  # a seed of its own is as it is
    assert own == [first[0]] * 3
    assert tokens(engine.generate(prompts, seed=np.int64(5), n=2, **asked)) == first
    assert tokens(engine.generate(prompts, sampling=[Sampling(seed=np.int32(5), **asked)] * 3)) == own


def test_calls_without_a_seed_draw_anew_and_follow_torchs_generator(device):
    engine = DecodeEngine(tiny_model("llama", device, scale=0.0), max_batch_size=4)
    asked = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
    torch.manual_seed(3)
    calls = [[c.tokens for c in engine.generate([[1, 2], [3, 4]], **asked)] for _ in range(2)]
    assert len({tuple(tokens) for call in calls for tokens in call}) == 4
    torch.manual_seed(3)
    assert [[c.tokens for c in engine.generate([[1, 2], [3, 4]], **asked)] for _ in range(2)] == calls
    before = torch.get_rng_state()
    engine.generate([[1, 2], [3, 4]], max_new_tokens=3)
    engine.generate([[1, 2], [3, 4]], seed=1, **asked)
    assert torch.equal(torch.get_rng_state(), before)
