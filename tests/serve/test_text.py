"""The text that is sent: cut before a stop, nothing of which is sent while it could still complete."""

import random

import pytest

from graphmod.decode.types import Completion
from graphmod.serve.api import Answer, Scorer, StopCut
from graphmod.text import ByteCodec, StopTexts, TextStream, TokenizerCodec, completion_text
from tests.support.made_tokenizers import KINDS, metaspace


def pieces(text, chance):
    while text:
        length = chance.randint(1, 3)
        yield text[:length]
        text = text[length:]


@pytest.mark.parametrize("seed", range(200))
def test_nothing_of_a_stop_is_ever_sent_and_all_before_it_is(seed):
    chance = random.Random(seed)
    text = "".join(chance.choices("ab", k=chance.randint(0, 12)))
    stops = ["".join(chance.choices("ab", k=chance.randint(1, 4))) for _ in range(chance.randint(0, 3))]
    cut, given, sent = StopCut(stops, []), "", ""
    for piece in pieces(text, chance):
        given += piece
        sent += cut.add(piece)
        assert text.startswith(sent) and not any(stop in sent for stop in stops)
        begun = [place for place in range(len(given)) if any(stop.startswith(given[place:]) for stop in stops)]
        assert cut.met or len(sent) <= min(begun, default=len(given))
    if not cut.met:
        assert sent + cut.rest() == text and not any(stop in text for stop in stops)
    else:
        assert any(text[len(sent) :].startswith(stop) for stop in stops)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_all_pieces_joined_are_the_text_and_all_tokens_are_scored_once(kind, seed):
    chance = random.Random(seed)
    made = KINDS[kind]()
    codec, count = TokenizerCodec(made), len(made)
    prompt, tokens = ([chance.randrange(count) for _ in range(length)] for length in (3, 20))
    logprobs = [-float(number) for number in range(20)]
    answer = Answer(codec, prompt, [], Scorer(codec))
    got = [answer.add([token], [logprob]) for token, logprob in zip(tokens, logprobs, strict=True)]
    got.append(answer.end(Completion(0, 0, prompt, tokens, logprobs, "length")))
    assert "".join(piece.text for piece in got) == completion_text(codec, prompt, tokens)
    scored = [one for piece in got for one in piece.scored]
    assert [(one.token, one.logprob) for one in scored] == list(zip(tokens, logprobs, strict=True))
    special = {*codec.special.values()}  # which are told by name
    assert "".join(one.text for one in scored if one.token not in special) == completion_text(codec, prompt, tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_runs_of_tokens_give_the_text_of_single_ones(kind, seed):
    chance = random.Random(seed)
    codec = TokenizerCodec(KINDS[kind]())
    tokens = [chance.randrange(len(codec.tokenizer)) for _ in range(60)]
    prompt = tokens[: chance.randint(0, 5)]
    for stops in ([], ["a"], ["zz", " t"]):
        sent = []
        for most in (1, 9):
            answer, left, text = Answer(codec, prompt, stops, None), tokens[len(prompt) :], ""
            while left:
                size = chance.randint(1, most)
                run, left = left[:size], left[size:]
                text += answer.add(run, [-1.0] * len(run)).text
            done = Completion(0, 0, prompt, tokens[len(prompt) :], finish_reason="length")
            sent.append(text + answer.end(done).text)
        assert sent[0] == sent[1]


def test_tokens_of_the_stop_are_not_scored():
    answer = Answer(ByteCodec(), list(b"x"), ["cd"], Scorer(ByteCodec()))
    sent = [answer.add([byte], [-1.0]) for byte in b"abcd"]
    sent.append(answer.end(Completion(0, 0, list(b"x"), list(b"abcd"), [-1.0] * 4, "stop")))
    assert "".join(piece.text for piece in sent) == "ab"
    assert [one.text for piece in sent for one in piece.scored] == ["a", "b"]
    assert [one.offset for piece in sent for one in piece.scored] == [0, 1]


def test_of_a_token_in_whose_middle_a_stop_begins_the_text_before_it_is_told():
    codec = TokenizerCodec(metaspace())
    ids = codec.tokenizer.get_vocab()
    tokens = [ids["▁x"], ids["return"], ids["▁END"]]
    answer = Answer(codec, [ids["▁def"]], ["turn E"], Scorer(codec))
    sent = [answer.add([token], [0.0]) for token in tokens]
    sent.append(answer.end(Completion(0, 0, [ids["▁def"]], tokens, [0.0] * 3, "stop")))
    assert "".join(piece.text for piece in sent) == " xre"
    assert [(one.text, one.bytes) for piece in sent for one in piece.scored] == [(" x", b" x"), ("re", b"re")]


def test_of_a_stop_with_a_special_token_nothing_is_sent_either():
    codec = TokenizerCodec(metaspace())
    ids = codec.tokenizer.get_vocab()
    tokens = [ids["▁x"], ids["\n"], ids["<|end|>"]]
    answer = Answer(codec, [ids["▁def"]], ["\n<|end|>"], None)
    sent = [answer.add([token], [0.0]).text for token in tokens]
    assert "".join(sent) == " x"
    assert answer.end(Completion(0, 0, [ids["▁def"]], tokens, [0.0] * 3, "stop")).text == ""
    goes_on = Answer(codec, [ids["▁def"]], ["\n<|end|>"], None)
    tokens = [ids["▁x"], ids["\n"], ids["▁x"]]
    sent = [goes_on.add([token], [0.0]).text for token in tokens]
    done = Completion(0, 0, [ids["▁def"]], tokens, [0.0] * 3, "length")
    assert "".join(sent) + goes_on.end(done).text == completion_text(codec, [ids["▁def"]], tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_stops_that_end_early_do_not_count_for_the_engine_nor_in_what_is_sent(kind, seed):
    chance = random.Random(seed)
    codec = TokenizerCodec(KINDS[kind]())
    prompt, tokens = ([chance.randrange(len(codec.tokenizer)) for _ in range(length)] for length in (2, 24))
    text, least = completion_text(codec, prompt, tokens), chance.randint(0, 16)
    begins = [chance.randrange(len(text) + 1) for _ in range(3)]
    stops = [stop for begin in begins if (stop := text[begin : begin + chance.randint(1, 4)])]
    stream, watched = TextStream(codec, prompt), StopTexts(codec, stops, prompt)
    early = len("".join(stream.add(token) for token in tokens[:least]))
    met = (number for number, token in enumerate(tokens, 1) if watched.met(token, number <= least))
    tokens = tokens[: next(met, len(tokens)) if stops else len(tokens)]
    answer, left, sent = Answer(codec, prompt, stops, None, min_tokens=least), [*tokens], ""
    if chance.random() < 0.3:
        answer = Answer(codec, prompt, stops, Scorer(codec), min_tokens=least)
    while left:
        size = chance.randint(1, 8)
        sent += answer.add(left[:size], [0.0] * len(left[:size])).text
        left = left[size:]
    sent += answer.end(Completion(0, 0, prompt, tokens, [0.0] * len(tokens), "stop")).text
    text = completion_text(codec, prompt, tokens)
    places = [text.find(stop, max(0, early - len(stop) + 1)) for stop in stops]
    assert sent == text[: min([place for place in places if place >= 0], default=len(text))]
