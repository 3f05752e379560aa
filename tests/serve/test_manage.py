"""What a server does beside answering: tokens of texts, what it is, and what clients do with it that may manage it."""

import json
import threading
from functools import partial

import pytest
import torch
from transformers import LlamaForCausalLM

from graphmod import __version__
from graphmod.cli.decode import _other_weights
from graphmod.cli.settings import ModelSource
from graphmod.decode import quantize_weights
from graphmod.decode.types import WeightsName
from graphmod.serve.settings import ServeSettings
from graphmod.text import TokenizerCodec
from tests.support.served import Served, chat_model, tokenizer

ASK = {"prompt": "one two three", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def served():
    with Served(chat_model(), tokenizer(), {"manage": True}, max_batch_size=4) as one:
        yield one


def answer(served, **more):
    status, body, _ = served.post("/v1/completions", ASK | more)
    assert status == 200, body
    return body["choices"][0]["text"]


def test_texts_become_tokens_as_they_do_in_requests_and_back(served):
    codec = TokenizerCodec(tokenizer())
    status, body, _ = served.post("/tokenize", {"model": "tiny", "prompt": "a b", "return_token_strs": True})
    assert status == 200 and body["tokens"] == codec.encode("a b") and body["count"] == len(body["tokens"])
    assert body["token_strs"][0] == "<s>" and body["max_model_len"] == 512
    plain = served.post("/tokenize", {"prompt": "a b", "add_special_tokens": False})[1]["tokens"]
    assert plain == body["tokens"][1:]
    assert served.post("/detokenize", {"tokens": body["tokens"]})[1] == {"prompt": "<s> a b"}
    chat = served.post("/tokenize", {"messages": MESSAGES})[1]["tokens"]
    _, whole, _ = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True})
    assert chat == whole["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [5, 100_000]}, "tokens"),
        ("/update_weights", {}, "path"),
        ("/update_weights?pth=a", {"path": "b"}, "pth"),
        ("/sleep?level=3", {}, "level"),
        ("/sleep", {"level": True}, "level"),
        ("/sleep?lvl=2", {}, "lvl"),
        ("/sleep", {"mode": "wait"}, "mode"),
        ("/wake_up?tags=weights", {}, "tags"),
        ("/reset_prefix_cache?level=1", {}, "level"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_its_field(served, path, body, param):
    status, said, _ = served.post(path, body)
    assert status == 400 and said["error"]["param"] == param, said


def test_a_server_says_what_it_is_and_what_it_serves(served):
    assert served.get("/version") == (200, json.dumps({"version": __version__}, separators=(",", ":")))
    status, page = served.get("/docs")
    assert status == 200 and "POST /v1/chat/completions" in page and "structured_outputs" in page
    assert "GET /v1/models/NAME" in served.get("/nothing")[1]


def test_a_sleeping_engine_has_no_cache_and_answers_as_before_when_it_wakes_up(served):
    before = answer(served)
    served.wait_until_idle()
    for level in (1, 2):
        assert served.post("/sleep", {})[0] == 200
        assert served.post(f"/sleep?level={level}", b"")[0] == served.post("/sleep", {"level": level})[0] == 200
        assert served.post("/reset_prefix_cache", {})[0] == 200
        assert json.loads(served.get("/is_sleeping")[1]) == {"is_sleeping": True}
        assert served.engine.stats.cache_bytes == 0
        status, said, headers = served.post("/v1/completions", ASK)
        assert status == 503 and "sleeps; POST /wake_up" in said["error"]["message"] and headers["retry-after"]
        assert served.get("/health")[0] == 503
        assert served.post("/wake_up", {})[0] == 200
        assert answer(served) == before
        served.wait_until_idle()


def test_an_engine_at_work_does_not_fall_asleep(served):
    with served.raw(ASK | {"max_tokens": 400, "stream": True}) as connection:
        connection.recv(100)
        status, said, _ = served.post("/sleep", {})
        assert status == 409 and "requests are running" in said["error"]["message"]
    assert json.loads(served.get("/is_sleeping")[1]) == {"is_sleeping": False}
    assert answer(served)


def test_beginnings_of_prompts_are_forgotten_where_that_is_asked(served):
    prompt = [5] * 200

    def found():
        known = served.metric("graphmod_prefix_tokens_total")
        answer(served, prompt=prompt)
        return served.metric("graphmod_prefix_tokens_total") - known

    found()
    assert found() > 0
    assert served.post("/reset_prefix_cache", {})[0] == 200
    assert found() == 0


def other_model():
    torch.manual_seed(7)
    model = chat_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def test_weights_change_while_requests_run(tmp_path):
    other_model().save_pretrained(tmp_path / "other")
    chat_model().save_pretrained(tmp_path / "own")
    chat_model(500).save_pretrained(tmp_path / "larger")
    with Served(other_model(), tokenizer(), max_batch_size=4) as one:
        wanted = answer(one)
    served = Served(chat_model(), tokenizer(), {"manage": True}, max_batch_size=4)
    served.load = LlamaForCausalLM.from_pretrained
    with served:
        before, addresses = answer(served), [one.data_ptr() for one in served.engine.model.parameters()]
        running = threading.Thread(target=answer, args=(served,), kwargs={"max_tokens": 400})
        running.start()
        assert served.post("/update_weights", {"path": str(tmp_path / "other")})[0] == 200
        assert answer(served) == wanted != before
        running.join()
        assert [one.data_ptr() for one in served.engine.model.parameters()] == addresses
        status, said, _ = served.post("/update_weights", {"path": str(tmp_path / "larger")})
        assert status == 409 and "has shape (500, 32) there and (349, 32) here" in said["error"]["message"]
        assert served.post("/update_weights", {"path": str(tmp_path / "nowhere")})[0] == 409
        assert answer(served) == wanted
        served.wait_until_idle()
        assert served.post("/sleep", {})[0] == 200
        assert served.post("/update_weights", {"path": str(tmp_path / "own")})[0] == 200
        assert served.post("/wake_up", {})[0] == 200
        assert answer(served) == before


def test_weights_of_8_bits_change_to_others_of_8_bits(tmp_path):
    other_model().save_pretrained(tmp_path / "other")
    models = chat_model(), other_model()
    for model in models:
        quantize_weights(model, "int8")
    with Served(models[1], tokenizer(), max_batch_size=4) as one:
        wanted = answer(one)
    served = Served(models[0], tokenizer(), {"manage": True}, max_batch_size=4)
    served.load = partial(_other_weights, ModelSource(), WeightsName.int8)
    with served:
        assert answer(served) != wanted
        assert served.post("/update_weights", {"path": str(tmp_path / "other")})[0] == 200
        assert answer(served) == wanted


def test_a_folder_without_weights_is_named_by_the_field_that_said_it(tmp_path):
    served = Served(chat_model(), tokenizer(), {"manage": True}, max_batch_size=1)
    served.load = partial(_other_weights, ModelSource(), WeightsName.saved)
    with served:
        for folder, what in ((tmp_path / "nowhere", "is not a folder"), (tmp_path, "holds neither a saved model")):
            status, said, _ = served.post("/update_weights", {"path": str(folder)})
            message = said["error"]["message"]
            assert status == 409 and message.startswith(f"path {folder} {what}") and "graphmod train" not in message


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    ],
)
def test_nobody_manages_a_server_that_does_not_let_him(path):
    assert not ServeSettings().manage
    with Served(chat_model(), tokenizer(), {"api_key": "k"}, max_batch_size=1) as one:
        assert one.post(path, {})[0] == 401
        status, said, _ = one.post(path, {}, authorization="Bearer k")
        assert status == 403 and "serve.manage=true" in said["error"]["message"]
