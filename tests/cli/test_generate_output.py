"""What `generate.py` reads and writes, run inside this process: prompts, the file of completions, standard output."""

import io
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphmod.cli import decode as decode_run
from graphmod.cli import generate as decode_cli
from graphmod.cli.prompts import OutputFile, open_output
from graphmod.cli.settings import model_folder
from graphmod.cli.start import OutputError
from graphmod.decode import DecodeEngine
from graphmod.errors import ConfigError, reason
from graphmod.text import ByteCodec
from graphmod.train.folders import FORMAT, PARTS
from tests.support.decode_models import tiny_model
from tests.support.processes import Python, finished
from tests.support.settings import ROOT, typed


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model of bytes."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_model("gpt2", torch.device("cpu"))
    model.resize_token_embeddings(256)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def generate(saved, tmp_path, monkeypatch, capfd):
    """Runs `generate.py` with arguments in `tmp_path`; returns its status, standard output and standard error."""

    def run(*arguments):
        settings = [f"model.path={saved}", "model.device=cpu", "tokenizer=bytes", "decode.max_new_tokens=4"]
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        return (decode_cli.main([*settings, *arguments]), *capfd.readouterr())

    return run


@pytest.fixture
def no_model(monkeypatch):
    """Fails where a model would be loaded."""
    monkeypatch.setattr(decode_run, "load_model", lambda *_: pytest.fail("the model was loaded"))


def test_out_never_is_the_file_of_the_prompts(generate, tmp_path, no_model):
    (tmp_path / "p.txt").write_text("a\n")
    (tmp_path / "link").symlink_to("p.txt")
    os.link(tmp_path / "p.txt", tmp_path / "hard")
    for out in ("p.txt", "../" + tmp_path.name + "/p.txt", "link", "hard"):
        status, _, said = generate("prompts_file=p.txt", f"out={out}", "overwrite=true")
        assert status == 2 and f"out={out} is the file of the prompts" in said
    assert (tmp_path / "p.txt").read_text() == "a\n"


def test_prompts_of_windows_editors_are_read_or_say_how_to_convert_them(generate, tmp_path):
    (tmp_path / "p.txt").write_text("a\n", encoding="utf-8-sig")
    assert generate("prompts_file=p.txt")[0] == 0
    assert json.loads((tmp_path / "p.out.jsonl").read_text())["prompt"] == "a"
    (tmp_path / "wide.txt").write_text("a\n", encoding="utf-16")
    status, _, said = generate("prompts_file=wide.txt")
    assert status == 2 and "wide.txt is not UTF-8 but UTF-16; convert it: iconv -f UTF-16 -t UTF-8 wide.txt" in said
    (tmp_path / "packed.txt").write_bytes(b"\x1f\x8b\0")
    status, _, said = generate("prompts_file=packed.txt")
    assert status == 2 and "prompts_file: packed.txt holds no text; give one with a prompt a line" in said


