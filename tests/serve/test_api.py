"""What a server answers, asked with OpenAI's own client: the tokens of the engine, in the form of the API."""

import json
import re

import openai
import pytest
from transformers import GenerationConfig

from graphmod.errors import ConfigError
from graphmod.serve.settings import ServeSettings
from graphmod.text import ByteCodec, completion_text
from tests.support.served import Served, alone, chat_model, tokenizer


@pytest.fixture(scope="module")
def served():
    with Served(chat_model(), tokenizer(), max_batch_size=4) as one:
        yield one


MESSAGES = [{"role": "user", "content": "why is the sky blue"}]


def chat_prompt():
    codec = alone().requests.codec
    return codec.encode_as_is(codec.chat(MESSAGES))


def same(given, expected):
    """Whether a choice has the tokens and the text of a completion."""
    text = given.text if hasattr(given, "text") else given.message.content
    return (
        given.token_ids == expected.tokens and text == expected.text and given.finish_reason == expected.finish_reason
    )


def test_a_chat_has_the_tokens_of_the_engine(served):
    settings = {"temperature": 0.9, "top_p": 0.9, "seed": 7}
    got = served.client().chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=20,
        n=3,
        **settings,
        extra_body={"return_token_ids": True, "top_k": 50},
    )
    expected = alone().generate([chat_prompt()], n=3, max_new_tokens=20, top_k=50, **settings)
    assert [same(choice, done) for choice, done in zip(got.choices, expected, strict=True)] == [True] * 3
    assert len({choice.message.content for choice in got.choices}) == 3
    prompt, tokens = len(expected[0].prompt), sum(len(done.tokens) for done in expected)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (prompt, tokens)
    assert got.usage.total_tokens == prompt + tokens
    assert got.object == "chat.completion" and got.model == "tiny" and got.choices[0].message.role == "assistant"


def test_the_stream_of_a_chat_is_the_same_text(served):
    asked = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 30, "seed": 3, "n": 2}
    (whole,) = [served.client().chat.completions.create(**asked)]
    texts, reasons, ids = ["", ""], [None, None], set()
    chunks = list(served.client().chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        assert chunk.usage is None and len(chunk.choices) == 1 and chunk.object == "chat.completion.chunk"
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
        ids.add(chunk.id)
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices] and len(ids) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_several_prompts_share_a_request(served):
    prompts = ["one two", "three", "four five six"]
    got = served.client().completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=12, temperature=1.0, seed=5, extra_body={"return_token_ids": True}
    )
    expected = alone().generate(prompts, n=2, max_new_tokens=12, temperature=1.0, seed=5)
    assert [choice.index for choice in got.choices] == list(range(6))
    assert all(same(choice, done) for choice, done in zip(got.choices, expected, strict=True))


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8, 9]]])
def test_prompts_may_be_token_ids(served, prompt):
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    got = served.client().completions.create(model="tiny", prompt=prompt, temperature=0)
    expected = alone().generate(prompts, max_new_tokens=16)  # as many as OpenAI's API takes
    assert [choice.text for choice in got.choices] == [done.text for done in expected]


def test_the_stream_of_several_prompts_is_the_same(served):
    asked = {"model": "tiny", "prompt": ["one", "two", "three"], "max_tokens": 20, "seed": 1, "n": 2, "logprobs": 1}
    whole = served.client().completions.create(**asked)
    texts, scores = [""] * 6, [[] for _ in range(6)]
    for chunk in served.client().completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        scores[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    for streamed, choice in zip(scores, whole.choices, strict=True):  # the last bits go by the size of the batch
        assert streamed == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_is_cut_off(served, stream):
    prompt = chat_prompt()
    (free,) = alone().generate([prompt], max_new_tokens=40)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 0, "stop": [stop, "never"]}
    got = served.client().chat.completions.create(**asked, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in got]
        text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        text, reason = got.choices[0].message.content, got.choices[0].finish_reason
    assert text == free.text[: free.text.index(stop)] and reason == "stop"


