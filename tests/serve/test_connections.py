"""Clients that are many, go away, read slowly, send too much, or send nonsense."""

import asyncio
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from graphmod.decode import DecodeEngine, Sampling
from graphmod.serve import app as app_module
from tests.support.served import Served, alone, chat_model, tokenizer

LONG = {"prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served():
    with Served(chat_model(), tokenizer(), max_batch_size=4) as one:
        yield one
        one.wait_until_idle()


def test_two_hundred_at_once_get_the_tokens_of_the_engine(served):
    prompts = [[5 + number % 90, 6, 7 + number % 50] for number in range(200)]
    settings = [{"temperature": 0.9 if number % 2 else 0.0, "seed": number} for number in range(200)]
    expected = alone().generate(prompts, sampling=[Sampling(max_new_tokens=8, **own) for own in settings])

    def ask(number):
        body = {"prompt": prompts[number], "max_tokens": 8, "return_token_ids": True, **settings[number]}
        return served.post("/v1/completions", body)

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(200)))
    assert [status for status, _, _ in answers] == [200] * 200
    assert [body["choices"][0]["token_ids"] for _, body, _ in answers] == [done.tokens for done in expected]
    served.wait_until_idle()


@pytest.fixture
def slowly(served, monkeypatch):
    """Decode steps take a while, so that whoever goes away does so in time."""
    launch = served.engine.graphs.launch
    monkeypatch.setattr(served.engine.graphs, "launch", lambda *given: (time.sleep(0.1), launch(*given))[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(served, slowly, stream):
    gone = served.metric("graphmod_requests_total")
    before = served.metric("graphmod_tokens_total")
    with contextlib.closing(served.raw({**LONG, "n": 4, "stream": stream})):
        served.wait_until(lambda: served.metric("graphmod_running"))
    served.wait_until_idle()
    assert served.metric("graphmod_tokens_total") - before < 4 * 300
    assert served.metric("graphmod_requests_total") == gone + 1
    assert 'outcome="gone"' in served.get("/metrics")[1]


def test_a_stream_that_is_closed_ends_its_request(served, slowly):
    before = served.metric("graphmod_tokens_total")
    asked = {"prompt": [5], "max_tokens": 300, "extra_body": {"ignore_eos": True}}
    with served.client().completions.create(model="tiny", stream=True, **asked) as stream:
        next(iter(stream))
    served.wait_until_idle()
    assert served.metric("graphmod_tokens_total") - before < 300


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_before_the_engine_has_taken_the_request_leaves_the_queue(served, monkeypatch, stream):
    launch, go_on = served.engine.graphs.launch, threading.Event()
    monkeypatch.setattr(served.engine.graphs, "launch", lambda *given: (go_on.wait(60), launch(*given))[1])
    try:
        with contextlib.closing(served.raw({**LONG, "stream": stream})):
            served.wait_until(lambda: served.metric("graphmod_running"))
            with contextlib.closing(served.raw({**LONG, "stream": stream})):
                served.wait_until(lambda: served.service.admission.requests == 2)
            served.wait_until(lambda: served.service.admission.requests == 1)
    finally:
        go_on.set()
    served.wait_until_idle()


TEXT = {"prompt": "a text", "max_tokens": 300, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_before_his_text_is_tokens_leaves_the_queue(served, stream):
    go_on, before = threading.Event(), served.metric("graphmod_tokens_total")
    served.service.aside(lambda: go_on.wait(60))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(contextlib.closing(served.raw({**TEXT, "stream": stream})))
            served.wait_until(lambda: served.service.admission.requests == 3)
        served.wait_until(lambda: served.service.admission.requests == 0)
    finally:
        go_on.set()
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    assert served.metric("graphmod_tokens_total") - before < 10  # nothing was made of the three


def test_a_text_that_is_not_tokens_yet_when_the_server_ends_is_told():
    go_on = threading.Event()
    one = Served(chat_model(), tokenizer(), max_batch_size=2)
    try:
        with one, ThreadPoolExecutor(1) as pool:
            one.service.aside(lambda: go_on.wait(60))
            waiting = pool.submit(one.post, "/v1/completions", TEXT)
            one.wait_until(lambda: one.service.admission.requests)
            one.host.drain()
            one.end()
            status, body, _ = waiting.result()
    finally:
        go_on.set()
    assert status == 503 and "shutting down" in body["error"]["message"]


def test_clients_that_wait_and_go_away_leave_the_queue(served, slowly):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(contextlib.closing(served.raw(LONG)))
        served.wait_until(lambda: served.service.admission.requests == 20)
    served.wait_until_idle()


def test_who_reads_slowly_holds_up_nobody_and_still_gets_all(served):
    asked = {**LONG, "n": 4, "stream": True, "logprobs": 1, "return_token_ids": True}
    slow = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    given = json.dumps(asked).encode()
    slow.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(given)
    )
    slow.sendall(given)
    served.wait_until(lambda: served.metric("graphmod_running"))
    served.wait_until(lambda: not served.metric("graphmod_blocks_used"), seconds=60)  # it has ended for the engine
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
    with contextlib.closing(slow):
        parts = []
        while part := slow.recv(65536):
            parts.append(part)
    lines = [line for line in b"".join(parts).decode().splitlines() if line.startswith("data: {")]
    tokens = [[] for _ in range(4)]
    for line in lines:
        (choice,) = json.loads(line[6:])["choices"]
        tokens[choice["index"]] += choice["token_ids"]
    (expected,) = alone().generate([LONG["prompt"]], max_new_tokens=300, ignore_eos=True)
    assert tokens == [expected.tokens] * 4


SCOPE = {
    **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"},
    **{"path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": []},
}


def given(body):
    """What an application receives of a client that sends this, and stays."""
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        return incoming.pop() if incoming else await asyncio.Event().wait()

    return receive


def test_who_never_reads_is_given_up(served, monkeypatch):
    monkeypatch.setattr(app_module, "PATIENCE", 0.3)
    sent = []

    async def send(message):
        sent.append(message)
        if len(sent) == 3:
            await asyncio.Event().wait()

    asyncio.run(served.app(SCOPE, given({**LONG, "stream": True}), send))
    assert len(sent) == 3
    served.wait_until_idle()


def test_while_nobody_reads_nothing_more_is_made_ready(served):
    sent, receive = [], given({**LONG, "stream": True, "prompt": [[5], [6], [7]]})

    async def ask():
        reads = asyncio.Event()

        async def send(message):
            sent.append(message)
            if len(sent) == 3:
                await reads.wait()

        answer = asyncio.create_task(served.app(SCOPE, receive, send))
        while len(sent) < 3 or await asyncio.to_thread(served.metric, "graphmod_blocks_used"):
            await asyncio.sleep(0.02)
        assert len(sent) == 3
        reads.set()
        await answer

    asyncio.run(ask())
    assert sent[-1]["body"] == b"data: [DONE]\n\n"
    choices = [choice for one in sent[1:-1] for choice in json.loads(one["body"].removeprefix(b"data: "))["choices"]]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"] == "length") == [0, 1, 2]
    assert all(choice["text"] for choice in choices)


def test_a_full_queue_says_when_to_try_again():
    with Served(chat_model(), tokenizer(), {"max_waiting": 2}, max_batch_size=2) as one:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(contextlib.closing(one.raw(LONG)))
            one.wait_until(lambda: one.service.admission.samples == 4)
            status, body, headers = one.post("/v1/completions", {"prompt": "a"})
            assert status == 429 and body["error"]["code"] == "queue_full" and int(headers["retry-after"]) >= 1
            with pytest.raises(openai.RateLimitError):
                one.client().completions.create(model="tiny", prompt="a")
        one.wait_until_idle()
        assert one.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        assert one.metric("graphmod_requests_total") == 7


def test_a_body_that_is_too_large_is_refused():
    with Served(chat_model(), tokenizer(), {"max_body_bytes": 1000}, max_batch_size=2) as one:
        assert one.post("/v1/completions", {"prompt": "a" * 2000})[0] == 413
        with contextlib.closing(socket.create_connection(("127.0.0.1", one.port), timeout=20)) as chunked:
            chunked.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
            chunked.sendall(b"400\r\n" + b"a" * 1024 + b"\r\n")
            assert b" 413 " in chunked.recv(1000)
        assert one.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def test_headers_that_do_not_end_are_refused(served):
    with contextlib.closing(socket.create_connection(("127.0.0.1", served.port), timeout=20)) as endless:
        endless.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx: ")
        with contextlib.suppress(OSError):
            for _ in range(400):
                endless.sendall(b"a" * 10_000)
        with contextlib.suppress(ConnectionResetError):
            assert b" 431 " in endless.recv(1000)
    with contextlib.closing(socket.create_connection(("127.0.0.1", served.port), timeout=20)) as trailing:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        trailing.sendall(head + b"2\r\n{}\r\n0\r\nx: ")
        with pytest.raises(OSError):
            for _ in range(4000):
                trailing.sendall(b"a" * 100_000)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)) as connection:
        for size in (10, 300_000, 1_000_000, 10):  # bodies may be large, one after the other
            connection.request(
                "POST", "/v1/completions", json.dumps({"prompt": [5], "max_tokens": 1, "user": "a" * size})
            )
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 500\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    ],
)
def test_nonsense_on_a_socket_harms_nobody(served, sent):
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.sendall(sent)
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_streams(served):
    command = ["curl", "-sN", f"{served.url}/v1/completions", "-d"]
    body = json.dumps({"prompt": "a", "max_tokens": 5, "seed": 1, "stream": True})
    done = subprocess.run([*command, body], capture_output=True, text=True, timeout=60)
    events = done.stdout.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
    assert json.loads(events[-3][6:])["choices"][0]["finish_reason"] == "length"


