"""What changes logits before the choice (penalties, biases, what is ruled out, logits processors) does what
transformers' own processors do, or a written-out formula, in any batch."""

import functools

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as own

from graphmod.decode import DecodeEngine, DecodeError, RequestError, Sampling
from graphmod.decode.sampling import ADJUSTED, gumbel, row_keys
from graphmod.text import ByteCodec
from tests.support.decode_models import VOCABULARY, prompts_of, reference, tiny_model

NEW = 14


def penalties(presence, frequency, prompt):
    """The formula of OpenAI's API: mu[j] -> mu[j] - c[j] * frequency - float(c[j] > 0) * presence."""

    def process(tokens, logits):
        count = torch.bincount(tokens[0, prompt:], minlength=logits.shape[1])
        return logits - count * frequency - (count > 0).float() * presence

    return process


def backwards(tokens, logits):
    return logits.flip(1)


def by_length(tokens, logits):
    """Other logits at each place, so that a token too many or too few is noticed."""
    odd = (tokens >= 0).sum(1, keepdim=True) % 2
    return logits + odd * torch.linspace(0, 3, logits.shape[1], device=logits.device)


PAIRS = [[a, b] for a in range(0, VOCABULARY, 5) for b in range(0, VOCABULARY, 2)]
# Settings of a request -> what transformers makes of them, given the length of the prompt.
CASES = {
    "none": ({}, lambda _: []),
    "repetition": ({"repetition_penalty": 1.6}, lambda _: [own.RepetitionPenaltyLogitsProcessor(1.6)]),
    "encouraged": ({"repetition_penalty": 0.7}, lambda _: [own.RepetitionPenaltyLogitsProcessor(0.7)]),
    "presence": ({"presence_penalty": 2.0}, lambda prompt: [penalties(2.0, 0.0, prompt)]),
    "frequency": ({"frequency_penalty": 1.1}, lambda prompt: [penalties(0.0, 1.1, prompt)]),
    "both": ({"presence_penalty": -1.0, "frequency_penalty": 0.6}, lambda prompt: [penalties(-1.0, 0.6, prompt)]),
    "bias": ({"logit_bias": {7: 3.0, 9: -2.5}}, lambda _: [own.SequenceBiasLogitsProcessor({(7,): 3.0, (9,): -2.5})]),
    "allowed": (
        {"allowed_token_ids": [3, 8, 20, 21, 40, 90]},
        lambda _: [own.SuppressTokensLogitsProcessor([*({*range(VOCABULARY)} - {3, 8, 20, 21, 40, 90})])],
    ),
    "bad": (
        {"bad_words": [*PAIRS, 31, [59]]},
        lambda _: [own.NoBadWordsLogitsProcessor([*PAIRS, [31], [59]])],
    ),
    "shortest": (
        {"min_tokens": 6, "stop": [*range(0, 48, 8)]},
        lambda prompt: [own.MinNewTokensLengthLogitsProcessor(prompt, 6, [*range(0, 48, 8)])],
    ),
    "function": ({"logits_processors": [backwards, by_length]}, lambda _: [backwards, by_length]),
    "other order": ({"logits_processors": [by_length, backwards]}, lambda _: [by_length, backwards]),
    "all": (
        {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {4: 2.0, 11: 1.5},
            "bad_words": [[4, 4], [11, 4], 12],
            "min_tokens": 5,
            "stop": [11, 30],
            "logits_processors": [by_length],
        },
        lambda prompt: [
            own.SequenceBiasLogitsProcessor({(4,): 2.0, (11,): 1.5}),
            own.RepetitionPenaltyLogitsProcessor(1.3),
            penalties(0.5, 0.25, prompt),
            own.NoBadWordsLogitsProcessor([[4, 4], [11, 4], [12]]),
            own.MinNewTokensLengthLogitsProcessor(prompt, 5, [11, 30]),
            by_length,
        ],
    ),
}
DRAWN = {
    "greedy": {},
    "drawn": {"temperature": 0.9},
    "filtered": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
}


