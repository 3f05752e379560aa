"""Checkpoints are whole or noticed to be damaged, the last ones are kept, and a disk that fills up costs none."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from graphmod.errors import ConfigError, GraphmodError
from graphmod.train import run as steps
from graphmod.train.checkpoint import check_room
from graphmod.train.folders import MANIFEST_FILE, DamagedCheckpoint, checkpoint_name, checkpoints, verify
from graphmod.train.run import train
from graphmod.train.step import TrainStep
from tests.support.made_tokenizers import word_tokenizer
from tests.support.processes import finished, shell
from tests.support.settings import DROPOUT, ROOT, TINY


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(on_text, tmp_path, caplog, stop_after, damage):
    settings = ["train.checkpoint_every=2", "train.keep_checkpoints=3"]
    whole = train(on_text(*settings), tmp_path / "whole")
    stop_after(7)
    train(on_text(*settings), tmp_path / "run")
    newest, before = checkpoints(tmp_path / "run" / "checkpoints")[:2]
    assert (newest.name, before.name) == ("step_00000007", "step_00000006")
    weights = newest / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "flipped":
        content = bytearray(weights.read_bytes())
        content[-50] ^= 1
        weights.write_bytes(content)
    elif damage == "missing":
        (newest / "training_state.pt").unlink()
    else:
        (newest / "checkpoint.json").write_text("{")
    resumed = train(on_text(*settings, "train.resume=auto"), tmp_path / "run")
    assert resumed.resumed_at_step == 6 and resumed.losses == whole.losses
    assert any(str(newest) in record.message and "damaged" in record.message for record in caplog.records)


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_job_with_nothing_whole_begins_in_another_folder_and_leaves_its_own_as_it_is(on_text, tmp_path, caplog):
    settings = ["train.checkpoint_every=3", "train.resume=auto"]
    whole = train(on_text(*settings), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for folder in checkpoints(tmp_path / "run" / "checkpoints"):
        (folder / "model.safetensors").write_bytes(b"")
    before = everything_in(tmp_path / "run")
    caplog.clear()
    anew = train(on_text(*settings), tmp_path / "run")
    assert anew.losses == whole.losses and anew.resumed_at_step == 0
    (said,) = [record.message for record in caplog.records if "damaged" in record.message]
    for words in ("step_00000008", "step_00000006", "model.safetensors has 0 bytes", f"in {tmp_path / 'run_restart1'}"):
        assert words in said
    assert everything_in(tmp_path / "run") == before
    assert (tmp_path / "run_restart1" / anew.checkpoint).is_dir()

    shutil.rmtree(tmp_path / "run_restart1" / "checkpoints" / "step_00000008")
    again = train(on_text(*settings), tmp_path / "run")
    assert again.resumed_at_step == 6 and again.losses == whole.losses, (
        "a job that is restarted once more goes on there"
    )
    (tmp_path / "run_restart1" / "checkpoints" / "step_00000006" / "checkpoint.json").unlink()
    (tmp_path / "run_restart1" / "checkpoints" / "step_00000008" / "checkpoint.json").unlink()
    assert train(on_text(*settings), tmp_path / "run").losses == whole.losses
    assert (tmp_path / "run_restart2" / "result.json").is_file() and everything_in(tmp_path / "run") == before


@pytest.mark.parametrize("damage", ["no manifest", pytest.param("no weights", marks=pytest.mark.slow)])
def test_a_run_beside_with_nothing_whole_is_named_and_left_as_it_is(on_text, text, tmp_path, stop_after, damage):
    stop_after(3)
    runs = tmp_path / "runs" / "train"
    train(on_text(), runs / "2020-01-01_00-00-00")
    (folder,) = checkpoints(runs / "2020-01-01_00-00-00" / "checkpoints")
    (folder / {"no manifest": "checkpoint.json", "no weights": "model.safetensors"}[damage]).unlink()
    before = everything_in(runs / "2020-01-01_00-00-00")
    process = shell(tmp_path, *TINY, "data=text", f"data.path={text}", "train.resume=auto")
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 0 and "resuming" not in said
    (line,) = [line for line in complained.splitlines() if "damaged" in line]
    assert str(folder) in line and "nothing of it is changed, and this run starts from the beginning" in line
    assert len(list(runs.iterdir())) == 2 and everything_in(runs / "2020-01-01_00-00-00") == before


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(on_text, tmp_path):
    result = train(on_text("train.checkpoint_every=4"), tmp_path)
    folder = tmp_path / result.checkpoint
    (folder / "training_state.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"training_state.pt has 0 bytes.*use the newest whole one"):
        train(on_text(f"train.resume={folder}"), tmp_path / "other")


def test_the_last_checkpoints_are_kept_and_all_are_whole(on_text, tmp_path):
    train(on_text("train.checkpoint_every=2", "train.keep_checkpoints=3"), tmp_path)
    kept = checkpoints(tmp_path / "checkpoints")
    assert [folder.name for folder in kept] == ["step_00000008", "step_00000006", "step_00000004"]
    for folder in kept:
        assert verify(folder)["steps_done"] == int(folder.name[5:])
        AutoModelForCausalLM.from_pretrained(folder)


def test_checkpoints_on_the_way_change_no_number(on_text, tmp_path):
    settings = [*DROPOUT, "train.precision=bf16_mixed"]
    plain = train(on_text(*settings), tmp_path / "plain")
    saved = train(on_text(*settings, "train.checkpoint_every=1"), tmp_path / "saved")
    assert saved.losses == plain.losses


@pytest.fixture
def full_at(monkeypatch):
    """`full_at(2)` lets the second checkpoint find a full disk."""

    def arrange(which):
        original, saves = torch.save, []

        def filling(*args):
            saves.append(args)
            if len(saves) == which:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args)

        monkeypatch.setattr(torch, "save", filling)

    return arrange


def test_a_disk_that_fills_up_keeps_the_checkpoint_before(on_text, tmp_path, full_at):
    full_at(2)
    with pytest.raises(GraphmodError, match=r"No space left on device; the newest one there is .*step_00000003") as why:
        train(on_text("train.checkpoint_every=3"), tmp_path)
    (kept,) = (tmp_path / "checkpoints").iterdir()
    assert verify(kept)["steps_done"] == 3 and f"train.resume={kept} hydra.run.dir=FOLDER" in str(why.value)


def test_a_disk_that_has_no_room_for_the_first_names_none(on_text, tmp_path, full_at):
    full_at(1)
    with pytest.raises(GraphmodError, match=r"on device; make room, or write elsewhere \(hydra.run.dir=FOLDER\)$"):
        train(on_text("train.checkpoint_every=3"), tmp_path)


@pytest.mark.parametrize(("limit", "named"), [(100, "{run}"), pytest.param(20_000, "{run}", marks=pytest.mark.slow)])
def test_a_disk_that_is_full_is_one_error_that_says_where(text, tmp_path, limit, named):
    limited = f"import resource, runpy\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    limited += f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
    (tmp_path / "limited.py").write_text(limited)
    settings = [*TINY, "data=text", f"data.path={text}", "train.checkpoint=false", f"hydra.run.dir={tmp_path / 'run'}"]
    done = finished([tmp_path / "limited.py", *settings, "train.steps=400"], tmp_path, timeout=120)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert error.startswith(f"error: cannot write to {named.format(run=tmp_path / 'run')}: File too large")


def test_a_disk_without_room_is_an_error_before_the_first_step(on_text, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(TrainStep, "__call__", lambda *args: pytest.fail("a step was done"))
    with pytest.raises(GraphmodError, match=r"a checkpoint takes about 0\.\d\d MiB, and .* has 0\.00 MiB free"):
        train(on_text(), tmp_path)
    assert not (tmp_path / "checkpoints").exists(), "a run that never began left a folder"


@pytest.mark.parametrize(
    ("settings", "at_once"),
    [
        ([], 1),
        (["train.checkpoint_every=3"], 3),
        (["train.checkpoint_every=3", "train.keep_checkpoints=1"], 2),
        (["train.checkpoint_every=4"], 2),
        (["train.checkpoint_every=8"], 1),
        (["train.checkpoint_every=100"], 1),
    ],
)
def test_as_many_checkpoints_need_room_as_may_be_there(on_text, tmp_path, monkeypatch, settings, at_once):
    asked = []
    monkeypatch.setattr(steps, "check_room", lambda *given: asked.append(given[3]))
    train(on_text(*settings), tmp_path)
    assert asked == [at_once]


@pytest.mark.parametrize(("there", "said"), [(0, "and 3 more checkpoints of about"), (1, "and 2 more"), (2, "")])
def test_room_for_one_checkpoint_and_not_for_all_is_a_warning(tmp_path, monkeypatch, caplog, there, said):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=15_000_000))
    for number in range(there):
        (tmp_path / checkpoint_name(number)).mkdir()
    model = torch.nn.Linear(2000, 1000, bias=False, dtype=torch.bfloat16)  # a checkpoint takes 12.6 million bytes
    check_room(tmp_path, model, False, at_once=3)
    assert [said in one.message for one in caplog.records] == [True] * bool(said)


def test_a_checkpoint_folder_that_cannot_be_written_is_an_error_before_the_first_step(on_text, tmp_path, monkeypatch):
    (tmp_path / "checkpoints").touch()
    monkeypatch.setattr(TrainStep, "__call__", lambda *args: pytest.fail("a step was done"))
    with pytest.raises(GraphmodError, match="cannot write checkpoints to"):
        train(on_text(), tmp_path)


def test_a_manifest_that_is_no_object_is_damage(tmp_path):
    (tmp_path / MANIFEST_FILE).write_text("[]")
    with pytest.raises(DamagedCheckpoint, match=r"checkpoint\.json: it holds a list, and not what was written"):
        verify(tmp_path)


def test_a_missing_file_is_damage(on_text, tmp_path):
    folder = tmp_path / train(on_text(), tmp_path).checkpoint
    (folder / "config.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"config\.json"):
        verify(folder)


def test_averaged_weights_have_the_tokenizer_beside_them(tiny, text, tmp_path):
    word_tokenizer(tmp_path / "tokenizer", [text.read_text()])
    data = ["data=text", f"data.path={text}", f"data.tokenizer={tmp_path / 'tokenizer'}"]
    result = train(tiny(*data, "train.ema_decay=0.5", "train.steps=1", "graph=none"), tmp_path / "run")
    folder = tmp_path / "run" / result.checkpoint
    one, other = (AutoTokenizer.from_pretrained(place) for place in (folder, folder / "ema"))
    assert one.get_vocab() == other.get_vocab() and one("a text").input_ids == other("a text").input_ids
