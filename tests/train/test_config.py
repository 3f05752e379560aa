"""A setting that is wrong is one clear error, and a right one arrives typed."""

import functools
import os
from dataclasses import is_dataclass

import pytest

from docs.meanings import meanings
from graphmod.cli.app import parse
from graphmod.cli.errors import setting_names
from graphmod.cli.start import CONFIGS
from graphmod.cli.train import main
from graphmod.errors import ConfigError
from graphmod.train.folders import job_folder
from graphmod.train.settings import Precision, RunConfig, Scope
from tests.support.settings import ROOT, composed, filled, parsed


def complaint(*overrides: str) -> str:
    """The error a user sees for these overrides."""
    with pytest.raises(ConfigError) as caught:
        parsed(*overrides)
    return str(caught.value)


def test_the_default_config_is_valid_and_typed(settings):
    config = settings()
    assert isinstance(config, RunConfig)
    assert config.graph.scope is Scope.full_iteration
    assert config.train.precision is Precision.fp32
    assert config.optim.learning_rate == pytest.approx(3e-3)


def test_filling_in_single_settings_gives_what_hydra_composes():
    given = ["model=gpt2_tiny", "graph=none", "train.steps=5", "data.buckets=[8,16]", "train.sample_prompt=a, b"]
    assert filled(*given) == composed(*given)


CHOICES = [path for path in sorted(CONFIGS.glob("*/*.yaml")) if path.parent.name != "decode" != path.stem]


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_choice_of_every_group_composes(path, tmp_path):
    group = path.parent.name
    overrides = [f"{group}={path.stem}"]
    if path.stem in ("text", "hf"):
        (tmp_path / "a.txt").write_text("a")
        overrides.append(f"data.path={tmp_path}")
    if path.stem == "local":
        (tmp_path / "config.json").write_text("{}")
        overrides.append(f"model.path={tmp_path}")
    config = composed(*overrides)
    if path.stem == "custom":
        config[group].target = {"_target_": "my_package.Mine"}
    assert isinstance(parse(config), RunConfig)


def test_every_graph_choice_sets_the_scope_it_is_named_after(settings):
    for scope in Scope:
        assert settings(f"graph={scope.value}").graph.scope is scope


def test_a_typo_in_a_key_names_the_nearest_key():
    assert "'train.stepz'; did you mean 'train.steps'?" in complaint("train.stepz=5")


def test_a_key_without_its_group_names_the_whole_key():
    assert "did you mean 'train.steps'?" in complaint("steps=5")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("steps=3", "train.steps=3"),
        ("train.stepz=3", "train.steps=3"),
        ("modle=llama_tiny", "model=llama_tiny"),
        ("optim.lr=1", "optim.learning_rate=1"),
        ("train.lr=1", "optim.learning_rate=1"),
        ("lr=1", "optim.learning_rate=1"),
        ("optim.wd=0", "optim.weight_decay=0"),
        ("train.batch_size=4", "data.batch_size=4"),
        ("trainsteps=3", "train.steps=3"),
        ("data.block_size=4", "data.seq_len=4"),
        ("dtype=bf16", "train.precision=bf16"),
        ("model.dtype=bf16", "train.precision=bf16"),
        ("max_steps=9", "train.steps=9"),
        ("buckets=[64,128]", "data.buckets=[64,128]"),
        ("train.gradient_checkpointing=true", "train.activation_checkpointing=true"),
        ("num_train_epochs=3", "train.epochs=3"),
        ("optimizer=adamw", "optim=adamw"),
        ("train.optimizer=adam", "optim=adam"),
        ("model.name=gpt2_tiny", "model=gpt2_tiny"),
        ("data.file=notes.txt", "data.path=notes.txt"),
        ("dataset=notes.txt", "data.path=notes.txt"),
        ("model.file=saved", "model.path=saved"),
        ("train.output_dir=mine", "hydra.run.dir=mine"),
        ("wandb=true", "train.log=wandb"),
        ("bf16=true", "train.precision=bf16_mixed"),
        ("optim.warmup_steps=100", "optim.warmup_fraction=SHARE_OF_THE_STEPS"),
        ("graph.warmup=3", "graph.warmup_steps=3"),
    ],
)
def test_a_typo_in_a_key_says_what_to_write(typed, meant):
    assert complaint(typed).splitlines()[0].endswith(f"Write {meant}")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("graph=true", "graph=full_iteration"),
        ("graph=false", "graph=none"),
        ("graph=whole_step", "graph=full_iteration"),
        ("model=gpt2", "model=gpt2_small or model=gpt2_tiny"),
    ],
)
def test_a_choice_that_there_is_not_says_what_to_write(typed, meant):
    key, _, value = typed.partition("=")
    assert complaint(typed).splitlines()[0] == f"there is no choice {value!r} for {key!r}; did you mean {meant}?"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("model=someone/their-model-1b", "a saved one: model=local model.path=FOLDER (nothing is downloaded)"),
        ("model=my_package.Net", "your own: model._target_="),
        ("data=folder/rows.jsonl", "files: data=text data.path=PATH, rows: data=hf data.path=PATH"),
    ],
)
def test_a_path_in_the_place_of_a_choice_says_how_paths_are_given(typed, said):
    assert said in complaint(typed).splitlines()[1]