def expected(model, prompt, sampling, processors):
    """Tokens and log-probabilities by transformers' processors and warpers, one forward of the whole for each token."""
    warpers = LogitsProcessorList(processors(len(prompt)))
    if sampling.temperature:
        warpers.append(own.TemperatureLogitsWarper(sampling.temperature))
        warpers += [own.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        warpers += [own.TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
        warpers += [own.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for one in warpers:
        if isinstance(one, own.MinNewTokensLengthLogitsProcessor):
            one.eos_token_id = one.eos_token_id.to(model.device)
    tokens, logprobs = [*prompt], []
    for position in range(len(prompt), len(prompt) + sampling.max_new_tokens):
        given = torch.tensor([tokens], device=model.device)
        with torch.no_grad():
            logits = model(given).logits[:, -1].float()
        scores = logits.clone()
        for process in warpers:
            scores = process(given, scores)
        if sampling.temperature:
            seed = torch.tensor([sampling.seed], device=model.device)
            scores = scores + gumbel(row_keys(seed, torch.full_like(seed, position)), scores.shape[1])
        tokens.append(int(scores.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[0, tokens[-1]]))
        if tokens[-1] in sampling.stop:
            break
    return tokens[len(prompt) :], logprobs


def asked(case, drawn="greedy", seed=5):
    return Sampling(**CASES[case][0], **DRAWN[drawn], seed=seed, max_new_tokens=NEW)


def same(model, done, sampling, case):
    tokens, logprobs = expected(model, done.prompt, sampling, CASES[case][1])
    assert done.error is None and done.tokens == tokens, case
    assert done.logprobs == pytest.approx(logprobs, abs=1e-5)


@pytest.fixture(scope="module")
def engine_of():
    """Gives the engine of some settings on a device: one for all cases, of which none may leave anything to others."""
    return functools.cache(lambda device, **sizes: DecodeEngine(tiny_model("llama", device, scale=1.5), **sizes))


# The filtered ones are drawn, too, and with all filters.
@pytest.mark.parametrize(
    "drawn", ["greedy", "filtered", *(pytest.param(one, marks=pytest.mark.slow) for one in ("drawn", "min_p"))]
)
def test_rows_of_one_batch_get_what_transformers_own_processors_give_each(drawn, device, engine_of):
    prompts = prompts_of(*range(3, 3 + len(CASES)))
    sampling = [asked(case, drawn, seed) for seed, case in enumerate(CASES)]
    sizes = {"max_batch_size": 4, "steps_per_sync": 3, "block_size": 8, "prefill_tokens": 16}
    engine = engine_of(device, **sizes)
    found = engine.generate(prompts, sampling=sampling)
    for done in found:
        same(engine.model, done, sampling[done.request], [*CASES][done.request])
    eager = engine_of(device, **sizes, graphs=False).generate(prompts, sampling=sampling)
    assert [one.tokens for one in eager] == [one.tokens for one in found]


@pytest.mark.parametrize("case", CASES)
def test_a_row_that_is_taken_again_has_nothing_of_who_had_it_before(case, device, engine_of):
    engine = engine_of(device, max_batch_size=2, steps_per_sync=2)
    prompts, cases = prompts_of(30, 4, 11, 7), [case, "none", "all", case]
    lengths = (6, 14, 7, 14)
    sampling = [Sampling(**CASES[one][0], max_new_tokens=length) for one, length in zip(cases, lengths, strict=True)]
    first, again = (engine.generate(prompts, sampling=sampling) for _ in range(2))
    assert [one.tokens for one in first] == [one.tokens for one in again]
    for done in first:
        same(engine.model, done, sampling[done.request], cases[done.request])


def test_prefixes_suspension_samples_and_streams_change_nothing(device):
    model = tiny_model("llama", device, scale=1.5)
    engine = DecodeEngine(model, max_batch_size=4, block_size=8, keep_prefixes=True)
    (prompt,) = prompts_of(33)
    sampling = [asked(case) for case in ("all", "repetition", "bad")]
    for keep in ("graphs", "none", None):
        for done in engine.generate([prompt] * 3, n=2, sampling=sampling):
            same(model, done, sampling[done.request], ("all", "repetition", "bad")[done.request])
        if keep is not None:
            engine.suspend(keep=keep)
            engine.resume()
    assert engine.stats.prefix_tokens
    streamed = [event.token for event in engine.stream([prompt], sampling=sampling[0])]
    assert streamed == expected(model, prompt, sampling[0], CASES["all"][1])[0]


def test_who_asks_for_none_of_it_pays_nothing(device):
    model = tiny_model("llama", device, scale=1.5)
    engine = DecodeEngine(model, max_batch_size=1)
    (prompt,) = prompts_of(6)

    def captures(**settings):
        before = engine.stats.total("captures")
        engine.generate([prompt], max_new_tokens=NEW, **settings)
        return engine.stats.total("captures") - before

    assert captures() == 1 and engine.state.rows(1).adjustments is None and "_adjustments" not in vars(engine.state)
    assert captures(repetition_penalty=1.5) == 1 and captures(bad_words=[5]) == captures(min_tokens=2) == 0
    assert captures(logits_processors=[backwards]) == 1 and captures(logits_processors=[by_length]) == 1
    assert captures() == captures(repetition_penalty=1.5) == captures(logits_processors=[backwards]) == 0
    assert engine.stats.total("recaptures") == engine.stats.total("failures") == 0
    engine.warm_up(kinds=(ADJUSTED,))
    assert captures(presence_penalty=1) == 0
    assert engine.generate([prompt], max_new_tokens=NEW)[0].tokens == reference(model, prompt, NEW)


def test_processors_of_an_engine_come_before_those_of_a_request_and_are_captured_ahead(device):
    model = tiny_model("llama", device, scale=1.5)
    engine = DecodeEngine(model, max_batch_size=2, logits_processors=[backwards])
    engine.warm_up()
    before = engine.stats.total("captures")
    for case, more in (("function", [by_length]), ("none", [])):
        (done,) = engine.generate(prompts_of(6), logits_processors=more, max_new_tokens=NEW)
        same(model, done, Sampling(max_new_tokens=NEW), case) if more else None
        assert done.tokens == expected(model, done.prompt, asked("none"), lambda _, m=more: [backwards, *m])[0]
    assert engine.stats.total("captures") == before + 1


def test_what_a_processor_reads_is_noticed_and_one_that_reads_on_the_host_runs_eagerly(device):
    model, factor = tiny_model("llama", device, scale=1.5), [1.0]
    engine = DecodeEngine(model, max_batch_size=1)

    def scaled(tokens, logits):
        return logits * factor[0]

    def on_host(tokens, logits):
        return logits * (-1.0 if tokens[0, 0].item() >= 0 else 1.0)

    def tokens_of(process):
        (done,) = engine.generate(prompts_of(6), logits_processors=[process], max_new_tokens=NEW)
        assert done.tokens == expected(model, done.prompt, asked("none"), lambda _: [process])[0]
        return done.tokens

    first = tokens_of(scaled)
    assert tokens_of(scaled) == first
    factor[0] = -1.0
    assert tokens_of(scaled) == tokens_of(on_host) != first


def in_place(tokens, logits):
    return logits.zero_()


def test_other_rows_do_not_see_what_a_processor_writes(device):
    model = tiny_model("llama", device, scale=1.5)
    engine = DecodeEngine(model, max_batch_size=2)
    prompts = prompts_of(6, 9)
    found = engine.generate(prompts, sampling=[Sampling(logits_processors=[in_place]), Sampling()], max_new_tokens=NEW)
    assert [one.tokens for one in found] == [[0] * NEW, reference(model, prompts[1], NEW)]


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"allowed_token_ids": [5, 6], "bad_words": [5, 6]}, 0),
        ({"allowed_token_ids": [5], "bad_words": [[5, 5]]}, 1),
        ({"logits_processors": [lambda tokens, logits: logits * float("nan")]}, 0),
    ],
    ids=["bad", "later", "nan"],
)
def test_a_request_that_has_no_token_left_ends_alone_with_what_it_had(settings, left, device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2)
    prompts = prompts_of(6, 9)
    sampling = [Sampling(**settings, max_new_tokens=NEW), Sampling(max_new_tokens=NEW)]
    failed, other = engine.generate(prompts, sampling=sampling)
    assert failed.finish_reason == "error" and "no token is left" in failed.error and failed.tokens == [5] * left
    assert other.tokens == reference(model, prompts[1], NEW)


