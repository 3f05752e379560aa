"""`train.py` from a shell, in an empty folder, as a user meets it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from graphmod.cli.app import TRAIN, parse
from graphmod.cli.job import Job, _way_on
from graphmod.cli.train import main
from graphmod.errors import ConfigError
from graphmod.train.folders import unused
from tests.support.processes import finished, search_first
from tests.support.settings import ROOT, TINY, composed

BRIEF = [*TINY, "data.max_bytes=20000", "train.steps=2"]


@pytest.fixture
def environment():
    return {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}


@pytest.fixture
def shell(tmp_path, environment):
    """Runs `python train.py ARGUMENTS` with `tmp_path` as the working directory."""
    return lambda *arguments: finished([ROOT / "train.py", *arguments], tmp_path, environment)


@pytest.fixture
def new_shell(tmp_path, environment):
    """Likewise, in an interpreter that has imported nothing before."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    return run


def assert_one_clear_error(done: subprocess.CompletedProcess, *said: str, status: int = 2) -> None:
    assert done.returncode == status, done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("error: ") and len(lines) <= 2, done.stderr
    assert all(words in done.stderr for words in said), done.stderr
    said_of_settings = done.stderr.replace("hydra.run.dir", "").replace("hydra.sweep.dir", "")
    for internal in ("Traceback", "hydra", "omegaconf", "HYDRA_FULL_ERROR", "full_key", "ConfigStore"):
        assert internal not in said_of_settings


def test_help_names_the_groups_the_choices_and_examples(new_shell):
    done = new_shell("--help")
    assert done.returncode == 0
    for words in (
        "graph: auto, full_iteration (default), none, per_layer",
        "llama_124m",
        "train.steps=",
        "--multirun",
        "Examples",
    ):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert "Powered by Hydra" not in done.stdout


def test_a_typo_in_a_key_is_one_clear_error(new_shell, tmp_path):
    assert_one_clear_error(new_shell("train.stepz=5"), "train.stepz", "did you mean 'train.steps'?")
    assert list(tmp_path.iterdir()) == [], "a run that never began left files"


def test_a_typo_in_a_choice_is_one_clear_error_in_a_multirun_too(shell):
    assert_one_clear_error(shell("--multirun", "graph=none,per_layr"), "did you mean graph=per_layer?")


def test_a_missing_file_is_one_clear_error(shell, tmp_path):
    assert_one_clear_error(shell("data=text", "data.path=not_there.txt"), "'not_there.txt'")
    assert list(tmp_path.iterdir()) == [], "a run that never began left a folder"


def test_a_batch_that_memory_cannot_hold_is_one_clear_error(shell):
    # More than any address space: some systems promise whatever fits into one.
    done = shell(*TINY, "data.max_bytes=20000", "data.batch_size=1000000000000000", "train.checkpoint=false")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and errors[0].startswith("error: out of memory; lower data.batch_size")


def test_several_values_without_multirun_name_the_flag(shell):
    assert_one_clear_error(shell("graph=none,per_layer"), "--multirun")


def the_comparison(folder: Path) -> Path:
    """The folder of the only comparison, to which the link points."""
    (sweep,) = (path for path in (folder / "runs" / "compare").iterdir() if not path.is_symlink())
    assert (sweep.parent / "latest").resolve() == sweep.resolve()
    return sweep