@pytest.mark.parametrize("typed", ["graph=decode", "graph=none,decode"])
def test_a_choice_of_another_command_is_none_of_training(typed):
    said = ["there is no choice 'decode' for 'graph'", "  choices of 'graph': auto, full_iteration, none, per_layer"]
    assert complaint(typed).splitlines() == said


@pytest.mark.parametrize("typed", ["optim=lion", "optim=1e-3", "train=fast", "parallel=2", "data=12"])
def test_a_choice_that_is_like_nothing_gets_no_advice(typed):
    """Hydra has no words of its own for a choice that is a number, a truth value or nothing."""
    said = complaint(typed)
    assert said.startswith("there is no choice ") and "did you mean" not in said


def test_several_values_are_runs_or_a_list():
    said = complaint("optim.betas=0.9,0.95")
    assert "add --multirun to run each, or write one list as 'optim.betas=[0.9,0.95]'" in said


@pytest.mark.parametrize(
    ("typed", "add"),
    [("data.path=a.txt", "choose data=custom | hf | text"), ("model.path=a", "choose model=custom | local")],
)
def test_a_path_without_its_group_says_which_to_choose(typed, add):
    assert add in complaint(typed)


@pytest.mark.parametrize("typed", ["train.compile=true", "train.compile=3"])
def test_a_value_that_the_setting_meant_does_not_take_is_not_advised(typed):
    said = complaint(typed).splitlines()[0]
    assert said.endswith("did you mean 'graph.compile'? Write graph.compile=VALUE with one of: none, default, max")


@pytest.mark.parametrize("typed", ["=3", "+=3", "++=3"])
def test_a_value_without_a_name_is_refused(typed):
    assert "names no setting; write key=value, such as train.steps=3" in complaint(typed)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("stepz: 3\n", "train/mine.yaml: there is no setting 'train.stepz'; did you mean 'train.steps'?"),
        ("steps: abc\n", "train/mine.yaml: train.steps: Value 'abc' of type 'str' could not be converted to Integer"),
        (
            "- steps: 3\n",
            "train/mine.yaml: the file is a list; write settings without '-', one a line, such as steps: 100",
        ),
        ("steps: [3\n", "train/mine.yaml:2 is not YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_an_error_in_a_config_file_names_the_file(content, said, tmp_path, capsys):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text(content)
    assert main(["train=mine", "--config-dir", str(tmp_path)]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.removeprefix("error: ").removeprefix(f"{tmp_path}/") == said


@pytest.mark.parametrize(
    "path",
    ["/my däta", "notes (1).txt", "it's here", "a=b.txt", "C:\\texts", "~user", "plain.txt", "*.txt"],
)
def test_a_path_is_taken_as_it_is(path):
    assert composed("data=text", f"data.path={path}").data.path == path


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("[a.txt,b.txt]", ["a.txt", "b.txt"]),
        ("'my däta'", "my däta"),
        ('"my däta"', "my däta"),
        ("null", None),
        ("${oc.env:HOME}", os.environ["HOME"]),
    ],
)
def test_a_path_that_is_written_for_hydra_stays(value, read):
    assert composed(f"data.path={value}").data.path == read


