"""Pairs whose prompt and completion are lists of messages; and what is said of files and rows that cannot be used."""

import json
import logging

import pytest
import torch

from graphmod.errors import ConfigError
from graphmod.text import TokenizerCodec
from graphmod.train.data import document, load_corpus, row_encoder
from graphmod.train.loss import inputs_of
from graphmod.train.run import train
from graphmod.train.settings import DataConfig, ModelConfig, Source, TrainOn
from tests.support.made_tokenizers import CHAT_TEMPLATE, llama_like

pytest.importorskip("datasets")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% if m.tool_calls is defined %}CALLS{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


ROWS = [
    {"prompt": [message("user", "what is a graph")], "completion": [message("assistant", "a set of nodes")]},
    {
        "prompt": [message("system", "be brief"), message("user", "and an edge")],
        "completion": [message("assistant", "a pair of them")],
    },
    {
        "prompt": [message("user", "a"), message("assistant", "b"), message("user", "c")],
        "completion": [message("assistant", "", tool_calls=[{"name": "f"}]), message("assistant", "d")],
    },
]


@pytest.fixture
def chatml(tmp_path):
    """A tokenizer and its folder."""
    tokenizer = llama_like(chat_template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tokenizer, str(tmp_path / "tokenizer")


@pytest.fixture
def write(tmp_path):
    def make(name, *rows):
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    return make


def corpus_of(*paths, **settings):
    data = DataConfig(source=Source.hf, path=[str(path) for path in paths], cache=None, **settings)
    return load_corpus(data, ModelConfig(), 0)


def test_what_follows_the_prompt_as_it_is_sampled_from_is_trained_on(write, chatml):
    tokenizer, folder = chatml
    expected, starts = [], []
    for row in ROWS:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template([*row["prompt"], *row["completion"]], return_dict=False)
        assert whole[: len(prompt)] == prompt and len(whole) > len(prompt)
        starts.append(len(expected))
        expected += [~token for token in prompt] + whole[len(prompt) :]
    corpus = corpus_of(write("a.jsonl", *ROWS), tokenizer=folder)
    assert corpus.tokens.tolist() == expected and corpus.starts.tolist() == starts
    everything = corpus_of(write("a.jsonl", *ROWS), tokenizer=folder, train_on=TrainOn.all)
    assert torch.equal(everything.tokens, inputs_of(corpus.tokens))


def test_chats_and_texts_may_stand_in_one_list_of_files_and_in_one_batch(write, chatml):
    tokenizer, folder = chatml
    text = {"prompt": "a", "completion": "b"}
    chats = corpus_of(write("a.jsonl", *ROWS), tokenizer=folder).tokens.tolist()
    texts = corpus_of(write("b.jsonl", text), tokenizer=folder).tokens.tolist()
    both = corpus_of(write("b.jsonl", text), write("a.jsonl", *ROWS), tokenizer=folder)
    assert both.tokens.tolist() == [*texts, *chats] and both.starts.tolist()[1] == len(texts) and len(both.starts) == 4
    made = [document(DataConfig(source=Source.hf), row, lambda: "a row") for row in (text, *ROWS)]
    encoded = row_encoder(TokenizerCodec(tokenizer), everything=False)(made)
    assert [token for part in encoded for token in part.tolist()] == [*texts, *chats]


def test_a_token_over_the_border_is_cut_there(write, tmp_path):
    llama_like(["[assistant] yes"] * 50, chat_template=CHAT_TEMPLATE).save_pretrained(tmp_path / "tokenizer")
    row = {"prompt": [message("user", "a")], "completion": [message("assistant", "yes")]}
    corpus = corpus_of(write("a.jsonl", row), tokenizer=str(tmp_path / "tokenizer"))
    trained = [token for token in corpus.tokens.tolist() if token >= 0]
    assert corpus.tokenizer.decode(trained) in (" yes</s>", "yes</s>")


def test_a_template_that_writes_the_prompt_otherwise_is_refused_with_the_row(write, tmp_path):
    odd = CHATML.replace("{{ m['role'] }}", "{{ m['role'] }}{{ '' if loop.last else '!' }}")
    llama_like(chat_template=odd).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"row 1 of data.path=.*a.jsonl: the chat template writes the prompt otherwi"):
        corpus_of(write("a.jsonl", *ROWS), tokenizer=str(tmp_path / "tokenizer"))


TEXT, PAIR = {"text": "a"}, {"prompt": "Q", "completion": "A"}
CHAT = [message("user", "a")]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], r"a.jsonl is empty: 1 file without a row"),
        ([TEXT, '{"text": "b"'], r"a.jsonl cannot be read by the datasets library: JSON parse error: .* in row 1"),
        (['["a"]', "3"], r"""a.jsonl cannot be read .*A line of JSON is an object such as \{"text": "..."\}"""),
        ([{"prompt": "a"}], r"a.jsonl has no column 'messages', 'prompt' and 'completion', or 'text'; it has prompt"),
        ([{"prompt": CHAT, "completion": "b"}], r"row 1 of .*both lists of messages; 'prompt' is list and 'comp.*is s"),
        (
            [PAIR, {"prompt": "a", "completion": ["b"]}],
            r"row 2 of .*both lists of messages|line 2 .* holds list, and str",
        ),
        ([{"prompt": [{"role": "user", "text": "a"}], "completion": CHAT}], r"row 1 .*'prompt': message 1 has no 'con"),
        (
            [{"prompt": CHAT, "completion": ["b"]}],
            r"row 1 .*'completion': message 1 must have the keys 'role'.* got str",
        ),
        ([{"text": CHAT}], r"row 1 of .*'text' must be text, got list; chats are read from a column 'messages'"),
        ([{"messages": [{"content": "a"}]}], r"row 1 .*'messages': message 1 has no 'role'"),
        ([{"messages": [message("tutor", "a")]}], r"template cannot be applied to row 1 of .*no such role: tutor"),
        ([{"prompt": "a", "completion": None}] * 2, r"data is empty: 'completion' has no value in row 1 of .*a.jsonl"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_file_its_row_and_its_key(write, tmp_path, rows, said):
    template = CHAT_TEMPLATE.replace(
        "{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"
    )
    llama_like(chat_template=template).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=said):
        corpus_of(write("a.jsonl", *rows), tokenizer=str(tmp_path / "tokenizer"))


