"""Tools: the calls that an answer holds or must have, as the openai client gets them, whole and streamed."""

import json
import sys
from functools import partial

import pytest
import torch

from graphmod.serve.tools import LIST, ArgumentReader, CallReader, notation_of, schema_of_calls, whole_calls
from graphmod.text import TokenizerCodec
from tests.support.made_tokenizers import llama_like
from tests.support.served import Served, chat_model
from tests.support.sweeps import sweep

HERMES, MISTRAL = notation_of("<tool_call>"), notation_of("{{ '[TOOL_CALLS]' }}")
LLAMA = notation_of("{% set environment = 'ipython' %}<|python_tag|>")
ONE, TWO = {"name": "look", "arguments": {"at": "é"}}, {"name": "go", "arguments": {}}


def written(*calls, key="arguments"):
    return [json.dumps({"name": one["name"], key: one["arguments"]}) for one in calls]


# notation, text -> what is said beside the calls, and the calls
TEXTS = {
    "one": (HERMES, f"Well.\n<tool_call>\n{written(ONE)[0]}\n</tool_call>", "Well.", [ONE]),
    "two": (
        HERMES,
        "<tool_call>{}</tool_call>\n<tool_call>\n{}</tool_call>\n".format(*written(ONE, TWO)),
        "",
        [ONE, TWO],
    ),
    "open": (HERMES, f"<tool_call>\n{written(TWO)[0]}\n", "", [TWO]),
    "text between": (
        HERMES,
        "a<tool_call>{}</tool_call>b <tool_call>{}</tool_call> c".format(*written(ONE, TWO)),
        "ab c",
        [ONE, TWO],
    ),
    "no call": (
        HERMES,
        "a <tool_c and <tool_call>\nnothing</tool_call> b",
        "a <tool_c and<tool_call>\nnothing</tool_call> b",
        [],
    ),
    "cut": (HERMES, '<tool_call>{"name": "look", "arg', '<tool_call>{"name": "look", "arg', []),
    "unknown": (HERMES, '<tool_call>{"name": "fly"}</tool_call>', '<tool_call>{"name": "fly"}</tool_call>', []),
    "plain": (HERMES, "  no calls, < or <tool> \n", "  no calls, < or <tool> \n", []),
    "list": (MISTRAL, f"[TOOL_CALLS] [{', '.join(written(ONE, TWO))}]", "", [ONE, TWO]),
    "named": (
        MISTRAL,
        'Hm. [TOOL_CALLS]look[ARGS]{"at": "é"}[TOOL_CALLS]go[CALL_ID]a1[ARGS]{}',
        "Hm.",
        [ONE, TWO],
    ),
    "named plainly": (MISTRAL, 'look [TOOL_CALLS]look{"at": "é"}', "look", [ONE]),
    "bare": (LLAMA, written(ONE, key="parameters")[0], "", [ONE]),
    "bare two": (LLAMA, "\n" + "; ".join(written(ONE, TWO, key="parameters")), "", [ONE, TWO]),
    "tagged": (LLAMA, "<|python_tag|>" + written(TWO, key="parameters")[0], "", [TWO]),
    "json": (LLAMA, '{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
    "brackets": (LLAMA, "[1] says {so}", "[1] says {so}", []),
    "forced": (LIST, f"[{','.join(written(ONE, TWO))}]", "", [ONE, TWO]),
    "forced, cut": (LIST, f"[{written(ONE)[0]},{{", "{", [ONE]),
}


def read(reader, text, size):
    said, calls = "", []
    for start in range(0, len(text), size):
        piece, more = reader.add(text[start : start + size])
        said, calls = said + piece, calls + more
    return said + reader.end(), whole_calls(calls)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_found_however_the_text_comes(name, size):
    notation, text, said, calls = TEXTS[name]
    got, found = read(CallReader(notation, ["look", "go"], True), text, size)
    assert [{"name": one.name, "arguments": json.loads(one.arguments)} for one in found] == calls
    assert got.replace(",", "") == said.replace(",", "") if notation is LIST else got == said
    assert [one.index for one in found] == [*range(len(calls))] and len({one.id for one in found}) == len(calls)
    assert all(len(one.id) == 9 for one in found) if notation is MISTRAL else True


def test_one_call_is_told_where_no_more_are_wanted_and_a_text_may_be_arguments():
    _, text, _, _ = TEXTS["two"]
    assert len(read(CallReader(HERMES, ["look", "go"], False), text, 5)[1]) == 1
    said, (call,) = read(ArgumentReader("look"), '{"city": "Bern"}', 3)
    assert len(call.id) == 9 and call.id.isalnum()
    assert (said, call.name, call.arguments) == ("", "look", '{"city": "Bern"}')


# -- over HTTP ---------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}Call tools as <tool_call>{{ tools | tojson }}</tool_call>.{% endif %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments }}</tool_call>{% endfor %}{{ eos_token }}{% endfor %}[assistant]"
)
POINT = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "at": {"$ref": "#/$defs/At"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"At": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "looks", "parameters": POINT}},
    {"type": "function", "function": {"name": "go"}},
]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "tools": TOOLS, "max_tokens": 300}