def test_a_text_in_quotes_is_read_as_hydra_reads_it_and_another_as_it_is():
    assert composed("train.sample_prompt='a, b'").train.sample_prompt == "a, b"
    assert composed("train.sample_prompt=a, b").train.sample_prompt == "a, b"
    assert composed("train.sample_prompt='a' or 'b'").train.sample_prompt == "'a' or 'b'"
    assert "gives several values: add --multirun" in complaint("train.sample_prompt='a b','c, d'")


@pytest.mark.parametrize("typed", ["train.qqq=1", "nonsense.foo=1", "optim.x=1"])
def test_what_is_like_nothing_gets_no_advice(typed):
    """A bad guess that is followed trains something else."""
    assert "did you mean" not in complaint(typed)


def test_a_setting_without_a_value_says_what_to_write():
    assert complaint("train.steps") == "'train.steps' has no value; write train.steps=VALUE, without spaces around '='"
    assert complaint("train.steps=notes(1.txt").startswith("train.steps: Value 'notes(1.txt' of type 'str' could not")
    assert complaint("train.steps=a=b").startswith("train.steps: Value 'a=b' of type 'str' could not")
    assert complaint("steps") == "'steps' has no value; write train.steps=VALUE, without spaces around '='"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("train.steps=abc", "train.steps: Value 'abc' of type 'str' could not be converted to Integer"),
        ("train.steps=1e3", "train.steps: Value '1000.0' of type 'float' could not be converted to Integer"),
        ("optim.learning_rate=high", "optim.learning_rate: Value 'high' of type 'str' could not be converted to Float"),
        ("train.deterministic=yess", "train.deterministic: Value 'yess' is not a valid bool (type str)"),
        ("data.buckets=[a]", "data.buckets[0]: Value 'a' of type 'str' could not be converted to Integer"),
        (
            "train.loss=null",
            "train.loss must be fused or have settings, got None; for a loss of your own write "
            "train.loss._target_=my_package.loss, or leave it out for that of the data",
        ),
        ("graph.scope=full", "graph.scope: Invalid value 'full', expected one of [none, per_layer, full_iteration]"),
    ],
)
def test_a_value_of_another_kind_says_what_is_expected(typed, expected):
    assert complaint(typed) == expected


def test_a_typo_in_a_group_names_the_nearest_group():
    assert "did you mean 'graph'?" in complaint("grph=none")


def test_a_typo_added_with_a_plus_is_still_an_error():
    assert "did you mean 'graph.warmup_steps'?" in complaint("+graph.warmup=3")


def test_a_typo_in_a_choice_names_the_nearest_and_all_choices():
    message = complaint("graph=per_layr")
    assert "did you mean graph=per_layer?" in message
    assert "full_iteration, none, per_layer" in message


def test_the_beginning_of_a_choice_names_it():
    assert "did you mean graph=full_iteration?" in complaint("graph=full")


def test_an_unknown_enum_value_names_the_allowed_ones():
    message = complaint("train.precision=fp17")
    assert "train.precision" in message and "fp32, bf16, bf16_mixed" in message


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("train.precision=null", "train.precision must not be null"),
        ("train.steps=null", "train.steps must not be null"),
        ("optim.betas=null", "optim.betas must not be null"),
        ("optim.betas=[null,1]", "optim.betas[0] must not be null"),
        ("train.checkpoint=null", "train.checkpoint must not be null"),
    ],
)
def test_null_says_what_is_expected(typed, expected):
    assert complaint(typed) == f"{expected}; leave it out for its default"


def test_text_that_is_no_override_is_refused_in_words():
    message = complaint("three steps")
    assert "'three steps' has no name; settings are written key=value" in message and "http" not in message


def test_an_environment_variable_that_is_not_set_is_named():
    assert "GRAPHMOD_NOT_SET" in complaint("data=text", "data.path=${oc.env:GRAPHMOD_NOT_SET}")


