"""Hydra as its users know it: flags, overrides, folders, logs, launchers, sweepers, callbacks, config trees."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.experimental.callback import Callback

from graphmod.cli import main as command
from graphmod.cli.generate import main as generate
from graphmod.cli.start import CONFIGS
from graphmod.cli.train import main
from tests.support.processes import search_first, shell
from tests.support.settings import ROOT, TINY

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab_size, width=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.register_buffer("turn", torch.polar(torch.ones(width), torch.ones(width)))

    def forward(self, tokens):
        assert self.turn.is_complex()
        return self.head((self.embed(tokens) * self.turn).real)
"""
OWN = ["train.device=cpu", "data.cache=null", "data.max_bytes=20000", "data.seq_len=16", "data.batch_size=2"]
OWN += ["train.eval_every=0"]
SMALL = [*TINY, "data.max_bytes=20000", "train.steps=4", "train.checkpoint=false"]


def rows(folder):
    """The runs of a comparison."""
    return json.loads((folder / "comparison.json").read_text())["runs"]


class Failing(Callback):
    """Raises where it is told to."""

    def __init__(self, at: str) -> None:
        setattr(self, at, self.fail)

    def fail(self, **_: object) -> None:
        raise ValueError("no disk for the callback")


class Noting(Callback):
    """Writes down what it was told."""

    def on_job_end(self, config, job_return, **_: object) -> None:
        Path("noted").write_text(f"{job_return.status.name} {job_return._return_value}")


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs `train.py` with arguments in `tmp_path`; returns its status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])

    def run(*arguments):
        capfd.readouterr()
        return (main([*arguments]), *capfd.readouterr())

    return run


def test_the_top_level_is_what_a_project_of_hydra_has():
    there = {path.name for path in ROOT.iterdir()}
    assert {"pyproject.toml", "graphmod", "configs", "train.py", "tests", "README.md"} <= there
    assert CONFIGS == ROOT / "configs" and not list((ROOT / "graphmod").rglob("*.yaml"))
    for name in ("train", "generate", "serve"):
        assert (CONFIGS / f"{name}.yaml").is_file()
    groups = {path.parent.name for path in CONFIGS.glob("*/*.yaml")}
    assert {"model", "data", "optim", "graph", "parallel", "decode", "experiment"} <= groups


@pytest.mark.parametrize(
    ("what", "keys"), [("job", {"graph", "model"}), ("hydra", {"hydra"}), ("all", {"hydra", "data"})]
)
def test_cfg_prints_what_it_is_asked_for(run, what, keys):
    status, said, _ = run("--cfg", what, "graph=none")
    found = yaml.safe_load(said)
    assert status == 0 and keys <= {*found} and ("hydra" in found) == (what != "job")


def test_cfg_prints_a_package_and_resolves(run):
    assert run("--cfg", "job", "--package", "train.steps", "train.steps=7")[1] == "7\n"
    _, said, _ = run("--cfg", "hydra", "--resolve", "-p", "hydra.run", "hydra.run.dir=${hydra.job.name}/x")
    assert "dir: train/x\n" in said


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("defaults", "llama_tiny"),
        ("defaults-tree", "experiment"),
        ("searchpath", str(ROOT / "configs")),
        ("config", "graph:"),
        ("plugins", "BasicLauncher"),
        ("all", "Config search path"),
    ],
)
def test_info_tells(run, what, said):
    status, shown, _ = run("--info", what)
    assert status == 0 and said in shown


def test_questions_leave_no_folder(run, tmp_path):
    for asked in (["--help"], ["--hydra-help"], ["--cfg", "all", "--resolve"], ["--info"], ["-sc", "install=bash"]):
        assert run(*asked)[0] == 0
    assert not list(tmp_path.iterdir())


def test_a_run_leaves_its_settings_where_hydra_does(run, tmp_path):
    assert run(*SMALL, "hydra.run.dir=mine", "hydra.output_subdir=.h")[0] == 0
    saved = {path.name: yaml.safe_load(path.read_text()) for path in (tmp_path / "mine" / ".h").iterdir()}
    assert saved["config.yaml"]["train"]["steps"] == 4 and "train.steps=4" in saved["overrides.yaml"]
    assert saved["hydra.yaml"]["hydra"]["job"]["name"] == "train"


