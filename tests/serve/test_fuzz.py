"""Requests at random, right and wrong, many at a time: each answer is right or says what is wrong, nothing leaks."""

import contextlib
import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from docs.fields import known_fields
from graphmod.serve.schema import ChatRequest, CompletionRequest
from tests.support.served import POSITIONS, Served, alone, chat_model, tokenizer

AT_ONCE = 12
WORDS = ["one", "two ", " three", "[user]", "\n", "€", "\U0001f600", "</s>", "\x00", "a" * 40]
ODD = [
    None,
    True,
    -1,
    0,
    1,
    5,
    10**30,
    0.5,
    -0.0,
    1e308,
    "",
    "a",
    [],
    {},
    [None],
    [[]],
    {"type": "text"},
]
FIELDS = [*sorted({one.path for kind in (ChatRequest, CompletionRequest) for one in known_fields(kind)}), "nonsense"]


def text(chance, most=6):
    return "".join(chance.choices(WORDS, k=chance.randint(1, most)))


def messages(chance):
    """A conversation, as texts or as parts, with what else clients send in messages."""
    said = []
    for number in range(chance.choice([1, 1, 3])):
        parts = [{"type": "text", "text": text(chance)} for _ in range(chance.randint(1, 3))]
        beside = chance.choice([{}, {"name": "a"}, {"refusal": None, "tool_calls": None}, {"reasoning_content": "b"}])
        content = text(chance) if chance.random() < 0.7 else parts
        said.append({"role": ("user", "assistant")[number % 2], "content": content, **beside})
    return said


def put(body, field, value):
    """Puts a value where a field is, as far as there is such a place."""
    *above, name = field.split(".")
    for one in above:
        body = body[one] if isinstance(body, dict) and isinstance(body.get(one), (dict, list)) else {}
        body = body[0] if isinstance(body, list) and body else body
    if isinstance(body, dict):
        body[name] = value


def good(chance):
    """A request that can be served; short, so that many can."""
    asked = {"max_tokens": chance.randint(1, 6), "n": chance.choice([None, 1, 2, 3]), "return_token_ids": True}
    asked |= {"seed": chance.randint(-(2**63), 2**63 - 1), "temperature": chance.choice([0, 0.7, 1, 1000, 1e-9])}
    asked |= {"top_p": chance.choice([None, 0.5, 1, 1e-300]), "top_k": chance.choice([None, 0, -1, 3, 10**9])}
    asked |= {"min_p": chance.choice([None, 0, 0.1]), "presence_penalty": chance.choice([None, 0, 0, 1.5])}
    asked |= {"logit_bias": chance.choice([None, {}, {"5": 9}]), "bad_words": chance.choice([None, [], ["one", "k"]])}
    asked["stop"] = chance.choice([None, "e", ["one", "k"], "</s>"])
    asked["stream"] = chance.random() < 0.4
    if chance.random() < 0.5:
        return "/v1/chat/completions", {**asked, "messages": messages(chance)}
    ids = [[chance.randrange(3, 300) for _ in range(chance.randint(1, 20))] for _ in range(chance.randint(1, 3))]
    return "/v1/completions", {**asked, "prompt": chance.choice([text(chance), ids, ids[0], [text(chance), "a"]])}


def asked(number):
    """A kind, a path and a body."""
    chance = random.Random(number)
    path, body = good(chance)
    kind = chance.choices(["good", "changed", "bytes", "long", "gone"], [6, 4, 1, 1, 1])[0]
    if kind == "changed":
        for _ in range(chance.randint(1, 3)):
            put(body, chance.choice(FIELDS), chance.choice(ODD))
    if kind == "long":
        body |= {"prompt": [5] * chance.randint(POSITIONS - 2, POSITIONS + 2), "max_tokens": 5}
        path = "/v1/completions"
    sent = json.dumps(body).encode()
    if kind == "bytes":
        place = chance.randrange(len(sent))
        sent = sent[:place] + chance.randbytes(chance.randint(0, 3)) + sent[place + chance.randint(0, 3) :]
    return kind, path, body, sent


def answered(served, number):
    """The status and, of an answer that is right, what its choices say."""
    kind, path, _, sent = asked(number)
    with contextlib.closing(socket.create_connection(("127.0.0.1", served.port), timeout=120)) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(sent)}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        if kind == "gone":
            return None, {}
        got = b""
        while part := connection.recv(65536):
            got += part
    head, _, body = got.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"text/event-stream" not in head:
        found = json.loads(body)
        assert status == 200 or set(found["error"]) == {"message", "type", "param", "code"}, (number, found)
        return status, found.get("choices", found)
    choices = {}
    events = [line[6:] for line in unchunked(body).decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    for event in map(json.loads, events):
        assert "error" not in event, (number, event)
        for choice in event["choices"]:
            own = choices.setdefault(choice["index"], {"text": "", "token_ids": []})
            own["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            own["token_ids"] += choice.get("token_ids", [])
            own["finish_reason"] = choice["finish_reason"]
    return status, [choices[index] for index in sorted(choices)]


def unchunked(body):
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return whole


def check_good(number, choices):
    """Compares with what the engine makes of that request alone."""
    _, path, body, _ = asked(number)
    codec = alone().requests.codec
    if "messages" in body and "chat" in path:
        prompts = [codec.encode_as_is(codec.chat(body["messages"]))]
    else:
        given = body["prompt"]
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    stop = body["stop"] or []
    stop = [stop] if isinstance(stop, str) else stop
    expected = alone().generate(
        prompts,
        n=body["n"] or 1,
        max_new_tokens=body["max_tokens"],
        temperature=0 if body["temperature"] < 1e-5 else body["temperature"],
        top_p=max(body["top_p"] or 1, 1e-5),
        top_k=max(body["top_k"] or 0, 0),
        seed=body["seed"],
        stop=stop,
        min_p=body["min_p"],
        presence_penalty=body["presence_penalty"] or 0,
        logit_bias={int(token): value for token, value in (body["logit_bias"] or {}).items()},
        bad_words=body["bad_words"] or [],
    )
    assert len(choices) == len(expected)
    for choice, done in zip(choices, expected, strict=True):
        said = choice["text"] if "text" in choice else choice["message"]["content"]
        cut = min([done.text.find(one) for one in stop if one in done.text], default=len(done.text))
        assert choice["token_ids"] == done.tokens, number
        assert said == done.text[:cut] and choice["finish_reason"] == done.finish_reason, number


def fuzz(numbers):
    with Served(chat_model(), tokenizer(), max_batch_size=4) as served:
        threads = threading.active_count()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = dict(zip(numbers, pool.map(lambda number: answered(served, number), numbers), strict=True))
        served.wait_until_idle()
        assert served.get("/health")[0] == 200
        assert served.metric("graphmod_running") == served.metric("graphmod_waiting") == 0
        assert served.service.admission.samples == 0
        assert threading.active_count() <= threads
    kinds = {number: asked(number)[0] for number in numbers}
    statuses = {status for status, _ in answers.values()}
    assert statuses <= {None, 200, 400, 404} and {200, 400} <= statuses
    for number, (status, choices) in answers.items():
        if kinds[number] == "good":
            assert status == 200, (number, choices)
            check_good(number, choices)


def test_two_hundred_requests_at_random():
    fuzz(range(200))


@pytest.mark.slow
def test_a_thousand_more():
    fuzz(range(1000, 2000))
