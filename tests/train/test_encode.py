"""Tokenizing in batches and pieces gives the tokens of each whole text, once for all runs on the same data."""

import itertools
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from graphmod.text import TokenizerCodec
from graphmod.train import data as encode
from graphmod.train.data import cached, encode_pairs, encode_pieces, files_key, flattened, pieces, tokenizer_key
from tests.support.made_tokenizers import llama_like

SPLITS = {
    "bytes": (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "spaces first": (pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "unsplit": (pre_tokenizers.Metaspace(split=False), decoders.Metaspace()),
}


@pytest.fixture(scope="module")
def prose():
    """Some 100,000 characters of words, punctuation, umlauts, runs of spaces and line breaks."""
    drawn = random.Random(0)
    parts = ["alpha", "beta,", "Gänse", "x=1;", "the", "end.", "\n", "\n\n", "  indented", "12345", "日本"]
    return " ".join(drawn.choice(parts) for _ in range(16000))


@pytest.fixture(params=SPLITS)
def tokenizer(request, prose):
    split, decoder = SPLITS[request.param]
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.decoder = decoder
    # Tokens of whole text do not span words either in tokenizers that are used so.
    made.pre_tokenizer = pre_tokenizers.Metaspace() if request.param == "unsplit" else split
    alphabet = pre_tokenizers.ByteLevel.alphabet() if request.param == "bytes" else []
    texts = [prose[:3000]]
    special = ["<unk>", "</s>"]
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    made.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def whole(tokenizer, text):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def test_a_long_text_has_the_tokens_of_the_whole(tokenizer, prose, monkeypatch):
    monkeypatch.setattr(encode, "_LONG", 2000)
    monkeypatch.setattr(encode, "_BATCH", 9000)
    found = list(pieces(TokenizerCodec(tokenizer), [prose]))
    assert len(found) > 20 and max(len(piece.text) for piece in found) < 5000
    tokens, starts = flattened(found, partial(encode_pieces, TokenizerCodec(tokenizer)))
    assert tokens.tolist() == whole(tokenizer, prose) and starts.tolist() == [0]


def test_a_log_file_gets_lines_and_no_bar(tokenizer, prose, monkeypatch, caplog, capsys):
    monkeypatch.setattr(encode, "_BATCH", 900)
    monkeypatch.setattr(encode, "_SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(encode, "_SECONDS_WITHOUT_BAR", 0.0)
    codec = TokenizerCodec(tokenizer)
    with caplog.at_level("INFO", "graphmod"):
        flattened(pieces(codec, [prose[:800], prose[:600], prose[:9]]), partial(encode_pieces, codec))
    assert caplog.messages == [f"tokenizing: {read} characters so far" for read in ("1,400", "1,409")]
    assert capsys.readouterr().err.count("\r") == 0


def test_several_texts_follow_each_other(tokenizer, prose, monkeypatch):
    monkeypatch.setattr(encode, "_LONG", 2000)
    texts = [prose[:300], prose[300:7000], "", prose[7000:7001]]
    tokens, starts = flattened(
        pieces(TokenizerCodec(tokenizer), texts), partial(encode_pieces, TokenizerCodec(tokenizer))
    )
    expected = [whole(tokenizer, text) for text in texts]
    assert tokens.tolist() == list(itertools.chain(*expected))
    assert starts.tolist() == np.cumsum([0, *map(len, expected)])[:-1].tolist()


def test_a_pair_has_the_tokens_of_its_prompt_alone(tokenizer):
    for prompt, completion in [("the end.", " beta, alpha"), ("alpha x=1;\n", "the"), ("beta, ", "the"), ("", "end.")]:
        (tokens,) = encode_pairs(TokenizerCodec(tokenizer), [(prompt, completion)])
        read, trained = (~tokens[tokens < 0]).tolist(), tokens[tokens >= 0].tolist()
        assert read == tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert trained[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(trained[:-1]).strip() == completion.strip()


def test_special_tokens_are_those_of_documents(monkeypatch, prose):
    monkeypatch.setattr(encode, "_LONG", 2000)
    tokenizer = llama_like([prose[:3000]], vocabulary=400)  # with BOS before and EOS after a text
    codec = TokenizerCodec(tokenizer)
    texts = ["the end.", prose[:9000]]
    tokens, starts = flattened(pieces(codec, texts), partial(encode_pieces, codec))
    expected = [codec.document(text) for text in texts]
    assert tokens.tolist() == expected[0] + expected[1] and starts.tolist() == [0, len(expected[0])]
    (pair,) = encode_pairs(codec, [("the end.", " alpha")])
    assert (~pair[pair < 0]).tolist() == codec.encode("the end.") and pair[-1] == tokenizer.eos_token_id


def test_no_text_at_all_has_no_tokens():
    tokens, starts = flattened([], list)
    assert len(tokens) == 0 and starts.tolist() == [0]


def test_processes_that_write_one_cache_at_once_do_no_harm(tmp_path):
    expected, together, found = torch.arange(1000, dtype=torch.int32), threading.Barrier(4), []

    def make():
        together.wait()
        return expected.clone(), torch.zeros(1, dtype=torch.int64)

    def run():
        found.append(cached(str(tmp_path), {"files": 1}, make)[0])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.equal(tokens, expected) for tokens in found)
    assert len(list(tmp_path.iterdir())) == 1
    kept, _ = cached(str(tmp_path), {"files": 1}, lambda: pytest.fail("made again"))
    assert torch.equal(kept, expected)


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    tokens = torch.zeros(3, dtype=torch.int32)
    made = cached(str(tmp_path / "file" / "cache"), {}, lambda: (tokens, torch.zeros(1, dtype=torch.int64)))
    assert made[0] is tokens and "data.cache=FOLDER" in caplog.text


def test_the_key_changes_with_a_file_and_with_the_tokenizer(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a")
    before = files_key([path]), tokenizer_key(tokenizer)
    path.write_text("ab")
    tokenizer.add_tokens(["new"])
    assert files_key([path]) != before[0] and tokenizer_key(tokenizer) != before[1]
