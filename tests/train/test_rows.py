"""Rows of files as people have them: texts, pairs and chats, what of them is trained on, and epochs over them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from graphmod.errors import ConfigError
from graphmod.train import data as rows
from graphmod.train.data import load_corpus
from graphmod.train.loss import inputs_of
from graphmod.train.run import train
from graphmod.train.settings import DataConfig, Documents, ModelConfig, Source, TrainOn
from tests.support.made_tokenizers import word_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }} <end>{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)
CHATS = [
    {"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "two one"}]},
    {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "one"}]},
]


@pytest.fixture
def write(tmp_path):
    """`write("a.jsonl", [row, ...])`: the path of a file of JSON lines."""

    def make(name, found):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in found))
        return tmp_path / name

    return make


@pytest.fixture
def library():
    return pytest.importorskip("datasets")


@pytest.fixture
def tokenizer(tmp_path):
    """The folder of a tokenizer of words, with a chat template."""
    made = word_tokenizer(tmp_path / "tokenizer", ["one two three user assistant"])
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def corpus_of(*paths, **settings):
    settings = {"cache": None, **settings}
    data = DataConfig(source=Source.hf, path=[str(path) for path in paths], **settings)
    return load_corpus(data, ModelConfig(), 0)


def words(corpus):
    """The words of a corpus, those only read in brackets."""
    found = corpus.tokenizer.convert_ids_to_tokens(inputs_of(corpus.tokens).tolist())
    return " ".join(f"({w})" if t < 0 else w for w, t in zip(found, corpus.tokens.tolist(), strict=True))


def test_texts_of_json_lines_end_with_the_tokenizers_end_and_begin_where_said(library, write, tokenizer):
    path = write("a.jsonl", [{"text": "one two"}, {"text": ""}, {"text": None}, {"text": "three"}])
    corpus = corpus_of(path, tokenizer=tokenizer)
    assert words(corpus) == "one two <end> three <end>"
    assert corpus.starts.tolist() == [0, 3] and corpus.tokens.dtype is torch.int32


def test_of_a_pair_the_completion_alone_is_trained_on(library, write, tokenizer):
    path = write("a.jsonl", [{"prompt": "one two", "completion": " three"}, {"prompt": "two ", "completion": "one"}])
    assert words(corpus_of(path, tokenizer=tokenizer)) == "(one) (two) three <end> (two) one <end>"
    assert words(corpus_of(path, tokenizer=tokenizer, train_on=TrainOn.all)) == "one two three <end> two one <end>"


def test_of_a_pair_of_bytes_too(library, write):
    corpus = corpus_of(write("a.jsonl", [{"prompt": "Q", "completion": "A"}]))
    assert corpus.tokens.tolist() == [~ord("Q"), ord("A"), ord("\n")]


def test_of_a_chat_what_the_assistant_says_is_trained_on(library, write, tokenizer):
    corpus = corpus_of(write("a.jsonl", CHATS), tokenizer=tokenizer)
    said = "(user) (one) (two) (assistant) two one <end> (user) (two) (assistant) one <end>"
    assert words(corpus) == said and corpus.starts.tolist() == [0, 7]
    everything = corpus_of(write("a.jsonl", CHATS), tokenizer=tokenizer, train_on=TrainOn.all)
    assert words(everything) == said.replace("(", "").replace(")", "")


def test_a_template_that_does_not_mark_the_assistant_says_how_to(library, write, tokenizer):
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(tokenizer)
    plain.chat_template = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    plain.save_pretrained(tokenizer)
    with pytest.raises(ConfigError, match=r"put {% generation %}.*data.train_on=all"):
        corpus_of(write("a.jsonl", CHATS), tokenizer=tokenizer)
    assert "(" not in words(corpus_of(write("a.jsonl", CHATS), tokenizer=tokenizer, train_on=TrainOn.all))


def test_chats_need_a_template(library, write):
    with pytest.raises(
        ConfigError, match="bytes, or this tokenizer, have no chat template; give the tokenizer of a chat model"
    ):
        corpus_of(write("a.jsonl", CHATS))


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl", "json.gz", "saved", "folder"])
def test_each_format_gives_the_same_rows(library, tmp_path, suffix):
    found = library.Dataset.from_dict({"note": ["first row", "second, row"]})
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        found.to_csv(path)
    elif suffix == "parquet":
        found.to_parquet(path)
    elif suffix == "saved":
        found.save_to_disk(path)
    elif suffix == "folder":
        path.mkdir()
        found.to_json(path / "part.jsonl")
    else:
        found.to_json(path, compression="gzip" if suffix.endswith("gz") else None)
    corpus = corpus_of(path, column="note")
    assert bytes(corpus.tokens.tolist()) == b"first row\nsecond, row\n" and corpus.starts.tolist() == [0, 10]


def test_a_text_file_is_one_document_or_one_for_each_line(library, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\nthree\n")
    assert len(corpus_of(path, documents=Documents.line).starts) == 3
    assert len(corpus_of(path, documents=Documents.file).starts) == 1


def test_a_split_of_a_folder_is_chosen(library, write, tmp_path):
    write("train.jsonl", [{"text": "a"}])
    write("test.jsonl", [{"text": "b"}])
    assert bytes(corpus_of(tmp_path).tokens.tolist()) == b"a\n"
    assert bytes(corpus_of(tmp_path, split="test").tokens.tolist()) == b"b\n"
    with pytest.raises(ConfigError, match=r"no split 'dev'; choose one with data.split: train, test"):
        corpus_of(tmp_path, split="dev")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([{"body": "a", "id": 1}], r"has no column 'messages'.*it has body, id. Name the one .* data.column=NAME"),
        ([{"text": 3}], r"row 1 of .*: column 'text' must be text, got int"),
        ([{"text": ""}], "the data is empty"),
    ],
)
def test_rows_that_cannot_be_used_are_named(library, write, found, said):
    with pytest.raises(ConfigError, match=said):
        corpus_of(write("a.jsonl", found))


def test_files_that_cannot_be_read_are_named(library, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{broken\n')
    with pytest.raises(ConfigError, match=r"a.jsonl cannot be read by the datasets library"):
        corpus_of(tmp_path / "a.jsonl")
    (tmp_path / "a.xyz").write_text("a")
    with pytest.raises(ConfigError, match=r"a.xyz: data=hf reads \*.json, "):
        corpus_of(tmp_path / "a.xyz")


@pytest.mark.parametrize(("encoding", "said"), [("utf-16", "but UTF-16; convert it"), ("latin-1", "such as Latin-1")])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_rows_in_another_encoding_say_how_to_convert_them(library, tmp_path, name, encoding, said):
    (tmp_path / name).write_text('{"text": "grün"}\n' if name == "a.jsonl" else "text\ngrün\n", encoding=encoding)
    with pytest.raises(ConfigError, match=f"{name} is not UTF-8 but .*{said}|{said}"):
        corpus_of(tmp_path / name)


def test_without_the_library_the_error_says_what_to_install(write, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[data\]'"):
        corpus_of(write("a.jsonl", [{"text": "a"}]))


def test_tokens_are_made_once_and_again_when_a_file_or_setting_changes(library, write, tmp_path, monkeypatch):
    made, original = [], rows.flattened
    monkeypatch.setattr(rows, "flattened", lambda *given: made.append(1) or original(*given))
    pair = [{"prompt": "Q", "completion": "A"}]
    cache = str(tmp_path / "cache")
    first = corpus_of(write("a.jsonl", pair), cache=cache)
    again = corpus_of(tmp_path / "a.jsonl", cache=cache)
    assert len(made) == 1 and torch.equal(first.tokens, again.tokens) and torch.equal(first.starts, again.starts)
    corpus_of(tmp_path / "a.jsonl", cache=cache, train_on=TrainOn.all)
    assert len(made) == 2
    corpus_of(write("a.jsonl", pair * 2), cache=cache)
    assert len(made) == 3
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(b"damaged")
    assert len(corpus_of(tmp_path / "a.jsonl", cache=cache).tokens) == 6 and len(made) == 4


@pytest.fixture
def pairs(library, tiny, write):
    """`pairs("graph=none")`: a run on pairs, one of which has a prompt longer than a window."""
    found = [{"prompt": f"{i} plus {i} is ", "completion": f"{2 * i}"} for i in range(40)]
    found.append({"prompt": "x" * 100, "completion": "y"})
    path = write("pairs.jsonl", found)
    return lambda *overrides: tiny(
        "data=hf", f"data.path={path}", "train.eval_every=8", "train.steps=12", "data.eval_fraction=0.3", *overrides
    )


@pytest.mark.parametrize("scope", ["per_layer", "full_iteration"])
@pytest.mark.parametrize("form", ["data.buckets=[16,40]", "data.packing=true", "data.packing=false"])
def test_masked_losses_are_eagers(pairs, tmp_path, scope, form):
    plain = train(pairs(form, "graph=none"), tmp_path / "none")
    graphed = train(pairs(form, f"graph={scope}"), tmp_path / scope)
    assert graphed.losses == plain.losses and graphed.eval_losses == plain.eval_losses
    assert graphed.graph["failures"] == 0


def test_a_run_of_epochs_is_as_long_as_the_data_and_resumes_bitwise(pairs, tmp_path, stop_after, monkeypatch):
    settings = ["train.epochs=2", "train.eval_every=0", "data.eval_fraction=0", "data.buckets=[40]", "graph=none"]
    whole = train(pairs(*settings), tmp_path / "whole")
    # 41 rows, and the long one in three pieces, of which one has something to train on.
    assert len(whole.losses) == 2 * 21 and whole.config["train"]["steps"] == 42
    with monkeypatch.context():
        stop_after(23)
        stopped = train(pairs(*settings), tmp_path / "parts")
    monkeypatch.undo()
    assert stopped.status == "interrupted"
    resumed = train(pairs(*settings, f"train.resume={tmp_path / 'parts'}"), tmp_path / "other")
    assert resumed.losses == whole.losses and resumed.resumed_at_step == 23
    AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / resumed.checkpoint)


def test_a_folder_of_several_kinds_of_files_is_refused_with_the_pattern_that_chooses(write, library, tmp_path, caplog):
    """The library takes the most frequent kind and leaves out the rest; asked how to cut texts, it failed on others."""
    write("rows.jsonl", [{"text": "one"}])
    (tmp_path / "README.md").write_text("about the rows")
    assert bytes(corpus_of(tmp_path).tokens.tolist()) == b"one\n"
    (tmp_path / "notes.txt").write_text("two")
    with pytest.raises(
        ConfigError, match=r"several kinds \(\*\.jsonl, \*\.txt\); choose one: data\.pattern='\*\.jsonl'"
    ):
        corpus_of(tmp_path)
    assert bytes(corpus_of(tmp_path, pattern="*.jsonl").tokens.tolist()) == b"one\n"
    assert not caplog.records  # the library looks at README.md, too
    assert bytes(corpus_of(tmp_path, pattern="*.txt").tokens.tolist()) == b"two\n"


def test_rows_that_are_read_as_text_are_named(write, caplog):
    path = write("rows.jsonl", [{"text": "one"}])
    load_corpus(DataConfig(source=Source.text, path=[str(path)], cache=None), ModelConfig(), 0)
    assert "rows.jsonl is read as plain text" in caplog.text and "data=hf" in caplog.text


def test_a_run_begins_with_the_documents_and_what_of_them_is_trained_on(write, library, tokenizer):
    chats = corpus_of(write("chats.jsonl", CHATS), tokenizer=tokenizer)
    trained = int((chats.tokens >= 0).sum())
    assert 0 < trained < len(chats.tokens)
    said = f"{len(chats.tokens)} tokens of {chats.description.rpartition(' of ')[2]} in 2 documents, {trained} of the"
    assert chats.summary().startswith(said)
    texts = corpus_of(write("texts.jsonl", [{"text": "one"}]))
    assert texts.summary() == f"{len(texts.tokens)} tokens (bytes) of {texts.description[20:]} in 1 document"
