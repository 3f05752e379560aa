"""What is told of tokens: their log-probabilities and the likeliest others, those of prompts, their ids."""

import contextlib
import http.client
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.made_tokenizers import KINDS
from tests.support.served import Served, chat_model, tokenizer

MESSAGES = [{"role": "user", "content": "one"}]


@pytest.fixture(scope="module")
def served():
    with Served(chat_model(), tokenizer(), max_batch_size=4) as server:
        yield server


def own(tokens, model=None):
    with torch.no_grad():
        return (model or chat_model())(torch.tensor([tokens])).logits[0].log_softmax(-1)


def ask(served, path="completions", **fields):
    status, body, _ = served.post(f"/v1/{path}", {"model": "tiny"} | fields)
    assert status == 200, body
    return body


def events(served, path="completions", **fields):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", f"/v1/{path}", json.dumps({"model": "tiny", "stream": True} | fields))
        lines = connection.getresponse().read().decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def joined(choices):
    """The log-probabilities of the pieces of a stream as those of a whole answer."""
    found = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for choice in choices:
        for name, values in found.items():
            values += choice["logprobs"][name]
    return found


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_completions_tell_the_likeliest_and_the_one_that_was_drawn(served, count, temperature):
    asked = {"prompt": [1, 9, 30], "max_tokens": 12, "seed": 3, "temperature": temperature, "return_token_ids": True}
    choice = ask(served, **asked, logprobs=count)["choices"][0]
    table, told = own([1, 9, 30, *choice["token_ids"]]), choice["logprobs"]
    for at, token in enumerate(choice["token_ids"]):
        row, top = table[2 + at], told["top_logprobs"][at]
        assert told["token_logprobs"][at] == pytest.approx(row[token].item(), abs=1e-5)
        assert top[told["tokens"][at]] == told["token_logprobs"][at]
        values = row.topk(count).values.tolist()
        assert len(top) in (count, count + 1) if count else len(top) == 1
        if count:
            assert max(top.values()) == pytest.approx(values[0], abs=1e-5)


def test_chats_tell_the_likeliest_with_their_bytes(served):
    asked = {"messages": MESSAGES, "max_tokens": 9, "seed": 3, "return_token_ids": True}
    body = ask(served, "chat/completions", **asked, logprobs=True, top_logprobs=4)
    (choice,) = body["choices"]
    table, start = own(body["prompt_token_ids"] + choice["token_ids"]), len(body["prompt_token_ids"]) - 1
    for at, one in enumerate(choice["logprobs"]["content"]):
        values = table[start + at].topk(4).values.tolist()
        assert [other["logprob"] for other in one["top_logprobs"]] == pytest.approx(values, abs=1e-5)
        assert all(set(other) == {"token", "logprob", "bytes"} for other in one["top_logprobs"])
    for top in ({}, {"top_logprobs": 0}):
        (choice,) = ask(served, "chat/completions", **asked, logprobs=True, **top)["choices"]
        assert all(one["top_logprobs"] == [] for one in choice["logprobs"]["content"])


@pytest.mark.parametrize("prompt", ["one two", [1, 9, 30, 40, 5], [7]])
def test_echo_tells_the_prompt_and_its_log_probabilities(served, prompt):
    asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "echo": True, "return_token_ids": True}
    choice = ask(served, **asked, logprobs=1)["choices"][0]
    ids, told = choice["prompt_token_ids"] + choice["token_ids"], choice["logprobs"]
    table = own(ids)
    wanted = [table[at, token].item() for at, token in enumerate(ids[1:])]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-5)
    likeliest = [max(one.values()) for one in told["top_logprobs"][1:]]
    assert likeliest == pytest.approx(table[:-1].max(1).values.tolist(), abs=1e-5)
    assert all(
        choice["text"].startswith(text, at)
        for text, at in zip(told["tokens"], told["text_offset"], strict=True)
        if text not in ("<s>", "</s>", "<unk>")
    )
    if isinstance(prompt, str):
        assert choice["text"].startswith(prompt)
        assert "".join(text for text in told["tokens"] if text != "<s>") == choice["text"]
    plain = ask(served, **asked)["choices"][0]
    assert plain["text"] == choice["text"] and plain["logprobs"] is None