@pytest.mark.parametrize("where", [[], ["hydra.run.dir=mine"], ["hydra.run.dir=there"]])
def test_a_run_that_is_refused_when_its_data_is_read_leaves_no_folder(run, tmp_path, where):
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").touch()
    status, _, said = run("data=text", "data.path=short.txt", *where)
    assert status == 2 and "the data is too short" in said
    assert not [*tmp_path.glob("runs/train/*"), *tmp_path.glob("mine")]
    # Where something else was before, what Hydra wrote stays beside it.
    left = {".hydra", ".lock"} if where[-1:] == ["hydra.run.dir=there"] else set()
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"notes", *left}


def test_a_resumed_run_leaves_the_settings_that_it_has(run, tmp_path):
    assert run(*TINY, "data.max_bytes=20000", "hydra.run.dir=mine")[0] == 0
    status, said, _ = run("train.resume=mine", "train.steps=10", "graph=none")
    assert status == 0 and "resuming from step 8 of 10" in said
    saved = yaml.safe_load((tmp_path / "mine" / ".hydra" / "config.yaml").read_text())
    assert (saved["model"]["layers"], saved["train"]["steps"], saved["graph"]["scope"]) == (2, 10, "none")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "runs"} and not list(
        (tmp_path / "runs/train").iterdir()
    )


def test_an_experiment_changes_a_run_that_is_resumed(run, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "layers.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /graph: per_layer\ntrain:\n  log_every: 1\n"
    )
    assert run(*TINY, "data.max_bytes=20000", "hydra.run.dir=mine")[0] == 0
    status, said, _ = run("-cd", "own", "train.resume=mine", "train.steps=12", "experiment=layers")
    assert status == 0 and "graph.scope was full_iteration and is now per_layer" in said
    assert "train.log_every was 3 and is now 1" in said


def test_a_resume_that_is_refused_leaves_the_settings_of_the_run(run, tmp_path):
    assert run(*TINY, "data.max_bytes=20000", "hydra.run.dir=mine")[0] == 0
    saved = {path: path.read_text() for path in (tmp_path / "mine" / ".hydra").iterdir()}
    for refused in (["train.steps=2"], ["train.seed=3"], ["model.width=3"], ["train.loss._target_=a.b"]):
        status, _, said = run("train.resume=mine", *refused)
        assert status == 2 and len(said.splitlines()) <= 2
    assert run(*SMALL, "graph.check=true", "hydra.run.dir=mine")[0] == 0
    assert {path: path.read_text() for path in saved} == saved


def test_arguments_of_ones_own_model_go_over_those_of_the_run(run, tmp_path, monkeypatch):
    (tmp_path / "own_net.py").write_text(NET)
    monkeypatch.setattr("sys.path", [*sys.path])
    own = ["model._target_=own_net.Net", "model.width=8", "train.steps=4", *OWN]
    assert run(*own, "hydra.run.dir=mine", "hydra.job.chdir=true")[0] == 0
    for width in ("model.width=16", "+model.target.width=16"):
        status, _, said = run("train.resume=mine", width)
        assert status == 2 and "width: 8} and is now {_target_: own_net.Net, width: 16}" in said
    assert run("train.resume=mine", "model.width=8", "train.steps=6")[0] == 0
    saved = yaml.safe_load((tmp_path / "mine" / ".hydra" / "config.yaml").read_text())
    assert saved["model"]["target"] == {"_target_": "own_net.Net", "width": 8} and "_target_" not in saved["model"]
    status, _, said = run(*own, "model.target=5")
    assert status == 2 and "unexpected keyword argument 'target'" in said


def test_ranks_do_not_wait_for_a_first_one_that_cannot_start(tmp_path):
    (tmp_path / "file").touch()
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    given = [*SMALL, "parallel=ddp", "hydra.run.dir=file/x"]
    ranks = [shell(tmp_path, *given, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2)]
    said = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert said[0].startswith(f"error: cannot write to {tmp_path}/file/x: Not a directory") and said[1] == ""


def test_a_folder_in_use_stays_as_it_is(run, tmp_path):
    (tmp_path / "mine").mkdir()
    holder = "import sys, time; from pathlib import Path; from graphmod.train.folders import owned\n"
    holder += "with owned(Path('mine')): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holder], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        status, _, said = run(*SMALL, "hydra.run.dir=mine")
        process.kill()
    assert status == 2 and "mine is in use: process" in said and len(said.splitlines()) == 1
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {".lock"}