def test_bad_words_may_be_texts_with_and_without_a_space_before_them(device):
    model = tiny_model("llama", device, scale=1.5)
    engine = DecodeEngine(model, max_batch_size=2, codec=ByteCodec())
    (plain,) = engine.generate([[65, 66, 67]], max_new_tokens=NEW)
    word = bytes(plain.tokens[1:3]).decode()
    (found,) = engine.generate([[65, 66, 67]], bad_words=[word], max_new_tokens=NEW)
    (ids,) = engine.generate([[65, 66, 67]], bad_words=[plain.tokens[1:3]], max_new_tokens=NEW)
    assert found.tokens == ids.tokens != plain.tokens and word not in found.text


def test_spaces_and_line_breaks_may_be_bad_words(device):
    class Stripping(ByteCodec):
        def encode(self, text):
            return super().encode(text.strip())

    model, prompt, asked = (
        tiny_model("llama", device),
        [65, 66, 67],
        {"allowed_token_ids": [10, 11], "max_new_tokens": 4},
    )
    engine = DecodeEngine(model, max_batch_size=1, codec=ByteCodec())
    (plain,) = engine.generate([prompt], logit_bias={10: 50.0}, **asked)
    (without,) = engine.generate([prompt], logit_bias={10: 50.0}, bad_words=["\n"], **asked)
    assert plain.tokens == [10] * 4 and without.tokens == [11] * 4
    with pytest.raises(RequestError, match=r"bad_words '\\n' has no tokens of its own; give token ids"):
        DecodeEngine(model, max_batch_size=1, codec=Stripping()).generate([prompt], bad_words=["\n"])


