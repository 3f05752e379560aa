"""The fields of requests: the page has all of OpenAI's and vLLM's, and the server does with each what the page says."""

import json
import typing

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from docs.fields import known_fields
from graphmod.serve.schema import ChatRequest, CompletionRequest
from tests.support.served import Served, chat_model, tokenizer

KINDS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
# Of vLLM's requests: those that OpenAI's API does not have.
VLLM = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens response_format response_format.type response_format.json_schema response_format.format
    response_format.structures response_format.triggers structured_outputs structured_outputs.json
    structured_outputs.regex structured_outputs.choice structured_outputs.grammar structured_outputs.json_object
    structured_outputs.disable_any_whitespace structured_outputs.disable_additional_properties
    structured_outputs.whitespace_pattern structured_outputs.structural_tag priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs
    cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
    stream_interval stream_options.continuous_usage_stats
"""
VLLM_OF = {
    "/v1/completions": "prompt_embeds",
    "/v1/chat/completions": """
        include_reasoning add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs return_prompt_text messages.reasoning messages.reasoning_content
        messages.tool_call_id tools.defer_loading tools.function.defer_loading messages.content.audio_url
        messages.content.video_url messages.content.image_embeds messages.content.audio_embeds
        messages.content.video_embeds messages.content.prompt_embeds messages.content.image_pil
        messages.content.uuid messages.content.thinking messages.content.closed
    """,
}
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.name }}{{ m.content or '' }}{{ m.tool_calls }}{{ m.function_call }}"
    "{{ m.refusal }}{{ m.tool_call_id }}{{ m.reasoning_content }}{{ m.reasoning }}{% endfor %}"
)
BASE = {
    "/v1/completions": {"prompt": [5, 6, 7]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
}
TOOL = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "look", "arguments": "{}"}}
# What supported fields may be, with what they need beside them.
GOOD = {
    "model": "tiny",
    "n": 2,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 1,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": -100},
    "min_tokens": 1,
    "allowed_token_ids": [5, 6],
    "bad_words": ["x", "y z"],
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [5],
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "return_tokens_as_token_ids": True,
    "response_format": {"type": "text"},
    "prompt": "one",
    "best_of": 1,
    "top_logprobs": 2,
    "messages": [{"role": "user", "content": "a"}],
    "messages.role": "user",
    "messages.content": "a",
    "messages.content.type": "text",
    "messages.content.text": "a",
    "messages.tool_calls": [CALL],
    "messages.tool_calls.function": CALL["function"],
    "messages.tool_calls.index": 0,
    "messages.function_call": CALL["function"],
    "messages.annotations": [],
    "response_format.type": "text",
    "response_format.json_schema": {"schema": {"type": "integer"}},
    "response_format.json_schema.schema": {"type": "integer"},
    "structured_outputs": {"regex": "[a-c]+"},
    "structured_outputs.json": {"type": "integer"},
    "structured_outputs.regex": "[a-c]+",
    "structured_outputs.choice": ["a", "bc"],
    "structured_outputs.grammar": 'start: "a"+',
    "structured_outputs.whitespace_pattern": " ?",
    "tools": [TOOL],
    "tools.type": "function",
    "tools.function": {"name": "go"},
    "tools.function.name": "go",
    "tools.function.description": "goes",
    "tools.function.parameters": {"type": "object"},
    "tool_choice": "auto",
    "tool_choice.type": "none",
    "tool_choice.function": {"name": "look"},
    "tool_choice.function.name": "look",
}
FORMS = ("json", "json_object", "regex", "choice", "grammar")
BESIDE = {
    "top_logprobs": {"logprobs": True},
    "return_tokens_as_token_ids": {"logprobs": True},
    "stream_options": {"stream": True},
}


def within(annotation, before=""):
    """The paths of the fields in a type of OpenAI's client, also of those in lists and unions."""
    names = getattr(annotation, "__annotations__", {}) if hasattr(annotation, "__required_keys__") else {}
    found = {before.removesuffix(".")} - {""}
    for name in names:
        found |= within(typing.get_type_hints(annotation)[name], f"{before}{name}.")
    for one in typing.get_args(annotation):
        found |= within(one, before)
    return found


def openai_fields(path):
    module = chat_create_params if "chat" in path else completion_create_params
    return within(module.CompletionCreateParamsNonStreaming) | within(module.CompletionCreateParamsStreaming)


