"""Tokens come from where the settings say, and a batch depends on the seed and the step alone."""

import threading

import pytest
import torch

from graphmod.errors import ConfigError
from graphmod.train import data as data_module
from graphmod.train.batches import (
    WindowSampler,
    evaluation_starts,
    prefetched,
    split,
    window_starts,
    windows_at,
)
from graphmod.train.data import Corpus, load_corpus, read_pieces, standard_library_files, text_files
from graphmod.train.loss import PADDING
from graphmod.train.settings import DataConfig, ModelConfig, Source
from tests.support.made_tokenizers import word_tokenizer


def text_data(*paths, **settings) -> DataConfig:
    return DataConfig(source=Source.text, path=[str(path) for path in paths], **settings)


def test_the_default_corpus_is_python_sources_and_capped():
    corpus = load_corpus(DataConfig(max_bytes=5000), ModelConfig(), 0)
    assert corpus.vocab_size == 256 and corpus.tokens.dtype == torch.uint8
    assert 5000 <= len(corpus.tokens) < 5100
    first = standard_library_files()[0].read_bytes()[:50]
    assert bytes(corpus.tokens[: len(first)].tolist()) == first


@pytest.mark.parametrize("tokenized", [False, True])
def test_for_tokens_that_are_not_kept_no_file_is_asked_whether_it_changed(tokenized, tmp_path, monkeypatch, text):
    monkeypatch.setattr(data_module, "files_key", lambda files: pytest.fail("the files were asked"))
    more = {"cache": str(tmp_path / "cache")}  # which bytes are not kept in
    if tokenized:
        word_tokenizer(tmp_path / "words", ["a line of text"])
        more = {"cache": None, "tokenizer": str(tmp_path / "words")}
    assert len(load_corpus(text_data(text, **more), ModelConfig(), 0).tokens)


def test_standard_library_files_are_sorted_sources_without_tests():
    files = standard_library_files()
    assert files == sorted(files)
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in files)