def test_an_engine_that_fails_answers_everybody_and_health_tells_it(monkeypatch):
    with Served(chat_model(), tokenizer(), max_batch_size=2) as one:
        assert one.get("/health")[0] == 200
        graphs, fail = one.engine.graphs, threading.Event()
        launch = graphs.launch

        def failing(*arguments):
            if fail.is_set():
                raise RuntimeError("the device is lost")
            return launch(*arguments)

        monkeypatch.setattr(graphs, "launch", failing)
        with ThreadPoolExecutor(5) as pool:
            whole = [pool.submit(one.post, "/v1/completions", LONG) for _ in range(4)]
            streamed = one.client().completions.create(
                model="tiny", prompt="a", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            one.wait_until(lambda: one.service.admission.requests == 5)
            fail.set()
            for status, body, _ in [answer.result() for answer in whole]:
                assert status == 500 and "the device is lost" in body["error"]["message"]
            with pytest.raises(openai.APIError, match="the device is lost"):
                list(streamed)
        status, said = one.get("/health")
        assert status == 503 and "the device is lost" in said
        assert one.post("/v1/completions", {"prompt": "a"})[0] == 500


def test_logits_that_are_not_numbers_fail_alone():
    model = chat_model()
    with Served(model, tokenizer(), max_batch_size=2) as one:
        assert one.post("/v1/completions", {"prompt": [5], "max_tokens": 2})[0] == 200
        model.model.embed_tokens.weight.data[9] = float("nan")
        status, body, _ = one.post("/v1/completions", {"prompt": [9]})
        assert status == 500 and "NaN" in body["error"]["message"] and body["error"]["code"] == "completion_error"
        assert one.get("/health")[0] == 200
        stream = one.client().completions.create(model="tiny", prompt=[9], stream=True)
        with pytest.raises(openai.APIError, match="NaN"):
            list(stream)


def test_requests_are_refused_while_the_model_loads_and_while_the_server_drains():
    one = Served(chat_model(), tokenizer(), max_batch_size=2)
    one.start()
    try:
        assert one.get("/health")[0] == 503 and "loaded" in one.get("/health")[1]
        status, _, headers = one.post("/v1/completions", {"prompt": "a"})
        assert status == 503 and headers["retry-after"] and one.get("/v1/models")[0] == 503
        assert one.get("/metrics")[0] == one.get("/")[0] == 200
        one.begin()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(one.post, "/v1/completions", LONG)
            one.wait_until(lambda: one.metric("graphmod_running"))
            one.host.drain()
            one.wait_until(lambda: one.host.left == 1)
            assert one.post("/v1/completions", {"prompt": "a"})[0] == 503 and one.get("/health")[0] == 503
            assert running.result()[0] == 200
    finally:
        one.end()


def test_what_still_runs_when_the_time_is_over_is_told():
    one = Served(chat_model(), tokenizer(), max_batch_size=2)
    with one, ThreadPoolExecutor(1) as pool:
        step = one.engine.graphs.launch
        one.engine.graphs.launch = lambda *given: (time.sleep(0.05), step(*given))[1]
        running = pool.submit(one.post, "/v1/completions", LONG)
        one.wait_until(lambda: one.metric("graphmod_running"))
        one.host.drain()
        one.end()
        status, body, _ = running.result()
        assert status == 503 and "shutting down" in body["error"]["message"]


def test_counters_that_cannot_be_read_cut_off_nobody(monkeypatch, caplog):
    with Served(chat_model(), tokenizer(), max_batch_size=2) as one:
        with monkeypatch.context() as patched:
            patched.setattr(DecodeEngine, "stats", property(lambda _: 1 / 0))
            status, said = one.get("/metrics")
        assert status == 200 and "graphmod_running" not in said and "ZeroDivisionError" in caplog.text
        assert one.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        assert one.metric("graphmod_running") == 0