def test_a_prompt_alone_is_scored_with_no_token_to_generate(served):
    body = ask(served, prompt=["one two", "three"], max_tokens=0, echo=True, logprobs=0)
    assert [choice["text"] for choice in body["choices"]] == ["one two", "three"]
    assert body["usage"]["completion_tokens"] == 0
    for choice, count in zip(body["choices"], (8, 6), strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) <= count + 2
        assert choice["finish_reason"] == "length"


def test_a_stream_tells_what_a_whole_answer_does(served):
    asked = {"prompt": ["one two", "three"], "n": 2, "max_tokens": 20, "seed": 3, "logprobs": 2, "echo": True}
    whole, streamed = ask(served, **asked)["choices"], [event["choices"][0] for event in events(served, **asked)]
    for index, choice in enumerate(whole):
        parts = [one for one in streamed if one["index"] == index]
        assert "".join(one["text"] for one in parts) == choice["text"]
        told = joined(parts)
        assert told["tokens"] == choice["logprobs"]["tokens"]
        assert told["text_offset"] == choice["logprobs"]["text_offset"]
        assert told["token_logprobs"][1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-5)


def test_ids_of_prompts_and_answers_are_told_where_vllm_tells_them(served):
    asked = {"prompt": [[1, 5, 9], [7, 8]], "n": 2, "max_tokens": 5, "seed": 1, "return_token_ids": True}
    whole = ask(served, **asked)
    assert [one["prompt_token_ids"] for one in whole["choices"]] == [[1, 5, 9]] * 2 + [[7, 8]] * 2
    assert "prompt_token_ids" not in whole
    got = [event["choices"][0] for event in events(served, **asked)]
    for index, choice in enumerate(whole["choices"]):
        parts = [one for one in got if one["index"] == index]
        assert [token for one in parts for token in one["token_ids"]] == choice["token_ids"]
        assert [one.get("prompt_token_ids") for one in parts] == [
            choice["prompt_token_ids"],
            *[None] * (len(parts) - 1),
        ]
    asked = {"messages": MESSAGES, "max_tokens": 5, "seed": 1, "return_token_ids": True}
    whole = ask(served, "chat/completions", **asked)
    assert whole["prompt_token_ids"] == served.engine.requests.codec.encode_as_is(
        served.engine.requests.codec.chat(MESSAGES)
    )
    got = events(served, "chat/completions", **asked)
    assert [event.get("prompt_token_ids") for event in got] == [whole["prompt_token_ids"], *[None] * (len(got) - 1)]
    assert "prompt_token_ids" not in ask(served, "chat/completions", messages=MESSAGES, max_tokens=2)


def test_ids_stand_in_the_place_of_texts_where_they_are_asked_for(served):
    asked = {"max_tokens": 5, "seed": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = ask(served, prompt=[1, 5], logprobs=3, **asked)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    choice = ask(served, "chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=2, **asked)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(other["token"].startswith("token_id:") for one in content for other in one["top_logprobs"])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_joined_are_the_text_whatever_the_tokenizer(kind):
    words = KINDS[kind]()
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(words), max_position_embeddings=128, eos_token_id=None, **sizes)
    ).eval()
    special = {*words.all_special_tokens}
    with Served(model, words, max_batch_size=4, max_seq_len=64) as server:
        for seed in range(8):
            asked = {"prompt": [3, 5, seed % len(words)], "max_tokens": 1 + 3 * seed, "seed": seed, "logprobs": 2}
            asked["ignore_eos"] = True
            whole = ask(server, **asked)["choices"][0]
            told = whole["logprobs"]
            assert "".join(text for text in told["tokens"] if text not in special) == whole["text"]
            assert len(told["tokens"]) == 1 + 3 * seed
            streamed = joined([event["choices"][0] for event in events(server, **asked)])
            assert streamed["tokens"] == told["tokens"] and streamed["text_offset"] == told["text_offset"]
