"""Samples while training, and `generate.py` from a shell on what training left."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from graphmod.cli.decode import load_model
from graphmod.cli.settings import DeviceName, ModelSource, model_folder
from graphmod.decode import DecodeEngine
from graphmod.errors import ConfigError
from graphmod.text import ByteCodec, TextStream, codec_for
from graphmod.train.run import train
from tests.support.decode_models import reference, tiny_model
from tests.support.processes import finished
from tests.support.settings import ROOT, TINY


@pytest.mark.parametrize("scope", ["none", "per_layer", "full_iteration"])
def test_sampling_while_training_changes_no_loss_and_is_logged(scope, tiny, tmp_path, capfd):
    settings = ["data.max_bytes=20000", f"graph={scope}", "graph.warmup_steps=1", "train.checkpoint=false"]
    plain = train(tiny(*settings), tmp_path / "plain")
    asked = ["train.sample_every=3", "train.sample_tokens=10", "train.sample_prompt=import "]
    sampled = train(tiny(*settings, *asked), tmp_path / "sampled")
    assert sampled.losses == plain.losses
    assert sampled.graph["captures"] == plain.graph["captures"]
    shown = capfd.readouterr().out
    assert [f"--- step {done}\nimport " in shown for done in (3, 6, 8)] == [True] * 3
    events = EventAccumulator(str(tmp_path / "sampled")).Reload()
    assert [event.step for event in events.Tensors("samples/text_summary")] == [3, 6, 8]


def test_settings_of_samples_are_checked(settings):
    for override in ("train.sample_tokens=0", "train.sample_every=-1", "train.sample_prompt="):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            settings(override)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which `train.py` has run."""
    folder = tmp_path_factory.mktemp("trained")
    finished([ROOT / "train.py", *TINY, "data.max_bytes=20000"], folder).check_returncode()
    return folder


def shell(folder, *arguments):
    return finished([ROOT / "generate.py", "model.device=cpu", *arguments], folder)


@pytest.mark.slow
def test_the_last_checkpoint_streams_text_and_tells_its_speed(trained):
    prompt = "x = {'a': \"b\", **c}  # it's ${odd}"
    done = shell(trained, "model.path=runs/train", f"prompt={prompt}", "decode.max_new_tokens=20")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(prompt) and len(done.stdout) > len(prompt) + 1
    for words in ("20 tokens in", "tokens/s", "20 launches of graphs", "checkpoints"):
        assert words in done.stderr
    eager = shell(trained, "model.path=runs/train", f"prompt={prompt}", "decode.max_new_tokens=20", "graph=none")
    assert eager.stdout == done.stdout and "without graphs: 19 eager steps" in eager.stderr


