"""What both commands refuse, and where their errors come from."""

import errno
import json
import os
import signal
import sys

import pytest

from graphmod.cli import generate as generation
from graphmod.cli import job
from graphmod.cli.errors import JobFailed
from graphmod.cli.job import Job, run_job
from graphmod.cli.settings import model_folder
from graphmod.cli.start import OutputError
from graphmod.cli.train import main
from graphmod.errors import ConfigError
from graphmod.train.folders import FORMAT, OtherFormat
from graphmod.train.result import RunResult
from graphmod.train.run import train
from tests.support.processes import shell
from tests.support.settings import TINY, composed


def test_generating_in_several_processes_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert generation.main(["graph=none"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: WORLD_SIZE=2 asks for 2 processes") and said.endswith("unset WORLD_SIZE")


@pytest.mark.parametrize(
    ("given", "hint"), [("graph=none", "add parallel=ddp"), ("parallel=ddp", "start the ranks with torchrun")]
)
def test_a_launcher_needs_a_parallel_mode_and_has_to_say_which_rank_this_is(tmp_path, given, hint):
    process = shell(tmp_path, given, WORLD_SIZE="2")
    _, err = process.communicate()
    assert process.returncode == 2 and len(err.splitlines()) == 1
    assert err.startswith("error: WORLD_SIZE=2") and hint in err


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_a_launcher_of_one_process_is_not(size, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert generation.main(["--help"]) == 0
    assert "model.path=" in capsys.readouterr().out


@pytest.mark.parametrize("there", [True, False])
def test_ranks_that_refuse_a_run_leave_a_folder_only_where_there_was_one(there, tmp_path, monkeypatch):
    def refuse(*_):
        raise JobFailed("no")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("graphmod.cli.launch.launch", refuse)
    folder = tmp_path / "mine"
    if there:
        folder.mkdir()
    assert main([*TINY, "parallel=ddp", "parallel.gpus=2", "hydra.run.dir=mine"]) == 1
    assert folder.exists() == there and not (there and any(folder.iterdir()))


def test_an_output_that_takes_nothing_is_not_blamed_on_the_folder(text, tmp_path, monkeypatch, capsys):
    arguments = [*TINY, "data=text", f"data.path={text}"]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(JobFailed) as failed:
            run_job(composed(*arguments), Job(tmp_path / "run", arguments, True, arguments))
    why = f"the standard output cannot be written: {os.strerror(errno.ENOSPC)}"
    assert failed.value.status == 1 and str(failed.value) == why
    assert f"error: {why}\n" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoints/*"))  # before the first step


@pytest.mark.parametrize("heard", [True, False])
def test_a_run_that_is_stopped_ends_so_also_where_nobody_hears_it(heard, tmp_path, monkeypatch, capsys):
    def unheard(text):
        raise OutputError(text)

    if not heard:
        monkeypatch.setattr(job, "tell", unheard)
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = {"train": {"steps": 9, "checkpoint": True}}
    result = RunResult(scope="none", config=config, error="SIGHUP", checkpoint="checkpoints/last")
    with pytest.raises(SystemExit) as ended:
        job._say_stopped(result, tmp_path, Job(tmp_path, [], True, []))
    assert ended.value.code == 128 + signal.SIGHUP
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["stopped by SIGHUP after step 0 of 9", f"  saved in {tmp_path}/checkpoints/last"] * heard


def test_a_sweep_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    process = shell(tmp_path, "-m", *TINY, "graph=none,per_layer", "hydra.sweep.dir=file/sweep")
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 1 and said == ""
    (error,) = complained.splitlines()
    assert error.startswith(f"error: cannot write to {tmp_path}/file/sweep: Not a directory; choose another folder")


@pytest.fixture
def checkpoint(on_text, tmp_path):
    result = train(on_text("train.checkpoint_every=4", "train.ema_decay=0.9"), tmp_path / "run")
    return tmp_path / "run" / result.checkpoint


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def test_a_damaged_model_is_not_trained_on_either(checkpoint, settings, tmp_path):
    config = settings("model=local", f"model.path={checkpoint}", "data.seq_len=16", "train.device=cpu")
    flip(checkpoint / "model.safetensors")
    with pytest.raises(ConfigError, match=r"step_00000008 is damaged: .*: model\.path=.*step_00000004$"):
        train(config, tmp_path / "anew")
    assert not (tmp_path / "anew").exists()


@pytest.mark.parametrize("inside", ["", "ema"])
def test_a_damaged_model_is_named_and_another_one_of_its_run(checkpoint, tmp_path, inside):
    older = checkpoint.parent / "step_00000004"
    assert model_folder(str(checkpoint / inside)) == checkpoint / inside
    flip(checkpoint / inside / "model.safetensors")
    said = rf"step_00000008 is damaged: the content of .*safetensors is not .*: model\.path={older / inside}$"
    with pytest.raises(ConfigError, match=said):
        model_folder(str(checkpoint / inside))
    assert model_folder(str(older / inside)) == older / inside
    flip(older / inside / "model.safetensors")
    with pytest.raises(ConfigError, match=r"and no other one of that run is whole; put that file back, or train again"):
        model_folder(str(checkpoint / inside))


def test_the_folder_of_the_checkpoints_stands_for_its_run(checkpoint):
    assert model_folder(str(checkpoint.parent)) == model_folder(str(checkpoint.parent.parent)) == checkpoint


def test_of_a_folder_of_runs_the_latest_whole_checkpoint_is_taken(checkpoint, tmp_path, caplog):
    assert model_folder(str(tmp_path)) == checkpoint and not caplog.messages
    (checkpoint / "config.json").write_text("{}")
    older = checkpoint.parent / "step_00000004"
    assert model_folder(str(tmp_path)) == older
    (said,) = caplog.messages
    assert "step_00000008 is damaged: config.json has 2 bytes" in said and said.endswith("; it is skipped")
    (checkpoint / "config.json").unlink()
    assert model_folder(str(tmp_path)) == older
    (older / "checkpoint.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no whole checkpoint: .*step_00000008 .*; .*step_00000004 is damaged"):
        model_folder(str(tmp_path))


def test_files_that_are_not_loaded_may_be_damaged(checkpoint):
    flip(checkpoint / "training_state.pt")
    flip(checkpoint / "ema" / "model.safetensors")
    assert model_folder(str(checkpoint)) == checkpoint
    flip(checkpoint / "model.safetensors")
    (checkpoint / "ema" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"ema/model\.safetensors: No such file"):
        model_folder(str(checkpoint / "ema"))


def test_a_checkpoint_without_its_list_of_files_or_with_a_newer_one_is_refused(checkpoint):
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    (checkpoint / "checkpoint.json").write_text(json.dumps({**manifest, "format": FORMAT + 1}))
    with pytest.raises(OtherFormat, match=f"format {FORMAT + 1}, of graphmod"):
        model_folder(str(checkpoint))
    (checkpoint / "checkpoint.json").unlink()
    with pytest.raises(ConfigError, match=r"is damaged: checkpoint\.json: No such file"):
        model_folder(str(checkpoint))


def test_a_model_of_other_origin_has_no_list_to_be_compared_with(checkpoint, tmp_path):
    (checkpoint / "checkpoint.json").unlink()
    checkpoint.rename(tmp_path / "mine")
    assert model_folder(str(tmp_path / "mine")) == tmp_path / "mine"


def test_a_run_goes_on_where_nobody_reads_what_it_says(tmp_path):
    process = shell(tmp_path, *TINY, "data.max_bytes=20000", "hydra.run.dir=mine")
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 0, said
    assert RunResult.read(tmp_path / "mine").status == "finished"