def test_an_empty_prompt_is_refused_before_the_model_is_loaded(generate, tmp_path, no_model):
    assert generate("prompt=")[::2] == (2, "error: the prompt is empty; write some text\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    assert generate("prompts_file=p.jsonl")[::2] == (2, "error: line 2 of p.jsonl is empty; write some text\n")


@pytest.mark.parametrize("out", ["p.out.jsonl", "mine.jsonl"])
def test_completions_of_an_earlier_run_are_kept_unless_told(generate, tmp_path, out):
    (tmp_path / "p.txt").write_text("a\nb\n")
    arguments = ["prompts_file=p.txt", *([f"out={out}"] if out == "mine.jsonl" else [])]
    (tmp_path / out).write_text("kept\n")
    status, _, said = generate(*arguments)
    assert status == 2 and f"out={out} exists" in said and "overwrite=true" in said
    status, _, _ = generate(*arguments, "overwrite=true", "decode.max_seq_len=99999")  # fails later than opening
    assert status == 2 and (tmp_path / out).read_text() == "kept\n"
    status, _, said = generate(*arguments, "overwrite=true")
    assert status == 0 and "\r" not in said, "the bar of a terminal in a file"
    assert len([json.loads(line) for line in (tmp_path / out).read_text().splitlines()]) == 2


@pytest.mark.parametrize(
    "setting", ["decode.stop=[9999]", "decode.max_seq_len=4", "decode.n=0", "decode.cache_tokens=64"]
)
def test_a_request_that_is_refused_costs_no_earlier_completions_and_says_nothing_else(generate, tmp_path, setting):
    (tmp_path / "p.txt").write_text("a\n" + "b" * 80 + "\n")
    (tmp_path / "p.out.jsonl").write_text("kept\n")
    status, _, said = generate("prompts_file=p.txt", "overwrite=true", setting)
    assert status == 2 and "finished" not in said and "tokens/s" not in said
    assert (tmp_path / "p.out.jsonl").read_text() == "kept\n"
    status, shown, said = generate("prompt=" + "b" * 80, setting)
    assert status == 2 and shown == "" and "tokens/s" not in said


@pytest.mark.parametrize(("longest", "note"), [(6, True), (7, True), (8, False), (20, False)])
def test_a_sample_that_had_no_room_for_more_tokens_says_so(generate, tmp_path, longest, note):
    (tmp_path / "p.txt").write_text("abcd\nefgh\n")
    length = f"decode.max_seq_len={longest}"
    status, _, said = generate("prompt=abcd", length)
    ended = f"note: a sequence has at most {longest} tokens, its prompt included, so"
    assert status == 0 and (f"{ended} it ended before decode.max_new_tokens=4" in said) == note
    status, _, said = generate("prompts_file=p.txt", length)
    assert status == 0 and (f"{ended} 2 samples ended before decode.max_new_tokens=4" in said) == note


def test_nothing_is_replaced_before_the_first_completion(generate, tmp_path, monkeypatch):
    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(DecodeEngine, "generate", interrupted)
    (tmp_path / "p.txt").write_text("a\n")
    (tmp_path / "p.out.jsonl").write_text("kept\n")
    status, _, said = generate("prompts_file=p.txt", "overwrite=true")
    assert status == 130 and "0 of 1 sample finished\n" in said
    assert (tmp_path / "p.out.jsonl").read_text() == "kept\n"


@pytest.mark.parametrize("out", [".", "/proc/x", "/proc/x/y", "p.txt/x"])
def test_an_output_that_cannot_be_opened_is_told_before_the_model_is_loaded(generate, tmp_path, no_model, out):
    (tmp_path / "p.txt").write_text("a\n")
    status, _, said = generate("prompts_file=p.txt", f"out={out}")
    assert status == 2 and f"error: out={out} cannot be written: " in said and "Errno" not in said


def test_a_run_that_fails_before_its_first_completion_leaves_no_file(generate, tmp_path):
    (tmp_path / "p.txt").write_text("a\n")
    assert generate("prompts_file=p.txt", "decode.max_seq_len=99999")[0] == 2
    assert not (tmp_path / "p.out.jsonl").exists()


def test_an_interruption_counts_what_is_written(generate, tmp_path, monkeypatch):
    line = OutputFile.line

    def interrupted(self, text):
        if self.path.stat().st_size:
            raise KeyboardInterrupt
        line(self, text)

    monkeypatch.setattr(OutputFile, "line", interrupted)
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    status, _, said = generate("prompts_file=p.txt")
    assert status == 130 and "1 of 3 samples finished, written to p.out.jsonl" in said
    assert len((tmp_path / "p.out.jsonl").read_text().splitlines()) == 1


def test_a_full_disk_is_named_and_counts_nothing(generate, tmp_path):
    (tmp_path / "p.txt").write_text("a\nb\n")
    status, _, said = generate("prompts_file=p.txt", "out=/dev/full")
    assert status == 1 and "error: out=/dev/full cannot be written: No space left on device" in said
    assert "0 of 2 samples finished" in said and "Errno" not in said


def test_a_standard_output_that_takes_nothing(saved, tmp_path):
    given = [f"model.path={saved}", "model.device=cpu", "tokenizer=bytes", "graph=none", "prompt=abc"]
    quiet = Python([ROOT / "generate.py", *given], tmp_path)
    assert quiet.stdout.buffer.raw.read(1) == b"a"
    quiet.stdout.close()
    assert quiet.stderr.read() == f"model: {saved}\n"
    full = "import os, runpy\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    (tmp_path / "full.py").write_text(f"{full}runpy.run_path({str(ROOT / 'generate.py')!r}, run_name='__main__')\n")
    done = finished([tmp_path / "full.py", *given], tmp_path)
    said = "error: the standard output cannot be written: No space left on device\n"
    assert done.returncode == 1 and done.stderr == f"model: {saved}\n{said}"


@pytest.mark.parametrize("samples", [1, 2])
def test_text_is_whole_where_nobody_reads_how_fast_it_was(generate, monkeypatch, samples):
    class Unread(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Unread())
    status, written, _ = generate("prompt=a", f"decode.n={samples}")
    assert status == 0 and written.count("a") >= samples and written.endswith("\n")


def test_json_lines_keep_their_other_fields(generate, tmp_path):
    lines = [{"prompt": "a\u2028b", "id": 7, "text": "lost"}, {"prompt": "c", "meta": {"x": [1]}}]
    (tmp_path / "p.jsonl").write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    assert generate("prompts_file=p.jsonl")[0] == 0
    written = [json.loads(line) for line in (tmp_path / "p.out.jsonl").read_text().split("\n") if line]
    first, second = sorted(written, key=lambda line: line["index"])
    assert (first["prompt"], first["id"], second["meta"]) == ("a\u2028b", 7, {"x": [1]})
    assert first["text"] == ByteCodec().decode(first["tokens"])  # a field of the output is the output's


def test_a_setting_of_the_library_is_named_as_the_command_has_it(generate):
    said = generate("prompt=a", "decode.attention=triton")[2]
    assert "error: decode.attention=triton cannot be used" in said


def test_several_greedy_samples_are_said_to_be_the_same(generate):
    assert "all samples of a prompt are the same" in generate("prompt=a", "decode.n=2")[2]
    assert "the same" not in generate("prompt=a", "decode.n=2", "decode.temperature=1")[2]


@pytest.mark.parametrize("line", ['{"prompt": 3}', '{"prompt": null}', '{"text": "x"}', "[1]", "3", "{", '"x"'])
def test_a_line_that_is_no_prompt_is_named(generate, tmp_path, no_model, line):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n' + line + "\n")
    status, _, said = generate("prompts_file=p.jsonl")
    assert status == 2 and "error: line 3 of p.jsonl" in said and '"prompt": ' in said


def test_what_is_told_of_graphs_and_compilation(generate):
    status, shown, said = generate("prompt=a", "graph.compile=default", "decode.max_new_tokens=2")
    assert status == 0 and said.count("compile=default is for a GPU and is ignored on this cpu") == 1
    assert "compiling" not in said and "2 launches of graphs, 1 eager step, 1 capture in" in said
    status, again, said = generate("prompt=a", "graph=none", "decode.max_new_tokens=2")
    assert again == shown and "without graphs: 1 eager step\n" in said and "invalid" not in said


def test_weights_of_8_bits_are_told(generate):
    status, _, said = generate("prompt=a", "decode.weights=int8")
    assert status == 0 and "8 linear layers in int8: 0.1 MiB instead of 0.1" in said
    said = generate("prompt=a", "decode.weights=int4")[2]
    assert "decode.weights: Invalid value 'int4', expected one of [saved, int8, fp8]" in said


def test_a_tokenizer_that_is_no_folder_is_named(generate):
    status, _, said = generate("prompt=a", "tokenizer=nope")
    assert status == 2 and "tokenizer=nope is not a folder" in said and "huggingface" not in said
    assert reason(ValueError("cannot read:\n\n  it is broken\nmore")) == "cannot read: it is broken"
    assert reason(KeyError()) == "KeyError"


def test_a_model_of_another_kind_is_told():
    with pytest.raises(ConfigError, match="transformers causal LM, got Linear"):
        DecodeEngine(nn.Linear(2, 2))


def test_a_completion_has_its_text_where_there_is_a_codec():
    model = tiny_model("gpt2", torch.device("cpu"))
    asked = {"max_new_tokens": 5, "ignore_eos": True}
    (done,) = DecodeEngine(model, codec=ByteCodec()).generate([[5, 6]], **asked)
    assert done.text == ByteCodec().decode(done.tokens) and len(done.tokens) == 5
    assert DecodeEngine(model).generate([[5, 6]], **asked)[0].text is None


def test_log_probabilities_of_several_samples_are_shown(generate):
    status, shown, _ = generate("prompt=ab", "decode.n=2", "decode.logprobs=true")
    assert status == 0 and shown.count("[-") == 8 and shown.count("--- sample") == 2


def test_a_line_break_may_be_written_as_in_python(tmp_path):
    given = [r"decode.stop=['\n','a\\n',10,'\t|']", "model.path=x", "prompt=y"]
    config = typed(decode_cli.GENERATE, *given)
    assert config.sampling().stop == ["\n", "a\\n", 10, "\t|"]


@pytest.mark.parametrize("path", ["007", "my (1) däta", "C:\\a", "it's here", "a=b"])
def test_a_path_is_taken_as_it_is(path, monkeypatch):
    assert typed(decode_cli.GENERATE, f"model.path={path}", f"out={path}", "tokenizer=null").out == path
    assert typed(decode_cli.GENERATE, f"model.path={path}").model.path == path
    monkeypatch.setenv("HOME", "/home/me")
    assert typed(decode_cli.GENERATE, "prompts_file=~/a b.txt").prompts_file == "/home/me/a b.txt"


def test_half_a_line_is_taken_back_when_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    with pytest.raises(OutputError, match="No space left"), open_output(path, tmp_path / "p", False) as out:
        out.line("a whole line")
        file = out._file

        def half(text):
            file.write(text[: len(text) // 2])
            file.flush()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(out, "_file", SimpleNamespace(write=half, fileno=file.fileno, close=file.close))
        out.line("another whole line")
    assert path.read_text() == "a whole line\n"


def test_a_prompt_of_a_file_that_is_too_long_is_named_by_its_line(generate, tmp_path):
    (tmp_path / "p.txt").write_text("\nab\n" + "x" * 200 + "\n")
    status, _, said = generate("prompts_file=p.txt")
    assert status == 2 and "line 3 of p.txt has 200 tokens" in said and "no more positions" in said
    status, _, said = generate("prompts_file=p.txt", "decode.max_seq_len=20")
    assert status == 2 and "raise max_seq_len" in said


def test_the_last_checkpoint_of_a_run_is_that_of_most_steps(tmp_path):
    """Not the newest file: a copy of a run has files of any order."""
    for step in (20, 10):
        folder = tmp_path / "checkpoints" / f"step_{step:08}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        written = {**dict.fromkeys(PARTS), "format": FORMAT, "steps_done": step, "settings": {}, "files": {}}
        (folder / "checkpoint.json").write_text(json.dumps(written))
        for name in ("config.json", "checkpoint.json"):
            os.utime(folder / name, (step, 1000 - step))
    assert model_folder(str(tmp_path)).name == "step_00000020"


def test_no_run_is_looked_for_far_below_a_folder(tmp_path):
    folder = tmp_path / "runs" / "compare" / "date" / "job" / "checkpoints" / "step_00000020"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "checkpoint.json").write_text(
        json.dumps({**dict.fromkeys(PARTS), "format": FORMAT, "steps_done": 20, "settings": {}, "files": {}})
    )
    for given in (folder.parents[3], folder.parents[4]):
        assert model_folder(str(given)) == folder
    with pytest.raises(ConfigError, match="holds neither"):
        model_folder(str(tmp_path))


def test_a_folder_of_llama_cpp_is_told_with_the_way_to_convert_it(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").touch()
    with pytest.raises(ConfigError, match=r"holds neither a saved model .*from_pretrained\(FOLDER, gguf_file=NAME\)"):
        model_folder(str(tmp_path))
    with pytest.raises(ConfigError, match="is not a folder; give that of a saved model"):
        model_folder(str(tmp_path / "model-Q4_K_M.gguf"))
