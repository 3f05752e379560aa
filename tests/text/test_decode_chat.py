"""Chats in `generate.py`: messages go through the tokenizer's chat template."""

import json

import pytest
import torch

from graphmod.cli import decode as decode_run
from graphmod.cli import generate as decode_cli
from tests.support.decode_models import tiny_model
from tests.support.made_tokenizers import CHAT_TEMPLATE, llama_like


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model with a tokenizer that has a chat template; in `plain`, the tokenizer without one."""
    folder = tmp_path_factory.mktemp("saved")
    tokenizer = llama_like(chat_template=CHAT_TEMPLATE)
    model = tiny_model("llama", torch.device("cpu"))
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    llama_like().save_pretrained(folder / "plain")
    return folder


@pytest.fixture
def tokenizer():
    return llama_like(chat_template=CHAT_TEMPLATE)


@pytest.fixture
def generate(saved, tmp_path, monkeypatch, capfd):
    """Runs `generate.py` with arguments in `tmp_path`; returns its status, standard output and standard error."""

    def run(*arguments):
        settings = [f"model.path={saved}", "model.device=cpu", "decode.max_new_tokens=6", "graph=none"]
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        return (decode_cli.main([*settings, *arguments]), *capfd.readouterr())

    return run


@pytest.fixture
def prompts_given(monkeypatch):
    """The token ids of the prompts that the engine decoded."""
    given = []
    original = decode_run.DecodeEngine.submit_all

    def submit(self, prompts, *asked, **settings):
        given.extend(self.requests.tokens(prompt, number) for number, prompt in enumerate(prompts))
        return original(self, prompts, *asked, **settings)

    monkeypatch.setattr(decode_run.DecodeEngine, "submit_all", submit)
    return given


def ids_of(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_prompt_is_the_message_of_a_user_and_the_answer_stands_alone(generate, tokenizer, prompts_given):
    asked = ids_of(tokenizer, [{"role": "user", "content": "hello you"}])
    status, answer, _ = generate("prompt=hello you", "chat=true")
    assert status == 0 and prompts_given == [asked] and asked.count(1) == asked.count(2) == 1
    assert "hello" not in answer
    status, plain, _ = generate("prompt=hello you")
    assert (
        status == 0 and plain.startswith("hello you") and prompts_given[1] == tokenizer("hello you")["input_ids"][:-1]
    )


def test_the_messages_of_a_file_go_through_the_template_without_being_told(
    generate, tokenizer, tmp_path, prompts_given
):
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    lines = [{"messages": messages, "id": 7}, {"prompt": "a b"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert generate("prompts_file=p.jsonl")[0] == 0
    assert prompts_given == [ids_of(tokenizer, messages), tokenizer("a b")["input_ids"][:-1]]
    written = [json.loads(line) for line in (tmp_path / "p.out.jsonl").read_text().splitlines()]
    chat, plain = sorted(written, key=lambda line: line["index"])
    assert (chat["messages"], chat["id"], plain["prompt"]) == (messages, 7, "a b") and "messages" not in plain
    assert chat["prompt"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    for line, prompt in ((chat, prompts_given[0]), (plain, prompts_given[1])):
        whole = tokenizer.decode(prompt + line["tokens"], skip_special_tokens=True)
        assert whole == tokenizer.decode(prompt, skip_special_tokens=True) + line["text"]


def test_a_template_that_reads_parts_gets_the_text_of_a_prompt(generate, saved, tmp_path, prompts_given):
    parts = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    made = llama_like(chat_template=parts)
    made.save_pretrained(tmp_path / "parts")
    assert generate("prompt=hello you", "chat=true", "tokenizer=parts")[0] == 0
    assert prompts_given == [made("[user]hello you", add_special_tokens=False)["input_ids"]]


def test_the_prompts_of_a_file_are_messages_when_asked(generate, tokenizer, tmp_path, prompts_given):
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    assert generate("prompts_file=p.txt", "chat=true")[0] == 0
    assert prompts_given == [ids_of(tokenizer, [{"role": "user", "content": text}]) for text in ("one", "two")]
    written = [json.loads(line) for line in (tmp_path / "p.out.jsonl").read_text().splitlines()]
    assert sorted(line["prompt"] for line in written) == ["one", "two"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tokenizer=plain"], "the tokenizer has no chat template; put one in its folder (chat_template.jinja)"),
        (["tokenizer=bytes"], "bytes have no chat template; give tokenizer=FOLDER"),
    ],
)
def test_a_tokenizer_without_a_template_is_told_before_the_model_is_loaded(
    generate, saved, tmp_path, monkeypatch, arguments, said
):
    monkeypatch.setattr(decode_run, "load_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "plain").symlink_to(saved / "plain")
    status, shown, wrong = generate("prompt=x", "chat=true", *arguments)
    assert status == 2 and shown == "" and f"error: chat=true: {said}" in wrong and "chat=false" in wrong
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n\n{"messages": [{"role": "user", "content": "y"}]}\n')
    status, _, wrong = generate("prompts_file=p.jsonl", *arguments)
    assert status == 2 and f"error: line 3 of p.jsonl: {said}" in wrong
    assert not (tmp_path / "p.out.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"messages": [{"role": "king", "content": "x"}]}, "refuses the messages: no such role: king"),
        ({"messages": []}, "got {'messages': []}"),
        ({"messages": "x"}, "got {'messages': 'x'}"),
        ({"messages": [{"content": "x"}]}, 'must be like {"prompt": "a text"} or {"messages": '),
        ({"messages": [{"role": "user"}]}, "messages.0.content is required"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content: only parts like"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages.0.tool_calls is nothing that"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "y"}, 'must be like {"prompt": "a text"} or'),
    ],
    ids=str,
)
def test_messages_that_cannot_be_used_are_named_by_their_line(generate, tmp_path, line, said):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + json.dumps(line))
    status, _, wrong = generate("prompts_file=p.jsonl")
    assert status == 2 and "error: line 2 of p.jsonl" in wrong and said in wrong


def test_samples_of_one_chat_are_shown_without_its_prompt(generate):
    status, shown, _ = generate("prompt=hello you", "chat=true", "decode.n=2", "decode=sample")
    assert status == 0 and shown.count("--- sample") == 2 and "hello" not in shown
