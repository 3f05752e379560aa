"""Answers of a form: over HTTP, as clients ask for it, whole and streamed."""

import json
import re

import pytest

from graphmod.decode import structured as rooms
from tests.support.served import Served, chat_model, tokenizer

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "people": {"type": "integer", "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "Which city?"}], "temperature": 1, "max_tokens": 300}


@pytest.fixture(scope="module")
def served():
    with Served(chat_model(), tokenizer(), max_batch_size=4) as one:
        yield one


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_of_the_schema_that_the_client_gave(served, stream):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    asked = {"model": "tiny", **CHAT, "response_format": form, "n": 3, "seed": 1, "stream": stream}
    texts = ["", "", ""]
    if stream:
        for event in served.client().chat.completions.create(**asked):
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in served.client().chat.completions.create(**asked).choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len({*texts}) == 3


@pytest.mark.parametrize(
    ("form", "matches"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[0-9]{2}:[0-9]{2}"}, r"\d\d:\d\d"),
        ({"json": {"const": 1}}, "1"),
    ],
    ids=str,
)
def test_completions_take_forms_as_vllm_has_them(served, form, matches):
    status, answer, _ = served.post("/v1/completions", {"prompt": "a", "max_tokens": 20, "structured_outputs": form})
    assert status == 200 and re.fullmatch(matches, answer["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is missing; type=json_schema needs",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
            "goes with type=json_schema",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "must be 'text', 'json_object' or 'json_schema'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objct"}}}},
            "response_format",
            "response_format: this json cannot be used: Invalid type: objct",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "goes without structured_outputs",
        ),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs", "unclosed character class"),
        ({"structured_outputs": {}}, "structured_outputs", "must be an object with one of json"),
        ({"guided_json": SCHEMA}, "guided_json", 'write structured_outputs={"json": ...}'),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_form_is_said(served, fields, param, said):
    status, answer, _ = served.post("/v1/chat/completions", CHAT | fields)
    assert status == 400 and answer["error"]["param"] == param and said in answer["error"]["message"]


def test_a_library_that_is_missing_is_named(served, monkeypatch):
    monkeypatch.setattr(rooms, "version", lambda name: "1.6.0")
    status, answer, _ = served.post("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}})
    assert status == 400 and "pip install -e '.[structured]'" in answer["error"]["message"]
