"""A run that is resumed has the settings it had; what is changed is shown, and refused where it decides the numbers."""

import json

import pytest

from graphmod.cli import job
from graphmod.cli.app import parse
from graphmod.cli.errors import JobFailed
from graphmod.cli.job import Job, job_settings, run_job
from graphmod.cli.train import main
from graphmod.errors import ConfigError
from graphmod.train.folders import CHECKPOINTS, FORMAT, MANIFEST_FILE, OtherFormat, checkpoints
from graphmod.train.result import RunResult
from graphmod.train.resume import claimed, differences
from graphmod.train.run import train
from tests.support.settings import DROPOUT, composed, filled

CONSTANT = ["optim.warmup_fraction=0", "optim.min_lr_ratio=1"]
SHORT_EPOCHS = ["data.batch_size=24"]  # of 23 steps


def given(*overrides: str):
    """The settings of `train.py` with these arguments."""
    return job_settings(filled(*overrides), list(overrides))


@pytest.fixture
def stopped(on_text, tmp_path, monkeypatch, stop_after):
    """A run that was stopped after 3 of 8 steps, and, where they are wanted, the losses it would have had."""

    def arrange(*settings: str, wanted: bool = True):
        losses = train(on_text(*settings), tmp_path / "whole").losses if wanted else None
        stop_after(3)
        train(on_text(*settings), tmp_path / "run")
        monkeypatch.undo()
        return tmp_path / "run", losses

    return arrange


def test_the_folder_is_all_that_has_to_be_given(stopped, tmp_path):
    run, losses = stopped(*DROPOUT, "graph=none", "train.log_every=2")
    settings, changed = given(f"train.resume={run}")
    config = parse(settings)
    assert changed == [] and config.train.log_every == 2 and config.graph.scope.value == "none"
    resumed = train(config, tmp_path / "unused")
    assert resumed.losses == losses and resumed.resumed_at_step == 3
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.resume=run"], "joined on cpu"),
        (["train.resume=run", "train.device=auto"], "joined on auto"),
        (["train.device=auto"], "joined on auto"),
        (["train.resume=elsewhere"], "elsewhere"),
    ],
)
def test_ranks_join_on_the_device_of_the_run(stopped, tmp_path, monkeypatch, capsys, overrides, said):
    def joined(wanted):
        raise ConfigError(f"joined on {wanted.value}")

    stopped(wanted=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "ranks_started", lambda: 2)
    monkeypatch.setattr(job, "joined", joined)
    settings = filled(*overrides)
    settings.train.device = "auto"  # as a command line without it has it
    with pytest.raises(JobFailed) as failed:
        run_job(settings, Job(tmp_path, overrides, alone=True, given=overrides))
    assert failed.value.status == 2
    assert said in capsys.readouterr().err


def test_so_does_one_of_its_checkpoints(stopped, tmp_path):
    run, losses = stopped("train.seed=3")
    (folder,) = checkpoints(run / CHECKPOINTS)
    assert train(parse(given(f"train.resume={folder}")[0]), tmp_path / "unused").losses == losses


def test_a_change_is_shown_and_a_group_changes_what_its_files_set(stopped, tmp_path, capsys):
    run, losses = stopped("graph=auto", "graph.warmup_steps=2")
    overrides = [f"train.resume={run}", "graph=per_layer", "train.log_every=7", "data.batch_size=2"]
    settings, _ = given(*overrides)
    config = parse(settings)
    assert config.graph.scope.value == "per_layer" and not config.graph.auto and config.graph.warmup_steps == 2
    job = Job(tmp_path / "unused", overrides, alone=True, given=overrides)
    assert run_job(composed(*overrides), job) == run
    said = capsys.readouterr().out
    assert f"resuming from step 3 of 8: {run / CHECKPOINTS / 'step_00000003'}" in said
    for line in ("train.log_every was 3 and is now 7", "graph.auto was true and is now false"):
        assert f"\n  {line}\n" in said
    assert "batch_size" not in said and RunResult.read(run).losses == losses


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.seed=4", "train.seed was 0 and is now 4"),
        ("optim.learning_rate=1", "optim.learning_rate was 0.003 and is now 1.0"),
        ("graph.compile=default", "graph.compile was none and is now default"),
        ("model=gpt2_tiny", "model.architecture was llama and is now gpt2"),
        ("data.seq_len=100000", "data.seq_len was 16 and is now 100000"),  # which the model could not have, either
    ],
)
def test_a_change_of_the_numbers_is_refused_and_the_way_out_named(stopped, change, said):
    run, _ = stopped(wanted=False)
    (folder,) = checkpoints(run / CHECKPOINTS)
    with pytest.raises(ConfigError, match=rf"{said}.* start anew .* model=local model\.path={folder}$"):
        given(f"train.resume={run}", change)