def test_an_error_of_the_graph_settings_names_the_group():
    assert complaint("graph.warmup_steps=-1").startswith("graph.warmup_steps must be")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data=text"], "data.path=FILE_OR_FOLDER"),
        (["data=text", "data.path=not_there.txt"], "'not_there.txt'"),
        (["data=text", "data.path=2024"], "write data.path=./2024"),
        (["data.path=a.txt"], "data.path does nothing with data=stdlib"),
        (["data.vocab_size=100"], "choose data=custom | synthetic"),
        (["data=synthetic", "data.tokenizer=bytes"], "data.tokenizer does nothing with data=synthetic"),
        (["data.tokenizer=not_there"], "neither a folder nor 'bytes'"),
        (["data.tokenizer=README.md"], "README.md is neither a folder nor 'bytes'; give the folder of a saved"),
        (["data.seq_len=0"], "at least 1"),
        (["data.seq_len=2000"], "model.max_positions=1024"),
        (["data.eval_fraction=0"], "train.eval_every=0"),
        (["data.eval_fraction=1.5"], "below 1"),
        (["model=local"], "model.path=FOLDER"),
        (["model=local", "model.path=not_there"], "not a folder"),
        (["model=local", "model.path=docs"], "config.json"),
        (["model=local", "model.path=docs"], "checkpoints/step_N"),
        (["model.path=docs"], "choose model=custom | local"),
        (["model.layers=null"], "model.layers is not set"),
        (["model.heads=3"], "does not divide"),
        (["model.kv_heads=3"], "does not divide"),
        (["model.head_dim=7"], "even"),
        (["model.dropout=0.1"], "model.dropout does not exist in llama"),
        (["model=gpt2_tiny", "model.kv_heads=2"], "gpt2"),
        (["model=gpt2_tiny", "model.dropout=1.0"], "below 1"),
        (["optim.learning_rate=0"], "above 0"),
        (["optim.learning_rate=nan"], "above 0"),
        (["optim.learning_rate=inf"], "finite"),
        (["optim.eps=inf"], "finite"),
        (["optim.weight_decay=inf"], "finite"),
        (["model.rope_theta=0"], "above 0"),
        (["train.seed=18446744073709551616"], "64 bits"),
        (["optim.betas=[0.9]"], "two numbers"),
        (["optim=sgd", "optim.betas=[0.5,0.6]"], "with optim=sgd; leave it out, or choose optim=adam | adamw | muon"),
        (["data.split=test"], "data.split does nothing with data=stdlib; leave it out, or choose data=custom | hf"),
        (["data=synthetic", "data.pattern=*.txt"], "data.pattern does nothing with data=synthetic"),
        (["optim.momentum=0.5"], "optim.momentum does nothing with optim=adamw; leave it"),
        (["optim.schedule=linear", "optim.min_lr_ratio=0.5"], "does nothing with optim.schedule=linear"),
        (["optim.schedule=constant", "optim.warmup_fraction=0.5"], "optim.warmup_fraction does nothing with"),
        (["parallel.reshard_after_forward=false"], "does nothing with parallel=none; leave it out, or choose"),
        (["optim.min_lr_ratio=2"], "from 0 to 1"),
        (["optim.max_grad_norm=0"], "null"),
        (["optim.weight_decay=-1"], "at least 0"),
        (["train.steps=0"], "at least 1"),
        (["train.grad_accumulation=0"], "at least 1"),
        (["graph=none", "graph.layers=[a]"], "graph=per_layer"),
        (["graph.layers=a"], "graph.layers=[a]"),
        (["graph=per_layer", "graph.layers=[a]", "graph.body=false"], "graph.layers, which names all modules"),
        (["train.device=cpu", "graph.backend=cuda"], "graph.backend=auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_impossible_combination_says_what_to_change(overrides, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    message = complaint(*overrides)
    assert said in message
    assert "Traceback" not in message and len(message.splitlines()) <= 2


def test_a_path_and_a_list_of_paths_both_become_a_list(settings, text):
    assert settings("data=text", f"data.path={text}").data.path == [str(text)]
    assert settings("data=text", f"data.path=[{text},{text}]").data.path == [str(text), str(text)]


def test_every_setting_is_explained_where_it_is_defined():
    for name in setting_names():
        *groups, key = name.split(".")
        if groups and not is_dataclass(found := functools.reduce(getattr, [*groups, key], RunConfig())):
            kind = type(functools.reduce(getattr, groups, RunConfig()))
            assert meanings(kind).get(key), f"{name} has no explanation, and is {found!r}"


def test_folders_of_jobs_are_named_after_what_varies():
    keys = ["graph", "train.seed"]
    assert job_folder(keys, ["graph=none", "train.seed=2", "train.steps=5"], "") == "none_train.seed=2"
    assert job_folder(["graph"], ["graph=none", "train.steps=5"], "") == "none"
    assert job_folder([], ["train.steps=5"], "per_layer") == "per_layer"
