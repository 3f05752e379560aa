"""One process owns a run folder, for as long as it lives and no longer."""

import errno
import fcntl
import os
import random
import signal
import time

import pytest

from graphmod.cli.train import main
from graphmod.errors import GraphmodError
from graphmod.train import folders as ownership
from graphmod.train.folders import CHECKPOINTS, FolderInUse, checkpoints, owned, verify
from graphmod.train.result import RunResult
from graphmod.train.resume import claimed
from graphmod.train.run import train
from tests.support.fighters import LOST, WON, own_and_wait, start_at_once, train_or_lose
from tests.support.processes import COPIES, shell
from tests.support.settings import DROPOUT, TINY


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(ownership, "_PATIENCE_S", 0.05)


def test_the_second_owner_is_told_who_the_first_is_and_what_to_do(tmp_path, impatient):
    with owned(tmp_path / "run"):
        said = rf"run is in use: process {os.getpid()} on \S+ has been writing to it since \d.*hydra\.run\.dir=FOLDER"
        with pytest.raises(FolderInUse, match=said), owned(tmp_path / "run"):
            pass
    with owned(tmp_path / "run"):
        pass


def test_an_owner_that_writes_nothing_leaves_nothing(tmp_path):
    with owned(tmp_path / "run" / "inner"):
        pass
    assert list((tmp_path / "run").iterdir()) == []
    with owned(tmp_path / "run"):
        (tmp_path / "run" / "result").touch()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"result", ".lock"}


def test_a_folder_that_cannot_be_made_has_no_owner(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(GraphmodError, match="cannot write to"), owned(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = f"cannot write to .*{os.strerror(number)}; choose .* that has locks"
    with pytest.raises(GraphmodError, match=said), owned(tmp_path / "run"):
        pass


def test_the_lock_ends_with_a_killed_process_although_its_child_lives_on(tmp_path, impatient):
    here, there = COPIES.Pipe()
    process = COPIES.Process(target=own_and_wait, args=(tmp_path, there))
    process.start()
    child = here.recv()
    try:
        with pytest.raises(FolderInUse, match=f"process {process.pid} "), owned(tmp_path):
            pass
        process.kill()
        process.join()
        os.kill(child, 0)  # it is there
        with owned(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_of_several_processes_that_start_at_once_one_gets_the_folder(tmp_path):
    barrier = COPIES.Barrier(5)
    processes = [COPIES.Process(target=start_at_once, args=(tmp_path / "run", barrier)) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(process.exitcode for process in processes) == [WON, LOST, LOST, LOST, LOST]


def test_two_processes_that_fight_for_a_run_and_are_killed_at_any_moment_lose_and_mix_nothing(on_text, tmp_path):
    settings = [*DROPOUT, "graph=none", "train.steps=60", "train.checkpoint_every=1"]
    whole = train(on_text(*settings, "train.checkpoint=false"), tmp_path / "whole")
    config, run, said = on_text(*settings, "train.resume=auto"), tmp_path / "run", tmp_path / "said"
    kills, refused, furthest, deadline = 0, 0, 0, time.monotonic() + 120
    alive = []
    try:
        while (fighting := kills < 20 or not refused) or alive:
            assert time.monotonic() < deadline, "they never met" if not refused else "they never ended"
            while fighting and len(alive) < 2:
                alive.append(COPIES.Process(target=train_or_lose, args=(config, run, said)))
                alive[-1].start()
            time.sleep(random.uniform(0, 0.4))
            if fighting:
                random.choice(alive).kill()
                kills += 1
            for process in [process for process in alive if not fighting or not process.is_alive()]:
                process.join()
                assert process.exitcode in (WON, LOST, -signal.SIGKILL), said.read_text()
                refused += process.exitcode == LOST
                alive.remove(process)
            done = [int(path.name[5:]) for path in checkpoints(run / CHECKPOINTS)]
            assert not furthest or max(done) >= furthest, "a checkpoint was lost"
            furthest = max(done, default=0)
    finally:
        for process in alive:
            process.kill()
    assert train(config, run).losses == whole.losses
    assert RunResult.read(run).status == "finished"
    assert sorted(path.name for path in (run / CHECKPOINTS).iterdir()) == ["step_00000059", "step_00000060"]


def test_two_fresh_runs_do_not_share_a_folder(text, tmp_path):
    settings = [*TINY, "data=text", f"data.path={text}", "train.steps=3000", "hydra.run.dir=run"]
    processes = [shell(tmp_path, *settings) for _ in range(2)]
    while all(process.poll() is None for process in processes):
        time.sleep(0.05)
    (refused,) = [process for process in processes if process.poll() is not None]
    (running,) = [process for process in processes if process is not refused]
    said, complained = refused.communicate()
    assert refused.returncode == 2 and said == ""
    assert complained.startswith(f"error: {tmp_path / 'run'} is in use: process {running.pid} on ")
    running.send_signal(signal.SIGTERM)
    said, complained = running.communicate(timeout=60)
    assert running.returncode == 143, complained
    newest = checkpoints(tmp_path / "run" / CHECKPOINTS)[0]
    assert f"saved in {newest}" in said and verify(newest)


@pytest.mark.parametrize("resume", ["none", "auto", "FOLDER"])
def test_a_run_that_is_alive_is_not_taken_over(on_text, tmp_path, stop_after, impatient, resume):
    stop_after(3)
    train(on_text(), tmp_path / "run")
    resume = tmp_path / "run" if resume == "FOLDER" else resume
    with owned(tmp_path / "run"), pytest.raises(FolderInUse, match="is in use: process"):
        train(on_text(f"train.resume={resume}"), tmp_path / "run")


def test_auto_skips_the_unfinished_run_beside_it_that_is_alive(on_text, tmp_path, stop_after, impatient, caplog):
    for name in ("2020", "2021"):
        stop_after(3)
        train(on_text(), tmp_path / "runs" / name)
    config = on_text("train.resume=auto")
    with claimed(config, tmp_path / "runs" / "2022", beside=True) as point:
        assert point.run_dir == tmp_path / "runs" / "2021"
    with owned(tmp_path / "runs" / "2021"), claimed(config, tmp_path / "runs" / "2022", beside=True) as point:
        assert point.run_dir == tmp_path / "runs" / "2020"
        assert "2021 is in use: process" in caplog.text and "it is skipped" in caplog.text
        with pytest.raises(FolderInUse), owned(tmp_path / "runs" / "2020"):
            pass
    both = owned(tmp_path / "runs" / "2021"), owned(tmp_path / "runs" / "2020")
    with both[0], both[1], claimed(config, tmp_path / "runs" / "2022", beside=True) as point:
        assert point.run_dir == tmp_path / "runs" / "2022" and point.checkpoint is None
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["2020", "2021"]


def test_a_multirun_in_the_folder_of_one_that_is_alive_is_refused(tmp_path, impatient, capsys):
    (tmp_path / "none").mkdir()
    RunResult(scope="none").write(tmp_path / "none")
    arguments = ["--multirun", "graph=none,per_layer", f"hydra.sweep.dir={tmp_path}"]
    for more in ([], ["train.resume=auto"]):
        with owned(tmp_path):
            assert main([*arguments, *more]) == 2
        assert "is in use: process" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "holds runs of an earlier multirun" in capsys.readouterr().err
