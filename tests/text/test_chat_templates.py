"""Chats through templates in the manners of known models: the prompt is what `apply_chat_template` writes, or an error
that names what it would leave out."""

import random

import pytest

from graphmod.text import ChatError, TokenizerCodec
from tests.support.made_tokenizers import llama_like

pytest.importorskip("starlette")

from graphmod.serve.api import ApiError, asked_of
from graphmod.serve.schema import ChatRequest

ASK = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
# The content as a text or as parts.
BOTH = "{% if m.content is string %}{{ m.content }}{% elif m.content %}" + PARTS + "{% endif %}"
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}</call>{% endfor %}"
)
# name -> the forms of contents that it reads, and the template
TEMPLATES = {
    "headers": (
        {str},
        "{% for m in messages %}{{ bos_token if loop.first }}<|start|>{{ m['role'] }}<|end|>\n\n"
        "{{ m['content'] | trim }}<|eot|>{% endfor %}" + ASK,
    ),
    "system in the turn of the user": (
        {str, list},
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% if messages[0].content is string %}"
        "{% set first = messages[0].content + '\n\n' %}{% else %}{% set first = messages[0].content[0].text + '\n\n' %}"
        "{% endif %}{% set rest = messages[1:] %}{% else %}{% set first, rest = '', messages %}{% endif %}"
        "{% for m in rest %}" + ALTERNATE + "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ first if loop.first }}"
        "{% if m.content is string %}{{ m.content | trim }}{% elif m.content is iterable %}"
        "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% else %}{{ raise_exception('nothing') }}{% endif %}"
        "</turn>\n{% endfor %}" + ASK,
    ),
    "no system": (
        {str},
        "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
        "{{ raise_exception('only user and assistant') }}{% endif %}" + ALTERNATE + "{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
    ),
    "strict alternation": (
        {list},
        "{{ bos_token }}{% for m in messages if m.role != 'system' %}" + ALTERNATE + "{{ m.role }}: " + PARTS + "\n"
        "{% endfor %}" + ASK,
    ),
    "tools in the system turn": (
        {str},
        "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<im>user\n<response>{{ m.content }}</response>{% else %}<im>{{ m.role }}\n"
        "{% if m.content %}{{ m.content }}{% endif %}" + CALLS + "{% endif %}</im>\n{% endfor %}" + ASK,
    ),
    "tools as a turn": (
        {str},
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call at a time') }}{% endif %}{% set c = m.tool_calls[0].function %}"
        '<|call|>{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
        "{% elif m.role in ['tool', 'ipython'] %}<|ipython|>{{ m.content | tojson }}{% else %}<|{{ m.role }}|>"
        "{{ m.name + ': ' if m.name }}{{ m.content | trim }}{% endif %}<|eot|>{% endfor %}" + ASK,
    ),
    "reasoning is dropped": (
        {str},
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ (m.content or '').split('</think>')[-1] }}"
        + CALLS
        + "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
        + ASK,
    ),
    "text only": ({str}, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"),
    "parts": (
        {list},
        "{% for m in messages %}<|{{ m.role }}|>" + PARTS + CALLS + "{{ m.tool_call_id }}\n{% endfor %}" + ASK,
    ),
    "dates": (
        {str, list},
        "Today is {{ strftime_now('%d %B') }}.\n{% for m in messages %}<|{{ m.role }}|>" + BOTH + CALLS + "\n"
        "{% endfor %}" + ASK,
    ),
}
TEXTS = [
    "Hello",
    " there ",
    "a",
    "user",
    "None",
    "wie geht's?\nzwei",
    "你好 🙂",
    "{'type': 'text'}",
    '"quoted" \\',
    "x" * 50,
]


def content(chance):
    """A text, or parts."""
    texts = [chance.choice(TEXTS) for _ in range(chance.randint(1, 3))]
    return "".join(texts) if chance.random() < 0.6 else [{"type": "text", "text": text} for text in texts]


