"""What is told at once: settings before PyTorch is loaded, misspelt names, files to check, models to decode."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from graphmod import CUDAGraphConfig, CUDAGraphModule, DecodeEngine, graph_layers
from graphmod.check.cli import main as check
from graphmod.cli.app import TRAIN, parse
from graphmod.cli.generate import GENERATE
from graphmod.cli.main import COMMANDS
from graphmod.cli.serve import SERVE
from graphmod.cli.settings import model_folder, require_positions
from graphmod.cli.train import main
from graphmod.decode.types import EngineConfig, Sampling
from graphmod.errors import ConfigError, UnknownSetting
from graphmod.text import tokenizer_folder
from graphmod.train.settings import TrainGraphConfig
from tests.support.processes import Python
from tests.support.settings import typed

ANSWERS = """
import sys
from graphmod.cli.main import train

wrong = ["train.steps=0", "train.steps=-5", "train.steps=abc", "train.log=foo", "optim.learning_rate=-1", "data=text"]
wrong += ["train.resume=nothing", "graph=true"]
assert [train([one]) for one in wrong] == [2] * len(wrong)
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
PRESSED_AT_EXIT = """
import atexit
import os
import signal
import sys

atexit.register(os.kill, os.getpid(), signal.SIGINT)  # as if it came while a library cleans up
from graphmod.cli.main import train

sys.exit(train(["train.steps=0"]))
"""
ANSWERS_OF_GENERATE = """
import sys
from pathlib import Path
from graphmod.cli.main import generate

model = Path("model")
model.mkdir()
(model / "config.json").write_text("{}")
Path("prompts.txt").write_text("one\\n")
Path("full.jsonl").write_text("kept\\n")
wrong = [
    ["prompt=a", "model.path=model", "decode.temprature=1"],
    ["prompt=a"],
    ["model.path=model"],
    ["model.path=model", "chat=true"],
    ["prompt=a", "model.path=nothing"],
    ["prompt=a", "model.path=model"],
    ["prompt=a", "model.path=model", "tokenizer=nothing"],
    ["prompts_file=nothing.txt", "model.path=model"],
    ["prompts_file=prompts.txt", "model.path=model", "out=full.jsonl"],
    ["prompts_file=prompts.txt", "model.path=model", "out=prompts.txt"],
    ["prompt=a", "model.path=model", "decode.temperature=-1"],
    ["prompt=a", "model.path=model", "decode.adapter=a"],
    ["prompt=a", "model.path=model", "decode.max_seq_len=1"],
]
assert [generate(one) for one in wrong] == [2] * len(wrong)
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
ANSWERS_OF_SERVE = """
import socket
import sys
from pathlib import Path
from graphmod.cli.main import serve

model = Path("model")
model.mkdir()
(model / "config.json").write_text("{}")
assert serve(["model.path=model"]) == 2
(model / "tokenizer.json").touch()
(model / "config.json").write_text('{"max_position_embeddings": 64}')
taken = socket.create_server(("127.0.0.1", 0))
wrong = [
    "serve.prot=1", "serve.port=70000", "serve.port=x", f"serve.port={taken.getsockname()[1]}", "serve.host=256.1.1.1",
    "serve.host=" + "a" * 70, "serve.api_key=", "serve.max_waiting=-1", "serve.drain_seconds=nan", "graph=per_layer",
    "serve.max_body_bytes=0", "serve.default_max_tokens=0", "decode.max_batch_size=0", "decode.max_seq_len=1",
    "decode.cache_tokens=1", "graph.compile=some", "tokenizer=nothing", "model.path=nothing", "model.device=tpu",
    "decode.max_seq_len=65", "decode.max_adapters=2",
]
assert [serve(["model.path=model", one]) for one in wrong] == [2] * len(wrong)
sys.modules["uvicorn"] = None
assert serve(["model.path=model"]) == 2
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
STEP = """
import torch
from beside import made

layer = torch.nn.Linear(4, 4)


def step():
    return layer(made).detach()


class Model:
    def fit_epoch(self):
        pass
"""
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32, "intermediate_size": 32}


def python(*arguments, cwd):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)