def test_prompts_of_a_file_are_written_as_json_lines(trained):
    (trained / "prompts.txt").write_text("import os\n\nclass A\nfor i in\n")
    done = shell(
        trained,
        "model.path=runs/train",
        "prompts_file=prompts.txt",
        "decode=sample",
        "decode.n=2",
        "decode.max_batch_size=4",
        "decode.max_new_tokens=7",
        "decode.logprobs=true",
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (trained / "prompts.out.jsonl").read_text().splitlines()]
    assert {(line["index"], line["sample"]) for line in lines} == {(i, s) for i in range(3) for s in range(2)}
    for line in lines:
        assert len(line["tokens"]) == len(line["logprobs"]) == 7 and line["finish_reason"] == "length"
        assert line["text"] == ByteCodec().decode(line["tokens"])
    assert "6 of 6 samples finished, written to prompts.out.jsonl" in done.stderr
    assert "6/6" not in done.stderr, "a bar, and no terminal"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prompt=x"], "model.path=FOLDER is missing"),
        (["model.path=nowhere", "prompt=x"], "model.path=nowhere is not a folder"),
        (["model.path=runs/train"], "give one of"),
        (["model.path=runs/train", "prompt="], "the prompt is empty; write some text"),
        (["model.path=runs/train", "prompt=x", "decode.temprature=1"], "did you mean 'decode.temperature'?"),
        (["model.path=runs/train", "prompt=x", "graph=decod"], "did you mean graph=decode?"),
        (["model.path=runs/train", "prompt=x", "graph=auto"], "\n  choices of 'graph': decode, none\n"),
        (["model.path=runs/train", "prompt=x", "decode.stop=[300]"], "unknown stop 300"),
        (["model.path=runs/train", "prompt=x", "decode.top_p=2"], "top_p must be above 0"),
        (["model.path=runs/train", "prompt=x", "decode.max_seq_len=99999"], "positions of the model"),
        (["model.path=runs/train", "prompts_file=none.txt"], "none.txt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_one_clear_error(trained, arguments, said):
    done = shell(trained, *arguments)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(lines) == 1 and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_groups_and_keys_in_lines_that_fit(trained):
    done = shell(trained, "--help")
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 120
    for words in ("graph: decode (default), none", "decode.temperature", "prompts_file=FILE", "--cfg job"):
        assert words in done.stdout
    shown = shell(trained, "--cfg", "job", "decode=sample")
    assert "temperature: 0.8" in shown.stdout and "scope: decode" in shown.stdout


def test_text_comes_when_its_characters_are_complete():
    stream = TextStream(ByteCodec())
    pieces = [stream.add(byte) for byte in "aä\n€b".encode()]
    assert pieces == ["a", "", "ä", "\n", "", "", "€", "b"]
    assert stream.add(0xE2) == "" and stream.rest() == "\ufffd"


def test_a_trained_model_decodes_the_tokens_of_generate(trained):
    folder = model_folder(str(trained / "runs" / "train"))
    model = load_model(folder, ModelSource(device=DeviceName.cpu))
    codec = codec_for(folder, None)
    assert isinstance(codec, ByteCodec)
    prompts = ["import ", "class A:\n    def ", "x", "for i in range(10):\n    print(i"]
    engine = DecodeEngine(model, max_batch_size=3, block_size=16, codec=codec)
    for done in engine.generate(prompts, max_new_tokens=50):
        assert done.tokens == reference(model, codec.encode(prompts[done.request]), 50)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"config.json": "{}"}, "model.path={} is not a model that transformers can read: "),
        ({"config.json": "{not json"}, "model.path={} is not a model that transformers can read: "),
        ({"model.safetensors": "cut off"}, "model.path={} holds no weights that transformers can read: "),
    ],
)
def test_a_folder_that_cannot_be_read_is_told_with_the_file_at_fault(written, said, tmp_path):
    tiny_model("gpt2", torch.device("cpu")).save_pretrained(tmp_path)
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_model(tmp_path, ModelSource(device=DeviceName.cpu))
    assert str(raised.value).startswith(said.format(tmp_path))


def test_a_saved_model_with_a_tokenizer_streams_its_text(tmp_path):
    letters = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(WordLevel(letters, unk_token="z"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split("", "isolated"), Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    model = tiny_model("qwen3", torch.device("cpu"))
    model.resize_token_embeddings(len(letters))
    model.save_pretrained(tmp_path / "model")
    done = shell(tmp_path, "model.path=model", "prompt=hello there", "decode.max_new_tokens=12")
    assert done.returncode == 0, done.stderr
    expected = reference(model, [letters[letter] for letter in "hello there"], 12)
    assert done.stdout.rstrip("\n") == "hello there" + "".join("abcdefghijklmnopqrstuvwxyz "[t] for t in expected)


def test_a_model_without_a_tokenizer_says_what_to_set(tmp_path):
    tiny_model("gpt2", torch.device("cpu")).save_pretrained(tmp_path / "model")
    done = shell(tmp_path, "model.path=model", "prompt=x")
    assert done.returncode == 2 and "tokenizer=FOLDER, or tokenizer=bytes" in done.stderr