def words():
    made = llama_like()
    made.chat_template = TEMPLATE
    return made


def scripted(made, text):
    """Logits processors by which a model says a text after the last message, and ends."""
    codec = TokenizerCodec(made)
    script = torch.tensor([*codec.encode_as_is(text), 2])
    lead = len(codec.encode_as_is("</s>[assistant]")) - 1

    def process(tokens, logits):
        last = torch.where(tokens == 2, torch.arange(tokens.shape[1]), -1).amax(1)
        said = (tokens >= 0).sum(1) - 1 - last - lead
        return torch.full_like(logits, -1e9).scatter(1, script[said.clamp(0, len(script) - 1)].unsqueeze(1), 0.0)

    return [process]


@pytest.fixture(scope="module")
def served():
    with Served(chat_model(), words(), max_batch_size=4) as one:
        yield one


def streamed(client, asked):
    """The parts of a choice as a client puts them together, and the reason of its end."""
    said, calls, reason = "", {}, None
    for event in client.chat.completions.create(**asked, stream=True):
        (choice,) = event.choices
        said, reason = said + (choice.delta.content or ""), choice.finish_reason or reason
        for one in choice.delta.tool_calls or []:
            own = calls.setdefault(one.index, {"name": "", "arguments": ""})
            if one.id is not None:
                assert one.type == "function" and own["name"] == ""
                own |= {"id": one.id, "name": one.function.name}
            own["arguments"] += one.function.arguments
    return said, [calls[index] for index in range(len(calls))], reason