def test_the_folder_of_a_run_may_be_its_working_directory(run, tmp_path):
    (tmp_path / "text.txt").write_text("a text of a few words\n" * 200)
    given = [*SMALL, "data=text", "data.path=text.txt", "hydra.job.chdir=true"]
    assert run(*given, "hydra.run.dir=mine")[0] == 0
    assert (tmp_path / "mine" / "result.json").is_file() and Path.cwd() == tmp_path
    assert run("-m", *given, "graph=none,per_layer", "hydra.sweep.dir=swept")[0] == 0
    runs = rows(tmp_path / "swept")
    assert [row["losses_equal"] for row in runs] == [None, True]


def test_logging_is_as_it_is_set(run, tmp_path):
    assert "found no unfinished run" in run(*TINY, "train.resume=auto", "train.steps=2", "hydra.run.dir=plain")[2]
    process = shell(tmp_path, *SMALL, "hydra/job_logging=default", "hydra.run.dir=default")
    out, said = process.communicate(timeout=100)
    assert "[graphmod][WARNING] - graphs are emulated" in out and "emulated on the CPU:" not in said
    log = (tmp_path / "default" / "train.log").read_text()
    assert log.count("graphs are emulated on the CPU") == 1
    process = shell(tmp_path, *SMALL, "hydra/job_logging=disabled", "hydra.run.dir=disabled")
    assert "emulated on the CPU:" not in "".join(process.communicate(timeout=100))
    _, _, said = run(*SMALL, "hydra.verbose=true", "hydra.run.dir=verbose")
    assert len(said.splitlines()) > len(run(*SMALL, "hydra.run.dir=again")[2].splitlines())


def test_folders_of_jobs_are_named_as_they_are_set(run, tmp_path):
    sweep = ["-m", *SMALL, "graph=none,full_iteration", "train.seed=0,1"]
    assert run(*sweep, "hydra.sweep.dir=default")[0] == 0
    jobs = {path.parent.name for path in tmp_path.glob("default/*/result.json")}
    assert jobs == {f"{scope}_train.seed={seed}" for scope in ("none", "full_iteration") for seed in (0, 1)}
    assert (tmp_path / "default" / "multirun.yaml").is_file()
    keys = "hydra.job.config.override_dirname.exclude_keys=[train.seed]"
    assert run(*sweep[:-1], keys, "hydra.sweep.dir=own", "hydra.sweep.subdir=job_${hydra.job.num}")[0] == 0
    assert {path.parent.name for path in tmp_path.glob("own/*/result.json")} == {"job_0", "job_1"}
    deep = ["hydra.sweep.dir=deep", "hydra.sweep.subdir=${hydra.job.num}/x"]
    assert run(*sweep[:-1], *deep)[0] == 0
    assert [row["name"] for row in rows(tmp_path / "deep")] == ["0/x", "1/x"]


@pytest.mark.parametrize(
    ("override", "seeds"),
    [
        pytest.param("train.seed=range(3)", [0, 1, 2], marks=pytest.mark.slow),
        *(("train.seed=choice(4,2)", [4, 2]), ("train.seed=glob(*)", None)),
    ],
)
def test_values_are_swept_as_hydra_writes_them(run, tmp_path, override, seeds):
    status, _, said = run("-m", *SMALL, "graph=none", override, "hydra.sweep.dir=swept")
    if seeds is None:
        assert status == 2 and "error: these settings make no job; look for a choice()" in said
        return
    assert status == 0
    runs = rows(tmp_path / "swept")
    assert [row["name"] for row in runs] == [f"train.seed={seed}" for seed in seeds]


def test_a_glob_sweeps_the_choices_of_a_group(run, tmp_path):
    assert run("-m", *SMALL, "optim=glob(ada*)", "hydra.sweep.dir=swept")[0] == 0
    assert {path.parent.name for path in tmp_path.glob("swept/*/result.json")} == {"adam", "adamw"}


def test_a_job_that_fails_does_not_stop_the_others(run, tmp_path):
    status, out, said = run("-m", *SMALL, "graph=none", "data.seq_len=4000,16", "hydra.sweep.dir=swept")
    assert status == 2
    assert [line.partition(":")[0] for line in said.splitlines() if re.match("(?i)error|Traceback", line)] == ["error"]
    assert "data.seq_len=4000: failed: data.seq_len=4000 is longer than" in out
    assert json.loads((tmp_path / "swept" / "data.seq_len=4000" / "result.json").read_text())["status"] == "failed"
    assert (tmp_path / "swept" / "data.seq_len=16" / "result.json").is_file()


def test_hydra_mode_makes_a_multirun(run, tmp_path):
    assert run("hydra.mode=MULTIRUN", *SMALL, "graph=none,per_layer", "hydra.sweep.dir=swept")[0] == 0
    assert (tmp_path / "swept" / "comparison.json").is_file()