def conversation(number):
    """Messages at random, mostly in an order that most templates take."""
    chance = random.Random(number)
    said = [{"role": "system", "content": content(chance)}] if chance.random() < 0.4 else []
    for turn in range(chance.randint(1, 5)):
        if chance.random() < 0.1:
            said.append({"role": chance.choice(["user", "assistant", "developer"]), "content": content(chance)})
        elif turn % 2 == 0:
            named = {"name": "Ada"} if chance.random() < 0.2 else {}
            said.append({"role": "user", "content": content(chance), **named})
        elif chance.random() < 0.4:
            call = {"name": "look", "arguments": chance.choice(['{"at": "Paris"}', "{}", "not JSON"])}
            calls = [{"id": f"c{turn}", "type": "function", "function": call}] * chance.choice([1, 1, 2])
            empty = chance.choice([{"content": None}, {"content": ""}, {}, {"content": "I look."}])
            said.append({"role": "assistant", **empty, "tool_calls": calls})
            said.append({"role": "tool", "tool_call_id": f"c{turn}", "content": content(chance)})
        else:
            more = chance.choice([{}, {}, {"reasoning_content": "thought"}, {"refusal": None, "tool_calls": None}])
            said.append({"role": "assistant", "content": content(chance), **more})
            if chance.random() < 0.15:
                said[-1]["content"] = None
            elif chance.random() < 0.1:
                said[-1]["content"] = "<think>long</think>short"
    return said


def read_as(messages, forms):
    """The messages with contents in a form that a template reads."""
    made = []
    for message in messages:
        given = message.get("content")
        if isinstance(given, list) and list not in forms:
            given = "".join(part["text"] for part in given)
        elif isinstance(given, str) and given and str not in forms:
            given = [{"type": "text", "text": given}]
        made.append({**message, "content": given} if "content" in message else message)
    return made


def written_by(tokenizer, messages):
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # whatever a template raises
        return None


def lost(tokenizer, messages, prompt):
    """The places of messages that a template leaves out, or writes as something else, in a prompt that it has made of
    them."""
    found = set()
    for number, message in enumerate(messages):
        given, others = message.get("content"), {**message}
        if number == len(messages) - 1 or message["role"] in ("user", "system", "developer"):
            others["content"] = "other" if isinstance(given, str) else [{"type": "text", "text": "other"}]
            if written_by(tokenizer, [*messages[:number], others, *messages[number + 1 :]]) == prompt:
                found.add(f"messages.{number}")
        if message.get("tool_calls") and "tool_calls" not in tokenizer.chat_template:
            found.add(f"messages.{number}.tool_calls")
        if "content" in message and given is None and "None" in prompt:
            found.add(f"messages.{number}.content")
    return found


