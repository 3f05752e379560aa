"""What signals that stop a run say, and what a second one leaves behind."""

import os
import signal

import pytest
import torch

from graphmod.cli.job import Job, run_job
from graphmod.train.folders import CHECKPOINTS, checkpoints, verify
from graphmod.train.run import Aborted, StopRequest, train
from tests.support.fighters import LOST, train_until_renamed
from tests.support.processes import COPIES
from tests.support.settings import TINY, composed


@pytest.fixture(autouse=True)
def python_s_handler():
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupt_save(monkeypatch):
    """`interrupt_save(2)` sends SIGINT twice in the middle of the second checkpoint."""

    def arrange(which: int) -> None:
        original, saves = torch.save, []

        def save(*args):
            saves.append(args)
            original(*args)
            if len(saves) == which:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(torch, "save", save)

    return arrange


@pytest.mark.parametrize(
    ("more", "number", "said"),
    [
        ([], signal.SIGINT, "SIGINT: stopping after this step and saving; press Ctrl-C again to abort at once\n"),
        ([], signal.SIGTERM, "SIGTERM: stopping after this step and saving\n"),
        ([], signal.SIGHUP, "SIGHUP: stopping after this step and saving\n"),
        (["train.checkpoint=false"], signal.SIGTERM, "SIGTERM: stopping after this step; nothing is saved\n"),
    ],
)
def test_the_first_says_what_it_does(on_text, tmp_path, stop_after, capfd, more, number, said):
    stop_after(3, number)
    assert train(on_text(*more), tmp_path).status == "interrupted"
    assert f"\n{said}" in capfd.readouterr().err


def test_handlers_are_as_before_once_one_has_come():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_closed_terminal_that_is_to_be_ignored_is():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_during_a_checkpoint_leaves_the_one_before_and_nothing_else(on_text, tmp_path, interrupt_save):
    whole = train(on_text(), tmp_path / "whole")
    interrupt_save(2)
    with pytest.raises(Aborted, match=r"aborted; the newest checkpoint is .*step_00000003") as caught:
        train(on_text("train.checkpoint_every=3"), tmp_path / "run")
    (kept,) = (tmp_path / "run" / CHECKPOINTS).iterdir()
    assert caught.value.kept == kept and verify(kept)["steps_done"] == 3
    assert train(on_text(f"train.resume={tmp_path / 'run'}"), tmp_path / "unused").losses == whole.losses


def test_the_second_during_the_first_checkpoint_says_that_none_was_saved(on_text, tmp_path, interrupt_save):
    interrupt_save(1)
    with pytest.raises(Aborted, match="no checkpoint was saved"):
        train(on_text("train.checkpoint_every=3"), tmp_path)
    assert list((tmp_path / CHECKPOINTS).iterdir()) == []


def test_what_was_kept_and_how_to_resume_it_is_said(text, tmp_path, interrupt_save, capfd):
    interrupt_save(2)
    arguments = [*TINY, "data=text", f"data.path={text}", "train.checkpoint_every=3"]
    with pytest.raises(SystemExit) as ended:
        run_job(composed(*arguments), Job(tmp_path / "run", arguments, True, arguments))
    status = ended.value.code
    said = capfd.readouterr()
    assert status == 130 and "written to" not in said.out and "Traceback" not in said.err
    *_, kept, way_on = said.err.splitlines()
    assert kept == f"aborted; the newest checkpoint is {tmp_path / 'run' / CHECKPOINTS / 'step_00000003'}"
    assert way_on.startswith("  to resume: ") and way_on.endswith(f" train.resume={tmp_path / 'run'}")


def test_a_signal_while_a_checkpoint_is_saved_ends_the_run_with_that_one(on_text, tmp_path, monkeypatch):
    original = torch.save

    def save(*args):
        original(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(torch, "save", save)
    stopped = train(on_text("train.checkpoint_every=3"), tmp_path)
    assert stopped.status == "interrupted" and len(stopped.losses) == 3
    assert [path.name for path in checkpoints(tmp_path / CHECKPOINTS)] == ["step_00000003"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_checkpoint_that_is_replaced_is_never_missing(on_text, tmp_path, monkeypatch, killed):
    """Between the two renames of a checkpoint that replaces a damaged one of its name."""
    first = train(on_text("train.checkpoint_every=6"), tmp_path)
    folder = tmp_path / first.checkpoint
    (folder / "model.safetensors").write_bytes(b"damaged")
    config = on_text(f"train.resume={tmp_path}")
    if killed:
        said = tmp_path / "said"
        process = COPIES.Process(target=train_until_renamed, args=(config, folder, said))
        process.start()
        process.join()
        assert process.exitcode == LOST and not folder.exists(), said.read_text()
    else:
        original = os.replace

        def replace(source, target):
            if str(source).endswith(".partial") and str(target) == str(folder):
                raise KeyboardInterrupt
            original(source, target)

        with monkeypatch.context() as patch, pytest.raises(Aborted):
            patch.setattr(os, "replace", replace)
            train(config, tmp_path)
        assert (folder / "model.safetensors").read_bytes() == b"damaged"
    assert train(config, tmp_path).losses == first.losses and verify(folder)["steps_done"] == 8
    assert sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir()) == ["step_00000006", "step_00000008"]