def test_a_folder_that_cannot_be_written_is_one_clear_error(shell, tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    assert_one_clear_error(shell(*TINY), "runs", "hydra.run.dir=FOLDER", status=1)


def test_a_run_reports_itself_and_leaves_events_result_and_checkpoint(shell, tmp_path):
    done = shell(*TINY, "data.max_bytes=20000", "train.eval_every=4", "train.eval_batches=1")
    assert done.returncode == 0, done.stderr
    for words in ("captures", "replays", "eager calls", "capturing took", "step ", "tokens/s", "loss "):
        assert words in done.stdout
    assert "step 8/8: loss " in done.stderr and "step 8/8: evaluation loss " in done.stderr
    assert all(f"{name}: " in done.stdout for name in ("model", "data", "batches", "device", "folder"))
    (run,) = (tmp_path / "runs" / "train").iterdir()
    assert list(run.glob("events.out.tfevents.*"))
    result = json.loads((run / "result.json").read_text())
    AutoModelForCausalLM.from_pretrained(run / result["checkpoint"])


def test_a_multirun_compares_the_three_scopes_side_by_side(shell, tmp_path):
    done = shell("--multirun", "graph=none,per_layer,full_iteration", *TINY, "data.max_bytes=20000")
    assert done.returncode == 0, done.stderr
    sweep = the_comparison(tmp_path)
    scopes = ["none", "per_layer", "full_iteration"]
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {*scopes, "comparison"}
    assert all(list((sweep / scope).glob("events.out.tfevents.*")) for scope in scopes)
    runs = json.loads((sweep / "comparison.json").read_text())["runs"]
    assert [run["name"] for run in runs] == scopes
    for run in runs:
        assert (
            run["losses_equal"] is (None if run["name"] == "none" else True)
            and run["speedup"] > 0
            and run["step_ms_p95"] >= run["step_ms_median"]
        )
    header = next(line for line in done.stdout.splitlines() if line.startswith("run "))
    for column in ("step ms", "p95", "host ms", "tokens/s", "speed-up", "capture s", "losses as none"):
        assert column in header
    assert "GPU busy" not in header and "train loss" not in header
    assert "tensorboard --logdir " in done.stdout and f"{Path('runs/compare') / 'latest'}\n" in done.stdout


@pytest.mark.slow
def test_a_multirun_over_other_axes_compares_within_each_and_names_the_job_that_failed(shell, tmp_path):
    small = [item for item in TINY if "seq_len" not in item]
    axes = ["graph=none,full_iteration", "data.seq_len=16,4000,8", "data.max_bytes=20000"]
    done = shell("--multirun", *axes, *small)
    assert done.returncode == 2
    sweep = the_comparison(tmp_path)
    runs = {run["name"]: run for run in json.loads((sweep / "comparison.json").read_text())["runs"]}
    assert len(runs) == 6
    for length in (16, 8):
        graphed = runs[f"full_iteration_data.seq_len={length}"]
        assert graphed["baseline"] == f"none_data.seq_len={length}" and graphed["losses_equal"] is True
    for failed in ("none_data.seq_len=4000", "full_iteration_data.seq_len=4000"):
        assert "model.max_positions" in runs[failed]["error"]
        assert f"{failed}: failed: " in done.stdout
    assert "Traceback" not in done.stderr
    assert (sweep / "comparison.md").is_file() and (sweep / "comparison.png").is_file()


@pytest.mark.slow
def test_a_multirun_in_the_folder_of_another_loses_nothing_and_compares_what_it_goes_on_with(shell, tmp_path):
    sweep = ["--multirun", "graph=none,full_iteration", *TINY, "data.max_bytes=20000", "hydra.sweep.dir=sweep"]
    assert shell(*sweep).returncode == 0
    folder = tmp_path / "sweep"
    kept = {path: path.read_bytes() for path in (*folder.glob("*.json"), *folder.glob("*/result.json"))}
    refused = shell(*sweep, "train.resume=auto", "train.seed=1")
    assert refused.returncode == 2 and "train.seed was 0 and is now 1" in refused.stderr
    assert "none: failed: " in refused.stdout and "is an earlier one" in refused.stdout
    assert {path: path.read_bytes() for path in kept} == kept

    (checkpoint,) = (folder / "full_iteration" / "checkpoints").iterdir()
    (checkpoint / "model.safetensors").unlink()
    done = shell(*sweep, "train.resume=auto")
    assert done.returncode == 0 and f"{folder / 'none'} is finished" in done.stdout
    assert (folder / "full_iteration_restart1" / "result.json").is_file()
    runs = {run["name"]: run for run in json.loads((folder / "comparison.json").read_text())["runs"]}
    assert runs["full_iteration"]["losses_equal"] is True and runs["full_iteration"]["error"] is None
    assert set(runs) == {"none", "full_iteration"}


@pytest.mark.slow
def test_a_multirun_does_not_mix_with_the_runs_of_another(shell, tmp_path):
    sweep = ["--multirun", *TINY, "train=measure", "train.steps=8", "data.max_bytes=20000", "hydra.sweep.dir=sweep"]
    assert shell(*sweep, "graph=none", "data.seq_len=4000").returncode == 2
    assert (tmp_path / "sweep" / "comparison.json").exists()
    assert shell(*sweep, "graph=none").returncode == 0, "all that was in the folder had failed"
    kept = {path: path.read_bytes() for path in (tmp_path / "sweep").rglob("*") if path.is_file()}
    refused = shell(*sweep, "graph=none,full_iteration")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and refused.stdout == ""
    assert "error: hydra.sweep.dir=sweep holds runs of an earlier multirun" in refused.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "sweep").rglob("*") if path.is_file()} == kept


