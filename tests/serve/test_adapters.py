"""LoRA adapters that clients load by name, and that requests name as their model."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from graphmod.decode import DecodeEngine
from tests.support.served import Served, chat_model, tokenizer

peft = pytest.importorskip("peft")
ASK = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "return_token_ids": True, "logprobs": 1}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Their folders, and the models that they make."""
    folder, merged = tmp_path_factory.mktemp("adapters"), {"tiny": chat_model()}
    for number, name in enumerate(("first", "second")):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(chat_model(), config)
        model.save_pretrained(folder / name)
        merged[name] = model.merge_and_unload().eval()
    return folder, merged


@pytest.fixture(scope="module")
def served(adapters):
    with Served(chat_model(), tokenizer(), {"manage": True}, max_batch_size=4, max_adapters=2) as one:
        for name in ("first", "second"):
            load(one, name, adapters[0] / name)
        yield one


def load(served, name, folder):
    body = {"lora_name": name, "lora_path": str(folder)}
    assert served.post("/v1/load_lora_adapter", body)[:2] == (200, {"status": "done"})


def expected(model):
    (done,) = DecodeEngine(model, max_batch_size=1, graphs=False).generate([ASK["prompt"]], max_new_tokens=12)
    return done


def models(served):
    return {one["id"]: one for one in json.loads(served.get("/v1/models")[1])["data"]}


def test_requests_that_run_together_get_the_model_that_each_names(served, adapters):
    folder, merged = adapters
    with ThreadPoolExecutor(4) as pool:
        names = ["first", "tiny", "second", "first"]
        answers = list(pool.map(lambda name: served.post("/v1/completions", ASK | {"model": name})[1], names))
    for name, answer in zip(names, answers, strict=True):
        (choice,), done = answer["choices"], expected(merged[name])
        assert answer["model"] == name and choice["token_ids"] == done.tokens
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(done.logprobs, abs=1e-5)
    chat = {"model": "second", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    client = served.client()
    assert client.chat.completions.create(**chat).model == "second"
    assert {event.model for event in client.chat.completions.create(stream=True, **chat)} == {"second"}
    found = models(served)
    assert {name: one.get("parent") for name, one in found.items()} == {"tiny": None, "first": "tiny", "second": "tiny"}
    assert found["first"]["root"] == str(folder / "first")
    assert json.loads(served.get("/v1/models/first")[1]) == found["first"]


def test_one_that_is_unloaded_is_no_model_any_more(served, adapters):
    folder, merged = adapters
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "first", "lora_int_id": 1})[0] == 200
    status, said, _ = served.post("/v1/completions", ASK | {"model": "first"})
    assert status == 404 and "this server has 'tiny', 'second'" in said["error"]["message"]
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "first"})[0] == 404
    assert {*models(served)} == {"tiny", "second"}
    for other in ("second", "first"):
        load(served, "first", folder / other)
        answer = served.post("/v1/completions", ASK | {"model": "first"})[1]
        assert answer["choices"][0]["token_ids"] == expected(merged[other]).tokens
        assert served.post("/v1/unload_lora_adapter", {"lora_name": "first"})[0] == 200
    load(served, "first", folder / "first")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"lora_name": "tiny"}, "lora_name", "there is a model 'tiny' already"),
        ({"lora_name": "first"}, "lora_name", "there is a model 'first' already"),
        ({"lora_path": "/nowhere"}, "lora_path", "/nowhere holds no LoRA adapter that can be read"),
        ({}, "lora_path", "there is room for 2 adapters"),
        ({"load_inplace": True}, "load_inplace", "is not supported"),
        ({"lora_path": None}, "lora_path", "must"),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_said_with_its_field(served, adapters, fields, param, said):
    assert served.post("/update_weights", {"model": "first", "path": "/nowhere"})[1]["error"]["param"] == "model"
    body = {"lora_name": "third", "lora_path": str(adapters[0] / "first")} | fields
    status, answer, _ = served.post("/v1/load_lora_adapter", body)
    assert status == 400 and answer["error"]["param"] == param and said in answer["error"]["message"], answer
    assert {*models(served)} == {"tiny", "first", "second"}