def test_log_probabilities_are_those_of_the_engine(served):
    (expected,) = alone().generate([chat_prompt()], max_new_tokens=15)
    asked = {"messages": MESSAGES, "max_tokens": 15, "temperature": 0, "logprobs": True}
    got = served.client().chat.completions.create(model="tiny", **asked).choices[0]
    assert [one.logprob for one in got.logprobs.content] == pytest.approx(expected.logprobs, abs=1e-5)
    assert "".join(one.token for one in got.logprobs.content) == got.message.content
    told = b"".join(bytes(one.bytes) for one in got.logprobs.content)
    signs = [re.sub("\ufffd+", "\ufffd", text) for text in (told.decode(errors="replace"), got.message.content)]
    assert signs[0] == signs[1]  # of bytes that are no character, one or several
    text = served.client().completions.create(model="tiny", prompt="one", max_tokens=9, seed=1, logprobs=1).choices[0]
    assert "".join(text.logprobs.tokens) == text.text and len(text.logprobs.token_logprobs) == 9
    assert text.logprobs.text_offset[0] == 0 and len(text.logprobs.top_logprobs) == 9


def test_each_event_of_a_stream_may_tell_the_number_of_tokens(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "stream": True}
    *chunks, last = served.client().completions.create(**asked, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 20 and chunks[-1].usage == last.usage
    assert all(chunk.usage.prompt_tokens == 3 for chunk in chunks)


def test_a_seed_repeats_and_no_seed_varies(served):
    def ask(**settings):
        made = served.client().completions.create(model="tiny", prompt="one", max_tokens=20, **settings)
        return made.choices[0].text

    assert ask(seed=1) == ask(seed=1) != ask(seed=2)
    assert len({ask() for _ in range(3)}) == 3


def test_models_are_listed(served):
    models = served.client().models
    assert [one.id for one in models.list()] == ["tiny"] and models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        models.retrieve("huge")
    assert error.value.code == "model_not_found"


WRONG = [
    ({"model": "huge"}, 404, "model", "'tiny'"),
    ({"messages": None}, 400, "messages", "messages must be a valid list, got null"),
    ({"messages": []}, 400, "messages", "must have at least 1 item after validation, not 0, got []"),
    ({"messages": [{"role": "user"}]}, 400, "messages.0.content", "required"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, 400, "messages", "no such role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content.0.type", "text"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, 400, "messages", "max_seq_len"),
    ({"n": 0}, 400, "n", "n must be greater than or equal to 1, got 0"),
    ({"n": 129}, 400, "n", "n must be less than or equal to 128, got 129"),
    ({"n": "é"}, 400, "n", 'n must be a valid integer, got "é"'),
    ({"max_tokens": "5"}, 400, "max_tokens", 'must be a valid integer, got "5"'),
    ({"max_tokens": 0}, 400, "max_tokens", "must be greater than or equal to 1, got 0"),
    ({"temperature": -1}, 400, "temperature", "must be greater than or equal to 0, got -1"),
    ({"temperature": None, "top_p": 0}, 400, "top_p", "must be greater than 0, got 0"),
    ({"seed": 2**63}, 400, "seed", "must be less than 9223372036854775808, got 9223372036854775808"),
    ({"stop": [""]}, 400, "stop.0", 'must have at least 1 character, got ""'),
    ({"stop": 5}, 400, "stop", "must be a valid list, got 5"),
    ({"stop_token_ids": [10**6]}, 400, "stop", "unknown stop"),
    ({"stream": "yes"}, 400, "stream", 'must be a valid boolean, got "yes"'),
    ({"tools": [{"type": "function"}]}, 400, "tools.0.function", "is missing"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "tools",
        "nothing that the chat template of this model reads",
    ),
    (
        {"response_format": {"type": "xml"}},
        400,
        "response_format.type",
        "must be 'text', 'json_object' or 'json_schema'",
    ),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias.5", "must be less than or equal to 100, got 101"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias.a.[key]", "must be a valid integer, unable to parse string"),
    ({"logit_bias": {"1000000": 1}}, 400, "logit_bias", "must have token ids below"),
    ({"presence_penalty": 2.5}, 400, "presence_penalty", "must be less than or equal to 2, got 2.5"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty", "must be greater than or equal to -2, got -3"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "must be greater than 0, got 0"),
    ({"min_p": 2}, 400, "min_p", "must be less than or equal to 1, got 2"),
    ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "must be 0 to the most tokens, 8, got 9"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids", "must have at least 1 item after validation, not 0, got []"),
    ({"allowed_token_ids": [10**6]}, 400, "allowed_token_ids", "must have token ids below"),
    ({"bad_words": "a"}, 400, "bad_words", 'must be a valid list, got "a"'),
    ({"bad_words": ["one two three " * 9]}, 400, "bad_words", "each of up to 16"),
    ({"length_penalty": 2}, 400, "length_penalty", "not supported"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "must be less than or equal to 20, got 21"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "goes with logprobs"),
    ({"return_tokens_as_token_ids": True}, 400, "return_tokens_as_token_ids", "goes with logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "goes with stream"),
    ({"max_token": 5}, 400, "max_token", "is max_tokens meant?"),
    ({"maxTokens": 5}, 400, "maxTokens", "is max_tokens meant?"),
    ({"Temperature": 0.5}, 400, "Temperature", "is temperature meant?"),
    ({"repeat_penalty": 1.5}, 400, "repeat_penalty", "is repetition_penalty meant?"),
    ({"lengthPenalty": 2}, 400, "lengthPenalty", "length_penalty, which is most like it, is not supported"),
    ({"n_predict": 5}, 400, "n_predict", "no field that this server knows"),
    ({"response_format": {"type": "text", "typ": 1}}, 400, "response_format.typ", "is type meant?"),
    ({"messages": [{"role": "user", "content": "a", "contents": "b"}]}, 400, "messages.0.contents", "content meant?"),
    ({"echo": True}, 400, "echo", "not supported"),
]


@pytest.mark.parametrize(("change", "status", "param", "said"), WRONG, ids=[str(one[0])[:40] for one in WRONG])
def test_what_is_wrong_with_a_chat_is_said_with_its_field(served, change, status, param, said):
    asked = {"model": "tiny", "messages": MESSAGES} | change
    got, body, _ = served.post("/v1/chat/completions", asked)
    assert got == status and set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param and said in body["error"]["message"], body


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"prompt": None}, "prompt", "a list of either, and not empty, got null"),
        ({"prompt": ""}, "prompt", ""),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": ["a", 5]}, "prompt", "token ids"),
        ({"prompt": [[1], []]}, "prompt", "not empty"),
        ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": [[1, 2], [10**9]]}, "prompt", "prompt 1 holds"),
        ({"prompt": [[1, 2], [5] * 600]}, "prompt", "prompt 1 has 600 tokens"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "no field that this server knows"),
        ({"max_tokens": 0}, "max_tokens", "goes with echo=true"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"logprobs": True}, "logprobs", "must be a valid integer, got true"),
        ({"logprobs": 21}, "logprobs", "must be less than or equal to 20, got 21"),
        ({"top_logprobs": 1}, "top_logprobs", "is logprobs meant?"),
        ({"prompt": ["a"] * 5, "n": 100}, "n", "takes 404 at a time"),
    ],
)
def test_what_is_wrong_with_a_completion_is_said_with_its_field(served, change, param, said):
    status, body, _ = served.post("/v1/completions", {"model": "tiny", "prompt": "a"} | change)
    if change == {"prompt": ""}:  # the start-of-text token alone is a prompt
        assert status == 200
        return
    assert status == 400 and body["error"]["param"] == param and said in body["error"]["message"], body