def test_values_that_cannot_be_are_told_without_loading_torch(tmp_path):
    done = python("-c", ANSWERS, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count("error: ") == 8, done.stderr
    assert "Traceback" not in done.stderr
    assert "train.steps must be at least 1, got -5" in done.stderr


def test_ctrl_c_while_python_exits_ends_it_without_a_word(tmp_path):
    done = python("-c", PRESSED_AT_EXIT, cwd=tmp_path)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == "error: train.steps must be at least 1, got 0\n"


def test_what_generate_cannot_use_is_told_without_loading_torch(tmp_path):
    done = python("-c", ANSWERS_OF_GENERATE, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count("error: ") == 13, done.stderr
    for said in ("error: decode.temperature must be 0", "error: decode.max_seq_len must be", "give one of prompt"):
        assert said in done.stderr
    for said in ("did you mean", "model.path=FOLDER is missing", "model.path=nothing is not", "holds no tokenizer"):
        assert said in done.stderr
    for said in ("tokenizer=nothing is not", "nothing.txt cannot be read", "full.jsonl exists", "is the file of the"):
        assert said in done.stderr


def test_what_serve_cannot_use_is_told_without_loading_torch(tmp_path):
    done = python("-c", ANSWERS_OF_SERVE, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count("error: ") == 23, done.stderr
    assert "decode.max_seq_len=65 is more than the 64 positions of the model" in done.stderr
    for said in ("holds no tokenizer", "serve.port=0 for any free one", "serve.host=256.1.1.1 serve.port=8000 cannot"):
        assert said in done.stderr
    for said in ("aaa serve.port=8000 cannot be listened on: ", "less than one block", "serving needs uvicorn"):
        assert said in done.stderr


def test_the_package_is_the_command(tmp_path):
    done = python("-m", "graphmod", "train", "train.steps=0", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: train.steps must be at least 1, got 0\n")
    assert (
        f"{Path(sys.executable).name} -m graphmod train [--multirun]"
        in python("-m", "graphmod", "train", "--help", cwd=tmp_path).stdout
    )


@pytest.fixture
def step_file(tmp_path, monkeypatch):
    """`inside/its_step.py`, which imports what lies beside it, is checked from the folder above."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "beside.py").write_text("import torch\n\nmade = torch.ones(2, 4)\n")
    (tmp_path / "inside" / "its_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "inside" / "its_step.py"
    for name in ("beside", "its_step", "inside.its_step", "inside"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("form", ["{relative}:step", "{absolute}:step", "{relative_without}:step", "{elsewhere}:step"])
def test_a_file_is_checked_by_its_path(step_file, monkeypatch, capsys, form):
    if "elsewhere" in form:
        (step_file.parent.parent / "other").mkdir()
        monkeypatch.chdir(step_file.parent.parent / "other")
    names = {"relative": "inside/its_step.py", "relative_without": "inside/its_step", "absolute": step_file}
    assert check([form.format(**names, elsewhere=step_file)]) == 0
    assert "'step' would be captured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("inside/nothing.py:step", "there is no file inside/nothing.py; write FILE.py:function, or package.module:"),
        ("inside/its_step.py", "names no function; write package.module:function or FILE.py:function"),
        (
            "inside/its_step.py:stpe",
            "importing inside.its_step:stpe raised AttributeError: module 'inside.its_step' has",
        ),
        ("inside/its_step.py:Model.fit_epok", "AttributeError: type object 'Model' has no attribute 'fit_epok'"),
    ],
)
def test_a_file_that_cannot_be_checked_says_what_is_expected(step_file, capsys, name, said):
    assert check([name]) == 2 and said in capsys.readouterr().err


def test_layers_of_a_function_are_told_to_be_those_of_a_module(step_file, capsys):
    assert check(["inside/its_step.py:step", "--layers", "layers.*"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: layers (--layers) are those of a module, and 'step' is a function; check the model")


@pytest.mark.parametrize("arguments", [["--help"], ["inside/its_step.py:step"]])
def test_a_report_that_nobody_reads_to_its_end_is_no_error(step_file, arguments):
    process = Python(["-m", "graphmod.check", *arguments], Path.cwd())
    process.stdout.close()
    assert process.stderr.read() == ""


def layers():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    return model


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: CUDAGraphConfig(warmup_step=2), "CUDAGraphConfig has no setting 'warmup_step'; did you mean"),
        (lambda: TrainGraphConfig(scop="none"), "TrainGraphConfig has no setting 'scop'; did you mean 'scope'?"),
        (lambda: graph_layers(layers(), warmup_step=2), "did you mean 'warmup_steps'?"),
        (lambda: CUDAGraphModule(torch.sin, max_graph=2), "did you mean 'max_graphs'?"),
        (lambda: EngineConfig(zzz=2), "EngineConfig has no setting 'zzz'; it has max_batch_size, "),
        (lambda: Sampling(temprature=1), "did you mean 'temperature'?"),
    ],
)
def test_a_misspelt_setting_names_the_nearest(call, said):
    with pytest.raises(UnknownSetting, match=said.replace("?", r"\?")) as raised:
        call()
    assert isinstance(raised.value, TypeError) and isinstance(raised.value, ConfigError)


def test_single_settings_take_the_place_of_those_of_the_config():
    config = CUDAGraphConfig(warmup_steps=2, max_graphs=5)
    (first, _) = graph_layers(layers(), config, warmup_steps=4)
    assert (first._context.config.warmup_steps, first._context.config.max_graphs) == (4, 5)
    assert config.warmup_steps == 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: BertForMaskedLM(BertConfig(**SMALL)), "got BertForMaskedLM, which does not predict the next token"),
        (
            lambda: LlamaModel(LlamaConfig(**SMALL)),
            "got LlamaModel, which does not predict the next token; load one wi",
        ),
        (
            lambda: T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)),
            "got T5ForConditionalGeneration, whose decoder reads what an encoder makes.*Use model.generate",
        ),
    ],
)
def test_an_engine_says_what_it_needs_of_a_model(model, said):
    with pytest.raises(ConfigError, match=said):
        DecodeEngine(model())


def test_a_misspelt_setting_of_an_engine_names_the_nearest():
    with pytest.raises(UnknownSetting, match=r"did you mean 'max_batch_size'\?"):
        DecodeEngine(LlamaForCausalLM(LlamaConfig(**SMALL)), max_batchsize=2)


def test_where_only_comparisons_have_models_generate_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "runs/compare/2026/none/checkpoints/step_00000009"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model.path=runs/train is not a folder.*model.path=runs/compare"):
        model_folder("runs/train")


@pytest.mark.parametrize(
    ("program", "typed", "said"),
    [
        (TRAIN, ["train.steps="], "'train.steps=' has no value; write train.steps=VALUE, without spaces around '='"),
        (TRAIN, ["data=text", "data.path="], "'data.path=' has no value"),
        (TRAIN, ["graph", "=", "none"], "'graph' has no value; write graph=VALUE, without spaces around '='"),
        (TRAIN, ["~train.steps"], "'~train.steps' takes away what each run has; write train.steps=VALUE, or leave"),
        (TRAIN, ["~data.seq_len"], "'~data.seq_len' takes away what each run has"),
        (TRAIN, ["~optim"], "'~optim' takes away what each run has; write optim=VALUE"),
        (
            TRAIN,
            ["+model=llama_tiny"],
            "'model' is chosen twice; write model=CHOICE without '+', or in a file 'override /",
        ),
        (TRAIN, ["model@foo=llama_tiny"], "Could not override 'model@foo'; Did you mean to override model?; To append"),
        (TRAIN, ["~nonsense"], "Could not delete from config. 'nonsense' does not exist."),
        (
            TRAIN,
            ["per_layer"],
            "'per_layer' has no name; settings are written key=value, such as train.steps=100, graph",
        ),
        (TRAIN, ["data=text", "data.path=my", "texts.txt"], 'put both in quotes: key="two words"'),
        (TRAIN, ["train.steps=3", "foo"], "'foo' has no name; settings are written key=value, such as train"),
        (TRAIN, [""], "'' has no name"),
        (TRAIN, ["--config", "mine"], "there is no flag '--config'; did you mean '--config-dir'?"),
        (TRAIN, ["--config-name", "mine"], "Cannot find primary config 'mine'"),
        (TRAIN, ["--config-path", "nowhere"], "nowhere is not a folder; give --config-dir one with files"),
        (TRAIN, ["--cfg", "nonsense"], "--cfg/-c: invalid choice: 'nonsense' (choose from 'job', 'hydra', 'all')"),
        (TRAIN, ["--cfg", "job", "--info"], "Only one of --run, --multirun, --cfg, --info and --shell_completion can"),
        (TRAIN, ["--resolve"], "The --resolve flag can only be used in conjunction with --cfg or --help"),
        (TRAIN, ["+foo=1", "--cfg", "job"], "there is no setting 'foo'"),
        (TRAIN, ["hydra.foo=1"], "there is no setting 'hydra.foo'; --cfg hydra prints those of Hydra"),
        (TRAIN, ["hydra/launcher=ray"], "a plugin may bring it: pip install hydra-ray-launcher"),
        (TRAIN, ["hydra/launcher=foo"], "there is no choice 'foo' for 'hydra/launcher'"),
        (TRAIN, ["hydra.launcher=foo"], "choices are written with a slash: hydra/launcher=foo"),
        (TRAIN, ["hydra.callbacks.x._target_=a.B"], "is new there is added: +hydra.callbacks.x._target_=a.B"),
        (TRAIN, ["+hydra.callbacks.x._target_=a.B"], "hydra.callbacks.x._target_=a.B cannot be imported: "),
        (TRAIN, ["-m", "train.seed=interval(1,3)"], "train.seed=interval(1,3) names no values; list them, or "),
        (TRAIN, ["-m", "train.seed=1,1"], "train.seed=1,1 gives a value twice"),
        (TRAIN, ["optim.betas=0.9"], "0.9 is not a list; write it as 'optim.betas=[0.9,0.95]'"),
        (SERVE, ["--multirun", "serve.port=1,2"], "graphmod serve runs one server; drop --multirun"),
        (
            GENERATE,
            ["model.path=my_texts", "hi"],
            "'hi' has no name; settings are written key=value, such as model.path=",
        ),
        (
            SERVE,
            ["model.path=x", "decode=sample"],
            "'decode' has no choices here; write decode.KEY=VALUE with one of: max_",
        ),
        (SERVE, ["serve.port=1", "tiny"], "such as model.path=FOLDER"),
    ],
)
def test_an_argument_that_is_no_setting_says_what_to_write(program, typed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my texts.txt").touch()
    assert COMMANDS[program.name](typed) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and said in first and all(line.startswith("  ") for line in others)
    assert {path.name for path in tmp_path.iterdir()} == {"my_texts", "my texts.txt"}


@pytest.mark.parametrize(
    ("written", "longest"),
    [
        ('{"max_position_embeddings": 64}', 64),
        ('{"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 8}', 64),
        ('{"n_positions": 64}', 10**6),
        ("[]", 10**6),
        ("{", 10**6),
    ],
)
def test_sequences_longer_than_a_models_positions_are_refused_before_it_is_loaded(written, longest, tmp_path):
    (tmp_path / "config.json").write_text(written)
    require_positions(tmp_path, longest)
    require_positions(tmp_path, None)
    if longest < 10**6:
        with pytest.raises(ConfigError, match=f"decode.max_seq_len={longest + 1} is more than the {longest} positions"):
            require_positions(tmp_path, longest + 1)


def test_an_empty_prompt_is_a_prompt():
    assert typed(GENERATE, "prompt=").prompt == ""


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_what_hydra_wants_a_plus_for_needs_none(plus):
    config = typed(TRAIN, f"{plus}optim.schedule_options.num_cycles=2", "++train.steps=7")
    assert (config.optim.schedule_options, config.train.steps) == ({"num_cycles": 2}, 7)


def test_a_plus_before_a_setting_that_there_is_says_so(capsys):
    assert main(["+train.steps=7"]) == 2
    said = capsys.readouterr().err
    assert "An item is already at 'train.steps'" in said and len(said.splitlines()) == 1


def test_a_name_in_the_place_of_a_folder_says_that_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ask in (lambda: model_folder("gpt2"), lambda: parse({"model": {"architecture": "local", "path": "gpt2"}})):
        with pytest.raises(ConfigError, match=r"model.path=gpt2 is not a folder; .*nothing is downloaded"):
            ask()


def test_a_model_for_generate_is_given_by_its_path():
    with pytest.raises(
        ConfigError, match=r"'model' has no choices here; write model.KEY=VALUE with one of: path, precision, device"
    ):
        typed(GENERATE, "model=gpt2")


def test_an_empty_folder_of_a_tokenizer_is_told(tmp_path):
    with pytest.raises(ConfigError, match="is empty; give the folder of a saved tokenizer, or tokenizer=bytes"):
        tokenizer_folder(tmp_path, str(tmp_path))


@pytest.mark.parametrize(
    "arguments", [["graph=null"], ["model=null"], ["-m", "graph=none,null"], ["-m", "graph=1e3,none"]]
)
def test_a_group_without_a_choice_is_no_bug(arguments, capfd):
    assert COMMANDS["train"](arguments) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and "bug" not in said and "Traceback" not in said


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "compare --help", "train --help", "check --help", "train --info defaults"]
)
def test_an_answer_that_cannot_be_written_is_one_line(arguments, tmp_path):
    command = f"{sys.executable} -m graphmod {arguments} > /dev/full"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    said = "error: the standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_an_error_that_cannot_be_written_leaves_the_exit_status(tmp_path):
    command = f"{sys.executable} -m graphmod train train.stpes=3 2> /dev/full"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False).returncode == 2


def test_text_for_a_closed_standard_output_is_refused(tmp_path):
    command = f"exec {sys.executable} -m graphmod generate model.path=x prompt=a >&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    said = "error: the standard output is closed, and the text would be lost; give it a place, such as > FILE\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_command_runs_where_its_streams_are_closed(tmp_path):
    command = f"exec {sys.executable} -m graphmod train graph=null 0<&- 1>&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False).returncode == 2