def test_text_is_read_from_files_and_folders_in_order(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").write_text("no")
    (folder / "b.txt").write_text("B")
    (folder / "a.md").write_text("no")
    (folder / "sub" / "c.txt").write_text("C")
    single = tmp_path / "z.md"
    single.write_text("Z")
    assert [path.name for path in text_files([str(single), str(folder)], "*.txt")] == ["z.md", "b.txt", "c.txt"]
    corpus = load_corpus(text_data(single, folder, pattern="*.txt"), ModelConfig(), 0)
    assert bytes(corpus.tokens.tolist()) == b"Z\nB\nC"


def test_reading_stops_at_max_bytes_and_cuts_the_last_file(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name * 10)
    files = [tmp_path / name for name in "abc"]
    assert list(read_pieces(files, 15)) == [b"a" * 10, b"b" * 5]
    assert len(list(read_pieces(files, None))) == 3


def test_an_empty_file_is_named(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(ConfigError, match=r"empty.*empty\.txt"):
        load_corpus(text_data(path), ModelConfig(), 0)


def test_a_folder_without_a_matching_file_says_which_pattern(tmp_path):
    with pytest.raises(ConfigError, match=r"data.path=/\S+ holds .* data.pattern='\*.txt'"):
        load_corpus(text_data(tmp_path, pattern="*.txt"), ModelConfig(), 0)


def test_the_error_for_a_pattern_names_what_would_match(tmp_path):
    for name in ("a.md", "b.md", "LICENSE", ".hidden.txt"):
        (tmp_path / name).write_text("text")
    with pytest.raises(ConfigError, match=r"data.pattern='\*.rst'; give another pattern: it holds \*.md, LICENSE$"):
        load_corpus(text_data(tmp_path, pattern="*.rst"), ModelConfig(), 0)


def test_a_folder_without_a_tokenizer_is_named(tmp_path, text):
    with pytest.raises(
        ConfigError, match=r"as written by save_pretrained of a tokenizer. transformers reports: .*[^:]$"
    ):
        load_corpus(text_data(text, tokenizer=str(tmp_path)), ModelConfig(), 0)


def test_a_local_tokenizer_is_used_and_ends_each_file(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    (tmp_path / "b.txt").write_text("three two")
    tokenizer = word_tokenizer(tmp_path / "tokenizer", ["one two three"])
    data = text_data(
        tmp_path / "a.txt", tmp_path / "b.txt", tokenizer=str(tmp_path / "tokenizer"), cache=str(tmp_path / "cache")
    )
    corpus = load_corpus(data, ModelConfig(), 0)
    words = tokenizer.convert_ids_to_tokens(corpus.tokens.tolist())
    assert " ".join(words) == "one two three <end> three two <end>"
    assert corpus.vocab_size == len(tokenizer) and corpus.tokenizer is not None


def test_synthetic_tokens_depend_on_the_seed_and_fill_the_vocabulary():
    data = DataConfig(source=Source.synthetic, vocab_size=300)
    first, again, other = (load_corpus(data, ModelConfig(), seed).tokens for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.min() == 0 and first.max() == 299


def test_synthetic_tokens_take_the_vocabulary_of_the_model():
    assert load_corpus(DataConfig(source=Source.synthetic), ModelConfig(vocab_size=1000), 0).vocab_size == 1000


def test_a_corpus_shorter_than_a_sequence_says_by_how_much():
    corpus = Corpus(torch.zeros(100, dtype=torch.uint8), 256, None, "100 bytes")
    with pytest.raises(ConfigError, match=r"100 bytes.*leaves 95 to train on.*takes 129"):
        split(corpus, DataConfig(seq_len=128, eval_fraction=0.05))
    with pytest.raises(ConfigError, match=r"leaves 5 to evaluate on.*takes 17"):
        split(corpus, DataConfig(seq_len=16, eval_fraction=0.05))


def test_training_and_evaluation_tokens_do_not_overlap():
    corpus = Corpus(torch.arange(1000), 1000, None, "")
    training, evaluation = split(corpus, DataConfig(seq_len=8, eval_fraction=0.1))
    assert torch.equal(torch.cat([training, evaluation]), corpus.tokens) and len(evaluation) == 100


def test_a_batch_is_windows_of_the_corpus_in_the_promised_shape():
    batch = WindowSampler(torch.arange(5000, dtype=torch.int32), (3, 2, 16), seed=0)(7)
    assert batch.shape == (3, 2, 17) and batch.dtype == torch.int64
    assert torch.equal(batch, batch[..., :1] + torch.arange(17))


def test_a_batch_is_a_function_of_seed_and_step_alone():
    tokens = torch.arange(5000)
    forward, jumping = WindowSampler(tokens, (1, 4, 8), 3), WindowSampler(tokens, (1, 4, 8), 3)
    batches = [forward(step) for step in range(10)]
    assert torch.equal(jumping(9), batches[9]) and torch.equal(jumping(2), batches[2])
    assert not torch.equal(batches[0], batches[1])
    assert not torch.equal(WindowSampler(tokens, (1, 4, 8), 4)(0), batches[0])


def test_an_epoch_trains_on_each_window_once_and_every_epoch_in_another_order():
    sampler = WindowSampler(torch.arange(97), (1, 4, 8), 3)  # 12 windows
    assert sampler.steps(1) == 3 and sampler.steps(5) == 15
    epochs = [torch.cat([sampler(step)[0, :, 1:].flatten() for step in range(e * 3, e * 3 + 3)]) for e in range(2)]
    assert all(torch.equal(epoch.sort().values, torch.arange(1, 97)) for epoch in epochs)
    assert not torch.equal(*epochs)


def test_epochs_that_do_not_fill_the_last_step_go_on_in_it():
    sampler = WindowSampler(torch.arange(41), (1, 4, 8), 3)  # 5 windows
    assert sampler.steps(3) == 4
    seen = torch.cat([sampler(step)[0, :, 0] for step in range(5)]).view(4, 5)
    assert all(torch.equal(epoch.sort().values, torch.arange(0, 40, 8)) for epoch in seen)


def test_the_last_window_ends_with_the_tokens():
    assert window_starts(torch.arange(20), 8).tolist() == [0, 8, 11]


def test_windows_with_nothing_to_train_on_are_left_out():
    tokens = torch.arange(33)
    tokens[9:17] = ~tokens[9:17]  # the targets of the second window
    assert window_starts(tokens, 8).tolist() == [0, 16, 24]
    with pytest.raises(ConfigError, match="no token to train on"):
        window_starts(torch.full((33,), PADDING), 8)


def test_the_shortest_possible_corpus_still_gives_batches():
    assert torch.equal(WindowSampler(torch.arange(9), (1, 1, 8), 0)(0)[0, 0], torch.arange(9))


def test_evaluation_batches_span_the_evaluation_tokens():
    tokens = torch.arange(1000)
    starts = evaluation_starts(tokens, sequences=4, length=8, count=3)
    batches = windows_at(tokens, starts, (3, 4, 8))
    assert batches.shape == (3, 4, 9)
    assert batches[0].min() == 0 and batches[-1].max() == 999


def test_prefetching_keeps_the_order():
    with prefetched(lambda step: torch.tensor(step), range(3, 20)) as batches:
        assert [int(batch) for batch in batches] == list(range(3, 20))


def test_an_error_while_making_a_batch_is_raised_where_it_belongs():
    def make(step):
        if step == 2:
            raise ValueError("bad step")
        return torch.tensor(step)

    seen = []
    with pytest.raises(ValueError, match="bad step"), prefetched(make, range(5)) as batches:
        for batch in batches:
            seen.append(int(batch))
    assert seen == [0, 1]


def test_leaving_early_stops_the_thread():
    before = threading.active_count()
    with prefetched(lambda step: torch.tensor(step), range(10**9)) as batches:
        next(iter(batches))
    assert threading.active_count() == before


@pytest.mark.gpu
def test_batches_for_a_gpu_are_pinned():
    with prefetched(lambda step: torch.tensor(step), range(2), pin=True) as batches:
        assert all(batch.is_pinned() for batch in batches)


def test_files_that_are_no_text_are_named(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("text " * 20)
    (tmp_path / "b.png").write_bytes(bytes(range(256)))
    (tmp_path / "c.txt").write_bytes("äöü".encode("latin-1"))
    load_corpus(text_data(tmp_path), ModelConfig(), 0)
    assert caplog.text.count("not UTF-8 text") == 1 and "2 of 3 files" in caplog.text and "b.png" in caplog.text
    caplog.clear()
    (tmp_path / "umlauts").write_text("ä" * 100, encoding="utf-8")
    load_corpus(text_data(tmp_path, pattern="a.txt"), ModelConfig(), 0)
    load_corpus(text_data(tmp_path, pattern="umlauts", max_bytes=101), ModelConfig(), 0)  # cut within a character
    assert "UTF-8" not in caplog.text


def test_a_text_in_utf16_is_an_error_that_says_how_to_convert_it(tmp_path):
    (tmp_path / "a b.txt").write_text("text " * 20, encoding="utf-16")
    with pytest.raises(ConfigError, match=r"is not UTF-8 but UTF-16; convert it: iconv -f UTF-16 .*a b.txt' >"):
        load_corpus(text_data(tmp_path), ModelConfig(), 0)


def test_what_only_begins_like_utf16_is_no_text(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("text " * 20)
    (tmp_path / "b.mp3").write_bytes(b"\xff\xfe" + b"\xd8" * 64)  # halves of characters without the others
    load_corpus(text_data(tmp_path), ModelConfig(), 0)
    assert "b.mp3" in caplog.text


def test_the_mark_of_an_editor_is_no_part_of_a_text(tmp_path):
    (tmp_path / "plain").write_text("text " * 20)
    (tmp_path / "marked").write_text("text " * 20, encoding="utf-8-sig")
    plain, marked = (load_corpus(text_data(tmp_path, pattern=name), ModelConfig(), 0) for name in ("plain", "marked"))
    assert torch.equal(plain.tokens, marked.tokens)