def test_profiling_within_a_multirun_is_a_clear_error(shell, tmp_path):
    done = shell("--multirun", "graph=none,per_layer", "train.profile=true", *TINY)
    assert_one_clear_error(done, "run it alone")
    assert not (tmp_path / "runs").exists(), "it was said after jobs had begun"


@pytest.mark.parametrize("command", ["train.py", "generate.py prompt=a model.path=x tokenizer=bytes"])
def test_an_interrupt_while_libraries_are_imported_is_one_line(command, tmp_path):
    # A torch that is still being imported, whenever the signal comes; a model, as what is wrong is told before that.
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.json").write_text("{}")
    # Short sleeps: one that begins just after the signal is not cut short by it.
    loop = "for _ in range(600):\n    time.sleep(0.1)\n"
    (tmp_path / "torch.py").write_text(f"import time\nprint('importing', flush=True)\n{loop}")
    script, *arguments = command.split()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=tmp_path,
        env=search_first(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # sys.path[0], the script's folder, has no torch of its own.
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "interrupted\n")
    assert not (tmp_path / "runs").exists(), "a run that never began left a folder"


def test_flags_may_stand_anywhere_among_the_settings():
    plain = ["hydra/job_logging=plain", "hydra/hydra_logging=plain"]
    assert TRAIN.arguments(["a=1", "-m", "b=2,3"]) == ["--multirun", *plain, "a=1", "b=2,3"]
    asked = TRAIN.arguments(["train.steps=1", "-c", "hydra", "hydra/job_logging=default", "-p", "hydra.job"])
    assert asked == ["--cfg", "hydra", "--package", "hydra.job", plain[1], "train.steps=1", "hydra/job_logging=default"]


def test_an_unknown_flag_and_an_empty_folder_are_clear_errors(shell):
    assert_one_clear_error(shell("train.steps=3", "--multirum"), "'--multirum'", "did you mean '--multirun'?")
    assert_one_clear_error(shell("hydra.run.dir="), "is empty; give the folder")
    assert_one_clear_error(shell("--config-dir", "nowhere"), "nowhere is not a folder")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--steps", "3"], "train.steps=VALUE"),
        (["--steps=3"], "train.steps=3"),
        (["--step=3"], "train.steps=3"),
        (["--train.steps=3"], "train.steps=3"),
        (["--max-steps=3"], "train.steps=3"),
        (["--batch-size", "4", "graph=none"], "data.batch_size=VALUE"),
        (["--model=llama_tiny"], "model=llama_tiny"),
        (["--resume", "graph=none"], "train.resume=VALUE"),
        (["--num-workers", "4"], "without dashes: key=VALUE"),
    ],
)
def test_a_setting_with_dashes_says_what_to_write(typed, meant):
    with pytest.raises(ConfigError) as caught:
        TRAIN.arguments(typed)
    assert str(caught.value).endswith(meant) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["def ", "it's $HOME (", "a,b=[", "\\", "a\\'b\\", "${x}", "\\${x}", "null", "1 {", "ü\n"]
)
def test_a_prompt_is_taken_as_it_is(text):
    assert parse(composed(f"train.sample_prompt={text}")).train.sample_prompt == text


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(3):  # as three processes
        unused.cache_clear()
        found.append(unused("runs/train/now"))
    assert found == ["runs/train/now", "runs/train/now_2", "runs/train/now_3"] and unused("runs/train/now") == found[-1]
    (tmp_path / "file").touch()
    assert unused("file/now") == "file/now"