@pytest.fixture(scope="module")
def codec():
    return TokenizerCodec(llama_like(["Hello there user None"]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_what_the_template_writes_or_an_error_that_names_what_it_leaves_out(codec, name):
    forms, codec.tokenizer.chat_template = TEMPLATES[name]
    written = refused = 0
    for number in range(200):
        messages = conversation(number)
        given = read_as(messages, forms)
        expected = written_by(codec.tokenizer, given)
        try:
            (got,) = asked_of(ChatRequest.model_validate({"messages": messages}), codec, 8).prompts
        except ApiError as error:
            refused += 1
            assert error.status == 400 and error.param.startswith("messages")
            assert expected is None or error.param in lost(codec.tokenizer, given, expected), (number, error.message)
            continue
        if expected is None:  # it fails at fields that are null
            given = [{key: one[key] for key in one if one[key] is not None or key == "content"} for one in given]
            expected = written_by(codec.tokenizer, given)
        written += 1
        if got != codec.encode_as_is(expected):  # it reads no second part
            given = read_as(messages, {str})
            expected = written_by(codec.tokenizer, given)
            assert messages[0]["role"] == "system" and got == codec.encode_as_is(expected), (number, expected)
        said = {one for one in lost(codec.tokenizer, given, expected) if not one.endswith(".content")}
        assert not said, (number, said, expected)
    assert written > 10 and written + refused == 200


def chat(template, *messages):
    tokenizer = llama_like()
    tokenizer.chat_template = template
    return TokenizerCodec(tokenizer).chat(list(messages))


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "Paris"}'}}
PLAIN = TEMPLATES["text only"][1]


@pytest.mark.parametrize(
    ("template", "messages", "field", "said"),
    [
        (PLAIN, [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "messages.1.tool_calls", "reads"),
        (PLAIN, [USER, {"role": "assistant", "content": None}, USER], "messages.1.content", 'send ""'),
        (
            PLAIN.replace("{{ m.content", "{{ m.tool_calls }}{{ '' + m.content"),
            [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            "messages.1.content",
            'null beside tool_calls, and the chat template of this model fails at that; send ""',
        ),
        (PLAIN, [USER | {"contents": "more"}], "messages.0.contents", "reads"),
        (
            PLAIN,
            [{"role": "assistant", "content": "a", "tool_call": [CALL]}],
            "messages.0.tool_call",
            "tool_calls meant",
        ),
        (PLAIN, [{"role": "user", "content": None}], "messages.0.content", "required"),
        (PLAIN, [{"role": "user", "content": []}], "messages.0.content", "a list of parts"),
        (PLAIN, [{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content", "only parts like"),
        (PLAIN.replace("messages", "messages[1:]"), [USER, USER], "messages.0", "leaves out"),
        (PLAIN.replace("messages", "messages[:1]"), [USER, {"role": "tool", "content": "sun"}], "messages.1", "'tool'"),
        (
            PLAIN.replace("{{ m.content", "{{ m.reasoning_content }}{{ m.content"),
            [{"role": "assistant", "content": "a", "reasoning": "thought"}],
            "messages.0.reasoning",
            "reasoning_content; send it by that name",
        ),
    ],
)
def test_what_a_template_leaves_out_is_named(template, messages, field, said):
    with pytest.raises(ChatError, match=said.replace("[", r"\[")) as error:
        chat(template, *messages)
    assert error.value.field == field


def test_arguments_become_objects_where_a_template_needs_them():
    template = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments | items %}{{ key }}={{ value }};{% endfor %}{% endfor %}{% endfor %}"
    )
    assert chat(template, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER) == "Hiat=Paris;Hi"


@pytest.mark.parametrize("depth", [200, 900, 100_000])
def test_arguments_that_are_nested_deeply_are_a_text_like_others(depth):
    deep = {"function": {"name": "look", "arguments": "[" * depth + "]" * depth}}
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    written = chat(template, USER, {"role": "assistant", "content": "", "tool_calls": [deep], "refusal": None}, USER)
    assert written == "Hi" + "[" * depth + "]" * depth + "Hi"
    with pytest.raises(ChatError, match="refuses the messages"):
        items = template.replace("arguments", "arguments | items | list")
        chat(items, USER, {"role": "assistant", "tool_calls": [deep]})


def test_null_fields_are_left_out_where_a_template_fails_at_them():
    count = "{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
    template = "{% for m in messages %}{{ m.content }}" + count + "{% endfor %}"
    answer = {"role": "assistant", "content": "yes", "tool_calls": None, "refusal": None}
    assert chat(template, USER, answer, USER) == "HiyesHi"


def test_parts_reach_a_template_that_reads_them_as_they_were_sent():
    part = "[{{ p.text }}|{{ (p.cache_control or {}).type }}]"
    template = "{% for m in messages %}{% for p in m.content %}" + part + "{% endfor %}{% endfor %}"
    part = {"type": "text", "text": "a", "cache_control": {"type": "short"}}
    assert chat(template, {"role": "user", "content": [part, part]}) == "[a|short][a|short]"
    assert chat(template, USER) == "[Hi|]"


def test_a_template_may_read_roles_in_different_forms():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        + PARTS
        + "{% else %}{{ m.content + '!' }}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "well"}]
    assert chat(template, USER, {"role": "assistant", "content": parts}, USER) == "Hiwell!Hi"