def test_what_changes_the_logits_has_the_tokens_of_the_engine(served):
    openais = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "seed": 7, "temperature": 0.9}
    bias = {5: 3.0, 9: -100.0}
    vllms = {"repetition_penalty": 1.3, "min_p": 0.02, "min_tokens": 12, "bad_words": ["one", "blue sky"]}
    for path in ("completions", "chat"):
        asked = {
            **openais,
            "model": "tiny",
            "max_tokens": 20,
            "n": 2,
            "logit_bias": {str(k): v for k, v in bias.items()},
        }
        extra = {**vllms, "return_token_ids": True, "allowed_token_ids": [*range(200)]}
        if path == "chat":
            got = served.client().chat.completions.create(messages=MESSAGES, **asked, extra_body=extra)
        else:
            got = served.client().completions.create(prompt=[5, 6, 7], **asked, extra_body=extra)
        prompt = chat_prompt() if path == "chat" else [5, 6, 7]
        given = {**openais, **vllms, "logit_bias": bias, "allowed_token_ids": [*range(200)], "max_new_tokens": 20}
        expected = alone().generate([prompt], n=2, **given)
        assert [same(choice, done) for choice, done in zip(got.choices, expected, strict=True)] == [True] * 2
        assert expected != alone().generate([prompt], n=2, **openais, max_new_tokens=20)


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_a_request_that_rules_out_all_tokens_is_told_so(served, stream):
    asked = {"model": "tiny", "prompt": [5, 6, 7], "stream": stream, "max_tokens": 5}
    ruled_out = {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}
    with pytest.raises(openai.APIError, match="no token is left to choose: min_tokens, allowed_token_ids") as found:
        [*served.client().completions.create(**asked, extra_body=ruled_out)]
    assert stream or found.value.status_code == 400