def test_a_folder_that_is_no_run_is_a_clear_error(tmp_path):
    for folder, said in ((tmp_path, "neither a run"), (tmp_path / "nothing", "is not a folder")):
        with pytest.raises(ConfigError, match=said):
            given(f"train.resume={folder}")


@pytest.mark.parametrize("scope", ["none", "per_layer", "full_iteration"])
def test_a_finished_run_is_extended_to_the_bits_of_a_longer_one(on_text, tmp_path, scope):
    settings = [*DROPOUT, *CONSTANT, f"graph={scope}", "train.ema_decay=0.9"]
    longer = train(on_text(*settings, "train.steps=11"), tmp_path / "longer")
    first = train(on_text(*settings), tmp_path / "run")
    assert first.status == "finished" and first.losses == longer.losses[:8]
    said = []
    again = parse(given(f"train.resume={tmp_path / 'run'}")[0])
    assert train(again, tmp_path / "unused", say=said.append) == first
    assert "is finished; to extend it: train.resume=" in said.pop() and not said
    config = parse(given(f"train.resume={tmp_path / 'run'}", "train.steps=11")[0])
    extended = train(config, tmp_path / "unused", say=said.append)
    assert extended.losses == longer.losses and extended.resumed_at_step == 8
    assert said[1] == "train.steps was 8; the numbers are those of a run that had 11 steps from the start"
    ends = [tmp_path / name / extended.checkpoint / "model.safetensors" for name in ("run", "longer")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_an_extension_with_a_schedule_says_that_its_numbers_are_others(on_text, tmp_path):
    longer = train(on_text("train.steps=11"), tmp_path / "longer")
    train(on_text(), tmp_path / "run")
    said = []
    config = parse(given(f"train.resume={tmp_path / 'run'}", "train.steps=11")[0])
    extended = train(config, tmp_path / "unused", say=said.append)
    assert len(extended.losses) == 11 and extended.losses != longer.losses
    assert said[0].startswith("resuming from step 8 of 11")
    assert "schedule for 11 steps (step 8: 0.0003, step 9: 0.000616). The" in said[1]
    assert "The numbers differ from" in said[1]


def test_fewer_steps_than_are_done_are_refused(on_text, tmp_path):
    train(on_text(), tmp_path / "run")
    config = parse(given(f"train.resume={tmp_path / 'run'}", "train.steps=5")[0])
    with pytest.raises(ConfigError, match=r"has done 8 steps already, and train\.steps=5 asks for fewer"):
        train(config, tmp_path / "unused")


def test_an_extension_that_was_killed_is_unfinished(on_text, tmp_path, monkeypatch, stop_after):
    settings = [*CONSTANT, "train.steps=11"]
    longer = train(on_text(*settings), tmp_path / "longer")
    train(on_text(*CONSTANT), tmp_path / "runs" / "one")
    kept = (tmp_path / "runs" / "one" / "result.json").read_bytes()
    stop_after(1)
    train(on_text(*settings, f"train.resume={tmp_path / 'runs' / 'one'}"), tmp_path / "unused")
    monkeypatch.undo()
    (tmp_path / "runs" / "one" / "result.json").write_bytes(kept)  # as if it had been killed after it had saved
    config = on_text(*settings, "train.resume=auto")
    with claimed(config, tmp_path / "runs" / "two", beside=True) as point:
        assert point.checkpoint.name == "step_00000009"
        assert train(config, point.run_dir, point).losses == longer.losses


def test_a_folder_of_its_own_leaves_the_run_as_it_is(stopped, tmp_path):
    run, losses = stopped()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    config = parse(given(f"train.resume={run}")[0])
    with claimed(config, tmp_path / "branch", named=True) as point:
        assert point.run_dir == tmp_path / "branch"
        assert train(config, point.run_dir, point).losses == losses
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    result = RunResult.read(tmp_path / "branch")
    assert (tmp_path / "branch" / result.checkpoint).is_dir() and result.resumed_at_step == 3
    with pytest.raises(ConfigError, match="holds the checkpoints of an earlier run"):
        claimed(config, tmp_path / "branch", named=True).__enter__()


def test_a_run_is_not_resumed_before_its_newest_checkpoint(on_text, tmp_path):
    train(on_text("train.checkpoint_every=4"), tmp_path / "run")
    newest, older = checkpoints(tmp_path / "run" / CHECKPOINTS)
    with pytest.raises(ConfigError, match=rf"{newest} comes after it.*hydra\.run\.dir=FOLDER"):
        train(on_text(f"train.resume={older}"), tmp_path / "unused")
    (newest / "model.safetensors").write_bytes(b"")
    resumed = train(on_text(f"train.resume={older}"), tmp_path / "unused")
    assert resumed.resumed_at_step == 4 and resumed.losses == RunResult.read(tmp_path / "run").losses


def edit(folder, change) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    change(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


def test_a_setting_that_came_later_was_what_it_is_by_default():
    assert differences({"optim.eps": 1e-8}, {"optim.eps": 1e-8, "optim.weight_decay": 0.1}) == []
    assert differences({}, {"optim.weight_decay": 0.2}) == ["optim.weight_decay was 0.1 and is now 0.2"]
    assert differences({"optim.gone": None}, {}) == []
    assert differences({"optim.gone": 3}, {}) == ["optim.gone was 3 and is now null"]


def test_a_checkpoint_with_a_setting_that_is_gone_is_resumed_where_it_decided_nothing(stopped, tmp_path):
    run, losses = stopped()
    (folder,) = checkpoints(run / CHECKPOINTS)
    edit(folder, lambda manifest: manifest["config"]["train"].update(log_colour="red"))
    assert train(parse(given(f"train.resume={run}")[0]), tmp_path).losses == losses


@pytest.mark.parametrize(
    ("written", "arguments", "launched", "gpus"),
    [
        ({"processes": 3}, [], "1", 3),
        ({"processes": 3}, ["parallel.gpus=2"], "1", 2),
        ({"processes": 3}, ["parallel=none"], "1", None),
        ({"processes": 3}, [], "2", None),  # those that a launcher has started now
    ],
)
def test_as_many_ranks_are_started_as_a_launcher_had(stopped, monkeypatch, written, arguments, launched, gpus):
    run, _ = stopped(wanted=False)
    (folder,) = checkpoints(run / CHECKPOINTS)

    def as_launched(manifest):
        manifest["config"]["parallel"].update(mode="ddp", gpus=None)
        manifest.update(written)

    edit(folder, as_launched)
    monkeypatch.setenv("WORLD_SIZE", launched)
    assert given(f"train.resume={run}", *arguments)[0]["parallel"]["gpus"] == gpus


@pytest.mark.parametrize("resume", ["auto", "FOLDER"])
def test_a_checkpoint_of_a_newer_format_is_named_and_nothing_older_taken_in_its_place(on_text, tmp_path, resume):
    run = tmp_path / "run"
    train(on_text("train.checkpoint_every=4"), run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    edit(checkpoints(run / CHECKPOINTS)[0], lambda manifest: manifest.update(format=FORMAT + 1, graphmod="7.5"))
    resume = run if resume == "FOLDER" else resume
    with pytest.raises(
        OtherFormat, match=rf"format {FORMAT + 1}, of graphmod 7\.5, .* reads format {FORMAT}; train on"
    ):
        train(on_text(f"train.resume={resume}"), run)
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert {path.name for path in changed} == {MANIFEST_FILE}


def test_a_number_of_steps_takes_the_place_of_epochs(on_text, tmp_path):
    train(on_text("train.epochs=1", *SHORT_EPOCHS), tmp_path / "run")
    done = len(RunResult.read(tmp_path / "run").losses)
    config = parse(given(f"train.resume={tmp_path / 'run'}", f"train.steps={done + 2}")[0])
    assert len(train(config, tmp_path / "unused").losses) == done + 2


def test_where_epochs_were_asked_for_epochs_are_named(on_text, tmp_path):
    run = tmp_path / "run"
    train(on_text("train.epochs=2", *SHORT_EPOCHS), run)
    steps, said = len(RunResult.read(run).losses), []
    train(parse(given(f"train.resume={run}")[0]), tmp_path / "unused", say=said.append)
    assert f"is finished; to extend it: train.resume={run} train.epochs=4." in said[0]
    with pytest.raises(
        ConfigError, match=rf"has done {steps} steps already, and train.epochs=1, which are {steps // 2} st"
    ):
        train(parse(given(f"train.resume={run}", "train.epochs=1")[0]), tmp_path / "unused")
    longer = train(parse(given(f"train.resume={run}", "train.epochs=3")[0]), tmp_path / "unused")
    assert len(longer.losses) == steps // 2 * 3 and longer.config["train"]["epochs"] == 3


def test_options_of_a_schedule_are_compared_as_a_whole(stopped, tmp_path):
    settings = ["optim.schedule=cosine_with_restarts", "+optim.schedule_options.num_cycles=2"]
    run, losses = stopped(*settings)
    with pytest.raises(ConfigError, match=r"schedule_options was \{num_cycles: 2\} and is now \{num_cycles: 3\}"):
        train(parse(given(f"train.resume={run}", "+optim.schedule_options.num_cycles=3")[0]), tmp_path / "unused")
    assert train(parse(given(f"train.resume={run}")[0]), tmp_path / "unused").losses == losses


def test_steps_and_epochs_at_once_are_refused(capsys):
    assert main(["train.steps=3", "train.epochs=2"]) == 2
    assert "train.steps=3 and train.epochs=2 both say how long to train" in capsys.readouterr().err
    assert main(["train.steps=0", "train.epochs=null"]) == 2
    assert "train.steps must be at least 1" in capsys.readouterr().err