def test_of_several_files_the_one_with_the_row_is_named(write):
    first = write("a.jsonl", PAIR, PAIR)
    with pytest.raises(ConfigError, match=r"row 2 of data.path=.*b.jsonl: both columns must be text"):
        corpus_of(first, write("b.jsonl", PAIR, {"prompt": "a", "completion": [message("user", "a")]}))
    with pytest.raises(ConfigError, match=r"c.jsonl has no column .*; it has other"):
        corpus_of(first, write("c.jsonl", {"other": "a"}))
    with pytest.raises(ConfigError, match=r"d.jsonl is empty: 1 file without a row"):
        corpus_of(first, write("d.jsonl"))


def test_in_a_folder_a_file_with_other_columns_is_named(write, tmp_path):
    write("a.jsonl", TEXT)
    write("b.jsonl", {"other": "a"})
    with pytest.raises(
        ConfigError, match=r"Couldn't cast other: string .* and all files of a folder have the same columns"
    ):
        corpus_of(tmp_path)


def test_rows_without_a_completion_are_skipped_and_counted(write, caplog):
    with caplog.at_level(logging.WARNING, "graphmod"):
        corpus = corpus_of(write("a.jsonl", PAIR, {"prompt": "a", "completion": None}, {"prompt": "b"}))
    assert len(corpus.tokens) == 3
    assert "such as 'completion' in row 2" in caplog.text and "skipped 2 of 3 rows of data.path=" in caplog.text


def test_a_run_trains_on_them(write, chatml, tiny, tmp_path):
    path = write("a.jsonl", *ROWS * 10)
    settings = [
        "data=hf",
        f"data.path={path}",
        f"data.tokenizer={chatml[1]}",
        "data.buckets=[96]",
        "train.steps=3",
        "data.eval_fraction=0.2",
        "train.eval_every=0",
    ]
    plain = train(tiny(*settings, "graph=none"), tmp_path / "none")
    assert train(tiny(*settings, "graph=full_iteration"), tmp_path / "graph").losses == plain.losses
