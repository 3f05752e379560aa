"""A model trained with a tokenizer begins and ends documents as the tokenizer says, and writes text as it decodes."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, GenerationConfig

from graphmod.cli import generate as generate_cli
from graphmod.decode import DecodeEngine
from graphmod.text import TextStream, codec_for
from graphmod.train.data import load_corpus
from graphmod.train.model import set_special_tokens
from graphmod.train.run import train
from tests.support.made_tokenizers import byte_level, llama_like

NAMES = ("ann", "bob", "cleo", "dan", "eve", "fay", "gus", "hal", "ida", "jo", "kim", "lou", "max", "nat")
ENDINGS = ("waved", "left\n    and sang", "stayed\n\n    for  long:\n        [a]")
DOCUMENTS = [f"{one} met {two}\n    and {ENDINGS[len(two) % 3]}" for one in NAMES for two in NAMES if one != two]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of documents, and their tokenizer in `tokenizer`."""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "texts").mkdir()
    for number, document in enumerate(DOCUMENTS):
        (folder / "texts" / f"{number:03}.txt").write_text(document)
    llama_like(DOCUMENTS, vocabulary=340).save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def on_documents(tiny, folder):
    """`on_documents("train.steps=5")`: a run on these."""
    paths = ["data=text", f"data.path={folder}/texts", f"data.tokenizer={folder}/tokenizer"]
    return lambda *overrides: tiny(*paths, "data.seq_len=48", "data.batch_size=8", *overrides)


@pytest.fixture(scope="module")
def trained():
    return {}


@pytest.fixture
def checkpoint(on_documents, folder, trained):
    """A checkpoint that has learnt the documents."""
    if not trained:
        asked = ["train.sample_every=150", "train.sample_prompt=ann met bob", "train.ema_decay=0.9"]
        settings = ["graph=none", "train.steps=150", "model.hidden_size=64", "model.intermediate_size=128"]
        result = train(on_documents(*settings, *asked, "optim.learning_rate=0.01"), folder / "run")
        trained["checkpoint"] = folder / "run" / result.checkpoint
    return trained["checkpoint"]


def test_two_hundred_documents_or_so():
    assert 150 < len(DOCUMENTS) == len(set(DOCUMENTS)) < 250


def test_a_document_has_the_special_tokens_of_a_prompt_and_an_end(on_documents):
    corpus = load_corpus((config := on_documents()).data, config.model, 0)
    begins = corpus.starts.tolist()
    for start, end, text in zip(begins, [*begins[1:], len(corpus.tokens)], DOCUMENTS, strict=True):
        ids = corpus.tokens[start:end].tolist()
        assert ids == corpus.tokenizer(text)["input_ids"] and (ids[0], ids[-1]) == (1, 2)
        assert 1 not in ids[1:] and 2 not in ids[:-1]


def test_a_checkpoint_says_what_ends_a_document(checkpoint):
    for folder in (checkpoint, checkpoint / "ema"):
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2
        assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
        assert codec_for(folder, None).around.end == 2  # averaged weights have no tokenizer of their own


def test_a_trained_model_stops_where_documents_end_and_streams_their_text(checkpoint):
    model, codec = AutoModelForCausalLM.from_pretrained(checkpoint), codec_for(checkpoint, None)
    engine = DecodeEngine(model, max_batch_size=8, codec=codec, graphs=False)
    prompts = [f"{one} met" for one in NAMES] + [document.partition("\n")[0] for document in DOCUMENTS[::9]]
    for done in engine.generate(prompts, max_new_tokens=80):
        whole = codec.tokenizer.decode(done.prompt + done.tokens, skip_special_tokens=True)
        assert prompts[done.request] + done.text == whole
        stream = TextStream(codec, done.prompt)
        assert "".join([*map(stream.add, done.tokens), stream.rest()]) == done.text
        first, _, rest = whole.partition("\n    and ")
        assert (done.finish_reason, done.tokens[-1]) == ("stop", 2) and rest in ENDINGS
        assert first == prompts[done.request] or first.removeprefix(prompts[done.request] + " ") in NAMES


def test_transformers_stops_at_the_same_place(checkpoint):
    model, codec = AutoModelForCausalLM.from_pretrained(checkpoint), codec_for(checkpoint, None)
    prompt = codec.encode("ann met bob")
    (done,) = DecodeEngine(model, max_batch_size=1, graphs=False).generate([prompt], max_new_tokens=80)
    given = torch.tensor([prompt])
    mask = torch.ones_like(given)
    out = model.generate(given, attention_mask=mask, do_sample=False, max_new_tokens=80, pad_token_id=0)
    assert out[0].tolist() == prompt + done.tokens and done.finish_reason == "stop"


def test_samples_while_training_are_whole_documents(checkpoint):
    events = EventAccumulator(str(checkpoint.parent.parent)).Reload()
    (event,) = events.Tensors("samples/text_summary")
    lines = event.tensor_proto.string_val[0].decode().split("\n")
    assert "\n".join(line.removeprefix("    ") for line in lines) in {f"ann met bob\n    and {end}" for end in ENDINGS}


def test_generate_shows_a_whole_document_and_ends(checkpoint, capfd):
    settings = [f"model.path={checkpoint}", "model.device=cpu", "graph=none", "prompt=kim met lou"]
    capfd.readouterr()
    assert generate_cli.main(settings) == 0
    assert capfd.readouterr().out in {f"kim met lou\n    and {end}\n" for end in ENDINGS}


def test_ends_of_a_saved_model_stay_where_they_are_special(checkpoint):
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.generation_config.eos_token_id, model.config.eos_token_id = [turn, 5], 5
    set_special_tokens(model, tokenizer)
    assert model.generation_config.eos_token_id == [0, turn] and model.config.eos_token_id == 0
    tokenizer.eos_token = None
    model.generation_config.eos_token_id, model.config.eos_token_id = [turn, 5], 5
    set_special_tokens(model, tokenizer)
    assert model.generation_config.eos_token_id == turn and model.config.eos_token_id is None