def test_fields_that_change_nothing_are_ignored(served):
    others = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "tools": [],
        "logit_bias": {},
        "presence_penalty": 0,
    }
    status, _, _ = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "other": None} | others)
    assert status == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"temperature": NaN}']
)
def test_what_is_no_json_object_is_refused(served, body):
    status, answer, _ = served.post("/v1/chat/completions", body)
    assert status == 400 and "error" in answer


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"prompt": "a", "seed": %s}' % (b"9" * 5000), "Exceeds the limit"),
        (b'{"prompt": "\\ud800"}', "surrogates not allowed"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_json_that_cannot_be_used_is_not_called_something_else(served, body, said):
    status, answer, _ = served.post("/v1/completions", body)
    assert status == 400 and said in answer["error"]["message"]


def test_half_a_surrogate_pair_is_refused(served):
    for field in (b"model", b"prompt", b"stop"):
        status, body, _ = served.post("/v1/completions", b'{"prompt": "a", "%s": "\\ud800"}' % field)
        assert status == 400 and "error" in body
    for raw in (b'{"prompt": "a\xed\xa0\x80b"}', '{"prompt": "a\\ud800"}'.encode("utf-16")):
        status, body, _ = served.post("/v1/completions", raw)
        assert status == 400 and "error" in body
    assert served.post("/v1/completions", b'{"prompt": "\\ud83d\\ude00"}')[0] == 200


def test_other_paths_and_methods_are_told_what_there_is(served):
    assert served.post("/v1/embeddings", {})[0] == 404
    status, body = served.get("/v1/chat/completions")
    assert status == 405 and "POST /v1/chat/completions" in body


ASKS = {"origin": "http://page.example", "access-control-request-method": "POST"}


def test_options_say_what_there_is_and_pages_of_others_are_refused(served):
    status, _, headers = served.ask("OPTIONS", "/v1/chat/completions")
    assert status == 204 and headers["allow"] == "POST, OPTIONS"
    assert "GET" in served.ask("OPTIONS", "/v1/models")[2]["allow"] and served.ask("OPTIONS", "/v1/no")[0] == 404
    status, body, _ = served.ask("OPTIONS", "/v1/completions", **ASKS)
    assert status == 403 and "serve.cors_origins=['http://page.example']" in json.loads(body)["error"]["message"]
    assert served.ask("GET", "/v1/completions")[2]["allow"] == "POST"


def test_pages_of_other_servers_may_be_let_in():
    key = {"authorization": "Bearer secret", "origin": ASKS["origin"]}
    with Served(chat_model(), tokenizer(), {"cors_origins": [ASKS["origin"]], "api_key": "secret"}) as one:
        status, _, headers = one.ask("OPTIONS", "/v1/completions", **ASKS, **{"access-control-request-headers": "x-a"})
        assert status == 200 and headers["access-control-allow-origin"] == ASKS["origin"]
        assert headers["access-control-allow-headers"] == "x-a"
        for status, _, headers in (
            one.ask("GET", "/v1/models", **key),
            one.ask("GET", "/v1/models", origin=key["origin"]),
        ):
            assert status in (200, 401) and headers["access-control-allow-origin"] == ASKS["origin"]
        status, body, headers = one.ask("OPTIONS", "/v1/completions", **ASKS | {"origin": "http://other.example"})
        assert status == 403 and "cors_origins=['http://other.example']" in body
        assert "access-control-allow-origin" not in headers
        headers = one.ask("GET", "/v1/models", **key | {"origin": "http://other.example"})[2]
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("origin", ["localhost:3000", "http://a.example/", "http://a.example/page", "", "*.example"])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ConfigError, match=r"serve\.cors_origins must hold origins"):
        ServeSettings(cors_origins=[origin]).check()
    ServeSettings(cors_origins=["*", "https://a.example:8", "chrome-extension://abc"]).check()


