"""The front in a process of its own: what goes over the link, and that neither process outlives the other."""

import contextlib
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from graphmod.decode import Sampling
from graphmod.serve.engine_side import FrontLost
from tests.support.served import Apart, alone, chat_model, tokenizer

LONG = {"prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "ignore_eos": True}


def children():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += (task / "children").read_text().split()
    return set(map(int, found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    saved = tmp_path_factory.mktemp("saved")
    tokenizer().save_pretrained(saved)
    return saved


@pytest.fixture(scope="module")
def apart(folder):
    """A server that has answered while the model was loaded; nothing of it is left afterwards."""
    Apart.engine_of(chat_model(), tokenizer())  # what it opens once and keeps
    gc.collect()  # else what earlier tests have left open may be closed meanwhile
    before = children(), len(os.listdir("/proc/self/fd")), threading.active_count()
    one = Apart(folder, chat_model(), tokenizer(), {"api_key": "secret"}, max_batch_size=4)
    (one.pid,) = children() - before[0]
    try:
        one.start()
        one.while_loading = [one.get(path, authorization="Bearer secret") for path in ("/health", "/v1/models")]
        one.while_loading.append(one.get("/metrics"))
        one.begin()
        yield one
        one.wait_until_idle()
    finally:
        one.end()
    gc.collect()
    assert (children(), len(os.listdir("/proc/self/fd")), threading.active_count()) == before


@pytest.fixture
def post(apart):
    return lambda body: apart.post("/v1/completions", body, authorization="Bearer secret")


def test_it_answers_while_the_model_is_being_loaded(apart):
    statuses, said = zip(*apart.while_loading, strict=True)
    assert statuses == (503, 503, 200) and "loaded" in said[0] and "loaded" in said[1]
    assert "graphmod_requests" in said[2] and "graphmod_blocks_total" not in said[2]
    assert apart.get("/health")[0] == 200 and apart.metric("graphmod_blocks_total") > 0


def test_the_key_is_no_argument(apart):
    assert b"secret" not in Path(f"/proc/{apart.pid}/cmdline").read_bytes()
    assert b"secret" not in Path(f"/proc/{apart.pid}/environ").read_bytes()
    assert apart.post("/v1/completions", {"prompt": "a"})[0] == 401


@pytest.mark.slow
def test_two_hundred_at_once_get_the_tokens_of_the_engine(apart, post):
    prompts = [[5 + number % 90, 6, 7 + number % 50] for number in range(200)]
    settings = [{"temperature": 0.9 if number % 2 else 0.0, "seed": number} for number in range(200)]
    expected = alone().generate(prompts, sampling=[Sampling(max_new_tokens=8, **own) for own in settings])
    asked = [
        {"prompt": prompt, "max_tokens": 8, "return_token_ids": True, "logprobs": 1, **own}
        for prompt, own in zip(prompts, settings, strict=True)
    ]
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(post, asked))
    assert [status for status, _, _ in answers] == [200] * 200
    choices = [body["choices"][0] for _, body, _ in answers]
    assert [choice["token_ids"] for choice in choices] == [done.tokens for done in expected]
    assert [choice["text"] for choice in choices] == [done.text for done in expected]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_does_not_take_is_refused_before_any_stream(apart, post, stream):
    before = apart.metric("graphmod_tokens_total")
    for prompt, said in (([[5], [6] * 600], "prompt 1 has 600 tokens"), ([5, 10**6], "which is not a token id")):
        status, body, _ = post({"prompt": prompt, "stream": stream})
        assert status == 400 and said in body["error"]["message"] and body["error"]["param"] == "prompt"
    assert post({"prompt": "a", "stop_token_ids": [10**6]})[1]["error"]["param"] == "stop"
    apart.wait_until_idle()
    assert apart.metric("graphmod_tokens_total") == before, "nor are the prompts before it taken"


def test_who_goes_away_ends_the_request(apart, monkeypatch):
    launch = apart.engine.graphs.launch
    monkeypatch.setattr(apart.engine.graphs, "launch", lambda *given: (time.sleep(0.05), launch(*given))[1])
    before = apart.metric("graphmod_tokens_total")
    asked = {"model": "tiny", "prompt": [5], "max_tokens": 300, "extra_body": {"ignore_eos": True}}
    with apart.client("secret").completions.create(stream=True, n=4, **asked) as stream:
        next(iter(stream))
    apart.wait_until_idle()
    assert apart.metric("graphmod_tokens_total") - before < 4 * 300


def test_what_the_engine_cannot_do_now_is_an_error_of_that_request(apart, post):
    apart.engine.suspend()
    status, body, _ = post({"prompt": "a"})
    assert (status, body["error"]["code"]) == (500, "internal_error") and "suspended" in body["error"]["message"]
    apart.engine.resume()
    assert post({"prompt": "a", "max_tokens": 2})[0] == 200 and apart.get("/health")[0] == 200


def test_an_error_of_the_engine_reaches_all_who_wait(folder, monkeypatch):
    with Apart(folder, chat_model(), tokenizer(), max_batch_size=2) as one, ThreadPoolExecutor(4) as pool:
        fail, launch = threading.Event(), one.engine.graphs.launch

        def failing(*given):
            time.sleep(0.05)
            if fail.is_set():
                raise RuntimeError("the device is lost")
            return launch(*given)

        monkeypatch.setattr(one.engine.graphs, "launch", failing)
        waiting = [pool.submit(one.post, "/v1/completions", LONG) for _ in range(4)]
        one.wait_until(lambda: one.metric("graphmod_running") + one.metric("graphmod_waiting") == 4)
        stream = one.client().completions.create(model="tiny", prompt="a", stream=True)
        fail.set()
        for status, body, _ in [answer.result() for answer in waiting]:
            assert status == 500 and "the device is lost" in body["error"]["message"]
        with pytest.raises(openai.APIError, match="the device is lost"):
            list(stream)
        status, said = one.get("/health")
        assert status == 503 and "the device is lost" in said


def test_a_front_that_is_killed_is_noticed_and_what_ran_has_ended(folder):
    before = children()
    one = Apart(folder, chat_model(), tokenizer(), max_batch_size=2)
    try:
        one.start()
        one.host.begin(one.engine, one.load)
        while not one.host.ready:
            one.host.tend(1)
        with contextlib.closing(one.raw(LONG | {"stream": True})) as connection:
            assert b" 200 " in connection.recv(100)
            one.process.kill()
            with pytest.raises(FrontLost, match="the process that answers HTTP has ended"):
                one.host.tend(20)
            with contextlib.suppress(ConnectionError):
                while connection.recv(1000):
                    pass
        one.wait_until(lambda: not one.engine.unfinished)
        assert one.process.status == "by SIGKILL" and one.engine.stats.blocks_used == 0
    finally:
        one.end()
    assert children() == before