def test_parameters_of_the_sweeper_make_jobs(run, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "both.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      graph: none,full_iteration\n"
        "      train.log_every: 2\n"
    )
    assert run("--config-dir", "own", "experiment=both", *SMALL, "hydra.sweep.dir=swept")[0] == 0
    assert {path.parent.name for path in tmp_path.glob("swept/*/result.json")} == {"none", "full_iteration"}


def test_a_multirun_has_a_run_without_the_experiment_too(run, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "short.yaml").write_text("# @package _global_\ntrain:\n  log_every: 2\n")
    swept = ["-cd", "own", "-m", "experiment=none,short", *SMALL, "graph=none", "hydra.sweep.dir=swept"]
    assert run(*swept)[0] == 0
    assert {path.parent.name for path in tmp_path.glob("swept/*/result.json")} == {"none", "short"}
    assert "did you mean experiment=none?" in run("-m", "experiment=null,measure_124m")[2]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_of_other_launchers_are_compared(tmp_path, launcher):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    more = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else ["hydra.launcher.timeout_min=5"]
    sweep = ["-m", f"hydra/launcher={launcher}", *more, "hydra.sweep.dir=swept"]
    jobs = [*sweep, *SMALL, "graph=none,full_iteration", "data.seq_len=16,4000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    asked = [sys.executable, str(ROOT / "train.py"), *jobs]
    done = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "losses as none" in done.stdout, done.stderr
    runs = rows(tmp_path / "swept")
    failed = {row["name"] for row in runs if row["error"]}
    assert failed == {"data.seq_len=4000_none", "data.seq_len=4000_full_iteration"}
    assert [row["losses_equal"] for row in runs if row["name"] == "data.seq_len=16_full_iteration"] == [True]


def test_optuna_minimizes_the_last_loss(run, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    rate = "optim.learning_rate=choice(1e-6,1e-1)"
    sweep = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1"]
    status, _, said = run(*sweep, "hydra.sweeper.sampler.seed=1", *SMALL, "graph=none", rate, "hydra.sweep.dir=swept")
    assert status == 0 and "alembic" not in said, said
    best = yaml.safe_load((tmp_path / "swept" / "optimization_results.yaml").read_text())
    runs = {
        row["name"]: row["train_loss"]
        for row in json.loads((tmp_path / "swept" / "comparison.json").read_text())["runs"]
    }
    assert len(runs) == 4 and best["best_value"] == pytest.approx(min(runs.values()))
    assert best["best_params"] == {"optim.learning_rate": 0.1}


def test_a_config_tree_of_ones_own_finds_the_groups_too(run, tmp_path):
    for group in ("model", "experiment"):
        (tmp_path / "own" / group).mkdir(parents=True)
    (tmp_path / "own" / "model" / "small.yaml").write_text((CONFIGS / "model" / "llama_tiny.yaml").read_text())
    (tmp_path / "own" / "experiment" / "quick.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: small\n  - override /graph: none\ntrain:\n  steps: 3\n"
    )
    (tmp_path / "own" / "mine.yaml").write_text("defaults:\n  - train\n  - _self_\ntrain:\n  steps: 5\n")
    assert run("-cd", "own", "experiment=quick", "--cfg", "job", "-p", "train.steps")[1] == "3\n"
    assert run("-cd", "own", "-cn", "mine", "--cfg", "job", "-p", "train.steps")[1] == "5\n"
    assert run("-cp", "own", "-cn", "mine", "--cfg", "job", "-p", "train.eval_every")[1] == "100\n"
    assert run("hydra.searchpath=[file://own]", "model=small", "--cfg", "job", "-p", "model.layers")[1] == "4\n"
    assert "experiment: measure_124m, none (default), quick" in run("-cd", "own", "--help")[1]
    status, _, said = run("-cd", "own", "experiment=quck")
    assert status == 2 and "did you mean experiment=quick?" in said
    (tmp_path / "own" / "experiment" / "quick.yaml").write_text("# @package _global_\ntrain:\n  stepz: 3\n")
    status, _, said = run("-cd", "own", "experiment=quick")
    assert status == 2 and "there is no setting 'train.stepz'; did you mean 'train.steps'?" in said


def test_a_changed_file_is_seen_at_once(run, monkeypatch, tmp_path):
    changed = tmp_path / "clone"
    shutil.copytree(ROOT / "graphmod", changed / "graphmod", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CONFIGS, changed / "configs")
    for name in ("pyproject.toml", "train.py"):
        shutil.copy(ROOT / name, changed)
    (changed / "configs" / "train" / "default.yaml").write_text("steps: 7\n")
    asked = [sys.executable, str(changed / "train.py"), "--cfg", "job", "-p", "train.steps"]
    assert (
        subprocess.run(asked, cwd=tmp_path, env=search_first(changed), capture_output=True, text=True).stdout == "7\n"
    )


@pytest.mark.parametrize("at", ["on_run_start", "on_run_end", "on_job_start"])
def test_what_a_callback_raises_is_an_error(run, tmp_path, at):
    callback = f"+hydra.callbacks.mine={{_target_:{__name__}.Failing,at:{at}}}"
    status, _, said = run(*SMALL, callback, "hydra.run.dir=mine")
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert status == 1 and error == f"error: Callback Failing.{at} raised ValueError: no disk for the callback"
    assert (tmp_path / "mine" / "result.json").exists() == (at == "on_run_end")


def test_a_callback_hears_of_the_end_of_a_job(run, tmp_path):
    callback = f"+hydra.callbacks.mine._target_={__name__}.Noting"
    assert run(*SMALL, callback, "hydra.run.dir=mine")[0] == 0
    status, loss = (tmp_path / "noted").read_text().split()
    losses = json.loads((tmp_path / "mine" / "result.json").read_text())["losses"]
    assert status == "COMPLETED" and float(loss) == losses[-1]
    assert run(*SMALL, callback, "data.max_bytes=10", "hydra.run.dir=short")[0] == 2
    assert (tmp_path / "noted").read_text().startswith("FAILED the data is too short")


def test_what_cannot_be_made_of_the_settings_of_hydra_is_one_error(run, tmp_path):
    status, _, said = run(*SMALL, "+hydra.callbacks.mine._target_=nowhere.Callback")
    assert status == 2 and len(said.splitlines()) == 1 and "nowhere.Callback" in said
    status, _, said = run(*SMALL, "hydra.launcher.foo=1", "-m")
    assert status == 2 and "there is no setting 'hydra.launcher.foo'" in said


@pytest.mark.parametrize(
    ("plugin", "arguments", "why"),
    [
        ("optuna_sweeper", ["hydra/sweeper=optuna", "optim.learning_rate=interval(2,1)"], "The `low` value must be"),
        ("joblib_launcher", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=0"], "n_jobs == 0 in Parallel has no"),
    ],
)
def test_what_a_plugin_says_of_settings_is_one_error(plugin, arguments, why, run):
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}")
    status, _, said = run(*SMALL, "-m", "graph=none", *arguments)
    assert status == 2 and f"error: {why}" in said and "Traceback" not in said and "bug" not in said


def test_hydra_full_error_shows_where_an_error_came_from(tmp_path):
    process = shell(tmp_path, "train.steps=0", HYDRA_FULL_ERROR="1")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" in said and said.endswith("at least 1, got 0\n")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("graphmod tr", {"train"}),
        ("graphmod train graph=", {"graph=auto", "graph=full_iteration", "graph=none", "graph=per_layer"}),
        ("graphmod generate graph=", {"graph=decode", "graph=none"}),
        ("graphmod compare model=ll", {"model=llama_124m", "model=llama_deep", "model=llama_tiny"}),
        ("graphmod generate decode=", {"decode=greedy", "decode=model", "decode=sample"}),
        ("graphmod train optim.learning", {"optim.learning_rate="}),
        ("graphmod train graph.compile=", {"graph.compile=default", "graph.compile=max", "graph.compile=none"}),
        ("graphmod train train.precision=bf", {"train.precision=bf16", "train.precision=bf16_mixed"}),
        ("graphmod train train.steps=", {"train.steps=500"}),
        ("graphmod check my_lo", set()),
    ],
)
def test_a_shell_completes_commands_groups_choices_and_keys(line, found, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setattr("sys.argv", ["graphmod", "-sc", "query=bash"])
    assert command.main() == 0 and {*capsys.readouterr().out.split()} == found


def test_completion_is_installed_for_the_command(monkeypatch, capsys):
    for arguments in (["-sc", "install=bash"], ["train", "--shell-completion", "install=bash"]):
        monkeypatch.setattr("sys.argv", ["graphmod", *arguments])
        assert command.main() == 0
        assert capsys.readouterr().out.strip().endswith("hydra_bash_completion graphmod")


def test_generating_leaves_no_folder_of_hydra(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert generate(["prompt=a", "model.path=nothing"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: model.path=nothing is not a folder") and len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())