def test_metrics_count_what_was_done(served):
    before = {name: served.metric(name) for name in ("graphmod_tokens_total", "graphmod_requests_total")}
    served.client().completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=10, temperature=0)
    after = {name: served.metric(name) for name in before}
    assert after["graphmod_tokens_total"] - before["graphmod_tokens_total"] == 13
    assert after["graphmod_requests_total"] - before["graphmod_requests_total"] == 1
    assert served.metric("graphmod_replays_total") > 0 and served.metric("graphmod_blocks_total") > 0
    for name in ("time_to_first_token_seconds", "time_between_tokens_seconds", "request_seconds"):
        assert served.metric(f"graphmod_{name}_count") > 0
    assert served.metric("graphmod_blocks_used") == served.metric("graphmod_waiting") == 0


def test_a_model_without_a_template_completes_and_does_not_chat():
    model = chat_model()
    model.resize_token_embeddings(256)
    with Served(model, ByteCodec(), max_batch_size=2) as one:
        status, body, _ = one.post("/v1/chat/completions", {"messages": MESSAGES})
        assert status == 400 and body["error"]["param"] == "messages" and "/v1/completions" in body["error"]["message"]
        got = one.client().completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0)
        expected = Served.engine_of(model, ByteCodec()).generate(["abc"], max_new_tokens=5)
        assert got.choices[0].text == completion_text(ByteCodec(), b"abc", expected[0].tokens)


def test_a_key_is_asked_for():
    with Served(chat_model(), tokenizer(), {"api_key": "secret"}, max_batch_size=2) as one:
        assert one.post("/v1/completions", {"prompt": "a"})[0] == 401
        assert one.get("/v1/models")[0] == 401 and one.get("/v1/models", authorization="Bearer other")[0] == 401
        assert one.get("/health")[0] == one.get("/")[0] == one.get("/metrics")[0] == 200
        assert [model.id for model in one.client("secret").models.list()] == ["tiny"]


def test_the_generation_config_is_the_default_of_requests_and_what_it_cannot_do_is_refused():
    model = chat_model()
    model.generation_config = GenerationConfig(eos_token_id=2, temperature=0.3, top_k=1, no_repeat_ngram_size=2)
    asked = {"model": "tiny", "prompt": "one", "max_tokens": 12}
    with Served(model, tokenizer(), max_batch_size=4) as server:
        texts = {server.post("/v1/completions", asked)[1]["choices"][0]["text"] for _ in range(4)}
        assert len(texts) == 1, "top_k=1 draws the same each time"
        status, body, _ = server.post("/v1/completions", asked | {"top_k": -1, "temperature": 1, "seed": 1})
        assert status == 200 and body["choices"][0]["text"] not in texts
        status, body, _ = server.post("/v1/completions", asked | {"temperature": 0})
        assert status == 400 and body["error"]["param"] == "temperature"
        assert "no_repeat_ngram_size=2" in body["error"]["message"]
    with Served(model, tokenizer(), max_batch_size=4, generation_config="none") as server:
        (expected,) = alone().generate(["one"], max_new_tokens=12)
        assert server.post("/v1/completions", asked | {"temperature": 0})[1]["choices"][0]["text"] == expected.text
        assert len({server.post("/v1/completions", asked)[1]["choices"][0]["text"] for _ in range(4)}) > 1