def whole(client, asked):
    (choice,) = client.chat.completions.create(**asked).choices
    calls = [{"id": one.id, **one.function.model_dump()} for one in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


@sweep(ask=[whole, streamed], special=[False, True])
def test_calls_that_the_model_makes_are_told_and_answers_to_them_are_taken(ask, special):
    """Whether or not the marks of calls are special tokens, which texts leave out."""
    text, made = "Ah. <tool_call>{}</tool_call><tool_call>{}</tool_call>".format(*written(ONE, TWO)), words()
    if special:
        made.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    small = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
    chat = {"model": "tiny", "messages": CHAT["messages"], "tools": small, "max_tokens": 200}
    with Served(chat_model(len(made)), made, max_batch_size=2, logits_processors=scripted(made, text)) as one:
        client = one.client()
        said, calls, reason = ask(client, chat)
        assert (said.strip(), reason) == ("Ah.", "tool_calls")
        assert [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls] == [ONE, TWO]
        assert len(ask(client, chat | {"parallel_tool_calls": False})[1]) == 1
        said, none, reason = ask(client, chat | {"tool_choice": "none"})
        assert (none, reason) == ([], "stop") and "Ah." in said and (special or said.strip() == text)
        made_calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
        said = [{"role": "assistant", "content": None, "tool_calls": made_calls}]
        said += [{"role": "tool", "tool_call_id": call["id"], "content": "here"} for call in calls]
        assert ask(client, chat | {"messages": [*CHAT["messages"], *said], "max_tokens": 5})[2] == "length"


@pytest.mark.parametrize("ask", [whole, streamed])
def test_calls_may_be_required_or_forced(served, ask):
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    checks = {"look": partial(jsonschema.validate, schema=POINT), "go": lambda given: given}
    for seed in range(6):
        asked = CHAT | {"temperature": 1, "seed": seed, "tool_choice": "required", "parallel_tool_calls": False}
        said, calls, reason = ask(served.client(), asked)
        if reason == "length":
            continue
        assert (said, reason, len(calls)) == ("", "tool_calls", 1)
        checks[calls[0]["name"]](json.loads(calls[0]["arguments"]))
    forced = CHAT | {"temperature": 1, "tool_choice": {"type": "function", "function": {"name": "look"}}}
    said, (call,), reason = ask(served.client(), forced)
    assert (said, call["name"], reason) == ("", "look", "tool_calls")
    checks["look"](json.loads(call["arguments"]))


def test_definitions_of_schemas_stay_with_them():
    jsonschema = pytest.importorskip("jsonschema")
    schema = schema_of_calls(TOOLS, True)
    jsonschema.validate([{"name": "look", "arguments": {"city": "Bern", "at": [1]}}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "look", "arguments": {"city": "Bern", "at": [3]}}], schema)


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function", "is missing"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name", "at least 1"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.custom", "not supported"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "goes with tools"),
        ({"tools": CHAT["tools"] * 2}, "tools", "has 'go' twice; give each tool a name of its own"),
        ({"tool_choice": "any"}, "tool_choice.type", "must be 'none', 'auto', 'required' or 'function', got \"any\""),
        ({"tool_choice": "function"}, "tool_choice.function", "is missing; type=function needs it"),
        (
            {"tool_choice": {"type": "auto", "function": {"name": "go"}}},
            "tool_choice.function",
            "goes with type=function",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice.function.name",
            "must be one of look, go",
        ),
        ({"logprobs": True}, "logprobs", "goes without tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "goes without tools"),
    ],
    ids=str,
)
def test_what_is_wrong_with_tools_is_said(served, change, param, said):
    status, answer, _ = served.post("/v1/chat/completions", CHAT | change)
    assert status == 400 and answer["error"]["param"] == param and said in answer["error"]["message"], answer


@pytest.mark.parametrize("depth", [450, 3000])
def test_a_schema_that_is_nested_too_deeply_is_refused(served, depth):
    schema = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
    tool = {"type": "function", "function": {"name": "look", "parameters": "SCHEMA"}}
    body = json.dumps(CHAT | {"tools": [tool], "tool_choice": "required"}).replace('"SCHEMA"', schema)
    status, answer, _ = served.post("/v1/chat/completions", body.encode())
    said = answer["error"]["message"]
    # From Python 3.12 on calls from C do not count, so that the shallow one gets as far as its prompt.
    through = depth == 450 and sys.version_info >= (3, 12)
    assert status == 400 and ("no room for another" if through else "nested too deeply") in said


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TEMPLATE.replace("tools", "tool"), "tools is nothing that the chat template of this model reads"),
        (TEMPLATE.replace("tool_call>", "call>"), "how this model writes calls is not known"),
    ],
    ids=["unread", "unknown"],
)
def test_a_template_without_tools_or_of_another_notation_is_said(template, said):
    made = words()
    made.chat_template = template
    with Served(chat_model(), made, max_batch_size=2) as one:
        status, answer, _ = one.post("/v1/chat/completions", CHAT)
        assert status == 400 and answer["error"]["param"] == "tools" and said in answer["error"]["message"], answer