def test_the_command_that_goes_on_can_be_typed_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr("sys.argv", ["train.py"])
    job = Job(tmp_path / "run", [], True, ["train.sample_prompt=def ", "train.resume=auto"])
    said = shlex.split(_way_on(tmp_path / "run", job))
    assert said == [".venv/bin/python", "train.py", "train.resume=run"]


def test_the_command_that_goes_on_with_a_multirun_names_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    given = ["-m", "graph=none,per_layer", "hydra.sweep.dir=elsewhere"]
    job = Job(tmp_path / "sweep" / "none", [], False, given, sweep=tmp_path / "sweep")
    said = shlex.split(_way_on(tmp_path / "sweep" / "none", job))
    assert said[2:] == ["-m", "graph=none,per_layer", "hydra.sweep.dir=sweep", "train.resume=auto"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["-m", "graph=none,per_layer", "hydra.run.dir=mine"],
            "does nothing in a multirun; give hydra.sweep.dir=FOLDER",
        ),
        (["graph=none", "hydra.sweep.dir=mine"], "does nothing in a single run; give hydra.run.dir=FOLDER"),
    ],
)
def test_a_folder_of_the_other_kind_of_run_is_an_error(given, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(given) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_jobs_of_a_multirun_do_not_all_go_on_with_one_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "graph=none,per_layer", "train.resume=runs/train/one"]) == 2
    said = capsys.readouterr().err
    assert "all its jobs resume one run; " in said and "hydra.sweep.dir=FOLDER" in said
    assert main(["-m", "train.resume=runs/train/one,runs/train/two"]) == 2
    assert "train.resume=runs/train/two is not a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stopped_multirun_goes_on_with_the_command_that_it_says(shell, tmp_path):
    graphs = ["--multirun", "graph=none,full_iteration", *TINY, "data.max_bytes=20000", "train.steps=900"]
    graphs += ["train.checkpoint_every=300"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *graphs], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    while process.poll() is None and not list(tmp_path.glob("runs/compare/*/full_iteration/checkpoints/step*")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    (command,) = [line.partition(": ")[2] for line in said.splitlines() if "to resume" in line]
    done = shell(*shlex.split(command)[2:])
    assert done.returncode == 0, done.stderr
    sweep = the_comparison(tmp_path)
    runs = json.loads((sweep / "comparison.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["none", "full_iteration"]
    assert runs[1]["losses_equal"] is True and "resuming from step" in done.stdout


def test_the_command_that_goes_on_names_a_folder_elsewhere_in_full(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert (
        shlex.split(_way_on(tmp_path / "run", Job(tmp_path / "run", [], True, [])))[-1]
        == f"train.resume={tmp_path / 'run'}"
    )


def test_a_comparison_that_cannot_be_written_is_one_clear_error(shell, tmp_path):
    sweep = tmp_path / "sweep"
    (sweep / "comparison.md").mkdir(parents=True)  # a folder in the place of a file
    done = shell("--multirun", "graph=none,full_iteration", f"hydra.sweep.dir={sweep}", *BRIEF)
    assert done.returncode == 1 and "cannot write the comparison to" in done.stderr, done.stderr
    assert "losses as none" in done.stdout and "Traceback" not in done.stderr and "Warning" not in done.stderr
    assert (sweep / "none" / "result.json").exists() and (sweep / "full_iteration" / "result.json").exists()


def test_a_job_whose_folder_cannot_be_made_ends_a_multirun_and_does_not_hide_what_came_before(shell, tmp_path):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "per_layer").touch()  # where the folder of the second job should be
    done = shell("--multirun", "graph=none,per_layer", f"hydra.sweep.dir={sweep}", *BRIEF)
    assert done.returncode == 1 and "File exists: 'sweep/per_layer'" in done.stderr, done.stderr
    assert "none " in done.stdout and "step ms" in done.stdout
    assert (sweep / "comparison.json").exists() and "Traceback" not in done.stderr


def test_the_home_folder_may_be_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "my home"))
    assert composed("data.path=~/texts").data.path == f"{tmp_path}/my home/texts"