def test_stops_of_several_tokens_do_not_count_among_the_least(device):
    model = tiny_model("llama", device, scale=1.5)
    engine, prompt = DecodeEngine(model, max_batch_size=1, codec=ByteCodec()), [65, 66, 67]
    (plain,) = engine.generate([prompt], max_new_tokens=NEW)
    pair, word = plain.tokens[3:5], plain.text[3:5]
    for stop in (pair, word):
        for least in range(8):
            (done,) = engine.generate([prompt], max_new_tokens=NEW, stop=[stop], min_tokens=least)
            ends = [at + 2 for at in range(NEW - 1) if plain.tokens[at : at + 2] == pair and at + 2 > least]
            assert done.tokens == plain.tokens[: min(ends, default=NEW)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_p": 1.5}, "min_p must be 0 .all. to 1, got 1.5"),
        ({"min_p": "a"}, "min_p must be a number, got 'a'"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0 and finite, got 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be above 0 and finite, got inf"),
        ({"presence_penalty": -2.5}, "presence_penalty must be -2 to 2, got -2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be -2 to 2, got nan"),
        ({"frequency_penalty": None}, "frequency_penalty must be a number, got None"),
        ({"logit_bias": [5]}, r"logit_bias must be a dict of token ids and numbers, got \[5\]"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias must have finite numbers, got inf for token 5"),
        ({"logit_bias": {VOCABULARY: 1}}, f"logit_bias must have token ids below {VOCABULARY}, got {VOCABULARY}"),
        ({"logit_bias": {"5": 1}}, f"logit_bias must have token ids below {VOCABULARY}, got '5'"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens must be 0 to the most tokens, 8, got 9"),
        ({"allowed_token_ids": []}, r"allowed_token_ids must be a list of at least one token id, got \[\]"),
        ({"allowed_token_ids": [-1]}, f"allowed_token_ids must have token ids below {VOCABULARY}, got -1"),
        ({"bad_words": "a"}, "bad_words must be a list, got 'a'"),
        ({"bad_words": ["a"]}, "bad_words 'a' is text and the engine has no codec"),
        ({"bad_words": [[]]}, r"unknown bad_words \[\]: expected a token id below"),
        ({"bad_words": [[5] * 17]}, "each of up to 16, got 1, the longest of 17"),
        ({"bad_words": [[5, 6, n // 90, n % 90] for n in range(1025)]}, "at most 1024 sequences .* got 1025"),
        ({"logits_processors": ["f"]}, "logits_processors must be functions f.tokens, logits., got 'f'"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_with_what_was_got_and_what_is_allowed(settings, said):
    engine = DecodeEngine(tiny_model("llama", torch.device("cpu")), max_batch_size=1)
    with pytest.raises(RequestError, match=said):
        engine.generate(prompts_of(5), **settings)


def test_processors_that_return_something_else_or_are_too_many_are_errors(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=1)
    with pytest.raises(DecodeError, match=r"lambda> returned NoneType; it must return the logits it was given, \(1, "):
        engine.generate(prompts_of(5), logits_processors=[lambda tokens, logits: None])
    with pytest.raises(RequestError, match="make the functions once and use them again"):
        for _ in range(40):
            engine.submit(prompts_of(5)[0], logits_processors=[lambda tokens, logits: logits])
    engine.abort_all()
    assert engine.generate(prompts_of(5), max_new_tokens=3)[0].error is None