CASES = [(path, one) for path, kind in KINDS.items() for one in known_fields(kind)]
IDS = [f"{path.split('/')[2]} {one.path}" for path, one in CASES]


def set_at(path, field, value):
    """A request with a field, and where it is in there."""
    body, *names = json.loads(json.dumps(BASE[path])), *field.split(".")
    if field.startswith("response_format.json_schema"):
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": {}}}
    if names[0] == "tool_choice" or field.startswith("tools."):
        body["tools"] = json.loads(json.dumps([TOOL]))
    if field.startswith("tool_choice."):
        forced = {"type": "function", "function": {"name": "look"}}
        body["tool_choice"] = forced if names[1] == "function" else {"type": "auto"}
    if names[0] == "structured_outputs" and names[-1] not in FORMS:
        body["structured_outputs"] = {"json_object": True}
    place, steps = body, []
    for number, name in enumerate(names):
        steps.append(name)
        if number == len(names) - 1:
            place[name] = value
        elif name in ("messages", "content", "tool_calls", "tools", "functions"):
            if not isinstance(place.get(name), list):
                place[name] = [{}]
            place, steps = place[name][0], [*steps, "0"]
        else:
            place = place.setdefault(name, {})
    if "tool_calls" in names:
        body["messages"][0]["role"] = "assistant"
    if "stream_options" in names:
        body["stream"] = True
    beside = {"logprobs": 1} if body.get("return_tokens_as_token_ids") and "prompt" in body else BESIDE.get(field, {})
    return body | beside | ({} if "max_tokens" in body else {"max_tokens": 2}), ".".join(steps)


@pytest.fixture(scope="module")
def served():
    words = tokenizer()
    words.chat_template = TEMPLATE
    with Served(chat_model(), words, max_batch_size=4) as one:
        yield one


@pytest.mark.parametrize("path", KINDS)
def test_all_fields_of_both_apis_are_known(path):
    known = {one.path for one in known_fields(KINDS[path])}
    api = openai_fields(path)
    assert {"stream_options.include_usage", "temperature"} <= api and len(api) > 15
    assert api - known == set()
    assert {*VLLM.split(), *VLLM_OF[path].split()} - known == set()


@pytest.mark.parametrize(("path", "one"), CASES, ids=IDS)
def test_the_server_does_with_a_field_what_the_page_says(served, path, one):
    if one.path.startswith(("structured_outputs", "response_format.json_schema", "tool_choice.function")):
        pytest.importorskip("llguidance")
    if one.state == "supported":
        value = GOOD.get(one.path, 1 if one.path == "logprobs" and "chat" not in path else None)
        if value is None:
            value = "text" if one.path.startswith("messages") else True
        body, _ = set_at(path, one.path, value)
        assert served_status(served, path, body)[0] == 200, body
        if one.path.endswith(("arguments", "annotations")):
            return  # a template takes whatever it takes
        any_object = one.path.endswith(("json_schema.schema", "outputs.json", "function.parameters"))
        body, place = set_at(path, one.path, 5 if any_object else {"wrong": 1})
        status, error = served_status(served, path, body)
        assert status == 400 and (error["param"].startswith(place) or place.startswith(error["param"])), error
    elif one.state == "ignored":
        for value in (True, {"a": 1}, "b"):
            body, _ = set_at(path, one.path, value)
            assert served_status(served, path, body)[0] == 200
        other = {"temperature": 0, "max_tokens": 5}
        answers = [served.post(path, {**set_at(path, one.path, value)[0], **other})[1] for value in (None, "b")]
        assert [choice.pop("index") for answer in answers for choice in answer["choices"]] == [0, 0]
        assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["usage"] == answers[1]["usage"]
    else:
        body, place = set_at(path, one.path, {"a": 1})
        status, error = served_status(served, path, body)
        assert status == 400 and place.startswith(error["param"]) and "not supported" in error["message"]
        assert error["code"] == "unsupported_field"
        for value in [*map(json.loads, one.said), None]:
            if "." not in one.path or one.said:
                assert served_status(served, path, set_at(path, one.path, value)[0])[0] == 200, value
        assert served_status(served, path, set_at(path, f"{one.path}x", 1)[0])[0] == 400


def served_status(served, path, body):
    if body.get("stream"):
        with served.raw(body, path) as connection:
            head = connection.recv(65536)
            status = int(head.split()[1])
            return status, None if status == 200 else json.loads(head.partition(b"\r\n\r\n")[2])["error"]
    status, answer, _ = served.post(path, body)
    return status, answer.get("error")
